"""The flags of the page on more public datasets, on invented rows of their columns: GOOD is preferred to BAD."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest

from pages import read as read_page
from parsing import preference, replies, turns, user
from rewardlab.data.config import ReadingConfig
from rewardlab.data.winners import other_winners

A = {"role": "assistant", "content": "BAD"}
SIDES = ({"prompt": "Why?", "response": "GOOD"}, {"prompt": "Why?", "response": "BAD"})
SHAREGPT = [[{"from": "human", "value": "Why?"}, {"from": "gpt", "value": text}] for text in ("GOOD", "BAD")]
OPTIONS = {"instruction": "Why?", "input": "", "output_1": "BAD", "output_2": "GOOD"}
PAIR = {"chosen": "GOOD", "rejected": "BAD"}

ROWS: dict[str, list[dict[str, Any]]] = {
    "Intel/orca_dpo_pairs": [{"system": "", "question": "Why?", **PAIR}],
    "argilla/distilabel-intel-orca-dpo-pairs": [
        {"system": "", "input": "Why?", **PAIR, "generations": ["BAD", "GOOD"], "rating": [3, 9], "status": "swapped"}
    ],
    "argilla/ultrafeedback-binarized-preferences": [
        {"source": "s", "instruction": "Why?", "chosen_response": "GOOD", "rejected_response": "BAD"}
    ],
    "openbmb/UltraInteract_pair": [
        {"task": "Coding", "trajectory": [{"from": "user", "value": "Why?"}], "id": "a", "parent_id": "b", **PAIR}
    ],
    "lvwerra/stack-exchange-paired": [{"qid": 1, "question": "Why?", "response_j": "GOOD", "response_k": "BAD"}],
    "tatsu-lab/alpaca_farm": [{**OPTIONS, "preference": 2}],
    "NCSOFT/offsetbias": [{**OPTIONS, "label": 2}],
    "prometheus-eval/Preference-Collection": [
        {
            **{"orig_instruction": "Why?", "orig_response_A": "BAD", "orig_response_B": "GOOD", "orig_preference": "B"},
            **{"instruction": "Which is better?", "output": "B"},
        }
    ],
    "PKU-Alignment/BeaverTails": [
        {**side, "category": {"a": not safe}, "is_safe": safe} for side, safe in zip(SIDES, (True, False), strict=True)
    ],
    "snorkelai/Snorkel-Mistral-PairRM-DPO-Dataset": [
        {
            **{"prompt": "Why?", "all_generated_responses": ["BAD", "GOOD"], "all_rm_scores": [-0.1, 0.2]},
            **{"chosen": [*turns(user("Why?")), {**A, "content": "GOOD"}], "rejected": [*turns(user("Why?")), A]},
        }
    ],
    "distilabel": [{"instruction": "Why?", "generations": ["BAD", "GOOD"], "ratings": [1, 5], "rationales": ["", ""]}],
    "lmarena-ai/PPE-Human-Preference-V1": [
        {
            **{"question_id": "q", "prompt": "Why?", "response_1": "BAD", "response_2": "GOOD", "winner": "model_b"},
            **{"model_a": "m", "model_b": "n"},
        }
    ],
    "WSDM Cup": [
        {
            **{"id": "1", "prompt": "Why?", "response_a": "BAD", "response_b": "GOOD", "winner": "model_b"},
            **{"model_a": "m", "model_b": "n", "language": "English"},
        }
    ],
    "ScalerLab/JudgeBench": [
        {"pair_id": "1", "source": "s", "question": "Why?", "response_A": "BAD", "response_B": "GOOD", "label": "B>A"}
    ],
    "infly/INF-ORM": [{name: [*turns(user("Why?")), {**A, "content": PAIR[name]}] for name in PAIR} | {"magnitude": 3}],
    "Label Studio's pairwise": [
        {"prompt": "Why?", "answer1": "BAD", "answer2": "GOOD", "pw": [{"selected": "right"}], "annotator": 3}
    ],
    "Argilla's exports": [
        {
            **{"id": "a", "status": "completed", "prompt": "Why?", "response1": "BAD", "response2": "GOOD"},
            **{"preference.responses": ["response2"], "preference.responses.users": ["u"]},
        }
    ],
    "Anthropic's model-written evaluations": [
        {"question": "Why?", "answer_matching_behavior": "BAD", "answer_not_matching_behavior": "GOOD"}
    ],
    "LLaMA-Factory's KTO data": [
        {"conversations": turns_, "kto_tag": good} for turns_, good in zip(SHAREGPT, (True, False), strict=True)
    ],
    "ms-swift's": [{"query": "Why?", "response": "GOOD", "rejected_response": "BAD", "system": "", "history": []}],
    "nvidia/HelpSteer3:edit_quality": [
        {
            **{"domain": "general", "context": turns(user("Why?")), "original_response": "Why not?"},
            **{"good_edited_response": "GOOD", "bad_edited_response": "BAD", "feedback": ["f"]},
        }
    ],
    "nvidia/HelpSteer3:edit,": [
        {
            **{"domain": "general", "context": turns(user("Why?")), "original_response": "BAD"},
            **{"edited_response": "GOOD", "feedback": ["f"], "change_summary": "c"},
        }
    ],
    "Vezora/Code-Preference-Pairs": [{"input": "Why?", "accepted": "GOOD", "rejected": "BAD", "ID": 1}],
    "torchtune's": [
        {f"{side}_conversations": [*turns(user("Why?")), {**A, "content": text}] for side, text in PAIR.items()}
    ],
    "Axolotl's": [{"system": "", "input": "Why?", **PAIR}],
}
"""Beginning of a row of the table -> rows of that dataset."""


def table() -> dict[str, list[str]]:
    """First cell -> the words of its flags, of the table on the page."""
    section = read_page("more-datasets.md").split("## With flags")[1].split("## ")[0]
    cells = re.findall(r"^\| (.+?) \| `(.+?)`.* \|$", section, re.MULTILINE)
    return {first.replace("`", ""): shlex.split(flags) for first, flags in cells}


def settings_of(words: list[str]) -> dict[str, Any]:
    """Flags as the settings that they are."""
    found: dict[str, Any] = {}
    for word in words:
        if word.startswith("--"):
            found[name := word[2:].replace("-", "_")] = ()
        else:
            found[name] = (*found[name], word)
    return {name: said if name in ("map_label", "attributes") else said[0] for name, said in found.items()}


def test_every_dataset_of_the_table_has_a_row_here() -> None:
    unmatched = [first for first in table() if sum(first.startswith(name) for name in ROWS) != 1]
    assert unmatched == []
    assert len(table()) == len(ROWS)


@pytest.mark.parametrize("name", ROWS)
def test_the_flags_prefer_the_reply_that_is_meant(name: str) -> None:
    (words,) = (words for first, words in table().items() if first.startswith(name))
    found = preference(*ROWS[name], **settings_of(words))
    assert [turn.content for turn in found.prompt] == ["Why?"]
    (one,) = found.comparisons
    better, worse = (one.first, one.second) if one.label > 0.5 else (one.second, one.first)
    assert (replies(found)[better], replies(found)[worse]) == ("GOOD", "BAD")
    assert one.label in (0.0, 1.0)


def test_ties_of_the_table_are_ties() -> None:
    for name, row in (
        ("argilla/distilabel-intel", {"status": "tie"}),
        ("lmarena-ai/PPE", {"winner": "tie"}),
        ("lmarena-ai/PPE", {"winner": "tie (bothbad)"}),
    ):
        (words,) = (words for first, words in table().items() if first.startswith(name))
        (whole,) = (rows[0] for known, rows in ROWS.items() if known.startswith(name))
        assert preference({**whole, **row}, **settings_of(words)).comparisons[0].label == 0.5


@pytest.mark.parametrize("name", ROWS)
def test_with_these_flags_nothing_is_told_of_other_winners(name: str) -> None:
    (words,) = (words for first, words in table().items() if first.startswith(name))
    assert other_winners(ROWS[name], ReadingConfig(**settings_of(words))) == []
