"""A file of preferences that are sound but for defects planted in it, with exact counts of the rows of each kind."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

from rewardlab.data.rows import MAX_CHARACTERS

WORDS = tuple("".join(pair) for pair in zip("bcdfghjklm" * 400, "aeiou" * 800, strict=True))
Row = dict[str, object]


class Planted:
    """Rows that are sound, and rows with defects; `flagged` and `causes` count what an audit must find."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.rows: list[Row | str] = []
        self.flagged: Counter[str] = Counter()
        self.counts: dict[str, dict[str, int]] = {}
        self.causes: Counter[str] = Counter()

    def words(self, low: int, high: int) -> str:
        """Return different words drawn at random."""
        number = self.rng.randint(low, high)
        return " ".join(f"{self.rng.choice(WORDS)}{self.rng.randrange(10_000)}" for _ in range(number))

    def sound(self, **changed: object) -> Row:
        """Return a new row without a defect, with some of its columns changed."""
        row = {
            "prompt": f"{self.words(15, 30)}?",
            "chosen": f"{self.words(30, 60)}.",
            "rejected": f"{self.words(30, 60)}.",
        }
        return row | changed

    def add(self, *rows: Row | str, **flagged: int) -> None:
        """Add rows of which so many are flagged by each check (underscores stand for hyphens)."""
        self.rows += rows
        self.flagged.update({name.replace("_", "-"): number for name, number in flagged.items()})

    def drop(self, row: Row | str, cause: str, **flagged: int) -> None:
        """Add a row, or a line that is none, that reading drops."""
        self.add(row, unusable_rows=1, **flagged)
        self.causes[cause] += 1

    def plant_all(self) -> None:
        """Plant every kind of defect that a file of pairs can have without settings or other files."""
        self._plant_dropped()
        self._plant_texts()
        self._plant_duplicates()
        self._plant_judgements()

    def _plant_dropped(self) -> None:
        for _ in range(13):
            same = self.words(30, 60)
            self.drop(self.sound(chosen=same, rejected=f" {same}\n"), "identical_replies", identical_replies=1)
        for _ in range(9):
            self.drop(self.sound(rejected=" \n"), "empty_reply", empty_replies=1)
        for _ in range(3):
            self.drop(self.sound(chosen=None), "missing_field")
        for _ in range(2):
            self.drop(self.sound(label=1.5), "bad_label")
        for _ in range(4):
            self.drop(self.sound(chosen="half \ud83d of it"), "bad_unicode", encoding_damage=1)
        for _ in range(2):
            self.drop(self.sound(prompt=[{"role": "wizard", "content": "hm"}]), "bad_roles")
        for _ in range(3):
            self.drop(self.sound(rejected=17), "reply_not_text")
        self.drop(self.sound(prompt=[{"role": "system", "content": "Be kind."}]), "empty_prompt")
        for _ in range(2):
            self.drop(self.sound(strength=-1), "bad_strength")
        for _ in range(4):
            asked = [{"role": "user", "content": self.words(9, 9)}, {"role": "assistant", "content": self.words(9, 9)}]
            self.drop(self.sound(chosen=asked), "prompt_differs")
        self.drop(self.sound(prompt=[{"role": "user", "content": self.words(9, 9), "images": ["a.png"]}]), "media")
        turns = [{"role": role, "content": "so"} for role in ("user", "assistant")] * 1_001
        self.drop(self.sound(prompt=[*turns, {"role": "user", "content": "then?"}]), "too_many_turns")

    def _plant_texts(self) -> None:
        sentence = self.words(8, 8)
        for mark in (
            "<|im_end|>", "[INST] again [/INST]", "<start_of_turn>", "</s>", "\n\nHuman: and then?", "\nHuman:",
            "<|eot_id|>", "<\uff5cend\u2581of\u2581sentence\uff5c>",
        ):  # fmt: skip
            self.add(self.sound(rejected=f"{self.words(30, 40)}. {mark}"), template_residue=1)
        for head in ("### Response:\n", "Assistant: ", "<s> ", "[/INST] "):
            self.add(self.sound(chosen=f"{head}{self.words(30, 40)}."), template_residue=1)
        for token in ("<|im_start|>system", "<|endoftext|>", "<</SYS>>", "[PAD]"):
            self.add(self.sound(prompt=f"{sentence} {token} {self.words(8, 20)}?"), special_tokens=1)
        for head in (
            "I'm sorry, but I cannot", "I\u2019m unable to help with", "As an AI language model, I have",
            "I cannot assist", "I must decline",
        ):  # fmt: skip
            self.add(self.sound(chosen=f"{head} {self.words(30, 40)}."), refusals=1)
        for ending in (" and then the", ", which", ",", " many words go on and on until nothing is left here x"):
            self.add(self.sound(rejected=self.words(30, 40) + ending), truncated_endings=1)
        self.add(self.sound(chosen=f"{self.words(30, 40)}:\n```python\nprint(1)."), truncated_endings=1)
        for damage in ("a\0b", "\ufffd", "\x1b[31m", "schÃ¶n und grÃ¼n", "itâ€™s"):
            self.add(self.sound(rejected=f"{self.words(30, 40)} {damage}."), encoding_damage=1)
        for _ in range(5):
            self.add(self.sound(chosen=f"{self.words(10, 10)} " * 5 + "end."), repetition=1)
        for _ in range(4):
            row = self.sound()
            self.add(row | {"chosen": f"{self.words(20, 30)} {str(row['prompt']).upper()} so."}, prompt_repeated=1)
        for _ in range(8):
            self.add(self.sound(chosen=f"{self.words(30, 60)}.", rejected=f"{self.words(2, 2)}."), unequal_lengths=1)

    def _plant_duplicates(self) -> None:
        for number in range(37):
            row = self.sound()
            again = {**row, "note": number} if number % 2 else {**row, "prompt": f" {str(row['prompt']).upper()}  "}
            self.add(row, again, duplicate_rows=1)
        for _ in range(5):
            row = self.sound()
            self.add(row, {**row, "chosen": row["rejected"], "rejected": row["chosen"], "label": 0}, duplicate_rows=1)
        self.counts["duplicate-rows"] = {"rows with copies": 42, "copies": 42}
        for _ in range(11):
            row = self.sound()
            self.add(row, {**row, "label": 0.9}, duplicate_pairs=1)
        self.counts["duplicate-pairs"] = {"judgements made before": 11}
        for _ in range(23):
            row = self.sound()
            self.add(row, {**row, "chosen": f"{row['chosen']} indeed."}, near_duplicates=1)
        for _ in range(7):
            prompt = self.words(60, 80)
            self.add(self.sound(prompt=prompt), self.sound(prompt=f"{prompt} please"), near_prompts=2)
        for _ in range(9):
            row = self.sound()
            turned = {**row, "chosen": row["rejected"], "rejected": f"{row['chosen']} indeed."}
            self.add(row, turned, near_contradictions=2)
        self.counts["near-contradictions"] = {"pairs of similar replies": 9}
        self.counts["near-duplicates"] = {"groups": 23}
        self.counts["near-prompts"] = {"groups": 7}

    def _plant_judgements(self) -> None:
        for _ in range(19):
            row = self.sound()
            self.add(row, {**row, "chosen": row["rejected"], "rejected": row["chosen"]}, contradictions=2)
        self.counts["contradictions"] = {"pairs of replies": 19}
        for length in (3, 3, 3, 3, 3, 4):
            prompt, replies = f"{self.words(15, 30)}?", [f"{self.words(40, 60)}." for _ in range(length)]
            around = zip(replies, [*replies[1:], replies[0]], strict=True)
            self.add(*(self.sound(prompt=prompt, chosen=a, rejected=b) for a, b in around), cycles=length)
        self.counts["cycles"] = {"cycles": 6, "replies in them": 19}
        for _ in range(3):
            prompt = f"{self.words(15, 30)}?"
            for _ in range(5):
                row = self.sound(prompt=prompt, chosen=f"{self.words(61, 70)}.")
                self.add(row, longer_always_wins=1)
        self.counts["longer-always-wins"] = {"prompts": 3}
        for _ in range(6):
            self.add(self.sound(label=0.5), ties=1)
        for _ in range(4):
            same = self.words(30, 60)
            # Equal but for the case: reading keeps such a row.
            self.add(self.sound(chosen=same, rejected=same.upper()), identical_replies=1)

    def plant_unreadable(self) -> None:
        """Plant lines that are no rows, and a row that is too long to be read."""
        for line in ('{"prompt": "cut off', "[1, 2]", "\x00\x00"):
            self.drop(line, "not_json")
        self.drop(self.sound(chosen="long " * (MAX_CHARACTERS // 5)), "row_too_long")

    def plant_lengths(self, limit: int) -> None:
        """Plant rows above a limit in words, at least 200, some of them with replies that are above it alone."""
        excess = 0
        for number in range(9):
            reply = limit + 20 if number < 4 else 50
            row = self.sound(
                prompt=self.words(limit - 10, limit - 10),
                chosen=f"{self.words(reply, reply)}.",
                rejected=f"{self.words(40, 40)}.",
            )
            if number < 4:
                # As long as the other, so that lengths are not unequal.
                row["rejected"] = f"{self.words(reply - 5, reply - 5)}."
            self.add(row, overlong=1, overlong_replies=int(number < 4))
            excess += limit - 10 + reply - limit
        self.counts["overlong"] = {"words that do not fit": excess}
        self.counts["overlong-replies"] = {"words that do not fit": 4 * 20}

    def plant_leaks(self) -> list[Row]:
        """Plant rows of which a later split knows something; return rows of that split."""
        later: list[Row] = []
        for _ in range(6):
            row = self.sound()
            later.append(self.sound(prompt=f"{str(row['prompt']).upper()} "))
            self.add(row, leaked_prompts=1, leaked_conversations=1, leaked_near_prompts=1, leaks=1)
        for _ in range(5):
            prompt = self.words(60, 80)
            later.append(self.sound(prompt=f"{prompt} please"))
            self.add(self.sound(prompt=prompt), leaked_near_prompts=1, leaks=1)
        for _ in range(4):
            first = self.words(15, 30)
            row, other = (self.sound(prompt=self._after(first)) for _ in range(2))
            later.append(other)
            self.add(row, leaked_conversations=1, leaks=1)
        self.counts["leaked-prompts"] = {"shared": 6}
        self.counts["leaks"] = {"prompts": 15}
        return later

    def _after(self, first: str) -> list[dict[str, str]]:
        """Return a prompt of three turns that begins with this one."""
        said = (first, f"{self.words(20, 30)}.", f"{self.words(20, 30)}?")
        roles = ("user", "assistant", "user")
        return [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]

    def plant_overlaps(self) -> list[Row]:
        """Plant rows whose prompts overlap with others; return these, each a prompt alone."""
        others: list[Row] = []
        for _ in range(7):
            row = self.sound()
            others.append({"prompt": f" {str(row['prompt']).upper()}"})
            self.add(row, overlap_prompts=1, overlap_13=1, overlap_8=1)
        for _ in range(5):
            run = self.words(13, 13)
            others.append({"prompt": f"{self.words(20, 20)} {run} {self.words(20, 20)}"})
            self.add(self.sound(prompt=f"{self.words(30, 30)} {run} {self.words(30, 30)}"), overlap_13=1)
        for _ in range(3):
            runs = [self.words(12, 12) for _ in range(3)]
            others += [{"prompt": f"{self.words(9, 9)} {run}"} for run in runs]
            # 15 of 29 runs of 8 words, and none of 13.
            self.add(self.sound(prompt=" ".join(runs)), overlap_8=1)
        return others

    def write(self, path: Path, *, num_rows: int) -> None:
        """Write the planted rows among sound ones, in an order drawn at random, as JSON Lines."""
        self.rows += [self.sound() for _ in range(num_rows - len(self.rows))]
        self.rng.shuffle(self.rows)
        lines = (row if isinstance(row, str) else json.dumps(row) for row in self.rows)
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
