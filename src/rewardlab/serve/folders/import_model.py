"""Import: a reward model of another project as a reward-model folder, after both gave the same scores."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from rewardlab.artifact.base import require_positions, settle_length
from rewardlab.artifact.canaries import render_canaries
from rewardlab.artifact.foreign.adapter import holds_adapters, open_adapters
from rewardlab.artifact.foreign.config import ImportConfig
from rewardlab.artifact.foreign.layouts import ForeignModel, recognise
from rewardlab.artifact.foreign.rendering import foreign_renderer
from rewardlab.artifact.foreign.source import Source, WholeModel
from rewardlab.artifact.save import choose_pad, save_reward_model, saved_dtype, verify_in_clean_process
from rewardlab.artifact.seal import seal
from rewardlab.core.errors import ArtifactError, ConfigError, RewardlabError
from rewardlab.core.files import provenance, write_json
from rewardlab.core.folders import move, remove, replacing_folder
from rewardlab.core.signals import raised_at_once
from rewardlab.core.spec import SPEC_FILE, RewardSpec
from rewardlab.core.values import require
from rewardlab.data.chat import Renderer
from rewardlab.data.config import RenderingConfig
from rewardlab.model.config import BackboneConfig
from rewardlab.serve.folders.export import require_apart

logger = logging.getLogger("rewardlab")
FLOAT32_STEP: Final = 2.0**-23
"""Relative distance of neighbouring float32 numbers."""


@dataclass(frozen=True, kw_only=True)
class Imported:
    """The result of an import, and how it compares with its source."""

    spec: RewardSpec
    source: ForeignModel
    words: str
    """What the source is, in words."""
    allowed: float
    """Largest distance that is allowed."""
    distance: float
    """Largest distance on the canaries between the source's own scores and the new folder's plus the constant, in
    units of max(1, |score|) and beyond what float32 loses by the constant."""
    end: str | None
    """Text of the token at which the score is read; None if renderings end in any token."""


def import_model(
    source: Path, target: Path, settings: ImportConfig | None = None, *, overwrite: bool = False
) -> Imported:
    """Write the foreign reward model in `source` as the reward-model folder `target`; `source` stays as it is.

    The scores that `source` gives by itself, in float32 and by its own project's arithmetic, are compared with those of
    the new folder on the canaries. Where the source adds a constant to every score (a bias of the head, a mean), the
    new folder's scores lack it, since no engine has a place for it; comparisons are the same. The constant and the
    distance are in `provenance.import` of the new spec.

    `source` may hold adapters of PEFT, which are merged into the base model that `settings` or their files name.

    Raises ArtifactError or ModelError if `source` is not a reward model that can be imported, or if the scores differ
    by more than is allowed; ConfigError if the rendering is left open, or if `target` exists and is not to be
    overwritten.
    """
    settings = settings or ImportConfig()
    require_apart(source, target, overwrite=overwrite)
    _require_foreign(source)
    opened = _open(source, target, settings)
    found = opened.found
    logger.info("%s: %s, %s", source, opened.words, _arithmetic(found))
    end_known = found.kind == "seq-cls" and settings.layout != "ms-swift"
    length = _length(opened.model, settings)
    require_positions(found.config, length)
    renderer = foreign_renderer(opened.tokenizer(), source, settings, max_seq_len=length, end_known=end_known)
    choose_pad(renderer, found.config.get_text_config().vocab_size)
    sequences = [token_ids for _, _, token_ids in render_canaries(renderer)]
    own = opened.own_scores(sequences)
    if not all(map(math.isfinite, own)):
        raise ArtifactError(f"{source}: its own scores of the canaries are not finite, so nothing can be compared.")
    model = opened.as_reward_model()
    with replacing_folder(target) as place:
        spec = save_reward_model(
            place,
            model,
            renderer,
            beta=settings.beta,
            save_dtype=saved_dtype(settings.dtype),
            provenance={**provenance(), "import": _origin(opened)},
        )
        # Free this model first: the verifying process loads one as well, and memory may not be enough for both.
        del model
        distance = _require_parity(opened, renderer, own, [canary.score for canary in spec.canaries], settings.dtype)
        spec = _with_parity(place, spec, opened.allowed, distance, own)
        verify_in_clean_process(place)
        require_apart(source, target, overwrite=overwrite)  # another process may have made it meanwhile
    final = spec.renderer.final_token_id
    end = None if final is None else str(renderer.tokenizer.decode([final]))
    return Imported(spec=spec, source=found, words=opened.words, allowed=opened.allowed, distance=distance, end=end)


def import_in_place(source: Path, settings: ImportConfig | None = None) -> Imported:
    """Do what `import_model` does, with the new folder in the place of `source`, which is renamed to NAME.original.

    Raises as `import_model` does, and ConfigError if NAME.original or NAME.imported, where the new folder is made, is
    there already. On any error, Ctrl-C and SIGTERM among them, everything stays as it was. A process that is killed
    between the two renames leaves the source as NAME.original; the next call says so.
    """
    source = source.resolve()
    original = source.with_name(f"{source.name}.original")
    new = source.with_name(f"{source.name}.imported")
    if not source.exists() and original.is_dir():
        made = f", and {new} is the new folder, which was verified" if new.is_dir() else ""
        raise ConfigError(
            f"{source}: not there, since an import in its place was ended between two renames. {original} is the "
            f"original{made}. Rename the one that you want to {source.name}."
        )
    require(
        not original.exists(),
        f"{original}: it is there already, as the original of an earlier import would be. Move it away, or import into "
        f"another folder with --output-dir.",
    )
    require(
        not new.exists(),
        f"{new}: it is there already, as an import that was ended would leave it. {source} is still the original. "
        f"Remove {new.name}, or import into another folder with --output-dir.",
    )
    with raised_at_once():
        try:
            result = import_model(source, new, settings)
            move(source, original)
            move(new, source)
        except BaseException as error:
            if original.exists() and (new.exists() or not source.exists()):
                remove(source)  # of an original that was copied aside, what was not removed yet
                move(original, source)
            remove(new)
            if not isinstance(error, RewardlabError):
                place = original if original.exists() else source
                logger.warning("the import in place of %s ended early; the original is %s", source, place)
            raise
    return result


def import_report(result: Imported, target: Path) -> list[str]:
    """Return the lines that say what an import made."""
    found, spec = result.source, result.spec
    renderer = spec.renderer
    end = "any token" if result.end is None else f"token {renderer.final_token_id} ({result.end!r})"
    lines = [
        f"{target}: {found.folder} ({result.words}), verified. Its own forward pass and the new folder are at most "
        f"{result.distance:.1e} apart on {len(spec.canaries)} canaries in float32 ({result.allowed:.0e} allowed).",
        f"Rendering: {renderer.template_source} template, {renderer.num_bos} BOS, read at {end}, up to "
        f"{renderer.max_length} tokens.",
    ]
    if found.constant:
        lines.append(
            f"The source adds {found.constant:.6g} to every score ({_arithmetic(found)}). No engine has a place for "
            f"it, so the new scores lack it; comparisons are the same. It is in the spec as "
            f"provenance.import.constant_left_out."
        )
    return lines


def _require_foreign(source: Path) -> None:
    """Raise ConfigError if the source is one of rewardlab's own folders."""
    if (source / SPEC_FILE).is_file():
        raise ConfigError(
            f"{source}: it is a reward-model folder of rewardlab already. Check it with `rewardlab verify`; another "
            f"dtype is made by `rewardlab export`."
        )


