"""The names of commands, their purposes, and the parsing of their arguments into settings."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Final

from rewardlab.console import say
from rewardlab.core.errors import ConfigError
from rewardlab.core.terminal import brief, short
from rewardlab.core.values import did_you_mean
from rewardlab.flags import Settings, parse
from rewardlab.training.settings.conventions import Conventions

PURPOSES: Final[Mapping[str, str]] = {
    "quickstart": "train a first reward model on generated preferences; downloads nothing but packages",
    "train": "train a reward model from preferences",
    "probe": "fit a reward head on a frozen model: the baseline that fine-tuning has to beat",
    "eval": "judge a reward model on preferences, with intervals",
    "calibrate": "turn a model's scores into probabilities that hold, judged on data of their own",
    "compare": "compare models on the same rows: paired tests, who is not worse, which may be the best",
    "diagnose": "run control experiments that tell what a model really learned, with a verdict on each",
    "data": "look at preference data, audit, clean, convert, divide and mix it",
    "gold": "make preferences with a gold model, and a proxy; measure the match and where it breaks",
    "plan": "experiments: plans frozen before their runs, done here or on Slurm, with verdicts",
    "rl": "reinforcement learning with a reward model: is the policy exploiting it?",
    "report": "write what run folders hold as one HTML page and Markdown, and a model card",
    "watch": "watch a run while it goes on, in the terminal or as a page",
    "import": "make a reward-model folder of another project's reward model, with the same scores",
    "card": "write the model card of a run, an evaluation, or the model in one",
    "push": "upload a verified reward-model folder and its card to the Hugging Face hub",
    "score": "score replies in a file",
    "serve": "score over HTTP: batches, limits, metrics, hot swap, workers",
    "verify": "check that a model, as a folder or a live endpoint, gives the scores it was saved with",
    "export": "write a reward-model folder for an engine: another dtype, shards, adapters alone",
    "average": "average the weights of several reward models that began from one",
}
"""Command -> what it does, in the order of `rewardlab --help`."""
DATA_PURPOSES: Final[Mapping[str, str]] = {
    "inspect": "what a dataset holds: counts, lengths, baselines, agreement, the noise ceiling",
    "audit": "what is wrong with a dataset: duplicates, leaks, damage; with --fix a cleaned file",
    "mislabels": "pairs that are probably labelled the wrong way round, and what removing them is worth",
    "convert": "write a dataset as the project's JSONL, or as TRL's",
    "split": "divide a dataset so that no conversation is on two sides",
    "mix": "write one dataset from several, by weights",
    "show": "one row as the model sees it: tokens, prompt boundary, cuts, special tokens",
}
"""Tool of `rewardlab data` -> what it does, in the order of its help."""
RL_PURPOSES: Final[Mapping[str, str]] = {
    "audit": "whether gold or held-out evidence followed the reward of a run; exit status 1 if it did not",
}
"""Tool of `rewardlab rl` -> what it does."""
GOLD_PURPOSES: Final[Mapping[str, str]] = {
    "sample": "replies of a language model to prompts, each with its own seed",
    "label": "gold scores of the replies: by a reward model, here or on servers, or by an LLM as judge",
    "build": "preference data from gold scores, for rewardlab and for TRL, with a test part",
    "train": "a proxy reward model from them: `rewardlab train` with the preset for it",
    "match": "how well proxies agree with the gold model, and what is wrong if they do not",
    "curve": "where optimising against a proxy stops helping: best-of-n under the gold model",
    "check": "the files of all stages against each other",
    "run": "all stages from one file, done where they are not complete",
}
"""Stage of `rewardlab gold` -> what it does, in the order of work."""
PLAN_PURPOSES: Final[Mapping[str, str]] = {
    "check": "what a plan would do, cost and show; exit status 1 if it cannot be frozen",
    "freeze": "make a plan the one that holds, before any run",
    "amend": "change a frozen plan, with a reason that the report shows",
    "run": "do the runs of a study on this machine; the same command goes on where it ended",
    "submit": "hand the runs of a study to Slurm, and return",
    "status": "how far a study is; exit status 0: complete, 1: something failed, 2: it goes on",
    "report": "verdicts, tables, charts; exit status 0: all supported, 1: any refuted, else 2",
    "archive": "one file of a study with the checksums of everything in it",
    "gate": "whether the next phase may begin; exit status 0: it may, 1: not, 2: undecided",
    "task": "one run of a study, as `run` and Slurm call it",
}
"""Tool of `rewardlab plan` -> what it does, in the order of work."""
TOOL_PURPOSES: Final = {"data": DATA_PURPOSES, "gold": GOLD_PURPOSES, "plan": PLAN_PURPOSES, "rl": RL_PURPOSES}
EXAMPLES: Final[Mapping[str, str]] = {
    "quickstart": "--output-dir runs/quickstart",
    "train": "--model smollm2-135m-instruct --dataset pairs.jsonl --output-dir runs/mine",
    "probe": "--model smollm2-135m-instruct --dataset pairs.jsonl --output-dir runs/probe",
    "eval": "runs/mine/best runs/other/best --dataset test.jsonl --output-dir runs/judged",
    "calibrate": "runs/mine/best --dataset other.jsonl --output-dir runs/calibration",
    "compare": "runs/judged",
    "diagnose": "--model smollm2-135m-instruct --dataset pairs.jsonl --output-dir checks",
    "report": "runs/mine --card",
    "watch": "runs/mine --port 8080",
    "import": "their-folder --output-dir runs/imported",
    "card": "runs/mine",
    "push": "runs/mine/best --repo you/reward-model",
    "score": "--model runs/mine/best --input replies.jsonl --output scored.jsonl",
    "serve": "runs/mine/best --port 8000",
    "verify": "runs/mine/best",
    "export": "runs/mine/best --dtype bfloat16 --output-dir runs/mine/best-bf16",
    "average": "runs/a/best runs/b/best runs/c/best --output-dir runs/average",
    "data inspect": "pairs.jsonl --html pairs.html",
    "data audit": "pairs.jsonl --fix --output cleaned.jsonl",
    "data mislabels": "pairs.jsonl --model smollm2-135m-instruct --output-dir mislabels",
    "data convert": "pairs.jsonl --output pairs.parquet --to trl",
    "data split": "pairs.jsonl --output-dir splits --fractions train=0.9 test=0.1",
    "data mix": "a.jsonl:0.7 b.jsonl:0.3 --output mix.jsonl",
    "data show": "pairs.jsonl --model smollm2-135m-instruct",
    "gold sample": "--prompts prompts.json --model Qwen/Qwen3-0.6B --output samples.jsonl",
    "gold label": "--input samples.jsonl --model runs/gold/best --output labels.jsonl",
    "gold build": "--input labels.jsonl --output-dir pairs",
    "gold train": "--data pairs --model smollm2-135m-instruct --output-dir runs/proxy",
    "gold match": "--input pairs/labels.test.jsonl --proxies runs/proxy",
    "gold curve": "--input pairs/labels.test.jsonl --proxies runs/proxy",
    "gold check": "--folder runs/farm",
    "gold run": "plan.yaml",
    "plan check": "plan.yaml",
    "plan freeze": "plan.yaml",
    "plan amend": 'studies/first --reason "one more seed" --seen no-results',
    "plan run": "studies/first",
    "plan submit": "studies/first --dry-run",
    "plan status": "studies/first",
    "plan report": "studies/first",
    "plan archive": "studies/first",
    "plan gate": "studies/first --phase diagnostics",
    "rl audit": "runs/grpo --gold runs/gold/best",
}
"""Command -> what is given to it in the example of its help. `plan task` is called by `run` and Slurm alone."""
MODELS_FIRST: Final = {"eval": "--models", "calibrate": "--model"}
"""Command that takes models as its first words -> the flag for several models."""


def parse_command(
    settings_type: type[Settings],
    arguments: Sequence[str],
    command: str,
    conventions: Conventions | None = None,
    *,
    more: str = "",
    given_names: set[str] | None = None,
) -> Settings:
    """Return the settings of a command from its arguments; its help begins with its purpose and an example. Raises as
    `parse` does.

    `command` is the command's name: `data TOOL` for a tool of `rewardlab data`, and likewise for other groups. `more`
    is further text for the help, and `given_names` as for `parse`.
    """
    if command in MODELS_FIRST:
        arguments = _models_behind_a_flag(arguments, MODELS_FIRST[command])
    group, _, tool = command.partition(" ")
    purpose = TOOL_PURPOSES[group][tool] if tool else PURPOSES[group]
    example = f"Example: rewardlab {command} {EXAMPLES[command]}" if command in EXAMPLES else ""
    purpose = "\n\n".join(filter(None, (purpose, example, more)))
    return parse(settings_type, arguments, command, purpose, conventions, given_names=given_names)


def listed(purposes: Mapping[str, str]) -> list[str]:
    """Return a line for each command, with its purpose in a second column."""
    width = max(map(len, purposes))
    return [f"  {name:<{width}}  {text}" for name, text in purposes.items()]


def run_tool(
    group: str, tools: Mapping[str, Callable[[Sequence[str]], None]], arguments: Sequence[str], *, usage: str
) -> None:
    """Run the tool of a group of commands that the first argument names; `usage` is what follows it.

    Raises ConfigError if no tool has that name.
    """
    asked = bool(arguments) and arguments[0] in ("-h", "--help")
    if asked or not arguments:
        say(f"usage: rewardlab {group} [-h] TOOL {f'{usage} ' if usage else ''}[flags]", "", PURPOSES[group], "")
        say(*listed(TOOL_PURPOSES[group]), "", f"rewardlab {group} TOOL --help lists the flags of a tool.")
        if asked:
            # The help of every other command ends by argparse in the same way.
            sys.exit(0)
    elif arguments[0] not in tools:
        near = did_you_mean(short(arguments[0]), tools)
        raise ConfigError(f"rewardlab {group}: unknown tool {brief(arguments[0])}.{near} Tools: {', '.join(tools)}.")
    else:
        tools[arguments[0]](arguments[1:])


def _models_behind_a_flag(arguments: Sequence[str], several: str) -> list[str]:
    """Return the arguments with a flag in front of models that are their first words: --model for one, else
    `several`.

    Raises ConfigError if --model is given more than once where several models may be named: all but the last would go
    unseen.
    """
    models = list(takewhile(lambda word: not word.startswith("-"), arguments))
    rest = list(arguments[len(models) :])
    times = sum(word.partition("=")[0] == "--model" for word in rest)
    if times > 1 and several == "--models":
        raise ConfigError(f"--model is given {times} times, and takes one model. Name several as {several} A B.")
    alone = len(models) == 1 and not any(word.partition("=")[0] in ("--model", "--models") for word in rest)
    return [*(["--model" if alone else several, *models] if models else []), *rest]
