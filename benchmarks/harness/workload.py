"""What is computed: rows of files fixed by their hash, generated rows, synthetic lengths; models whole or cut off."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness.in_memory import load_preferences
from harness.tiny import TINY, write_tiny
from rewardlab.artifact.save import choose_pad
from rewardlab.core.types import Comparison, Preference, TokenGroup
from rewardlab.data.chat import Renderer, load_tokenizer
from rewardlab.data.config import ReadingConfig, RenderingConfig
from rewardlab.data.synthetic import generate
from rewardlab.data.templates import build_renderer
from rewardlab.data.token_report import tokenize
from rewardlab.model.builtin import resolve_model_name
from rewardlab.model.load import read_config

GENERATED = "generated"
"""In place of a file: preferences of rewardlab.data.synthetic, which need no data beside the repository."""
DATA_FOLDER = Path(__file__).resolve().parents[3] / "shared" / "data" / "dev"
EXTENSIONS = ("", ".jsonl", ".jsonl.gz")


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The first rows of a file."""

    name: str
    preferences: Sequence[Preference]
    sha256: str
    """Of the lines as they are in the file, line ends included; empty for generated rows."""
    rows: int

    @property
    def fixed_by(self) -> str:
        """What says which rows these are."""
        return "made with seed 0" if self.name == GENERATED else f"SHA-256 {self.sha256[:12]}"


def read_rows(name: str, count: int, *, folder: Path, expected: str | None = None) -> Rows:
    """The first `count` rows of `folder/name` (or of a path, or GENERATED).

    SystemExit if the file is absent or shorter, or the rows are not those of the hash `expected`.
    """
    if name == GENERATED:
        preferences = [pair.preference for pair in generate(count, seed=0, topics="train")]
        return Rows(name=name, preferences=preferences, sha256="", rows=count)
    path = next((path for end in EXTENSIONS if (path := folder / f"{name}{end}").is_file()), None)
    if path is None:
        raise SystemExit(f"{name}: not in {folder}. Name the folder with --data-folder, or use --data {GENERATED}.")
    lines = list(itertools.islice(_lines(path), count))
    found = hashlib.sha256(b"".join(lines)).hexdigest()
    if len(lines) < count:
        raise SystemExit(f"{name} has {len(lines)} rows, wanted {count}. Ask for fewer with --pairs.")
    if expected is not None and found != expected:
        raise SystemExit(
            f"{name}: its first {count} rows have the hash {found[:12]}, recorded results are of {expected[:12]}. "
            f"Use that file, or --any-rows."
        )
    with tempfile.TemporaryDirectory() as work:
        part = Path(work) / "rows.jsonl"
        part.write_bytes(b"".join(lines))
        loaded = load_preferences([str(part)], split="train", reading=ReadingConfig(), seed=0, limit=None)
    return Rows(name=name, preferences=loaded.preferences, sha256=found, rows=count)


def _lines(path: Path) -> Iterator[bytes]:
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        yield from file


def renderer_of(folder: str, *, max_seq_len: int) -> Renderer:
    """The folder's tokenizer and template, as a run has them."""
    return build_renderer(load_tokenizer(folder), RenderingConfig(max_seq_len=max_seq_len))


def to_groups(rows: Rows, folder: str, *, max_seq_len: int) -> list[TokenGroup]:
    """Tokenised as a run does. SystemExit if a row is lost."""
    renderer = renderer_of(folder, max_seq_len=max_seq_len)
    groups, report = tokenize(rows.preferences, renderer, max_drop_fraction=0.0, name=rows.name)
    if report.kept != rows.rows:
        raise SystemExit(f"{rows.name}: {rows.rows - report.kept} of {rows.rows} rows cannot be used.")
    return groups


def pad_token(folder: str) -> int:
    """A token that no rendering ends with."""
    renderer: Renderer = build_renderer(load_tokenizer(folder), RenderingConfig())
    return choose_pad(renderer, read_config(folder).get_text_config().vocab_size)


