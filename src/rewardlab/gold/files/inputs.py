"""Which rows a stage reads: a file of ours, or the files of the layout with one JSON file a fact."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from rewardlab.core.config import require_between
from rewardlab.core.errors import DataError
from rewardlab.core.files import sha256_file
from rewardlab.core.values import Section, require
from rewardlab.gold.files.layouts import read_layout
from rewardlab.gold.files.parts import parts_of
from rewardlab.gold.files.rows import GoldRow, read_gold_rows, with_system


@dataclass(frozen=True, kw_only=True)
class InputConfig(Section):
    """The prompts, replies and gold scores that are read."""

    input: tuple[Path, ...] = ()
    """Files with `prompt`, `responses` and perhaps `gold`, as `rewardlab gold sample` and `label` write them. One that
    was written in parts is named as a whole."""
    prompts_path: Path | None = None
    """In place of --input: a file of prompts."""
    responses_path: Path | None = None
    """With --prompts-path: `[{"response_1": …, "response_2": …}]`, a row for each prompt, in their order."""
    rewards_path: Path | None = None
    """With --prompts-path: `[[r1, r2]]`, the gold scores of each row."""
    num_responses: int | None = None
    """Replies of each row that are used, the first so many; by default all. A row that has fewer is refused."""
    system: str | None = None
    """System turn of prompts that have none; `--system ""` gives them an empty one. Give it to every stage, or to
    `sample` alone, whose file has it from then on."""

    def __post_init__(self) -> None:
        theirs = (self.prompts_path, self.responses_path, self.rewards_path)
        require(
            not (self.input and any(theirs)),
            "--input and --prompts-path, --responses-path, --rewards-path: give one file of ours, or theirs.",
        )
        require(
            bool(self.prompts_path) == bool(self.responses_path) and not (self.rewards_path and not self.prompts_path),
            "--prompts-path and --responses-path: give both; with scores also --rewards-path.",
        )
        if self.num_responses is not None:
            require_between(self, num_responses=(1, 100_000))

    @property
    def is_given(self) -> bool:
        """Whether anything is named."""
        return bool(self.input) or self.prompts_path is not None

    def rows(self, *, labelled: bool = False) -> Iterator[GoldRow]:
        """Yield the rows. Raises ConfigError if nothing is named, DataError as `read_gold_rows` and `read_layout`."""
        require(self.is_given, "--input is missing: name a file that `rewardlab gold sample` or `label` wrote.")
        if self.input:
            found = read_gold_rows(self.input, labelled=labelled)
        else:
            assert self.prompts_path is not None
            assert self.responses_path is not None
            require(
                not labelled or self.rewards_path is not None,
                "--rewards-path is missing: the file with the gold scores, `[[r1, r2], …]`.",
            )
            found = read_layout(
                self.prompts_path, self.responses_path, self.rewards_path, num_responses=self.num_responses
            )
        for row in found:
            yield _settled(row, self.num_responses, self.system)

    def files(self) -> list[Path]:
        """Return the files that are read. Raises DataError for one that is not there."""
        named = [*self.input, self.prompts_path, self.responses_path, self.rewards_path]
        return [part for path in named if path is not None for part in parts_of(path)]

    def digests(self) -> dict[str, str]:
        """Return the SHA-256 of every file that is read, by its name without folders where that is unique."""
        return digests_of(self.files())


def digests_of(files: Sequence[Path]) -> dict[str, str]:
    """Return the SHA-256 of every file, by its name without folders where that is unique."""
    names = [path.name for path in files]
    return {path.name if names.count(path.name) == 1 else str(path): sha256_file(path) for path in files}


NO_INPUT: Final = InputConfig()


def _settled(row: GoldRow, num_responses: int | None, system: str | None) -> GoldRow:
    """Return a row with its first `num_responses` replies, and with a system turn. Raises DataError if it has fewer."""
    kept = slice(num_responses)
    row = replace(row, prompt=with_system(row.prompt, system))
    if num_responses is None or num_responses == len(row.responses):
        return row
    if num_responses > len(row.responses):
        raise DataError(
            f"{row.where}: has {len(row.responses)} responses, wanted {num_responses} (--num-responses). Sample more, "
            f"or ask for fewer."
        )
    return replace(
        row,
        responses=row.responses[kept],
        samples=row.samples[kept],
        gold=None if row.gold is None else row.gold[kept],
        gold_errors={place: why for place, why in row.gold_errors.items() if int(place) < num_responses},
    )
