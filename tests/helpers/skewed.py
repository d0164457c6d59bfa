"""Values of models that fail in different ways."""

from __future__ import annotations

import numpy as np


def failing_apart(generator: np.random.Generator, prompts: int = 50) -> tuple[np.ndarray, np.ndarray]:
    """NLL of an underconfident and an overconfident model, both of 0.441 in the mean: 0.25 and 2.8 times the true
    logits, which have the sizes of normal values times 4."""
    logit = 4 * np.abs(generator.normal(size=prompts))
    signed = np.where(generator.random(prompts) < 1 / (1 + np.exp(-logit)), logit, -logit)
    return np.logaddexp(0, -0.25 * signed), np.logaddexp(0, -2.8 * signed)
