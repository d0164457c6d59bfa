"""Settings of data: reading, rendering, and what is held out. Imports no third-party package."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final, Literal

from rewardlab.core.config import require_between
from rewardlab.core.controls import notice
from rewardlab.core.errors import ConfigError
from rewardlab.core.terminal import short
from rewardlab.core.values import Section, require
from rewardlab.data.template_files import parse_arguments, require_template

USUAL_LENGTH: Final = 1024
"""`--max-seq-len auto` for a model with as many positions."""
MAPPED_COLUMNS = ("prompt", "chosen", "rejected", "label", "response", "responses", "scores", "strength")
"""Columns that a flag can name: `--prompt-column` and its like."""


def require_share(value: float, flag: str) -> None:
    """Raise ConfigError unless the value of `flag` lies between 0 and 1."""
    require(0 <= value <= 1, f"{flag} {value}: must be between 0 and 1.")


def require_limits(config: object, *names: str) -> None:
    """Raise ConfigError if a setting that limits rows is below 1."""
    for name in names:
        value = getattr(config, name)
        require(
            value is None or value > 0,
            f"--{name.replace('_', '-')} {value}: must be at least 1; leave it out to use every row.",
        )


@dataclass(frozen=True, kw_only=True)
class ReadingConfig(Section):
    """How rows become preferences, and where these are cached: the same for training, probing and evaluating."""

    max_drop_fraction: float = 0.05
    """Stop if more than this share of a dataset's rows cannot be used."""
    incomplete_pairs: Literal["drop", "error"] = "drop"
    """Long-form rows whose pair lacks a side."""
    ties: Literal["auto", "skip", "half", "error"] = "auto"
    """Equal scores in a K-wise row: not compared, compared with label 0.5, or an error; `auto` skips for
    pairs and is an error for Plackett-Luce."""
    max_replies: int | None = None
    """Replies kept of a K-wise row, drawn with the seed."""
    margin_column: str | None = None
    """Column with an additive margin in logits, at least 0."""
    strength_as: Literal["none", "weight", "margin", "soft"] = "none"
    """What the `strength` of a row does: nothing, weight in the loss, margin in logits, or the label itself."""
    shp: Literal["pairs", "kwise"] = "pairs"
    """Rows of SHP: each a pair, or those of one post together, compared where people's votes compare them."""
    max_per_post: int | None = None
    """Judgements kept of each post of SHP, drawn with the seed; its authors suggest 5."""
    min_score_ratio: float | None = None
    """Leave out SHP's pairs whose preferred reply has less than this many times the votes of the other."""
    attributes: tuple[str, ...] = ()
    """What rated replies are compared by, as `NAME=WEIGHT` (`helpfulness=1 coherence=0.5`): the weighted sum, in which
    true is 1 and false 0. By default `helpfulness` of HelpSteer, and UltraFeedback's mean rating."""
    prompt_column: str | None = None
    """Column to read as `prompt`."""
    chosen_column: str | None = None
    """Column to read as `chosen`."""
    rejected_column: str | None = None
    """Column to read as `rejected`."""
    label_column: str | None = None
    """Column to read as `label`, the probability that `chosen` is preferred (with lists or mappings: as `labels`)."""
    response_column: str | None = None
    """Column to read as `response`, the reply of a row that has one: rated, or good or bad."""
    responses_column: str | None = None
    """Column to read as `responses`, the replies of a K-wise row."""
    scores_column: str | None = None
    """Column to read as `scores`."""
    strength_column: str | None = None
    """Column to read as `strength`, which `--strength-as` uses."""
    map_label: tuple[str, ...] = ()
    """What the values of the label mean, as `VALUE=NUMBER` (`A=1 B=0 tie=0.5`); rows with others are dropped."""
    num_workers: int | None = None
    """Processes that read and tokenise large data; by default one a core, and 1 does it all in this process."""
    cache_dir: str = "auto"
    """Folder in which prepared data are kept; `auto` is `tokens` in rewardlab's cache, `none` keeps nothing."""
    streaming: bool = False
    """Read datasets of the hub as they arrive, without downloading them first; files are read a piece at a time
    anyway."""
    shuffle_buffer: int = 10_000
    """With `--streaming`, rows among which a limit draws each of its rows; the rest of the stream is not read."""

    def __post_init__(self) -> None:
        require(
            self.max_replies is None or self.max_replies >= 2,
            f"--max-replies {self.max_replies}: must be at least 2, since a comparison needs two replies.",
        )
        require_between(self, max_per_post=(1, 10**9), min_score_ratio=(1, math.inf))
        require("" not in self.attribute_weights, "--attributes: a name is empty; wanted NAME=WEIGHT.")
        parse_numbers(self.map_label, "--map-label", low=0.0, high=1.0)
        named = list(self.own_columns.values())
        require("" not in named, "--prompt-column and its like: the name of the column is empty; leave the flag out.")
        twice = next((own for own in named if named.count(own) > 1), None)
        require(twice is None, f"the column {twice!r} is named twice among {', '.join(self.column_flags)}.")
        require(self.cache_dir != "", "--cache-dir: the name is empty; give a folder, or none to keep nothing.")
        require_between(self, num_workers=(0, 1024), shuffle_buffer=(1, 10_000_000))
        require_share(self.max_drop_fraction, "--max-drop-fraction")
        if self.margin_column and self.strength_as == "margin":
            raise ConfigError("--margin-column and --strength-as margin both set the margin; choose one.")

    @property
    def own_columns(self) -> dict[str, str]:
        """Our name of a column -> the name in the data, for the columns that a flag names."""
        named = {name: getattr(self, f"{name}_column") for name in MAPPED_COLUMNS}
        return {name: own for name, own in named.items() if own is not None}

    @property
    def column_flags(self) -> list[str]:
        """The flags that name columns, as they were given."""
        return [f"--{name}-column {own}" for name, own in self.own_columns.items()]

    @property
    def joins_input(self) -> bool:
        """Return whether a row's `input` belongs to its prompt, as in Alpaca's files."""
        return self.prompt_column == "instruction"

    @property
    def attribute_weights(self) -> dict[str, float]:
        """Name -> weight, from `--attributes`."""
        return parse_numbers(self.attributes, "--attributes", low=-math.inf, high=math.inf)

    @property
    def label_values(self) -> dict[str, float]:
        """Value of a label -> probability, from `--map-label`."""
        return parse_numbers(self.map_label, "--map-label", low=0.0, high=1.0)


