"""The public layouts of the suites: where each is published, and how its files are found and read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from rewardlab.data.rows import Row
from rewardlab.data.suites.item_rows import (
    BENCHMARKS,
    HHH_PARTS,
    Place,
    Read,
    read_hhh,
    read_judgebench,
    read_llmbar,
    read_ppe,
    read_rewardbench,
    read_rewardbench2,
    read_rm_bench,
    read_rmb,
)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a suite is published."""

    columns: tuple[tuple[str, ...], ...]
    """Sets of columns of which a row must have one set whole."""
    read: Callable[[Row, Place], Read]
    files: tuple[str, ...]
    """Patterns of file names, relative to the folder; the first that fits any file is taken, the others are not."""
    hub: tuple[tuple[str, str], ...]
    """(dataset, split) on the hub; empty if no dataset there is known to be complete."""
    home: str
    """Where to get the files, for messages."""


_ANY = "**/*"
LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {
        "rewardbench": Layout(
            columns=(("prompt", "chosen", "rejected", "subset"),),
            read=read_rewardbench,
            files=("**/filtered*", _ANY),
            hub=(("allenai/reward-bench", "filtered"),),
            home="the hub dataset allenai/reward-bench, split filtered",
        ),
        "rewardbench2": Layout(
            columns=(("prompt", "chosen", "rejected", "subset", "id"),),
            read=read_rewardbench2,
            files=(_ANY,),
            hub=(("allenai/reward-bench-2", "test"),),
            home="the hub dataset allenai/reward-bench-2",
        ),
        "rm-bench": Layout(
            columns=(("prompt", "chosen", "rejected"),),
            read=read_rm_bench,
            files=("**/total_dataset.json", "**/*_filtered.json", _ANY),
            hub=(("THU-KEG/RM-Bench", "train"),),
            home="the folder data of github.com/THU-KEG/RM-Bench, or the hub dataset THU-KEG/RM-Bench",
        ),
        "judgebench": Layout(
            columns=(("question", "response_A", "response_B", "label", "source"),),
            read=read_judgebench,
            files=("data/dataset=judgebench,response_model=*.jsonl", "dataset=judgebench,response_model=*.jsonl", _ANY),
            hub=(("ScalerLab/JudgeBench", "gpt"), ("ScalerLab/JudgeBench", "claude")),
            home="github.com/ScalerLab/JudgeBench, or the hub dataset ScalerLab/JudgeBench",
        ),
        "ppe": Layout(
            columns=(
                ("prompt", "response_1", "response_2", "winner"),
                ("prompt", "scores", "sampled_conflict_pairs", "response_1"),
            ),
            read=read_ppe,
            files=(_ANY,),
            hub=(
                ("lmarena-ai/PPE-Human-Preference-V1", "test"),
                *((f"lmarena-ai/PPE-{name}-Best-of-K", "train") for name in BENCHMARKS.values()),
            ),
            home="the hub datasets lmarena-ai/PPE-Human-Preference-V1 and lmarena-ai/PPE-…-Best-of-K, a folder for "
            "each, with its name",
        ),
        "rmb": Layout(
            columns=(("conversation_input", "bon_best", "loser_list"), ("conversation_input", "chosen", "reject")),
            read=read_rmb,
            files=("**/*_set/**/*.json", _ANY),
            hub=(),
            home="the folder RMB_dataset of github.com/Zhou-Zoey/RMB-Reward-Model-Benchmark",
        ),
        "llmbar": Layout(
            columns=(("input", "output_1", "output_2", "label"),),
            read=read_llmbar,
            files=("**/LLMBar/**/dataset.json", "**/dataset.json", _ANY),
            hub=(),
            home="the folder Dataset/LLMBar of github.com/princeton-nlp/LLMBar",
        ),
        "hhh": Layout(
            columns=(("input", "targets"), ("input", "target_scores")),
            read=read_hhh,
            files=(_ANY,),
            hub=tuple((f"HuggingFaceH4/hhh_alignment:{part}", "test") for part in HHH_PARTS),
            home="the hub dataset HuggingFaceH4/hhh_alignment, or the folder hhh_alignment of BIG-bench's tasks, a "
            "folder or file for each part, with its name",
        ),
    }
)
"""Suite -> how it is published."""