def _open(source: Path, target: Path, settings: ImportConfig) -> Source:
    """Return the foreign reward model in `source`. Raises as `import_model` does for one that cannot be imported."""
    if holds_adapters(source):
        opened = open_adapters(source, settings)
        if Path(opened.model).is_dir():
            require_apart(Path(opened.model), target, overwrite=True)
        return opened
    require(
        settings.base is None or not source.is_dir(),
        f"--base {settings.base}: it is for adapters, and {source} holds none (no adapter_config.json). Leave it out.",
    )
    return WholeModel(found=recognise(source, settings))


def _length(model: str, settings: ImportConfig) -> int:
    """Return the length limit as a number. Raises ConfigError if it is left to a model that states none."""
    rendering = RenderingConfig(max_seq_len=settings.max_seq_len)
    return settle_length(BackboneConfig(model=model), rendering)


def _arithmetic(found: ForeignModel) -> str:
    """Return in words what the source does to w · h: its bias and its normalisation."""
    parts = [f"bias {found.bias:.6g}"] if found.bias else []
    parts += (
        [f"normalised by mean {found.mean:.6g} and std {found.std:.6g}"] if (found.mean, found.std) != (0, 1) else []
    )
    return " and ".join(parts) or "no bias and no normalisation"


def _origin(opened: Source) -> dict[str, Any]:
    """Return what the new spec says about the source: where and what it was, and what its score is made of."""
    found = opened.found
    return {
        "folder": str(found.folder),
        "kind": found.kind,
        "head": found.head,
        "architectures": list(found.config.architectures or []),
        "outputs": list(found.counts),
        "bias": found.bias,
        "mean": found.mean,
        "std": found.std,
        "constant_left_out": found.constant,
        **opened.origin(),
    }