def parse_numbers(words: tuple[str, ...], flag: str, *, low: float, high: float) -> dict[str, float]:
    """Return name -> number of words such as `tie=0.5`. What stands before the last `=` is the name.

    Raises ConfigError for a word of another form, a number out of range, and a name given twice.
    """
    found: dict[str, float] = {}
    for word in words:
        name, mark, text = word.rpartition("=")
        said = f"{flag} {short(word)}"
        if len(parts := word.split(",")) > 1 and all(re.fullmatch(r"[^=]+=[-+.\deE]+", part) for part in parts):
            raise ConfigError(f"{said}: several are written with spaces between them: {flag} {short(' '.join(parts))}.")
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not mark or math.isnan(number) or math.isinf(number):
            raise ConfigError(f"{said}: wanted NAME=NUMBER, such as {flag} {'A=1' if high == 1 else 'helpfulness=1'}.")
        require(low <= number <= high, f"{said}: the number must be from {low:g} to {high:g}.")
        require(name not in found, f"{said}: this name is given twice.")
        found[name] = number
    return found


@dataclass(frozen=True, kw_only=True)
class RenderingConfig(Section):
    """How preferences become tokens. A saved model stores these settings, so evaluating it needs none of them."""

    max_seq_len: int | Literal["auto", "model"] = "auto"
    """Tokens a conversation may have; `--truncation` says what happens to longer ones. `model` is as many as the model
    has positions; `auto` is the limit of a reward-model folder that is trained further, and for any other model 1024,
    or its positions if it has fewer."""
    truncation: Literal["prompt-left", "drop", "error", "reply-middle"] = "prompt-left"
    """Conversations above `--max-seq-len`: the oldest turns of the prompt are cut (`prompt-left`), the row is left out
    and counted (`drop`), the run ends and names the row (`error`), or the reply loses its middle (`reply-middle`). The
    rule is part of the model, and holds wherever it scores."""
    chat_template: str | Literal["auto", "template", "plain", "concat"] = "auto"
    """The tokenizer's chat template, a plain transcript, or the texts as they are, one after the other, and EOS;
    `auto` takes the template if there is one (`--use-chat-template` and `--no-chat-template` say `template` and
    `plain`). Or a FILE with the Jinja text of a template, or the folder of a tokenizer, for that to take the place of
    the tokenizer's; config.json then holds the text."""
    template_arguments: tuple[str, ...] = ()
    """What the chat template is given, as `NAME=VALUE` with values of JSON (`enable_thinking=false`). It is written
    into the saved template, so nobody has to give it again."""
    system_prompt: str | None = None
    """System turn for conversations that have none; an empty text is an explicit empty turn."""
    special_tokens_in_text: Literal["auto", "text", "keep"] = "auto"
    """Control tokens such as `<|im_end|>` that are typed in a message: `text` reads them as letters, so that nobody can
    forge a turn, `keep` as control tokens; `auto` is `text`, and `keep` where texts are joined as they are
    (`--chat-template concat`)."""

    def __post_init__(self) -> None:
        require(
            self.system_prompt is None or not re.search("[\ud800-\udfff]", self.system_prompt),
            "--system-prompt: has a lone surrogate (half a character), which no tokenizer can read. Write it in UTF-8.",
        )
        require(
            isinstance(self.max_seq_len, str) or self.max_seq_len >= 16,
            f"--max-seq-len {self.max_seq_len}: must be at least 16 to hold a chat template and a reply; "
            f"{USUAL_LENGTH} suits most data.",
        )
        require_between(self, max_seq_len=(16, 10_000_000))
        require_template(self.chat_template)
        require(
            not parse_arguments(self.template_arguments) or self.chat_template not in ("plain", "concat"),
            f"--template-arguments: --chat-template {self.chat_template} takes none. Leave them out.",
        )

    @property
    def length_limit(self) -> int:
        """`max_seq_len` as a number, once `model` is resolved; for `auto` the usual one, where no model is known."""
        assert self.max_seq_len != "model", "--max-seq-len model is decided when the model is found"
        return USUAL_LENGTH if self.max_seq_len == "auto" else self.max_seq_len

    @property
    def joins_texts(self) -> bool:
        """Return whether texts are joined as they are, without splitting transcripts into turns."""
        return self.chat_template == "concat"


