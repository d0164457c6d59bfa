"""Every causal family of transformers as a reward model: does it train, load back and give its own scores?

    python benchmarks/families.py
    python benchmarks/families.py --families granite mistral3 --jobs 2

Families that read images or sound too are among them. Each is tried in a process of its own, which may take so much
memory and time and no more, so that one that takes more is a row of the table and not the end.

A tiny model of each family, with random weights, is trained for two steps, all weights and with LoRA, saved, loaded
again by `rewardlab.load`, and read by its sequence-classification class alone. What is compared are the canaries.
Exits with 1 if a score is further off than float32 arithmetic explains, or if anything but a plain refusal happens.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import multiprocessing
import resource
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from harness import machine, results, tiny
from harness.family_sizes import SIZES, VOCABULARY, config_of
from rewardlab.analysis.faults import largest_distance
from rewardlab.artifact.load import load
from rewardlab.core.errors import RewardlabError
from rewardlab.core.spec import SCORE_TOLERANCE, read_spec
from rewardlab.data.synthetic import generate
from rewardlab.model.disk_class import disk_class_of, is_made
from rewardlab.model.load import quiet_transformers, read_config
from rewardlab.training.run import train
from rewardlab.training.settings.config import RewardTrainerConfig

LARGEST: Final = 100e6
"""Parameters above which a model is not tiny, since sizes of another name decide."""
WHY_NOT_BUILT: Final = (
    "No tiny model could be built by the sizes that this script knows. The errors are those of transformers: of a size "
    "that a family does not have or that does not fit its others, or of a package that is not installed."
)
MEMORY: Final = 12 << 30
"""Bytes of address space that the process of one family may take."""
SECONDS: Final = 600.0
"""How long it may take."""


@dataclass(kw_only=True)
class Outcome:
    """What became of one family."""

    family: str
    kind: str = ""
    """Whose its sequence-classification class is: that of `transformers`, or one `made` by rewardlab."""
    layout: str = ""
    why_padded: str = ""
    full: str = ""
    """`ok`, or the error, with all weights trained."""
    lora: str = ""
    distance: float | None = None
    """Largest distance of a score from the canonical one, over both runs and both ways of loading."""
    not_built: str = ""
    """Why there is no tiny model of the family."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Try the families one after the other, and write what became of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", help="model types of transformers; by default all that generate text")
    parser.add_argument("--jobs", type=int, default=1, help="families that are tried at the same time")
    results.add_flags(parser)
    options = parser.parse_args(arguments)
    before = machine.load_average()
    outcomes = []
    every = {
        *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        *MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    }
    with ThreadPoolExecutor(options.jobs) as pool:
        for outcome in pool.map(_outcome_apart, options.families or sorted(every)):
            outcomes.append(outcome)
            print(row_of(outcome), file=sys.stderr, flush=True)
    allowed = SCORE_TOLERANCE["float32"]
    results.write(
        "families",
        "tiny",
        page=page_of(outcomes, allowed),
        data={"allowed": allowed, "not_built": WHY_NOT_BUILT, "outcomes": [asdict(outcome) for outcome in outcomes]},
        options=options,
        device=torch.device("cpu"),
        load=(before, machine.load_average()),
    )
    return int(any(is_wrong(outcome, allowed) for outcome in outcomes))


def _outcome_apart(family: str) -> Outcome:
    with tempfile.TemporaryDirectory() as scratch:
        return apart(outcome_of, family, Path(scratch))


def apart(
    find: Callable[[str, Path], Outcome],
    family: str,
    folder: Path,
    *,
    memory: int = MEMORY,
    seconds: float = SECONDS,
) -> Outcome:
    """Find the outcome of a family in a process of its own, which has so many bytes of memory and so many seconds."""
    # Forked, since imports take longer than a family does; nothing was computed here that threads could be left of.
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def child() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        sender.send(find(family, folder))

    process = context.Process(target=child)
    process.start()
    sender.close()
    try:
        if receiver.poll(seconds):
            return receiver.recv()
        process.kill()
        why = f"it took more than {seconds:.0f} s"
    except EOFError:  # it ended without a word
        process.join()
        why = f"its process ended with status {process.exitcode}"
    finally:
        process.join()
    return Outcome(family=family, full=f"crash: {why}", lora="not tried")


def is_wrong(outcome: Outcome, allowed: float) -> bool:
    """Whether a score is too far off, or an error is none of those meant for users."""
    said = (outcome.full, outcome.lora)
    return (outcome.distance or 0.0) > allowed or any(text.startswith("crash") for text in said)


def generating_class(config: Any) -> Any:
    """The automatic class of transformers whose models of this configuration generate text."""
    # The causal class of some models that read images too is that of their text model alone.
    kinds = (AutoModelForImageTextToText, AutoModelForMultimodalLM, AutoModelForCausalLM)
    return next((kind for kind in kinds if type(config) in kind._model_mapping), AutoModelForCausalLM)


def fill_padding(model: torch.nn.Module) -> None:
    """Give the padding token's embedding numbers, as pretrained models have: some norms have no gradient at zero."""
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
            torch.nn.init.normal_(module.weight.data[module.padding_idx], std=SIZES["initializer_range"])


