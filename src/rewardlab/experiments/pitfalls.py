"""What would spoil a study though its plan can be read: test data that are trained on, other test rows, steps without a
value, data and models that are missing or refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, Final, Literal

from rewardlab.core.config import from_mapping, settings_of
from rewardlab.core.errors import ConfigError, DataError
from rewardlab.core.other_names import SAME_THING
from rewardlab.core.terminal import listed, plural
from rewardlab.data.config import ReadingConfig, TrainingDataConfig
from rewardlab.data.dataset_names import all_named
from rewardlab.data.finding import Source
from rewardlab.data.hub import parse_hub_name
from rewardlab.experiments.data_files import test_files_used
from rewardlab.experiments.expressions import Claim, Range, Term
from rewardlab.experiments.plan import WINNER, Plan, Run
from rewardlab.experiments.power import Reach
from rewardlab.experiments.quantities import quantity_named, range_of
from rewardlab.experiments.resolving import in_keys
from rewardlab.experiments.slurm_config import SlurmConfig, literal_values, secrets_in, slurm_config
from rewardlab.model.config import BUILTIN_NAMES, looks_local, misspelt_builtin
from rewardlab.model.hub import at_revision
from rewardlab.training.settings.config import interval_of
from rewardlab.training.settings.conventions import TRL
from rewardlab.training.settings.trl_file import show as shown

Level = Literal["error", "warning"]
HUB_TIMEOUT_S: Final = 5.0
"""Seconds without a word from the hub after which `plan check` does not wait for its answer on a model."""
Look = Callable[[Run], str]
"""Returns why the model of a run cannot be used; empty if it can, or if nothing can be said about it yet."""
KEEPS_ROWS: Final = frozenset(("max_drop_fraction", "margin_column", "strength_as"))
"""Settings of reading that leave the rows as they are."""
TEST_ROWS: Final = (
    *("test_dataset", "test_split", "eval_limit"),
    *(field.name for field in fields(ReadingConfig) if field.name not in KEEPS_ROWS),
)
"""Settings that decide which test rows there are."""
LENGTHS: Final = ("max_seq_len", "chat_template", "template_arguments", "system_prompt")
"""Settings that decide how long a conversation is, and so which rows are left out with `--truncation drop`."""
OF_MODELS: Final = ("model", "trust_remote_code", "truncation", "special_tokens_in_text")
"""Settings that decide, besides `LENGTHS`, whether a model can be used."""
UNDIVIDED: Final = {
    "quantization": ("nf4", "int8"),
    "optimizer": ("adafactor", "adamw8bit"),
    "micro_token_budget": ("auto",),
}
"""Settings that `rewardlab train` refuses for several processes unless `sharding` is `none`."""
ON_TRAINING_ROWS: Final = ("gap", "gap_loss", "train_accuracy", "train_loss")


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Something about the plan that should be mended before it is frozen."""

    level: Level
    text: str


def about_data(runs: Sequence[Run]) -> Iterator[Problem]:
    """Yield an error for data that are not there, and for test data that are also trained on or chosen by: files of the
    same content, and one split of a dataset."""
    for text in (same_files := test_files_used(runs)):
        yield Problem(level="error", text=text)
    read: dict[str, dict[str, None]] = {}
    refused: set[str] = set()
    for arm, values in _data_settings(runs):
        try:
            for purpose, source in _sources(from_mapping(TrainingDataConfig, values, where=arm)):
                read.setdefault(purpose, {}).update(dict.fromkeys(_places(source)))
        except (ConfigError, DataError) as error:
            if str(error) not in refused:
                yield Problem(level="error", text=f"arm {arm}: {in_keys(str(error))}")
            refused.add(str(error))
    for purpose in ("train", "eval"):
        for place in read.get("test", {}):
            # Two files with the same content were reported above; their names need no second report.
            if (other := _overlapping(place, read.get(purpose, {}))) and not (same_files and Path(place).is_absolute()):
                told = other if other == place else f"{place} and {other}"
                text = f"{told}: judges the arms, and is read as {_READ_AS[purpose]} too. Name another split or dataset"
                yield Problem(level="error", text=text)


