"""Settings of `rewardlab data audit`. Needs nothing but the standard library and tyro."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rewardlab.core.config import require_between
from rewardlab.core.values import require
from rewardlab.curation.auditing.registry import CHECKS, LEAKS, adjusted, require_checks
from rewardlab.curation.config import RowsConfig
from rewardlab.data.config import require_share

_REMOVED = tuple(check.name for check in CHECKS.values() if check.is_removed)


@dataclass(frozen=True, kw_only=True)
class AuditConfig(RowsConfig):
    """Which rows are audited, by which checks, and what is written."""

    splits: tuple[str, ...] = ()
    """Splits of the datasets, in the order of their use (`train test`); prompts must not leak from an earlier one to a
    later one. Files whose names end in a split are compared without it."""
    against: tuple[str, ...] = ()
    """Suites by name, or datasets, whose prompts must not be among these."""
    suite_data: Path | None = None
    """Folder of the suites of `--against`: of one, or with a folder for each, named like it; by default the hub."""
    model: str | None = None
    """Model folder or hub name: lengths are counted in its tokens, and its control tokens are looked for."""
    max_seq_len: int | None = None
    """Longest conversation that fits, in tokens of `--model`, else in words; without it lengths are not checked."""
    truncation: Literal["prompt-left", "drop", "error", "reply-middle"] | None = None
    """Rule by which what is above `--max-seq-len` tokens would be cut, as in training; by default that of a
    reward-model folder, else `prompt-left`."""
    near: float = 0.8
    """Jaccard similarity from which texts are near duplicates, of their runs of three words."""
    threshold: tuple[str, ...] = ()
    """`check=number`: the score from which a check flags a row."""
    fail_on: tuple[str, ...] = ()
    """`check=limit`: exit with status 1 above so many flagged rows (`5`, `1%`, or `none` for any number)."""
    fix: bool = False
    """Write a cleaned file to `--output`, and beside it a trace of every row removed. No label is changed."""
    output: Path | None = None
    """For `--fix`: the cleaned file; for several files the folder that holds one for each."""
    remove: tuple[str, ...] = _REMOVED
    """For `--fix`: the checks whose rows are removed."""
    overwrite: bool = False
    """Replace `--output`, and what `--json` and `--scores` name, if they exist."""
    json: Path | None = None
    """Also write the audit to this file, with every flagged row and its score."""
    scores: Path | None = None
    """Also write a line of JSON for every row, with its scores that are not 0."""
    examples: int = 3
    """Rows shown of each check in the text report."""

    def __post_init__(self) -> None:
        super().__post_init__()
        adjusted(self.threshold, self.fail_on)
        require_checks(self.remove, "--remove")
        require_between(self, max_seq_len=(1, 10_000_000), examples=(0, 1000))
        require_share(self.near, "--near")
        require(self.near > 0, "--near 0: must be above 0.")
        require(self.fix == (self.output is not None), "--fix and --output FILE are given together.")
        require(self.fix or self.remove == _REMOVED, "--remove says what --fix removes: give --fix and --output FILE.")
        require(not (self.fix and self.limit), "--fix cleans whole files; leave --limit out.")
        require(
            len(set(self.splits)) == len(self.splits) and len(self.splits) != 1,
            "--splits: name at least two different splits, such as `--splits train test`.",
        )
        require(
            self.truncation is None or (self.model is not None and self.max_seq_len is not None),
            "--truncation says what is cut of a conversation in tokens: give --model and --max-seq-len too.",
        )
        require(bool(self.against) or self.suite_data is None, "--suite-data is for suites named by --against.")

    @property
    def unasked(self) -> dict[str, str]:
        """Checks that cannot run with these settings -> what they need."""
        unasked = {} if self.max_seq_len else dict.fromkeys(("overlong", "overlong-replies"), "--max-seq-len")
        unasked |= {} if self.model else {"template-refuses": "--model"}
        return unasked | ({} if self.against else dict.fromkeys(_AGAINST, "--against"))


_AGAINST = tuple(name for name in CHECKS if name.startswith("overlap-"))
assert set(LEAKS) < set(CHECKS)
