"""Writes docs/settings.md, the settings of every command from the dataclasses that read them:

    python docs/site/settings.py

Flag, type, default and meaning are what `rewardlab COMMAND --help` shows: the name, annotation and default of a field,
and the text below it. A test compares the page with what this module makes of the code.
"""

from __future__ import annotations

import dataclasses
import re
import textwrap
import types
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro

from rewardlab import arguments
from rewardlab.core.config import field_texts
from rewardlab.curation.auditing.config import AuditConfig
from rewardlab.curation.files.config import ConvertConfig, MixConfig, SplitConfig
from rewardlab.curation.inspecting.config import InspectConfig
from rewardlab.curation.mislabels.config import MislabelsConfig
from rewardlab.curation.showing.config import ShowConfig
from rewardlab.diagnosing.config import DiagnoseConfig
from rewardlab.evaluation.config import CalibrateConfig, EvalConfig
from rewardlab.experiments.config import (
    AmendConfig,
    ArchiveConfig,
    FreezeConfig,
    GateConfig,
    ReadConfig,
    ReportConfig,
    StatusConfig,
    SubmitConfig,
    TaskConfig,
)
from rewardlab.experiments.config import RunConfig as PlanRunConfig
from rewardlab.gold.building.config import BuildConfig
from rewardlab.gold.checking.config import CheckConfig
from rewardlab.gold.curving.config import CurveConfig
from rewardlab.gold.labelling.config import LabelConfig
from rewardlab.gold.matching.config import MatchConfig
from rewardlab.gold.pipeline.config import RunConfig as GoldRunConfig
from rewardlab.gold.sampling.config import SampleConfig
from rewardlab.probing.config import ProbeConfig
from rewardlab.rl.audit.config import AuditConfig as RlAuditConfig
from rewardlab.training.settings.config import RewardTrainerConfig

PAGE = Path(__file__).resolve().parents[1] / "settings.md"
COMMANDS: dict[str, type] = {
    "train": RewardTrainerConfig,
    "probe": ProbeConfig,
    "diagnose": DiagnoseConfig,
    "eval": EvalConfig,
    "calibrate": CalibrateConfig,
    "compare": arguments.CompareArguments,
    "data mislabels": MislabelsConfig,
    "report": arguments.ReportArguments,
    "watch": arguments.WatchArguments,
    "score": arguments.ScoreArguments,
    "serve": arguments.ServeArguments,
    "verify": arguments.VerifyArguments,
    "export": arguments.ExportArguments,
    "average": arguments.AverageArguments,
    "import": arguments.ImportArguments,
    "card": arguments.CardArguments,
    "push": arguments.PushArguments,
    "quickstart": arguments.QuickstartArguments,
    "data convert": ConvertConfig,
    "data split": SplitConfig,
    "data mix": MixConfig,
    "data show": ShowConfig,
    "data inspect": InspectConfig,
    "data audit": AuditConfig,
    "gold sample": SampleConfig,
    "gold label": LabelConfig,
    "gold build": BuildConfig,
    "gold match": MatchConfig,
    "gold curve": CurveConfig,
    "gold check": CheckConfig,
    "gold run": GoldRunConfig,
    "plan check": ReadConfig,
    "plan freeze": FreezeConfig,
    "plan amend": AmendConfig,
    "plan run": PlanRunConfig,
    "plan submit": SubmitConfig,
    "plan status": StatusConfig,
    "plan report": ReportConfig,
    "plan archive": ArchiveConfig,
    "plan gate": GateConfig,
    "plan task": TaskConfig,
    "rl audit": RlAuditConfig,
}
TITLES = {
    "DataConfig": "Data",
    "ReadingConfig": "Reading rows",
    "RenderingConfig": "From messages to tokens",
    "DiagnosticConfig": "Controls",
    "SelectionConfig": "Data that choose the checkpoint",
    "BackboneConfig": "Model",
    "ModelConfig": "What trains",
    "ComputeConfig": "Speed",
    "TrainComputeConfig": "Speed and memory in training",
    "LossConfig": "Loss",
    "ScheduleConfig": "Schedule",
    "OptimizerConfig": "Optimiser",
    "RunConfig": "Run",
    "MonitorConfig": "Monitoring",
    "PublishConfig": "Publishing",
}
"""Of the tables of `rewardlab train`: the class that declares a setting -> its heading, in this order."""
HEAD = """\
# Settings

Every flag of every command, with its type and its default. This page is written by `docs/site/settings.py` from the
same dataclasses that the commands read, so it is what `rewardlab COMMAND --help` says.

- In Python a setting has the name of its flag with underscores: `--eval-every` is `eval_every`.
- `--config FILE` reads settings from YAML, TOML or a run's `config.json`, by either spelling. Flags win over the file.
- A switch takes no value: `--lora` turns it on, `--no-lora` off. The value `None` unsets what may be unset.
- `rewardlab train` and `probe` need `--model` and `--dataset`; everything else has a default.
- `--hf-dataset` is `--dataset`, `--use-chat-template` is `--chat-template template`, and `--no-chat-template` is
  `--chat-template plain`.

[Why the defaults are what they are](defaults.md) gives the reasons, and [guidelines.md](guidelines.md) says what to
change for which model and data.
"""
MORE: dict[str, str] = {
    "dataset": "data.md#how-a-name-is-resolved",
    "limit": "data.md#limits",
    "ties": "objective.md#k-wise-options",
    "strength_as": "formats.md#optional-columns",
    "shp": "published.md#shp",
    "attributes": "published.md#helpsteer-and-helpsteer2",
    "prompt_column": "formats.md#columns-under-other-names",
    "response_column": "formats.md#one-reply-a-row-rated-or-good-or-bad",
    "map_label": "formats.md#columns-under-other-names",
    "max_seq_len": "rendering.md#the-truncation-rule",
    "truncation": "rendering.md#the-truncation-rule",
    "chat_template": "rendering.md#which-chat-template",
    "template_arguments": "rendering.md#which-chat-template",
    "special_tokens_in_text": "rendering.md#control-tokens-typed-in-texts",
    "cache_dir": "prepared-data.md",
    "eval_fraction": "held-out.md",
    "diagnostic_mode": "controls.md",
    "attention": "layouts.md",
    "precision": "precision.md",
    "precision_card": "precision.md#the-precision-card",
    "half_rounding": "precision.md#half-precision-copies",
    "lora": "lora.md",
    "lora_dropout": "lora.md#dropout-of-adapters",
    "quantization": "lora.md#qlora",
    "train_head_only": "probe.md",
    "cache_states": "cached-states.md",
    "freeze_layers": "training.md#what-trains",
    "attention_backend": "kernels.md#attention",
    "label_smoothing": "objective.md#label-smoothing",
    "kwise_loss": "objective.md#k-wise-options",
    "optimizer": "training.md#optimisers",
    "compat": "coming-from-trl.md",
    "preset": "presets.md",
    "output_dir": "run-folder.md",
    "micro_token_budget": "performance.md#memory",
    "save_dtype": "one-score.md",
    "resume": "resume.md",
    "sharding": "scaling.md",
    "early_stopping_metric": "run-folder.md#columns-of-metricscsv",
    "report_to": "watching.md",
}
"""Setting -> where more is said of it, in the tables of `rewardlab train`."""
TABLE = "| flag | type | default | meaning |\n| --- | --- | --- | --- |\n"
WORDS: dict[Any, str] = {int: "whole number", float: "number", str: "text", Path: "path", bool: "switch"}


