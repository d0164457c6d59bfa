"""The ends of turns that are taken off replies: a policy that ends otherwise is noticed, one that is cut is not."""

from __future__ import annotations

import pytest

from rewardlab.rl.rollouts import RolloutError
from rewardlab.rl.turns import MOST_UNENDED, ReplyEnds


def test_the_longest_end_that_fits_is_taken_off_once() -> None:
    ends = ReplyEnds([">", "<|end|>", ""])
    assert ends.cut("Jane.<|end|>", name="one") == "Jane."
    assert ends.cut("Jane.>>", name="two") == "Jane.>"
    assert ends.cut("Jane.", name="three") == "Jane."


def test_a_policy_that_never_ends_as_it_is_said_to_ends_training_with_what_it_writes() -> None:
    ends = ReplyEnds(["<eos>"])
    for number in range(MOST_UNENDED - 1):
        assert ends.cut(f"{number}<|im_end|>", name=f"rollout {number}") == f"{number}<|im_end|>"
    with pytest.raises(
        RolloutError, match=r"rollout 256: none of the first 256 replies.*<eos>.*ends with 'x<\|im_end\|>'"
    ):
        ends.cut("x<|im_end|>", name="rollout 256")


@pytest.mark.parametrize("ends", [["<eos>"], []])
def test_one_that_ended_once_or_ends_with_nothing_may_be_cut_as_often_as_it_likes(ends: list[str]) -> None:
    seen = ReplyEnds(ends)
    assert seen.cut("Jane.<eos>", name="first") == ("Jane." if ends else "Jane.<eos>")
    for number in range(2 * MOST_UNENDED):
        assert seen.cut("and so on", name=f"rollout {number}") == "and so on"