Purpose = Literal["train", "eval", "test"]
"""What data are for."""
Mode = Literal["none", "label_shuffle", "prompt_only", "response_only", "random_negatives", "length_matched"]
"""Which control is run: what is changed in the data."""


@dataclass(frozen=True, kw_only=True)
class Control:
    """What a control does to the rows of a dataset, with everything that it depends on."""

    mode: Mode
    shuffle_rate: float | None = None
    """Probability that a pair is swapped; None where nothing is shuffled."""
    length_threshold: int | None = None
    """Tokens below which two replies count as equally long; None where lengths do not matter."""
    seed: int | None = None
    """Decides the draws; None where nothing is drawn."""


@dataclass(frozen=True, kw_only=True)
class DiagnosticConfig(Section):
    """Data changed on purpose, to see what a model learns without something; docs/controls.md."""

    diagnostic_mode: Mode = "none"
    """A control: judgements swapped at random, every reply the same text, no prompt, replies to other prompts in place
    of the rejected ones, or only pairs of nearly equal length. The model of a control is not one to use."""
    diagnostic_shuffle_rate: float = 0.5
    """Probability that `label_shuffle` swaps a pair; with 0.5 the labels say nothing."""
    diagnostic_length_threshold: int = 50
    """`length_matched` keeps comparisons of replies that differ by fewer tokens than this."""
    diagnostic_seed: int | None = None
    """Decides what a control draws; by default `--seed`."""
    diagnostic_splits: tuple[Purpose, ...] = ()
    """Data that the control changes; by default those for training (`label_shuffle`, `random_negatives`), or all."""

    def __post_init__(self) -> None:
        require_share(self.diagnostic_shuffle_rate, "--diagnostic-shuffle-rate")
        require_between(self, diagnostic_length_threshold=(1, 10_000_000))
        if self.diagnostic_seed is not None:
            require(
                0 <= self.diagnostic_seed < 1 << 63,
                f"--diagnostic-seed {self.diagnostic_seed}: must be a whole number from 0 to 2**63 - 1.",
            )
        require(
            self.diagnostic_mode != "none" or not self.diagnostic_splits,
            "--diagnostic-splits: names data for a control, and there is none. Name it with --diagnostic-mode.",
        )

    @property
    def splits(self) -> tuple[Purpose, ...]:
        """The data that the control changes; empty without one."""
        if self.diagnostic_mode == "none":
            return ()
        needed: tuple[Purpose, ...] = ("train", "eval", "test")
        if self.diagnostic_mode in ("label_shuffle", "random_negatives"):
            needed = ("train",)
        return tuple(dict.fromkeys(self.diagnostic_splits)) or needed

    @property
    def notice(self) -> str | None:
        """The sentence that says that the model is a control; None without one."""
        return notice(self.diagnostic_mode, self.splits) if self.splits else None

    @property
    def provenance(self) -> dict[str, object]:
        """The facts about the control that a saved model records; empty without one."""
        if not self.splits:
            return {}
        return {"control": {"mode": self.diagnostic_mode, "splits": list(self.splits)}}

    def control(self, purpose: Purpose, *, seed: int) -> Control | None:
        """Return what is done to the data for a purpose; None if they stay as they are. `seed` is that of the run."""
        mode = self.diagnostic_mode
        if mode == "none" or purpose not in self.splits:
            return None
        own_seed = seed if self.diagnostic_seed is None else self.diagnostic_seed
        return Control(
            mode=mode,
            shuffle_rate=self.diagnostic_shuffle_rate if mode == "label_shuffle" else None,
            length_threshold=self.diagnostic_length_threshold if mode == "length_matched" else None,
            seed=own_seed if mode in ("label_shuffle", "random_negatives") else None,
        )


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """Where preferences come from and how they become tokens."""

    dataset: tuple[str, ...] = ()
    """Training data: files, folders (also those that `save_to_disk` of datasets wrote) or hub names, one or several,
    which may have weights, as in `a.jsonl:0.7 b.parquet:0.3` (also `--hf-dataset`)."""
    hf_split: str = "train"
    """Split to train on."""
    test_dataset: tuple[str, ...] = ()
    """Data read once, at the end, for the headline numbers; by default the training datasets with `--test-split`."""
    test_split: str | None = None
    """Split for the headline numbers."""
    limit: int | None = None
    """Rows used from each training dataset, after a seeded shuffle."""
    eval_limit: int | None = None
    """Rows used from each evaluation and test dataset, after a seeded shuffle."""
    reading: ReadingConfig = ReadingConfig()
    rendering: RenderingConfig = RenderingConfig()
    diagnostic: DiagnosticConfig = DiagnosticConfig()

    def __post_init__(self) -> None:
        require_limits(self, "limit", "eval_limit")


@dataclass(frozen=True, kw_only=True)
class SelectionConfig(Section):
    """Which preferences choose the checkpoint, and what it is compared with."""

    eval_dataset: tuple[str, ...] = ()
    """Evaluation data used to choose the checkpoint; by default the training datasets with `--eval-split`."""
    eval_split: str | None = None
    """Split to evaluate on; without it and without `--eval-dataset`, prompts are held out of the training data."""
    eval_fraction: float = 0.05
    """Share of the training prompts held out, whole conversations, when no evaluation data is named; 0 turns evaluation
    off."""
    train_eval_limit: int = 0
    """Training rows evaluated together with the evaluation data, to measure the gap between the two."""
    baselines: bool = True
    """Fit what is to be beaten on the same data: reply length alone, and a bag of words."""

    def __post_init__(self) -> None:
        require_share(self.eval_fraction, "--eval-fraction")
        require_between(self, train_eval_limit=(0, math.inf))


@dataclass(frozen=True, kw_only=True)
class TrainingDataConfig(DataConfig):
    """Where preferences come from, how they become tokens, and which of them choose the checkpoint."""

    selection: SelectionConfig = SelectionConfig()
