"""How often `rewardlab verify` names the fault that was planted, and how often it names one where there is none such.

    python benchmarks/fault_names.py
    python benchmarks/fault_names.py --folders runs/quickstart/best

Planted faults are computed by plain transformers, as an engine that has them does, in float32 and all in bfloat16. What
is no known fault is random scores about several centres, scores of other conversations, moved or stretched scores, and
damaged weights; every name is a false one there. Each rate stands beside that of the rule before, by which a fault was
named whose decoys are at least three times nearer than the references.
Exits with 1 if more than one in a hundred of what is no known fault is given a name.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import old_transformers
from harness import machine, results
from harness.tiny import learn_slightly
from rewardlab.analysis.faults import FAULTS, largest_distance, name_fault, reference_scores
from rewardlab.analysis.stats import wilson
from rewardlab.artifact.canaries import rope_faults
from rewardlab.artifact.save import save_reward_model
from rewardlab.core.spec import SCORE_TOLERANCE, Canary, read_spec
from rewardlab.serve.folders.export import export

FAMILIES: Final = (
    "Llama, another base",
    "Llama 3 scaling",
    "Qwen2, yarn",
    "GPT-NeoX, partial rotary",
    "Gemma 3, local and global",
)
PRECISIONS: Final = ("float32", "bfloat16")
SPREADS: Final = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
"""Standard deviations of random scores."""
WIDTHS: Final = (None, 1.0, 0.3, 0.1, 0.03, 0.01)
"""Standard deviations that the canaries' own scores are brought to; None leaves them."""
NOISE: Final = 0.04
SHIFT: Final = 0.03
"""Standard deviations of a score's error and of what all errors of an engine have in common, in bfloat16 and units of
max(1, |score|): the largest that was measured (docs/one-score.md)."""
MOST_FALSE: Final = 0.01
Rule = Callable[..., str | None]
Scores = Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A saved model and what an engine makes of it."""

    name: str
    folder: Path
    precision: str
    canaries: Sequence[Canary]
    bos: int | None

    def engine(self, config: Any = None) -> Any:
        """The model in plain transformers, all of it in this precision."""
        more = {} if config is None else {"config": config}
        dtype = getattr(torch, self.precision)
        return AutoModelForSequenceClassification.from_pretrained(self.folder, dtype=dtype, **more).eval()

    @property
    def tokens(self) -> list[list[int]]:
        """Of the canaries."""
        return [canary.token_ids for canary in self.canaries]


def rule_before(canaries: Sequence[Canary], scores: Scores, *, precision: str) -> str | None:
    """The fault whose decoys are at least three times nearer than the references, the nearest winning."""
    distance = largest_distance(reference_scores(canaries, precision), scores)
    if distance <= SCORE_TOLERANCE[precision]:
        return None
    best, best_distance = "unknown", distance / 3
    for fault in FAULTS:
        decoys = [canary.decoys[fault] for canary in canaries if fault in canary.decoys]
        if len(decoys) == len(scores) and (fit := largest_distance(decoys, scores)) < best_distance:
            best, best_distance = f"({fault})", fit
    return best


RULES: Final[Mapping[str, Rule]] = {"now": name_fault, "before": rule_before}


def score(engine: Any, sequences: Sequence[Sequence[int]]) -> list[float]:
    """Scores of token sequences, one at a time."""
    with torch.no_grad():
        return [float(engine(torch.tensor([list(tokens)])).logits) for tokens in sequences]


def planted(subject: Subject) -> Iterator[tuple[str, list[float]]]:
    """(fault, what an engine scores that has it) for each fault that this model can have."""
    engine = subject.engine()
    right = torch.tensor(score(engine, subject.tokens)).to(getattr(torch, subject.precision))
    known = subject.canaries[0].decoys
    tokenizer = AutoTokenizer.from_pretrained(subject.folder)
    texts = ["\n".join(message["content"] for message in canary.messages) for canary in subject.canaries]
    bos = subject.bos
    if "double_bos" in known and bos is not None:
        yield "double_bos", score(engine, [[bos, *tokens] for tokens in subject.tokens])
    yield "shifted_position", score(engine, [tokens[:-1] for tokens in subject.tokens])
    yield "no_template", score(engine, [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts])
    yield "sigmoid", right.sigmoid().tolist()
    yield "softmax", right[:, None].softmax(1)[:, 0].tolist()
    yield "zero_head", [0.0] * len(right)
    for fault, parameters in rope_faults(engine.config).items():
        if fault in known:
            config = copy.deepcopy(engine.config)
            config.rope_parameters = parameters
            yield fault, score(subject.engine(config), subject.tokens)
    if "precision_mismatch" in known:  # a float32 folder, whose weights somebody rounded
        with torch.no_grad():
            for weight in engine.parameters():
                weight.copy_(weight.bfloat16())
        yield "precision_mismatch", score(engine, subject.tokens)


def damaged(subject: Subject, seed: int) -> Iterator[tuple[str, list[float]]]:
    """(damage, scores of the damaged model)."""
    draw = torch.Generator().manual_seed(seed)
    for name, change in (
        ("two layers swapped", swap_layers),
        ("a quarter of the signs flipped", partial(flip_signs, draw=draw)),
        ("weights moved by a tenth", partial(move_weights, draw=draw)),
        ("another head", partial(other_head, draw=draw)),
    ):
        engine = subject.engine()
        with torch.no_grad():
            change(engine)
        yield name, score(engine, subject.tokens)


def sound(subject: Subject, draw: np.random.Generator, draws: int) -> Iterator[tuple[str, Scores]]:
    """(what computed them, scores) with nothing wrong but the noise of half precision, as measured on engines."""
    yield "nothing wrong: plain transformers", score(subject.engine(), subject.tokens)
    references = np.array(reference_scores(subject.canaries, subject.precision))
    exact = np.array([canary.score for canary in subject.canaries])
    for about, right, noise in (
        ("the references", references, NOISE),
        ("the scores in float32", exact, NOISE),
        ("the scores in float32, a fifth of it", exact, NOISE / 5),
    ):
        for _ in range(draws):
            errors = draw.normal(draw.normal(0, SHIFT * noise / NOISE), noise, len(right))
            yield f"nothing wrong: noise about {about}", (right + errors * np.maximum(1, np.abs(right))).tolist()


def unplanted(subject: Subject, seed: int, draw: np.random.Generator, draws: int) -> Iterator[tuple[str, Scores]]:
    """(what it is, scores) of a sound engine, where arithmetic has noise, and of damaged ones."""
    if subject.precision != "float32":
        yield from sound(subject, draw, draws)
    yield from damaged(subject, seed)


def swap_layers(engine: nn.Module) -> None:
    """The first and the last layer change places."""
    layers = next(part for part in engine.modules() if isinstance(part, nn.ModuleList) and len(part) > 1)
    first, last = copy.deepcopy(layers[0].state_dict()), copy.deepcopy(layers[-1].state_dict())
    layers[0].load_state_dict(last)
    layers[-1].load_state_dict(first)


def flip_signs(engine: nn.Module, *, draw: torch.Generator) -> None:
    """Of a quarter of the numbers in every matrix."""
    for weight in engine.parameters():
        if weight.ndim > 1:
            weight.mul_(torch.where(torch.rand(weight.shape, generator=draw) < 0.25, -1.0, 1.0).to(weight.dtype))


def move_weights(engine: nn.Module, *, draw: torch.Generator) -> None:
    """By a tenth of their size, at random."""
    for weight in engine.parameters():
        weight.mul_((1 + 0.1 * torch.randn(weight.shape, generator=draw)).to(weight.dtype))


def other_head(engine: Any, *, draw: torch.Generator) -> None:
    """Drawn anew, of the same size."""
    weight = engine.score.weight
    weight.copy_(torch.randn(weight.shape, generator=draw) * weight.float().std())


def brought_to(canaries: Sequence[Canary], width: float | None) -> list[Canary]:
    """Canaries of the model whose head is as many times smaller as brings its scores to this standard deviation."""
    own = np.array([canary.score for canary in canaries])
    factor = 1.0 if width is None else width / float(own.std())
    found = []
    for canary in canaries:
        decoys = {fault: value * factor for fault, value in canary.decoys.items()}
        decoys |= {"sigmoid": float(1 / (1 + np.exp(-factor * canary.score))), "softmax": 1.0, "zero_head": 0.0}
        references = {name: value * factor for name, value in canary.references.items()}
        found.append(replace(canary, score=canary.score * factor, decoys=decoys, references=references))
    return found


def unrelated(canaries: Sequence[Canary], draw: np.random.Generator, draws: int) -> Iterator[tuple[str, Scores]]:
    """(what the scores are, scores) that no known fault gives."""
    own = np.array([canary.score for canary in canaries])
    decoys = np.array([list(canary.decoys.values()) for canary in canaries])
    centres = {"0": [0.0], "1": [1.0], "the mean": [own.mean()], "a decoy's mean": decoys.mean(0)}
    for _ in range(draws):
        for spread in SPREADS:
            for name, centre in centres.items():
                yield f"random about {name}", draw.normal(draw.choice(centre), spread, len(own)).tolist()
        yield "scores of other canaries", draw.permutation(own).tolist()
        yield "scores moved by one number", (own + draw.normal(0, 1)).tolist()
        yield "scores stretched", (own * draw.uniform(-3, 3)).tolist()


@dataclass
class Count:
    """What became of scores."""

    right: int = 0
    among_others: int = 0
    wrong: int = 0
    unknown: int = 0
    unnoticed: int = 0

    def add(self, named: str | None, fault: str | None) -> None:
        """Count one; `fault` is what was planted, None for what is no known fault."""
        if named is None:
            self.unnoticed += 1
        elif named.startswith("unknown"):
            self.unknown += 1
        elif fault is not None and f"({fault})" in named:
            self.right += ", or " not in named
            self.among_others += ", or " in named
        else:
            self.wrong += 1

    @property
    def tried(self) -> int:
        """All, with those that nothing was said about."""
        return self.right + self.among_others + self.wrong + self.unknown + self.unnoticed


Counts = dict[str, dict[str, dict[str, Count]]]
"""Precision -> what was planted or drawn -> rule -> count."""


def tally(
    counts: Counts, precision: str, what: str, canaries: Sequence[Canary], scores: Scores, fault: str | None
) -> None:
    """Ask every rule."""
    for name, rule in RULES.items():
        count = counts.setdefault(precision, {}).setdefault(what, {}).setdefault(name, Count())
        count.add(rule(canaries, scores, precision=precision), fault)


def subjects_in(folder: Path, name: str, work: Path) -> Iterator[Subject]:
    """The model of a float32 folder in every precision, with a folder of its own for each, and as an engine in bfloat16
    has it that was given the float32 one.
    """
    half = work / "half"
    export(folder, half, dtype="bfloat16", overwrite=True)
    for place, precision in ((folder, "float32"), (half, "bfloat16"), (folder, "bfloat16")):
        spec = read_spec(place)
        kind = "bfloat16 engine, float32 folder" if (place, precision) == (folder, "bfloat16") else precision
        yield Subject(
            name=f"{name} ({kind})",
            folder=place,
            precision=precision,
            canaries=spec.canaries,
            bos=spec.renderer.bos_token_id,
        )


def tiny_folders(work: Path, seeds: int) -> Iterator[tuple[str, Path]]:
    """Tiny models of several families, each slightly trained from a bfloat16 base."""
    for seed in range(seeds):
        for family in FAMILIES:
            folder = work / "tiny"
            model, renderer = old_transformers.tiny_model(old_transformers.MODELS[family](), seed=seed)
            save_reward_model(
                folder,
                learn_slightly(model, renderer, directions=(1.0, -1.0)),
                renderer,
                beta=1.0,
                save_dtype=torch.float32,
                provenance={},
            )
            yield f"{family}, seed {seed}", folder


def measure(folders: Iterator[tuple[str, Path]], work: Path, *, draws: int) -> tuple[Counts, Counts]:
    """(counts of planted faults, counts of what is none)."""
    planted_counts: Counts = {}
    false_counts: Counts = {}
    draw = np.random.default_rng(0)
    for number, (name, folder) in enumerate(folders):
        for subject in subjects_in(folder, name, work):
            if subject.name.endswith("float32 folder)"):
                scores = score(subject.engine(), subject.tokens)
                tally(planted_counts, "bfloat16", "precision_mismatch", subject.canaries, scores, "precision_mismatch")
                continue
            for fault, scores in planted(subject):
                if subject.precision == "float32" or fault != "precision_mismatch":
                    tally(planted_counts, subject.precision, fault, subject.canaries, scores, fault)
            for what, scores in unplanted(subject, number, draw, draws):
                tally(false_counts, subject.precision, what, subject.canaries, scores, None)
            for width in WIDTHS:
                canaries = brought_to(subject.canaries, width)
                for what, scores in unrelated(canaries, draw, draws):
                    tally(false_counts, subject.precision, what, canaries, scores, None)
        print(f"{name}: done", flush=True)
    return planted_counts, false_counts


def share(part: int, whole: int) -> str:
    """A rate with its 95 % interval, where there are enough for one."""
    if not whole:
        return "–"
    found = wilson(part, whole)
    if math.isnan(found.low):
        return f"{part / whole:.1%}"
    return f"{part / whole:.1%} [{found.low:.1%}, {found.high:.1%}]"


def page_of(planted_counts: Counts, false_counts: Counts, what: str) -> list[str]:
    """The page."""
    right = [
        [
            precision,
            fault,
            str(rules["now"].tried),
            *(f"**{share(rules[name].right, rules[name].tried)}**" for name in RULES),
            *(str(getattr(rules["now"], name)) for name in ("among_others", "wrong", "unknown", "unnoticed")),
        ]
        for precision, faults in planted_counts.items()
        for fault, rules in faults.items()
    ]
    false = [
        [
            precision,
            kind,
            str(rules["now"].tried),
            *(f"**{share(rules[name].wrong, rules[name].tried)}**" for name in RULES),
            *(str(getattr(rules["now"], name)) for name in ("unknown", "unnoticed")),
        ]
        for precision, kinds in false_counts.items()
        for kind, rules in kinds.items()
    ]
    return [
        "# Names of faults",
        "",
        f"{what}. Rates are of all that was tried, with 95 % intervals (Wilson); `unnoticed` is within the tolerance "
        f"of the references and not named: right where nothing is wrong. `before` is the rule by which a fault "
        f"was named whose decoys were three times nearer than the references.",
        "",
        "## What is no known fault, and was given the name of one",
        "",
        results.table(["arithmetic", "what", "tried", "named", "named before", "unknown", "unnoticed"], false),
        "## Planted faults that were named",
        "",
        results.table(
            [
                "arithmetic",
                "fault",
                "tried",
                "named",
                "named before",
                "with another",
                "wrongly",
                "unknown",
                "unnoticed",
            ],
            right,
        ),
        "",
    ]


def plain(counts: Counts) -> dict[str, Any]:
    """For the JSON file."""
    return {
        precision: {what: {rule: vars(count) for rule, count in rules.items()} for what, rules in kinds.items()}
        for precision, kinds in counts.items()
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Count on every folder, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folders", nargs="+", type=Path, help="float32 reward-model folders, in place of tiny ones")
    parser.add_argument("--seeds", type=int, default=8, help="of the tiny models, for each family")
    parser.add_argument("--draws", type=int, default=20, help="random scores for each centre, spread and width")
    results.add_flags(parser)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    load = machine.load_average()
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        folders = tiny_folders(work, options.seeds)
        if options.folders:
            folders = ((folder.name, folder) for folder in options.folders)
        found = measure(folders, work, draws=options.draws)
    what = (
        f"{len(options.folders)} folder{'s' * (len(options.folders) > 1)}"
        if options.folders
        else f"{len(FAMILIES) * options.seeds} tiny models"
    )
    results.write(
        "fault_names",
        "folders" if options.folders else "tiny",
        page=page_of(*found, what),
        data={"planted": plain(found[0]), "none": plain(found[1])},
        options=options,
        device=torch.device("cpu"),
        load=(load, machine.load_average()),
    )
    worst = 0.0
    for precision, kinds in found[1].items():
        for kind, rules in kinds.items():
            rate = rules["now"].wrong / max(1, rules["now"].tried)
            worst = max(worst, rate)
            if rate > MOST_FALSE:
                print(f"{precision}: {kind}: {rate:.1%} were given a name", file=sys.stderr)
    return int(worst > MOST_FALSE)


if __name__ == "__main__":
    sys.exit(main())
