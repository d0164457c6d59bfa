"""Push: a verified reward-model folder and its card to a repository on the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

from rewardlab.core.controls import notice_of
from rewardlab.core.errors import ConfigError
from rewardlab.core.run_folder import CARD
from rewardlab.core.schema import read_object
from rewardlab.core.spec import DAMAGED, SPEC_FILE, RewardSpec, read_spec
from rewardlab.core.values import require
from rewardlab.serve.verifying.folder import verify

REPOSITORY: Final = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}")
REPLACED: Final = (
    *("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "adapter/*"),
    *("tokenizer*", "*.tiktoken", "*.model", "vocab.*", "merges.txt", "added_tokens.json", "special_tokens_map.json"),
    *("chat_template.*", "additional_chat_templates/*", "generation_config.json", "tekken.json"),
    *("adapter_config.json", "adapter_model.*", "modules.json", "sentence_*_config.json", "hf_quant_config.json"),
)
"""Files of an earlier push that are deleted unless this one has them. An engine would prefer old weights in one file to
newer ones in shards, an old tokenizer or template would give other tokens, and the files of an embedding model another
pooling."""
SHOWN: Final = 60
"""Most characters of a value that a dry run shows."""
NAMES_A_PLACE: Final = re.compile(r"[/\\]|^~|:\d+$|\.jsonl?$")
PLACES: Final = ("output_dir", "folder", "model", "dataset", "publish_to", "base_model_name_or_path")
ADAPTER: Final = "adapter/adapter_config.json"
AGAIN: Final = "Some or all of the files may be there already. The same command may be given again."
CONNECTED: Final = "Check the name, the network, and the token of `hf auth login`."


@runtime_checkable
class Hub(Protocol):
    """The part of `huggingface_hub.HfApi` that a push calls."""

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> Any:
        """Create a repository for a model, unless it exists."""

    def repo_info(self, repo_id: str) -> Any:
        """Return what the hub knows about a repository, such as `private`."""

    def upload_folder(
        self,
        *,
        repo_id: str,
        folder_path: str,
        allow_patterns: list[str],
        delete_patterns: list[str],
        commit_message: str,
    ) -> Any:
        """Commit the files whose names match `allow_patterns`, and delete those in the repository that match
        `delete_patterns`."""


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """What was pushed, or would be in a dry run."""

    repository: str
    files: Sequence[tuple[str, int]]
    """(name, size in bytes) of every file."""
    left_out: Sequence[str]
    """Files of the folder that are not part of the model and stay here."""
    address: str | None
    """Where the commit is; None for a dry run."""
    control: str | None
    """The sentence that says that the model is a control; None if it is not one."""
    insides: Mapping[str, str]
    """Field -> value, for the fields that hold paths, addresses or commands of the run: every reader of the repository
    sees them."""


def push(
    folder: Path,
    repository: str,
    *,
    private: bool = True,
    card: bool = True,
    dry_run: bool = False,
    hub: Hub | None = None,
) -> Pushed:
    """Verify the reward-model folder and upload its files, and its card, to `repository` (OWNER/NAME).

    Only the files that the spec lists, the spec itself and the card are uploaded. `hub` is by default
    `huggingface_hub.HfApi()`; a `dry_run` never calls it.

    Raises ArtifactError if the folder does not pass verification; ConfigError if `repository` is not a valid name, if
    there is no card (unless `card` is False), if the repository is public and `private` was asked for, or if the hub
    refuses.
    """
    require(
        REPOSITORY.fullmatch(repository) is not None,
        f"--repo {repository}: must be OWNER/NAME, of letters, digits, dots, dashes and underscores.",
    )
    spec = read_spec(folder)
    has_card = (folder / CARD).is_file()
    require(
        has_card or not card,
        f"{folder}: it has no model card ({CARD}). Write one with `rewardlab card RUN`, or say --no-card.",
    )
    verify(folder)
    names = [*spec.files, SPEC_FILE, *([CARD] if has_card else [])]
    inside = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())
    made = Pushed(
        repository=repository,
        files=[(name, (folder / name).stat().st_size) for name in sorted(names)],
        left_out=[name for name in inside if name not in names],
        address=None,
        control=notice_of(spec.provenance.get("control")),
        insides=dict(_all_insides(folder, spec)),
    )
    return made if dry_run else replace(made, address=_upload(hub or _hub(), folder, made, private=private))


def push_report(made: Pushed, *, private: bool) -> list[str]:
    """Return the lines that say what was pushed, or what would be."""
    total = sum(size for _, size in made.files)
    what = f"{len(made.files)} files, {total:,} bytes"
    if made.address is None:
        kind = "private" if private else "public"
        head = f"dry run: {what} would go to {made.repository} ({kind} if it is new); nothing was sent"
    else:
        head = f"{made.repository}: {what}: {made.address}"
    lines = [*([made.control] if made.control else []), head, *(f"  {name}  {size:,}" for name, size in made.files)]
    if made.left_out:
        lines.append(f"left here, since they are not part of the model: {', '.join(made.left_out)}")
    if made.address is None and made.insides:
        lines.append("every reader of the repository will see how and where the model was made:")
        lines += [f"  {name}: {_shortened(value)}" for name, value in made.insides.items()]
    return lines


def _all_insides(folder: Path, spec: RewardSpec) -> Iterator[tuple[str, str]]:
    """Yield (field, value) for everything that the spec and the configuration of adapters say about where the model was
    trained."""
    yield from _insides(spec.provenance, "provenance")
    yield from _insides(spec.exported_from or {}, "exported_from")
    yield from _insides({} if spec.calibration is None else spec.calibration.data, "calibration.data")
    if ADAPTER in spec.files:
        base = "base_model_name_or_path"
        yield from _insides({base: read_object(folder / ADAPTER, DAMAGED).get(base)}, ADAPTER)


def _insides(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """Yield (field, value) for every command in a provenance, and every text that may be a path or an address."""
    if _field(name) == "command" and isinstance(value, list):
        yield name, " ".join(map(str, value))
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _insides(inner, f"{name}.{key}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _insides(inner, f"{name}[{index}]")
    elif isinstance(value, str) and (NAMES_A_PLACE.search(value) or _field(name) in PLACES):
        yield name, value


def _field(name: str) -> str:
    """Return the last field of a name such as `data.dataset[0]`, without the index."""
    return name.rpartition(".")[2].partition("[")[0]


def _shortened(value: str) -> str:
    return value if len(value) <= SHOWN else f"{value[:SHOWN]} …"


def _hub() -> Hub:
    """Return the client of the hub. Raises ConfigError if it is not installed."""
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise ConfigError('push needs huggingface_hub: pip install "rewardlab[hub]".') from error
    api: Hub = HfApi()
    return api


def _upload(hub: Hub, folder: Path, made: Pushed, *, private: bool) -> str:
    """Create the repository if need be, and commit the files. Returns the address of the commit."""
    try:
        hub.create_repo(made.repository, private=private, exist_ok=True)
        # `create_repo` leaves the visibility of a repository that exists as it is, whatever was asked for.
        if private and not getattr(hub.repo_info(made.repository), "private", False):
            raise ConfigError(
                f"--repo {made.repository}: it is there and public. Nothing was sent. Make it private on the hub, or "
                f"say --no-private."
            )
        answer = hub.upload_folder(
            repo_id=made.repository,
            folder_path=str(folder),
            allow_patterns=[_literally(name) for name, _ in made.files],
            delete_patterns=list(REPLACED),
            commit_message=f"Reward model {folder.resolve().name}, verified by rewardlab",
        )
    except ConfigError:
        raise
    except Exception as error:  # of any class: only the hub's client is called, and what carries its bytes has others
        raise ConfigError(f"--repo {made.repository}: the hub refuses: {_said(error)}. {CONNECTED} {AGAIN}") from error
    return str(getattr(answer, "commit_url", answer))


def _said(error: Exception) -> str:
    """Return the first line of an error of the hub's client, and that of what it came from, for a message."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    # Where an answer is not one of the hub's, all that the error says may be the name of a field.
    said = f"{type(error).__name__}: {lines[0]}" if isinstance(error, LookupError | TypeError) else lines[0]
    cause = error.__cause__
    more = f" ({_said(cause)})" if isinstance(error, RuntimeError) and isinstance(cause, Exception) else ""
    return f"{said.rstrip('.')}{more}"


def _literally(name: str) -> str:
    """Return a pattern of `fnmatch` that fits this name alone."""
    return re.sub(r"([*?\[])", r"[\1]", name)
