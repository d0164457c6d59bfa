"""Settings of a language model as judge. Needs nothing but the standard library."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rewardlab.core.config import require_between
from rewardlab.core.values import Section, require
from rewardlab.data.template_files import parse_arguments


@dataclass(frozen=True, kw_only=True)
class JudgeConfig(Section):
    """How a language model is asked which of two replies is better, and what that costs."""

    judge_prompt: Path | None = None
    """File with the text that the model is asked with. It has {question}, {answer_a} and {answer_b}, and asks for a
    last line of [[A]], [[B]] or [[C]] (a tie). By default a text of ours."""
    judge_max_tokens: int = 1024
    """Most tokens of an answer."""
    judge_template_arguments: tuple[str, ...] = ()
    """What the chat template of the judge is given, as `NAME=VALUE` with values of JSON (`enable_thinking=false`)."""
    judge_seed: int = 0
    """Sent with every question, with temperature 0."""
    keep_answers: bool = False
    """Keep the whole answers of the judge in the rows."""
    price_in: float | None = None
    """Price of a million tokens of questions, for the cost."""
    price_out: float | None = None
    """Price of a million tokens of answers."""

    def __post_init__(self) -> None:
        """Raise ConfigError for a value out of its range."""
        require_between(self, judge_max_tokens=(1, 1 << 20), judge_seed=(0, (1 << 63) - 1))
        parse_arguments(self.judge_template_arguments, flag="--judge-template-arguments")
        require_between(self, price_in=(0.0, 1e9), price_out=(0.0, 1e9))
        require(
            (self.price_in is None) == (self.price_out is None),
            "--price-in and --price-out: give both, for a million tokens each, or none.",
        )


DEFAULT_JUDGE: Final = JudgeConfig()
