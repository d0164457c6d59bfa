"""Perturbations change what they say and nothing else, the same way for the same seed."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rewardlab.core.types import Message, Preference
from rewardlab.data.perturb import PERTURBATIONS, POLITE, misspelt, perturb, plain_text, polite, reordered, spaced


def draw(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("One. Two! Three", "One.  Two!  Three"),
        ("One\nTwo\n\nThree", "One\n\nTwo\n\nThree"),
        ("Run:\n```\na. b\nc\n```\nDone. Bye", "Run:\n\n```\na. b\nc\n```\n\nDone.  Bye"),
        ("Run:\n~~~\na. b\n```\nc\n~~~\nDone. Bye", "Run:\n\n~~~\na. b\n```\nc\n~~~\n\nDone.  Bye"),
        ("Run:\n  ~~~ sh\na. b\nc", "Run:\n\n  ~~~ sh\na. b\nc"),
        ("a ~~~ b. c", "a ~~~ b.  c"),
        ("nothing here", None),
    ],
)
def test_white_space_is_doubled_outside_of_code(text, changed):
    assert spaced(text, draw()) == changed


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("## Title\n**bold** and *italic* and `code`", "Title\nbold and italic and code"),
        ("See [the page](https://x.y/z).", "See the page."),
        ("```python\nx = 2 ** 3\n```", "x = 2 ** 3\n"),
        (
            "__init__ is a method, 2 * 3 * 4 is 24, snake_case stays",
            "init is a method, 2 * 3 * 4 is 24, snake_case stays",
        ),
        ("~~~python\nx = 2 ** 3\n~~~\n**b**", "x = 2 ** 3\nb"),
        ("plain text, - not a list", None),
        ("```", None),
    ],
)
def test_markdown_is_stripped_and_the_words_stay(text, changed):
    assert plain_text(text, draw()) == changed


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("sign", ["[", "](", "*", "**a ", " **a", "__", "`", "`a", "~", "[a](b", "![", "# ", "***a"])
def test_a_long_line_of_marks_without_partners_is_read_once(sign):
    # With so many characters, time that grew with the square of the length would be minutes.
    plain_text(f"{sign * (200_000 // len(sign))} end", draw())


def test_code_loses_its_marks_and_nothing_else():
    code = "# add\nclass A:\n    def __init__(self, *a, **b):\n        self.x = 2**3 + 4**5 + m[0](1)\n"
    text = f"## Use\n**this** and `__name__`, **`x**2**y`**:\n```python\n{code}```\n# Then\n**done**"
    assert plain_text(text, draw()) == f"Use\nthis and __name__, x**2**y:\n{code}Then\ndone"
    assert plain_text(f"  ```\n{code}", draw()) == code, "indented, and not closed"
    assert plain_text("```\n```\n# Title \ue000 *now*", draw()) == "Title \ue000 now"
    assert plain_text("````md\n```py\n__a__\n```\n````\n**b**", draw()) == "```py\n__a__\n```\nb", "a longer fence"
    assert plain_text("```one line``` of **code**", draw()) == "``one line`` of code"


def test_marks_are_removed_over_a_few_hundred_characters_and_no_more():
    for mark in ("**", "*", "`", "__"):
        assert plain_text(f"{mark}{'a' * 300}{mark}", draw()) == "a" * 300
        assert plain_text(f"{mark}{'a' * 301}{mark}", draw()) is None
    assert plain_text(f"[{'a' * 300}](b)", draw()) == "a" * 300
    assert plain_text("[see [1](b)", draw()) == "[see 1"
    assert plain_text("[a](wiki/B_(c)) d", draw()) == "a d"


@pytest.mark.parametrize("below", ["  - y\n  - z", "  which is green", "\n  Another line.", "  ```\n  code\n  ```"])
def test_an_item_keeps_what_is_below_it(below):
    text = f"- apples\n- pears\n- plums:\n{below}"
    changed = below.replace("- y\n  - z", "- z\n  - y")
    assert reordered(text, draw()) == f"- pears\n- apples\n- plums:\n{changed}"
    assert reordered(f"- apples\n- plums:\n{below}\n", draw()) in (None, f"- apples\n- plums:\n{changed}\n")


def test_a_numbered_list_keeps_its_numbers_and_its_items():
    text = "Steps:\n1. wash\n2. cut\n3. cook\nEnjoy."
    changed = reordered(text, draw())
    assert changed is not None
    lines = changed.split("\n")
    assert (lines[0], lines[-1]) == ("Steps:", "Enjoy.")
    assert [line[:3] for line in lines[1:4]] == ["1. ", "2. ", "3. "]
    assert sorted(line[3:] for line in lines[1:4]) == ["cook", "cut", "wash"]
    assert changed != text


def test_lists_of_other_depths_are_not_mixed_and_code_is_no_list():
    text = "- a\n- b\n  - inner one\n  - inner two\n```\n- x\n- y\n```"
    changed = reordered(text, draw())
    assert changed == "- a\n- b\n  - inner two\n  - inner one\n```\n- x\n- y\n```"
    assert reordered("- only one", draw()) is None
    assert reordered("- same\n- same", draw()) is None


def test_politeness_is_appended_once():
    assert polite("So.\n", draw()) == "So." + POLITE
    assert polite("So." + POLITE, draw()) is None


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet="abcdefgh ijklm\n.", max_size=200), st.integers(0, 1000))
def test_typos_swap_letters_inside_words_and_lose_none(text, seed):
    changed = misspelt(text, draw(seed))
    if changed is None:
        return
    assert changed != text
    assert Counter(changed) == Counter(text)
    assert [len(word) for word in changed.split()] == [len(word) for word in text.split()]
    for before, after in zip(text.split(), changed.split(), strict=True):
        assert (before[0], before[-1]) == (after[0], after[-1]) or "." in before


def test_typos_spare_short_words_and_code():
    assert misspelt("it is so, and yet aaaa", draw()) is None
    changed = misspelt("certainly\n```\nprint(certainly)\n```", draw())
    assert changed is not None
    assert changed.endswith("```\nprint(certainly)\n```")


def preference(prompt: str, *replies: str, id: str = "1") -> Preference:
    return Preference(
        id=id,
        source="s",
        prompt=(Message("system", "Be certain."), Message("user", prompt)),
        replies=tuple((Message("assistant", reply),) for reply in replies),
        comparisons=(),
    )


def test_only_replies_to_which_it_applies_are_changed_and_the_prompt_stays():
    one = preference("- a\n- b", "- x\n- y", "no list")
    done = perturb(one, PERTURBATIONS["list order"], seed=0)
    assert done is not None
    assert done.changed == {0}
    assert done.preference.prompt == one.prompt
    assert done.preference.replies[1] == one.replies[1]
    assert done.preference.replies[0][0].content == "- y\n- x"
    assert perturb(preference("How?", "a", "b"), PERTURBATIONS["list order"], seed=0) is None


def test_a_change_of_the_prompt_is_one_of_all_conversations_and_of_its_last_user_turn():
    one = preference("certainly", "a", "b")
    done = perturb(one, PERTURBATIONS["prompt typos"], seed=0)
    assert done is not None
    assert done.changed == {0, 1}
    assert done.preference.replies == one.replies
    assert done.preference.prompt[0] == one.prompt[0]
    assert done.preference.prompt[1] != one.prompt[1]
    assert perturb(preference("How?", "certainly"), PERTURBATIONS["prompt typos"], seed=0) is None


@pytest.mark.parametrize("name", PERTURBATIONS)
def test_the_same_seed_gives_the_same_texts_whatever_else_is_perturbed(name):
    text = "Certainly. Here are **some** steps:\n- first wash\n- then dry\n- finally cook"
    perturbation = PERTURBATIONS[name]
    one, again, other = (perturb(preference(text, text, "b"), perturbation, seed=seed) for seed in (3, 3, 4))
    assert one is not None
    assert one == again
    assert other is not None
    if name in ("typos", "prompt typos"):
        assert any(perturb(preference(text, text), perturbation, seed=seed) != one for seed in range(5))