@dataclasses.dataclass(frozen=True)
class Setting:
    """One row of a table."""

    name: str
    home: type
    """The class that declares it."""
    hint: Any
    default: object
    text: str

    @property
    def flag(self) -> str:
        """As on the command line."""
        if tyro.conf.Positional in get_args(self.hint):
            return self.name.upper()
        return f"--{self.name.replace('_', '-')}"

    def row(self, more: str = "") -> str:
        """The line of the table; `more` is the page that says more."""
        text = f"{self.text} ([more]({more}))" if more else self.text
        cells = (f"`{self.flag}`", kind(self.hint), shown(self.default), text)
        return f"| {' | '.join(map(in_cell, cells))} |"


def in_cell(text: str) -> str:
    """A text whose bars, which stand in code alone, end no cell: neither on GitHub nor in MkDocs."""
    return re.sub(r"`([^`]*\|[^`]*)`", lambda code: f"<code>{escape(code[1]).replace('|', '&#124;')}</code>", text)


def settings_of(settings_type: type, defaults: object = None) -> Iterator[Setting]:
    """Every setting, those of a part (a field that is itself a dataclass) in its place, with its default there."""
    hints, texts = get_type_hints(settings_type, include_extras=True), field_texts(settings_type)
    for field in dataclasses.fields(settings_type):
        hint = hints[field.name]
        default = field.default if defaults is None else getattr(defaults, field.name)
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            yield from settings_of(hint, default)
        elif field.init:
            yield Setting(field.name, home_of(settings_type, field.name), hint, default, texts[field.name])


def home_of(settings_type: type, name: str) -> type:
    """The class that declares a field first."""
    return next(part for part in reversed(settings_type.__mro__) if name in vars(part).get("__annotations__", {}))


def kind(hint: Any) -> str:
    """A type in words: `whole number`, `a, b or c`, `one or several: text`."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return kind(arguments[0])
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if origin is tuple:
        return f"one or several: {kind(arguments[0])}"
    if origin in (Union, types.UnionType):
        return " or ".join(kind(argument) for argument in arguments if argument is not type(None))
    return WORDS[hint]


def shown(default: object) -> str:
    """A default as a page prints it: `none` where nothing is set."""
    if default is dataclasses.MISSING:
        return "required"
    if default is None or default in ("", ()):
        return "none"
    if isinstance(default, bool):
        return "on" if default else "off"
    text = " ".join(map(str, default)) if isinstance(default, tuple) else default
    return f"`{text:g}`" if isinstance(text, float) else f"`{text}`"


def train_tables() -> Iterator[str]:
    """One table for each room of `rewardlab train`."""
    rooms: dict[str, list[Setting]] = {name: [] for name in TITLES}
    for setting in settings_of(RewardTrainerConfig):
        rooms[setting.home.__name__].append(setting)
    for name, found in rooms.items():
        if found:
            yield f"### {TITLES[name]}\n\n{table(found, MORE)}"


def other_tables() -> Iterator[str]:
    """What each other command has of its own, and the names of what it has in common with `rewardlab train`."""
    in_training = {(setting.name, setting.home) for setting in settings_of(RewardTrainerConfig)}
    for command, settings_type in list(COMMANDS.items())[1:]:
        found = list(settings_of(settings_type))
        shared = [setting for setting in found if (setting.name, setting.home) in in_training]
        own = [setting for setting in found if setting not in shared]
        yield f"## rewardlab {command}\n"
        if shared:
            names = f"As in `rewardlab train`: {', '.join(f'`{setting.flag}`' for setting in shared)}."
            yield textwrap.fill(names, 118, break_on_hyphens=False) + "\n\nIts own:\n"
        yield table(own)


def table(found: list[Setting], more: Mapping[str, str] = MappingProxyType({})) -> str:
    """Rows below a head."""
    return TABLE + "".join(f"{setting.row(more.get(setting.name, ''))}\n" for setting in found)


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, "## rewardlab train\n", *train_tables(), *other_tables()])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
