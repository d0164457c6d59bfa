"""Advantages by the named rules beside those of verl's and OpenRLHF's own functions, run from their source in float64.

    scripts/bench credit_rules --verl core_algos.py --openrlhf experience_maker.py

The two files are `verl/trainer/ppo/core_algos.py` and `openrlhf/trainer/ppo_utils/experience_maker.py` of a checkout.
Ends with an error if an advantage differs by more than 1e-12. TRL is held against its own code by the tests.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from harness import results
from harness.peer_source import defined, lines_of, run
from harness.simulation import Simulation, parser_of
from rewardlab.rl import RULES, advantages

NEAR = 1e-12
Peer = Callable[[np.ndarray, int], np.ndarray]
"""Rewards in whole groups of a size -> advantages."""


def peers_of_verl(file: Path) -> dict[str, Peer]:
    """The functions for one reward a reply, by the names of the rules."""
    functions = {
        "verl-grpo": ("compute_grpo_outcome_advantage", {"norm_adv_by_std_in_grpo": True}),
        "verl-grpo-no-std": ("compute_grpo_outcome_advantage", {"norm_adv_by_std_in_grpo": False}),
        "verl-rloo": ("compute_rloo_outcome_advantage", {}),
        "verl-gpg": ("compute_gpg_outcome_advantage", {}),
    }

    def peer(name: str, settings: Mapping[str, object]) -> Peer:
        known = {"torch": torch, "np": np, "defaultdict": defaultdict}
        function = run([defined(file, name)], known)[name]

        def call(rewards: np.ndarray, size: int) -> np.ndarray:
            scores = torch.tensor(rewards)[:, None]
            index = np.arange(len(rewards)) // size
            return function(scores, torch.ones_like(scores), index=index, **settings)[0][:, 0].numpy()

        return call

    return {rule: peer(name, settings) for rule, (name, settings) in functions.items()}


def peers_of_openrlhf(file: Path) -> dict[str, Peer]:
    """The lines that take the baseline off, by the names of the rules."""
    method = defined(file, "compute_advantages_and_returns")
    lines = lines_of(
        method.body, first="rewards = rewards.reshape(-1, ", through="rewards = rewards.reshape(-1)[indices]"
    )

    def peer(estimator: str) -> Peer:
        def call(rewards: np.ndarray, size: int) -> np.ndarray:
            args = SimpleNamespace(
                rollout=SimpleNamespace(n_samples_per_prompt=size),
                algo=SimpleNamespace(advantage=SimpleNamespace(estimator=estimator)),
            )
            count = len(rewards)
            names = {"torch": torch, "args": args, "rewards": torch.tensor(rewards), "experiences": []}
            found = run(lines, names | {"indices": torch.arange(count), "exp_len": [count]})
            return found["rewards"][0].numpy()

        return call

    return {f"openrlhf-{name.replace('_', '-')}": peer(name) for name in ("group_norm", "rloo", "dr_grpo")}


def furthest(rule: str, peer: Peer, *, draws: int, generator: np.random.Generator) -> float:
    """The largest difference of an advantage, over groups of 2 to 16 with scores of several sizes."""
    worst = 0.0
    for _ in range(draws):
        size, groups = int(generator.integers(2, 17)), int(generator.integers(1, 9))
        rewards = generator.normal(size=size * groups) * generator.choice([0.1, 1.0, 10.0]) + generator.choice([0, 5])
        if generator.random() < 0.3:
            rewards = (rewards > rewards.mean()).astype(float)
        ours = advantages(rewards, np.arange(len(rewards)) // size, rule=rule).advantages_R
        worst = max(worst, float(np.abs(ours - peer(rewards, size)).max()))
    return worst


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare every rule whose source is given. Ends with an error if none is, or if an advantage differs."""
    parser = parser_of(__doc__, [rule for rule in RULES if not rule.startswith("trl")], draws=500)
    parser.add_argument("--verl", type=Path, help="core_algos.py of a checkout")
    parser.add_argument("--openrlhf", type=Path, help="experience_maker.py of a checkout")
    comparison = Simulation("credit_rules", parser, arguments)
    options = comparison.options
    torch.set_default_dtype(torch.float64)  # the libraries' counts and constants become numbers of the default type
    try:
        peers = {} if options.verl is None else peers_of_verl(options.verl)
        peers |= {} if options.openrlhf is None else peers_of_openrlhf(options.openrlhf)
        found = {
            rule: furthest(rule, peer, draws=options.draws, generator=comparison.generator(number))
            for number, (rule, peer) in enumerate(peers.items())
            if rule in options.kinds
        }
    finally:
        torch.set_default_dtype(torch.float32)
    rows = [[f"`{rule}`", RULES[rule].source, options.draws, f"{worst:.1e}"] for rule, worst in found.items()]
    page = [
        "Largest difference between advantages by our rule and by the library's own function, in float64, over batches "
        f"of groups of 2 to 16 ({comparison.minutes}).",
        "",
        results.table(["rule", "held against", "batches", "largest difference"], rows),
    ]
    return comparison.record("all", page=page, cells=found) or int(not found or max(found.values()) > NEAR)


if __name__ == "__main__":
    sys.exit(main())