_READ_AS: Final = {"train": "training data (dataset, hf_split)", "eval": "validation data (eval_dataset, eval_split)"}


def _sources(config: TrainingDataConfig) -> Iterator[tuple[str, Source]]:
    for named in all_named(config) if config.dataset else ():
        for source in named.sources():
            yield named.purpose, source


def _data_settings(runs: Sequence[Run]) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield each choice of data of the runs that train here, once, with the first arm that has it."""
    known: set[str] = set()
    for run in runs:
        values = {name: run.settings[name] for name in settings_of(TrainingDataConfig) if name in run.settings}
        if not run.program and repr(values) not in known:
            known.add(repr(values))
            yield run.arm, values


def unpinned(runs: Sequence[Run]) -> list[str]:
    """Return the models and data of the hub that runs name without a revision, each once."""
    found: dict[str, None] = {}
    for arm, values in _data_settings(runs):
        with suppress(ConfigError, DataError):  # which `about_data` reports
            sources = [source for _, source in _sources(from_mapping(TrainingDataConfig, values, where=arm))]
            on_hub = [source.name for source in sources if source.path is None]
            found |= dict.fromkeys(name for name in on_hub if parse_hub_name(name).revision is None)
    for model in dict.fromkeys(str(run.settings["model"]) for run in runs if not run.program):
        is_local = model.lower() in BUILTIN_NAMES or Path(model).is_dir() or looks_local(model)
        if not is_local and at_revision(model) is None:
            found[model] = None
    return list(found)


def _places(source: Source) -> list[str]:
    """Return where rows are: a path, or a name on the hub with each of its splits, whatever the revision."""
    if source.path is not None:
        return [str(source.path)]
    name = parse_hub_name(source.name)
    whole = f"{name.repository}{f':{name.configuration}' if name.configuration else ''}"
    return [f"{whole}[{split}]" for split in source.split.split("+")]


def _overlapping(place: str, others: Iterable[str]) -> str:
    """Return the first of other places with rows of a place; empty if there is none.

    A split with a slice, such as `test[:50%]`, has rows of the whole split; two slices are taken for different rows.
    """
    for other in others:
        if place == other or place.startswith(f"{other[:-1]}[") or other.startswith(f"{place[:-1]}["):
            return other
    return ""


def about_trl(plan: Plan, runs: Sequence[Run]) -> Iterator[Problem]:
    """Yield a warning for arms with `compat: trl` and settings that are not TRL's and that nobody chose: a plan has all
    its settings by its own defaults, so that none is left for TRL's."""
    chosen = _named_settings(plan)
    arms = {run.arm: run.settings for run in runs if run.settings.get("compat") == "trl" and run.arm in chosen}
    told: dict[str, list[str]] = {}
    for arm, settings in arms.items():
        others = [
            f"{name}: {shown(value)}"
            for name, value in TRL.items()
            if name != "seed"
            and name not in chosen[arm]
            and _as_list(settings.get(name)) != _as_list(value)
            and _counts(name, settings)
        ]
        if others:
            told.setdefault(", ".join(others), []).append(arm)
    for others_told, same in told.items():
        yield Problem(
            level="warning",
            text=f"{plural(len(same), 'arm')} {listed(same)}: compat: trl fills in none of TRL's defaults in a plan. "
            f"Write those that are meant: {others_told}",
        )


def _named_settings(plan: Plan) -> dict[str, set[str]]:
    """Return the settings that the plan itself names for each arm that is trained here, and those for which these stand
    in other units. The winner of a search has no entry: it is one of the search's arms."""
    searched = [arm for phase in plan.phases if phase.search is not None for arm in phase.search.arms]
    found = {}
    for arm in (*plan.arms.values(), *searched):
        given = {**plan.base, **arm.settings}
        if not arm.program:
            pairs = [pair for pair in SAME_THING if any(given.get(name) is not None for name in pair)]
            found[arm.name] = {*given, *chain.from_iterable(pairs)}
    return found