def outcome_of(family: str, folder: Path) -> Outcome:
    """Build, train, save and load a tiny model of the family."""
    outcome = Outcome(family=family)
    try:
        torch.manual_seed(0)
        config = config_of(family)
        with quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):
            # Where sizes have other names, a model may be larger than memory. On the meta device it takes none.
            with torch.device("meta"):
                count = sum(weight.numel() for weight in generating_class(config).from_config(config).parameters())
            if count > LARGEST:
                raise ValueError(f"{count:.2g} parameters, since sizes have other names")
            model = generating_class(config).from_config(config)
            fill_padding(model)
            model.save_pretrained(folder / "base")
    # Each family has rules of its own for its sizes.
    except Exception as error:  # reported in the table
        outcome.not_built = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
        return outcome
    tiny.byte_tokenizer([], vocab_size=VOCABULARY).save_pretrained(str(folder / "base"))
    pairs = [
        {"prompt": pair.preference.prompt[0].content, "chosen": replies[0], "rejected": replies[1]}
        for pair in generate(16, seed=0, topics="train")
        for replies in [[turns[0].content for turns in pair.preference.replies]]
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
    outcome.full = tried(outcome, folder, lora=False)
    outcome.lora = tried(outcome, folder, lora=True)
    return outcome


def tried(outcome: Outcome, folder: Path, *, lora: bool) -> str:
    """Train and load back; returns `ok` or the error, and notes the rest in `outcome`."""
    lines = Lines()
    logger = logging.getLogger("rewardlab")
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(lines)
    try:
        run = train(
            RewardTrainerConfig.of(
                model=str(folder / "base"),
                dataset=(str(folder / "pairs.jsonl"),),
                output_dir=folder / ("lora" if lora else "full"),
                steps=2,
                batch_size=4,
                lr=1e-3,
                eval_fraction=0.0,
                max_seq_len=256,
                precision="fp32",
                lora=lora,
            )
        )
        outcome.kind = "made" if is_made(disk_class_of(read_config(str(run.last)))) else "transformers"
        distance = max(_distances(run.last))
    except RewardlabError as error:
        return f"refused: {' '.join(str(error).split())}".replace(f"{folder}/", "")
    # A family that ends in anything else is what this script looks for.
    except Exception as error:  # reported in the table
        return f"crash: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    finally:
        logger.removeHandler(lines)
        logger.setLevel(level)
    outcome.distance = max(outcome.distance or 0.0, distance)
    outcome.layout = next((line.split()[1].rstrip(";") for line in lines.kept if line.startswith("layout:")), "")
    reasons = (line for line in lines.kept if line.startswith("attention: padded, because "))
    outcome.why_padded = next(reasons, "").removeprefix("attention: padded, because ").split(";")[0]
    return "ok"


def _distances(folder: Path) -> list[float]:
    """How far the canaries are from their scores: by `load`, in the layout it chooses, and by the class alone."""
    canaries = read_spec(folder).canaries
    wanted = [canary.score for canary in canaries]
    scorer = load(folder)
    disk_class = disk_class_of(read_config(str(folder)))
    with quiet_transformers():
        plain = disk_class.from_pretrained(folder, dtype=torch.float32).eval()
    backbone = getattr(plain, plain.base_model_prefix)
    with torch.no_grad():
        states = [
            backbone(input_ids=torch.tensor([canary.token_ids]), use_cache=False).last_hidden_state
            for canary in canaries
        ]
        alone = [float(plain.score(state[0, -1])) for state in states]
    together = scorer.score([canary.messages for canary in canaries])
    return [largest_distance(wanted, scores) for scores in (together, alone)]


class Lines(logging.Handler):
    """Keeps the lines of the log."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one."""
        self.kept.append(record.getMessage())


def row_of(outcome: Outcome) -> str:
    """One line for the terminal."""
    if outcome.not_built:
        return f"{outcome.family}: not built: {outcome.not_built}"
    distance = "" if outcome.distance is None else f", {outcome.distance:.1e}"
    return f"{outcome.family}: {outcome.layout or '–'}: {outcome.full} | {outcome.lora}{distance}"


def page_of(outcomes: Sequence[Outcome], allowed: float) -> list[str]:
    """The page: what trains, what is refused, and what could not be tried."""
    trained = [outcome for outcome in outcomes if "ok" in (outcome.full, outcome.lora)]
    built = [outcome for outcome in outcomes if not outcome.not_built]
    refused = [outcome for outcome in built if outcome not in trained]
    return [
        "# Families of causal models",
        "",
        f"Tiny models with random weights, trained for two steps; transformers {transformers.__version__}. Distances "
        f"of the canaries from the canonical scores, by `load` and by the class alone, in units of max(1, abs(score)); "
        f"{allowed:g} is allowed. {len(trained)} families of {len(outcomes)} train.",
        "",
        results.table(
            ["family", "class", "layout", "why padded", "all weights", "LoRA", "largest distance"],
            [
                [
                    f"`{outcome.family}`",
                    outcome.kind,
                    outcome.layout,
                    outcome.why_padded or "–",
                    outcome.full,
                    outcome.lora,
                    "–" if outcome.distance is None else f"{outcome.distance:.1e}",
                ]
                for outcome in trained
            ],
        ),
        "",
        "## Refused",
        "",
        results.table(["family", "message"], [[f"`{outcome.family}`", outcome.full] for outcome in refused]),
        "",
        "## Not tried",
        "",
        WHY_NOT_BUILT,
        "",
        results.table(
            ["family", "error"],
            [[f"`{outcome.family}`", outcome.not_built] for outcome in outcomes if outcome.not_built],
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())