def _require_parity(
    opened: Source, renderer: Renderer, own: Sequence[float], new: Sequence[float], dtype: str
) -> float:
    """Return the largest distance of the new scores, plus the constant, from the source's own.

    Raises ArtifactError if it is above what is allowed, with what is known to cause that.
    """
    found = opened.found
    # The unit is the score without the constant, which may be so large that it would hide any difference. Only what
    # float32 loses when the source adds the constant is let pass.
    lost = 2 * FLOAT32_STEP * max(abs(found.bias), abs(found.mean)) / found.std
    distances = [
        max(0.0, abs(score + found.constant - wanted) - lost) / max(1.0, abs(wanted - found.constant))
        for score, wanted in zip(new, own, strict=True)
    ]
    distance = max(distances)
    if distance <= opened.allowed:
        return distance
    worst = distances.index(distance)
    pad, final = found.config.get_text_config().pad_token_id, renderer.spec.final_token_id
    if found.kind == "seq-cls" and pad is not None and pad == final:
        why = (
            f"Its pad token {pad} is also the token that ends a conversation, so its own class skips that token and "
            f"reads the score before it. Give the template that its training data were rendered with: without "
            f"that token at its end, if its project read the score there. Or, if it was trained with another pad "
            f"token, correct {opened.pad_said_in}"
        )
    elif dtype != "float32":
        why = f"Its weights are not {dtype} values, so rounding moved them. Use --dtype float32"
    else:
        why = "The two do not compute the same function. Please report this with the model's name"
    raise ArtifactError(
        f"{found.folder}: canary {worst} scores {own[worst]:.6f} by the source's own forward pass and "
        f"{new[worst] + found.constant:.6f} as imported, {distance:.1e} apart where {opened.allowed:.0e} is allowed. "
        f"{why}. Nothing was written."
    )


def _with_parity(place: Path, spec: RewardSpec, allowed: float, distance: float, own: Sequence[float]) -> RewardSpec:
    """Write the result of the comparison into the spec, under a new seal."""
    parity = {"largest_distance": distance, "allowed": allowed, "precision": "float32", "own_scores": list(own)}
    origin = {**spec.provenance["import"], "parity": parity}
    sealed = seal(place, replace(spec, provenance={**spec.provenance, "import": origin}))
    write_json(place / SPEC_FILE, sealed.to_dict())
    return sealed
