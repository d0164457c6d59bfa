"""Weights written one at a time: whose failure is told when."""

from __future__ import annotations

import pytest
import torch

from rewardlab.artifact.weights import write_weights
from rewardlab.core.errors import ModelError
from rewardlab.model.sharded_weights import Weight


class Rank:
    """One of several processes, which counts what it does together with the others."""

    def __init__(self, *, first: bool) -> None:
        self.is_first, self.together = first, 0

    def gather(self, thing):
        return [thing]

    def by_first(self, do):
        self.together += 1
        return do() if self.is_first else None


def weights(error: Exception, gathered: list[str]) -> dict[str, Weight]:
    """Three, the second of which raises."""

    def whole(name: str, wanted: bool) -> torch.Tensor | None:
        gathered.append(name)
        if name == "b":
            raise error
        return torch.zeros(2) if wanted else None

    return {
        name: Weight(shape=(2,), dtype=torch.float32, whole=lambda wanted, name=name: whole(name, wanted))
        for name in "abc"
    }


def test_what_the_first_rank_refuses_is_told_once_all_are_gathered(tmp_path):
    gathered, rank = [], Rank(first=True)
    with pytest.raises(ModelError, match="another base"):
        write_weights(tmp_path / "w", weights(ModelError("another base"), gathered), rank)
    assert (gathered, rank.together) == (["a", "b", "c"], 1)


@pytest.mark.parametrize(
    ("first", "error"), [(True, RuntimeError("out of memory")), (False, OSError("gone")), (False, RuntimeError("no"))]
)
def test_a_weight_that_cannot_be_gathered_ends_the_rank_before_the_next_one(tmp_path, first, error):
    gathered, rank = [], Rank(first=first)
    with pytest.raises(type(error), match=str(error)):
        write_weights(tmp_path / "w", weights(error, gathered), rank)
    assert (gathered, rank.together) == (["a", "b"], 0), "it is at no other weight than the others"
