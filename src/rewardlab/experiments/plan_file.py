"""Reads a plan from YAML or TOML: what it says at one scale, or one error that says where it is wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final

from rewardlab.core.config import all_of, settings_of
from rewardlab.core.config_file import read_config_file
from rewardlab.core.errors import ConfigError
from rewardlab.core.files import absent
from rewardlab.core.other_names import ALSO_CALLED
from rewardlab.core.terminal import brief
from rewardlab.core.values import did_you_mean
from rewardlab.experiments.grids import as_number, drawn_arms, grid_arms
from rewardlab.experiments.plan import (
    DEFAULT_SEEDS,
    NAME,
    WINNER,
    Arm,
    Assumptions,
    Band,
    Budget,
    Hypothesis,
    Phase,
    Plan,
    Search,
)
from rewardlab.experiments.plan_bands import BAND_KEYS, read_band
from rewardlab.experiments.sweeps import require_able_to_prune, sweep_of
from rewardlab.training.settings.config import RewardTrainerConfig

KEYS: Final = (
    "title",
    "question",
    "base",
    "seeds",
    "arms",
    "grid",
    "phases",
    "hypotheses",
    "bands",
    "baseline",
    "waterfall",
    "primary",
    "pooled",
    "assume",
    "budget",
    "slurm",
    "scales",
    "probe",
)
"""Keys of a plan."""
SCALE_KEYS: Final = ("base", "arms", "seeds", "leave_out", "hypotheses", "bands", "budget", "slurm", "assume")
"""Keys of a scale, which take the place of those of the plan."""
NUMBERS: Final[Mapping[str, tuple[float, float]]] = {
    "seed_sd": (0, 1),
    "disagreeing": (0, 1),
    "disagreeing_seeds": (0, 1),
    "accuracy": (0.01, 0.99),
    "within_prompt": (0, 1),
    "test_comparisons": (1, math.inf),
    "test_prompts": (1, math.inf),
    "tflops": (1e-6, math.inf),
    "hours": (0, math.inf),
    "runs": (0, math.inf),
}
"""Number of `assume` or `budget` -> the least and the largest that it can be."""
OURS: Final = ("output_dir", "overwrite", "resume", "seed", "publish_to", "dry_run")
"""Settings that the plan decides for every run."""
BACKBONE: Final = (
    "differential_lr",
    "backbone_lr_mult",
    "freeze_layers",
    "quantization",
    "gradient_checkpointing",
    "half_rounding",
    "lora",
    "rslora",
    "optimizer",
)
"""Settings of a backbone that trains, about which a head on a frozen one says nothing; those of LoRA are more."""


def read_plan(
    path: Path, *, scale: str | None = None, probes: bool = False, sets: Mapping[str, Any] | None = None
) -> Plan:
    """Return the plan in a file, at a scale that it names; `sets` replace settings of its base.

    With `probes` each arm trains a head on the frozen backbone, and arms that need it to train are left out. Raises
    ConfigError for a plan that cannot be used.
    """
    if not path.is_file():
        raise ConfigError(
            f"PLAN {path}: {absent(path)}. Give a plan: a YAML or TOML file as docs/plans-file.md in rewardlab's "
            f"repository describes it."
        )
    values = _named(read_config_file(path, given_by="PLAN"), str(path))
    _require_known(values, KEYS, str(path))
    return _Reader(str(path), values, scale, probes, dict(sets or {})).plan()


class _Reader:
    def __init__(
        self, where: str, values: Mapping[str, Any], scale: str | None, probes: bool, sets: Mapping[str, Any]
    ) -> None:
        self._where, self._values, self._scale, self._probes, self._sets = where, values, scale, probes, sets
        self._at = [self._section(f"scales.{scale}", self._scale_named(scale))] if scale is not None else []
        self._at += [self._section("probe", values.get("probe"))] if probes and values.get("probe") else []
        for section in self._at:
            _require_known(section, SCALE_KEYS, f"{where}: {scale or 'probe'}")

    def plan(self) -> Plan:
        base = self._base()
        left_out = self._left_out()
        arms = {name: arm for name, arm in self._arms().items() if name not in left_out}
        if self._probes:
            needs = {name: why for name, arm in arms.items() if (why := _needs_backbone(arm))}
            left_out |= needs
            arms = {name: _on_frozen(arm) for name, arm in arms.items() if name not in needs}
        phases = self._phases(arms, left_out)
        if not arms and not any(phase.search for phase in phases):
            raise ConfigError(f"{self._where}: it has no arm. Name ways of training under `arms`, or a `grid`.")
        return Plan(
            title=self._text("title", default=Path(self._where).stem),
            question=self._text("question"),
            base=base,
            arms=arms,
            phases=phases,
            hypotheses=self._hypotheses(),
            bands=tuple(self._bands()),
            baseline=self._baseline(arms),
            waterfall=tuple(name for name in self._names("waterfall") if name not in left_out),
            primary=self._text("primary", default="accuracy"),
            pooled=self._flag("pooled"),
            assume=self._numbers("assume", Assumptions()),
            budget=self._numbers("budget", Budget()),
            slurm=self._merged("slurm"),
            scale=self._scale,
            probes=self._probes,
            left_out=left_out,
        )

    # --- parts -------------------------------------------------------------------------------------------------

    def _base(self) -> dict[str, Any]:
        base = self._merged("base") | dict(self._sets)
        if self._probes:
            base = {name: value for name, value in base.items() if not _is_of_backbone(name)}
            base |= {"train_head_only": True, "cache_states": True}
            if not any("lr" in _named(section.get("base") or {}, "") for section in self._at):
                # The learning rate of a plan is for weights or adapters; a head alone takes its own default.
                base.pop("lr", None)
        self._require_settings(base, "base")
        return base

    def _arms(self) -> dict[str, Arm]:
        arms: dict[str, Arm] = {}
        for name, given in self._section("arms", self._values.get("arms")).items():
            arms[self._name(name, "arms")] = self._arm(name, given, "arms")
        for arm in grid_arms(self._section("grid", self._values.get("grid")), f"{self._where}: grid"):
            self._require_settings(arm.settings, f"grid: {arm.name}")
            if arm.name in arms:
                raise ConfigError(f"{self._where}: grid: there are two arms {brief(arm.name)}. Name each value once.")
            arms[arm.name] = arm
        self._require_apart(arms)
        for section in self._at:
            for name, settings in self._section("arms", section.get("arms")).items():
                if name not in arms:
                    raise ConfigError(f"{self._where}: {self._scale}: arms: there is no arm {brief(name)}.")
                over = self._section(f"arms.{name}", settings)
                self._require_settings(over, f"{self._scale}: arms.{name}")
                arms[name] = replace(arms[name], settings={**arms[name].settings, **over})
        return arms

    def _require_apart(self, arms: Mapping[str, Arm]) -> None:
        """Raise ConfigError for arms that would share a folder where letters of both cases are the same."""
        known: dict[str, str] = {}
        for name in arms:
            if name.lower() == WINNER:
                raise ConfigError(f"{self._where}: arms: {name} stands for the winner of a search. Name it otherwise.")
            if (other := known.setdefault(name.lower(), name)) != name:
                raise ConfigError(
                    f"{self._where}: arms: {other} and {name} differ in upper and lower case only, which some file "
                    f"systems do not tell apart. Name one otherwise."
                )

    def _arm(self, name: str, given: object, where: str) -> Arm:
        settings = dict(self._section(f"{where}.{name}", given))
        says, program = settings.pop("says", ""), settings.pop("program", ())
        if isinstance(program, str) or not all(isinstance(word, str) for word in program):
            raise ConfigError(f"{self._where}: {where}.{name}: program: wanted a list of words, got {program!r:.60}.")
        self._require_settings(settings, f"{where}.{name}")
        return Arm(name=str(name), settings=settings, says=str(says), program=tuple(program))

    def _phases(self, arms: Mapping[str, Arm], left_out: Mapping[str, str]) -> tuple[Phase, ...]:
        given = self._values.get("phases")
        if given is None:
            return (Phase(name="main", arms=tuple(arms), seeds=self._seeds(self._values.get("seeds"))),)
        if not isinstance(given, Sequence) or isinstance(given, str):
            raise ConfigError(f"{self._where}: phases: wanted a list of phases, got {given!r:.60}.")
        phases = [self._phase(index, one, arms, left_out) for index, one in enumerate(given)]
        placed = {arm for phase in phases for arm in phase.arms}
        if missing := [name for name in arms if name not in placed]:
            raise ConfigError(f"{self._where}: phases: the arm {brief(missing[0])} is in no phase. Add it to one.")
        names = [phase.name for phase in phases]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigError(f"{self._where}: phases: two are called {brief(twice[0])}. Name one otherwise.")
        if len(searches := [phase.name for phase in phases if phase.search is not None]) > 1:
            raise ConfigError(
                f"{self._where}: phases: {searches[0]} and {searches[1]} both search, and a study has one winner. "
                f"Search in one phase, or write two plans."
            )
        return tuple(phases)

    def _phase(self, index: int, given: object, arms: Mapping[str, Arm], left_out: Mapping[str, str]) -> Phase:
        values = dict(self._section(f"phases[{index}]", given))
        where = f"{self._where}: phases[{index}]"
        _require_known(values, ("name", "arms", "seeds", "gate", "search"), where)
        name = self._name(values.get("name", f"phase_{index + 1}"), "phases")
        wanted = [str(arm) for arm in values.get("arms") or ()]
        for arm in wanted:
            if arm not in arms and arm not in left_out and arm != WINNER:
                raise ConfigError(f"{where}: there is no arm {brief(arm)}.{did_you_mean(arm, arms)}")
        search = values.get("search")
        if not wanted and search is None:
            raise ConfigError(f"{where}: it has no arms. Name some under `arms`.")
        found = None if search is None else self._search(name, search)
        seeds = self._seeds(values.get("seeds", self._values.get("seeds")))
        if found is not None and found.optuna is not None:
            require_able_to_prune(found.optuna, len(seeds), f"{where}: optuna")
        gate = {str(key): str(claim) for key, claim in self._section(f"{name}.gate", values.get("gate")).items()}
        return Phase(
            name=name,
            arms=tuple(arm for arm in wanted if arm not in left_out),
            seeds=seeds,
            gate=gate,
            search=found,
        )

    def _search(self, name: str, given: object) -> Search:
        values = dict(self._section(f"{name}.search", given))
        where = f"{self._where}: {name}.search"
        _require_known(values, ("grid", "random", "optuna", "metric"), where)
        arms = [
            *grid_arms(self._section("grid", values.get("grid")), f"{where}: grid"),
            *drawn_arms(self._section("random", values.get("random")), f"{where}: random"),
        ]
        for arm in arms:
            self._require_settings(arm.settings, f"{name}.search: {arm.name}")
        optuna = sweep_of(self._section("optuna", values.get("optuna")), f"{where}: optuna")
        if bool(arms) == bool(optuna):
            raise ConfigError(f"{where}: wanted a grid, random draws or both; or a search by optuna alone.")
        if optuna is not None:
            self._require_settings(optuna.settings, f"{name}.search: optuna")
        return Search(arms=tuple(arms), metric=str(values.get("metric", "accuracy")), optuna=optuna)

    def _hypotheses(self) -> dict[str, Hypothesis]:
        found = {}
        for name, given in self._claims().items():
            values = {"claim": given} if isinstance(given, str) else dict(given)
            _require_known(values, ("claim", "expects", "would_change"), f"{self._where}: hypotheses.{name}")
            if "claim" not in values:
                raise ConfigError(f"{self._where}: hypotheses.{name}: `claim` is missing, such as accuracy(a) > 0.6.")
            self._name(name, "hypotheses")
            found[str(name)] = Hypothesis(name=str(name), **{key: str(value) for key, value in values.items()})
        return found

    def _claims(self) -> dict[str, Any]:
        """Return hypothesis -> what the plan says about it, or what the scale says in its place."""
        found = dict(self._section("hypotheses", self._values.get("hypotheses")))
        for section in self._at:
            for name, given in self._section("hypotheses", section.get("hypotheses")).items():
                if name not in found:
                    raise ConfigError(f"{self._where}: {self._scale}: there is no hypothesis {brief(name)}.")
                over = {"claim": given} if isinstance(given, str) else self._section(f"hypotheses.{name}", given)
                before = found[name] if isinstance(found[name], Mapping) else {"claim": found[name]}
                found[name] = {**before, **over}
        return {
            name: given if isinstance(given, str) else self._section(f"hypotheses.{name}", given)
            for name, given in found.items()
        }

    def _bands(self) -> list[Band]:
        bands = []
        for about, given in self._merged("bands").items():
            if given is None:  # a scale unsets a band so
                continue
            values, where = self._section(f"bands.{about}", given), f"{self._where}: bands.{about}"
            _require_known(values, BAND_KEYS, where)
            bands.append(read_band(str(about), values, where))
        return bands

    def _baseline(self, arms: Mapping[str, Arm]) -> str | None:
        name = self._values.get("baseline")
        if name is None or name in arms or name in self._left_out():
            return name if name in arms else None
        raise ConfigError(f"{self._where}: baseline: there is no arm {brief(name)}.{did_you_mean(str(name), arms)}")

    def _left_out(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for section in self._at:
            given = section.get("leave_out") or {}
            named = given if isinstance(given, Mapping) else dict.fromkeys(given, "left out at this scale")
            found |= {str(name): str(why) for name, why in named.items()}
        known = {str(name) for name in self._values.get("arms") or ()}
        if unknown := [name for name in found if name not in known]:
            raise ConfigError(f"{self._where}: leave_out: there is no arm {brief(unknown[0])}.")
        return found

    # --- values ------------------------------------------------------------------------------------------------

    def _scale_named(self, scale: str | None) -> object:
        scales = self._section("scales", self._values.get("scales"))
        if scale not in scales:
            told = ", ".join(scales) or "none"
            raise ConfigError(f"--scale {scale}: {self._where} has no such scale. It has: {told}.")
        return scales[scale]

    def _seeds(self, given: object) -> tuple[int, ...]:
        for section in self._at:
            given = section.get("seeds", given)
        if given is None:
            return DEFAULT_SEEDS
        seeds = range(given) if isinstance(given, int) and not isinstance(given, bool) else given
        listed = list(seeds) if isinstance(seeds, Sequence) and not isinstance(seeds, str) else []
        if not listed or any(not isinstance(seed, int) or isinstance(seed, bool) or seed < 0 for seed in listed):
            raise ConfigError(f"{self._where}: seeds: wanted a number of seeds or a list of them, got {given!r:.60}.")
        if len(set(listed)) < len(listed):
            raise ConfigError(f"{self._where}: seeds: {listed} names one twice, which would be the same run again.")
        return tuple(listed)

    def _merged(self, key: str) -> dict[str, Any]:
        """Return a section of the plan, with the values that the scale puts in place of some."""
        merged = dict(self._section(key, self._values.get(key)))
        for section in self._at:
            merged |= self._section(key, section.get(key))
        return merged

    def _numbers(self, key: str, default: Any) -> Any:
        # A section of a scale replaces that of the plan as a whole: what it assumes or allows has no part in it.
        own = next((self._section(key, section[key]) for section in reversed(self._at) if key in section), None)
        values = self._section(key, self._values.get(key)) if own is None else own
        _require_known(values, [field.name for field in fields(default)], f"{self._where}: {key}")
        texts = {field.name for field in fields(default) if "str" in str(field.type)}
        for name, value in values.items():
            if name in texts and isinstance(value, str) and value.strip():
                continue
            if name in texts:
                raise ConfigError(f"{self._where}: {key}.{name}: wanted a text, got {value!r:.60}.")
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(f"{self._where}: {key}.{name}: wanted a number, got {value!r:.60}.{as_number(value)}")
            low, high = NUMBERS[name]
            if not low <= value <= high:
                most = "" if math.isinf(high) else f" and at most {high:g}"
                raise ConfigError(f"{self._where}: {key}.{name}: wanted at least {low:g}{most}, got {value:g}.")
        return replace(default, **values)

    def _text(self, key: str, default: str | None = None) -> str:
        value = self._values.get(key, default)
        if not isinstance(value, str) or not value.strip():
            raise ConfigError(f"{self._where}: `{key}` is missing. Write it as a sentence: it heads the report.")
        return " ".join(value.split())

    def _flag(self, key: str) -> bool:
        value = self._values.get(key, False)
        if not isinstance(value, bool):
            raise ConfigError(f"{self._where}: {key}: wanted true or false, got {value!r:.60}.")
        return value

    def _names(self, key: str) -> list[str]:
        given = self._values.get(key) or []
        if isinstance(given, str) or not isinstance(given, Sequence):
            raise ConfigError(f"{self._where}: {key}: wanted a list of arms, got {given!r:.60}.")
        known = {*self._arms()}
        if unknown := [str(name) for name in given if str(name) not in known]:
            raise ConfigError(f"{self._where}: {key}: there is no arm {brief(unknown[0])}.")
        return [str(name) for name in given]

    def _section(self, key: str, given: object) -> dict[str, Any]:
        if given is None:
            return {}
        if not isinstance(given, Mapping):
            is_gate = key.endswith(".gate")
            lines = "`name: claim` lines (`learns: accuracy(full) > 0.6`)" if is_gate else "`name: value` lines"
            raise ConfigError(f"{self._where}: {key}: wanted {lines}, got {given!r:.60}.")
        is_free = key.split(".")[0] in ("arms", "hypotheses", "bands", "scales") and key.count(".") == 0
        return {str(name): value for name, value in given.items()} if is_free else _named(given, self._where)

    def _name(self, name: object, what: str) -> str:
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ConfigError(
                f"{self._where}: {what}: {brief(name)} is not a name. Use letters, digits and _ . = , + -, at most 80."
            )
        return name

    def _require_settings(self, settings: Mapping[str, Any], where: str) -> None:
        known = settings_of(RewardTrainerConfig)
        for name in settings:
            if name in OURS:
                raise ConfigError(f"{self._where}: {where}: {name} is decided by the plan for every run. Leave it out.")
            if name not in known:
                near = did_you_mean(name, known, also=ALSO_CALLED) or all_of(known)
                raise ConfigError(f"{self._where}: {where}: {brief(name)} is not a setting of rewardlab train.{near}")


def _named(values: Mapping[Any, Any], where: str) -> dict[str, Any]:
    """Return values by names with underscores. Raises ConfigError for a name in both spellings."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        key = str(name).replace("-", "_")
        if key in found:
            raise ConfigError(f"{where}: {key} appears twice, with dashes and with underscores. Keep one.")
        found[key] = value
    return found


def _require_known(values: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    if unknown := [name for name in values if name not in known]:
        near = did_you_mean(unknown[0], known)
        raise ConfigError(f"{where}: unknown {brief(unknown[0])}.{near} It may say: {', '.join(known)}.")


# --- heads on a frozen backbone ------------------------------------------------------------------------------------


def _is_of_backbone(name: str) -> bool:
    return name in BACKBONE or name.startswith("lora_")


def _needs_backbone(arm: Arm) -> str:
    """Return why a head on a frozen backbone cannot answer for an arm; empty if it can."""
    settings = [name for name in arm.settings if _is_of_backbone(name)]
    return f"{', '.join(settings)}: the backbone would have to train" if settings else ""


def _on_frozen(arm: Arm) -> Arm:
    return replace(arm, settings={name: value for name, value in arm.settings.items() if name != "train_head_only"})