def model_folder(name: str, work: Path, *, layers: int | None) -> str:
    """A folder with the model: a tiny one, the built-in, or any other; with `layers`, its first ones alone.

    A smaller one is called `NAME-3-layers`, after the name that it was asked for by.
    """
    if name in TINY:
        return write_tiny(work / name, name)
    folder = Path(resolve_model_name(name, lambda line: print(line, flush=True)))
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if layers is None or layers >= config["num_hidden_layers"]:
        return str(folder)
    cut = work / f"{Path(name).name}-{layers}-layers"
    cut.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        if file.name != "config.json" and not (cut / file.name).exists():
            (cut / file.name).symlink_to(file.resolve())
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:layers]
    (cut / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}), encoding="utf-8")
    return str(cut)


def best_of(groups: Sequence[TokenGroup], *, count: int, replies: int, seed: int) -> list[TokenGroup]:
    """`count` groups of a prompt and `replies` replies: its own two, the others drawn from other rows.

    A row's own shared tokens (prompt and template) stay what is shared; a reply is what follows the prompt.
    """
    generator = np.random.default_rng(seed)
    pool = [group.conversation(n)[group.prompt_tokens[n] :] for group in groups for n in (0, 1)]
    found = []
    for index, group in enumerate(groups[:count]):
        prompt = group.conversation(0)[: group.prompt_tokens[0]]
        others = [n for n in generator.permutation(len(pool)) if n // 2 != index][: replies - 2]
        if len(others) + 2 < replies:
            raise SystemExit(f"{len(pool)} replies are too few for groups of {replies}. Ask for more rows.")
        own = [group.conversation(n)[group.prompt_tokens[n] :] for n in (0, 1)]
        found.append(group_of(prompt, [*own, *(pool[n] for n in others)], name=group.preference_id))
    return found


def group_of(prompt: np.ndarray, replies: Sequence[np.ndarray], *, name: str) -> TokenGroup:
    """A group of token ids whose first reply beats all others."""
    return TokenGroup(
        preference_id=name,
        source="benchmark",
        prompt_key=name,
        shared=prompt,
        suffixes=tuple(replies),
        prompt_tokens=(len(prompt),) * len(replies),
        truncated_tokens=(0,) * len(replies),
        comparisons=tuple(Comparison(first=0, second=n) for n in range(1, len(replies))),
    )


def random_group(prompt: int, replies: Sequence[int], *, vocabulary: int, seed: int) -> TokenGroup:
    """A group of these lengths with random tokens."""
    generator = np.random.default_rng(seed)

    def tokens(count: int) -> np.ndarray:
        return generator.integers(3, vocabulary, count, dtype=np.int32)

    return group_of(tokens(prompt), [tokens(count) for count in replies], name=f"random {seed}")


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """A log-normal distribution of token counts for prompt, chosen and rejected."""

    prompt: float
    """Mean."""
    chosen: float
    rejected: float
    spread: tuple[float, float]
    """Standard deviations of the logarithm: prompt, reply."""

    def draw(self, count: int, *, longest: int, vocabulary: int, seed: int) -> list[TokenGroup]:
        """`count` pairs with random tokens; conversations of more than `longest` tokens are drawn again."""
        generator = np.random.default_rng(seed)
        means = (self.prompt, self.chosen, self.rejected)
        spreads = (self.spread[0], self.spread[1], self.spread[1])
        found: list[TokenGroup] = []
        while len(found) < count:
            sizes = [
                max(4, round(float(generator.lognormal(np.log(mean) - spread**2 / 2, spread))))
                for mean, spread in zip(means, spreads, strict=True)
            ]
            if sizes[0] + max(sizes[1:]) <= longest:
                found.append(random_group(sizes[0], sizes[1:], vocabulary=vocabulary, seed=len(found)))
        return found