def _as_list(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _counts(name: str, settings: Mapping[str, Any]) -> bool:
    """Return whether a setting does anything among these."""
    return bool(settings.get("lora")) if name.startswith("lora_") else name != "epochs" or settings.get("steps") is None


def about_test_rows(runs: Sequence[Run]) -> Iterator[Problem]:
    """Yield a warning for arms that would be judged on different test rows, or on another draw with every seed."""
    judged = {run.arm: run.settings for run in runs if run.reads_test and not run.program}
    said: dict[str, set[str]] = {}
    for settings in judged.values():
        for name in _deciding(judged.values()):
            said.setdefault(name, set()).add(repr(settings.get(name)))
    if differing := [name for name, values in said.items() if len(values) > 1]:
        yield Problem(
            level="warning",
            text=f"arms would be judged on different test rows: {', '.join(differing)} differ among them. What differs "
            f"between them may then be the rows",
        )
    if limits := {one for settings in judged.values() if (one := settings.get("eval_limit")) is not None}:
        yield Problem(
            level="warning",
            text=f"eval_limit: each seed draws its own {' or '.join(map(str, sorted(limits)))} rows. Arms are paired "
            f"by seed, but more is seen with a test file of that size, which all seeds share",
        )


def _deciding(settings: Any) -> tuple[str, ...]:
    drops = any(one.get("truncation") == "drop" for one in settings)
    return (*TEST_ROWS, "truncation", *LENGTHS) if drops else TEST_ROWS


def about_values(name: str, claim: Claim, runs: Sequence[Run]) -> Iterator[Problem]:
    """Yield what keeps the terms of a claim from having a value: they are not measured, or not at that step."""
    for term in claim.terms:
        settings = next((run.settings for run in runs if run.arm == term.arm and not run.program), None)
        if settings is None:
            continue
        if term.quantity in ON_TRAINING_ROWS and not settings.get("train_eval_limit"):
            text = f"{name}: {term} is not measured: set train_eval_limit for {term.arm}, the training rows it takes"
            yield Problem(level="error", text=text)
        if term.step is not None:
            yield from _about_step(name, term, settings)


def _about_step(name: str, term: Term, settings: Mapping[str, Any]) -> Iterator[Problem]:
    steps, step = settings.get("steps"), term.step
    assert step is not None
    if isinstance(steps, int):
        every = interval_of(settings.get("eval_every"), steps)
        if step > steps:
            yield Problem(level="error", text=f"{name}: {term}: {term.arm} has {steps} steps")
        elif step % every and step != steps:
            text = f"{name}: {term}: {term.arm} is evaluated every {every} steps; name one of these, or set eval_every"
            yield Problem(level="error", text=text)
    if settings.get("early_stopping_patience") is not None:
        yield Problem(
            level="warning",
            text=f"{name}: {term}: a run that stops before that step has no value there, and the claim is then not "
            f"tested; {quantity_named(term.quantity).name} without a step is that of the chosen checkpoint",
        )


def about_reach(name: str, reach: Reach, ranges: Mapping[Term, Range], so: str) -> Iterator[Problem]:
    """Yield an error for a claim that no possible values support or refute; `so` is what follows from it."""
    fixed = [
        f"{term} is {low:g} in every run without early stopping" for term, (low, high) in ranges.items() if low == high
    ]
    why = f" ({', '.join(fixed)})" if fixed else ""
    for text in reach.problems:
        yield Problem(level="error", text=f"{name}: {text}{why}, so {so}")


def ranges_in(terms: Iterable[Term], runs: Sequence[Run]) -> dict[Term, Range]:
    """Return term -> the least and the largest value that it can have, by the steps of its arm where these are set.

    Raises ConfigError for a quantity that does not exist.
    """
    return {term: _range(term, runs) for term in terms}


def _range(term: Term, runs: Sequence[Run]) -> Range:
    # The settings of a search's winner are not known yet.
    own = [run for run in runs if run.arm == term.arm != WINNER]
    steps = [step for run in own if isinstance(step := run.settings.get("steps"), int)]
    low, high = range_of(term.quantity, max_steps=max(steps) if steps else None)
    stops_early = any(run.program or run.settings.get("early_stopping_patience") is not None for run in own)
    if quantity_named(term.quantity).name == "stopped_at" and len(steps) == len(own) > 0 and not stops_early:
        low = float(min(steps))
    return low, high


def about_slurm(plan: Plan, runs: Sequence[Run]) -> Iterator[Problem]:
    """Yield what is wrong with the section `slurm` of a plan: what `submit` would refuse, runs that cannot have so many
    processes, values that jobs take literally, and secrets."""
    try:
        config = slurm_config(plan.slurm)
    except ConfigError as error:
        yield Problem(level="error", text=str(error))
        return
    for text in (*literal_values(config), *secrets_in(config)):
        yield Problem(level="warning", text=text)
    if why := too_many_processes(config, runs):
        yield Problem(level="error", text=why)


def too_many_processes(config: SlurmConfig, runs: Sequence[Run]) -> str:
    """Return why runs cannot have as many processes as their jobs start; empty if they can."""
    if config.processes == 1:
        return ""
    told = f"slurm: {config.processes} processes a run (nodes × gpus_per_node)"
    for run in runs:
        if run.program:
            continue
        if run.settings.get("cache_states"):
            what = "Ask for one, or leave it out; a scale and `probe` may have a `slurm` of their own."
            return f"{told}: arm {run.arm}: cache_states is for one process. {what}"
        divided = [name for name, values in UNDIVIDED.items() if run.settings.get(name) in values]
        if divided and run.settings.get("sharding") != "none":
            said = f"{divided[0]}: {run.settings[divided[0]]}"
            return f"{told}: arm {run.arm}: {said} needs a whole model on each device. Set `sharding: none`."
    return ""


def about_models(runs: Sequence[Run], look: Look | None) -> Iterator[Problem]:
    """Yield what is wrong with the models of runs, once for each model and length limit: folders that are not there,
    and what `look` says about the others."""
    known: set[str] = set()
    for run in runs:
        said = repr([run.settings.get(name) for name in (*OF_MODELS, *LENGTHS)])
        if run.program or said in known:
            continue
        known.add(said)
        if missing := _missing_model(run.arm, str(run.settings["model"])):
            yield missing
        certain = missing is not None and missing.level == "error"
        if not certain and look is not None and (why := look(run)):
            yield Problem(level="error", text=f"arm {run.arm}: {in_keys(why)}")


def _missing_model(arm: str, model: str) -> Problem | None:
    """Return what is wrong with the name of a model that is not a folder here; None for a name on a hub."""
    path = Path(model)
    if path.is_dir():
        return None
    if looks_local(model) or path.is_file():
        what = "is a file, and a model is a folder" if path.is_file() else "there is no such folder"
        return Problem(level="error", text=f"arm {arm}: no model at {model!r}: {what}")
    if said := misspelt_builtin(model):
        return Problem(level="error", text=f"arm {arm}: {said}")
    if len(path.parts) > 1 and Path(path.parts[0]).is_dir():
        text = (
            f"arm {arm}: model {model!r}: the folder {path.parts[0]} has none of this name, so it is sought on the hub"
        )
        return Problem(level="warning", text=text)
    return None


@cache
def missing_on_hub(name: str) -> str:
    """Return that the hub has no such model; empty if it has, if it cannot be asked, or if there is nothing to ask.

    Without the question each run of a plan with a mistyped name would wait for the hub, and fail. It is asked once for
    each name, whatever else arms change.
    """
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    repository, revision = at_revision(name) or (name, None)
    none = f"no model at {name!r}: there is no such folder, and"
    try:
        if name.lower() in BUILTIN_NAMES or try_to_load_from_cache(repository, "config.json", revision=revision):
            return ""
    except HFValidationError:
        return f"{none} no model of the hub can have this name"
    api = HfApi()
    try:
        api.model_info(repository, revision=revision, timeout=HUB_TIMEOUT_S)
    except GatedRepoError:
        return ""
    except RevisionNotFoundError:
        return f"{none} the model of the hub has no revision {revision!r}"
    except RepositoryNotFoundError:
        return (
            f"{none} the hub shows no model of this name. If it is private, log in (hf auth login); "
            "HF_HUB_OFFLINE=1 leaves the question out"
        )
    except Exception:
        # The errors of a network have no common base, and none of them says anything about the model. HF_HUB_OFFLINE=1
        # is one of them.
        return ""
    return ""
