"""Tiny saved reward models for tests of what uses them: with a calibration if asked for, and behind a server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from common import CHATML, make_model, make_tokenizer
from rewardlab.artifact.save import save_reward_model
from rewardlab.artifact.seal import seal
from rewardlab.core.files import write_json
from rewardlab.core.spec import CalibrationSpec, read_spec
from rewardlab.data.config import RenderingConfig
from rewardlab.data.templates import build_renderer
from rewardlab.serve.engine.local import LocalEngine
from rewardlab.serve.http.app import make_app
from rewardlab.serve.http.config import HttpConfig, LimitsConfig
from served_in_thread import in_thread


def save_tiny(
    folder: Path,
    *,
    seed: int = 0,
    scale: tuple[float, float] | None = None,
    affine: tuple[float, float] = (1.0, 0.0),
    template: str | None = CHATML,
    **how: Any,
) -> Path:
    """Save a tiny reward model; each seed has a head of its own. `scale` is (mean, std) of a stored calibration, and
    `affine` its map; `how` goes to RenderingConfig."""
    rendering = RenderingConfig(**{"max_seq_len": 256, **how})
    model = make_model()
    with torch.no_grad():
        model.head.weight.add_(torch.randn(model.head.weight.shape, generator=torch.Generator().manual_seed(seed)))
    save_reward_model(
        folder,
        model,
        build_renderer(make_tokenizer(template), rendering),
        beta=1.0,
        save_dtype=torch.float32,
        provenance={},
    )
    if scale is not None:
        stored = CalibrationSpec(
            reward_mean=scale[0],
            reward_std=scale[1],
            num_replies=100,
            num_comparisons=50,
            precision="fp32",
            data={},
            judged={},
        )
        spec = seal(folder, replace(read_spec(folder), temperature=1.0, affine=affine, calibration=stored))
        write_json(folder / "reward_spec.json", spec.to_dict())
    return folder


@contextmanager
def served(
    folder: Path,
    *,
    name: str = "model",
    others: Mapping[str, Path] | None = None,
    http: HttpConfig | None = None,
    **settings: Any,
) -> Iterator[str]:
    """The address of rewardlab's server for a folder, and `others` by name, in this process.

    `settings` are those of the engine.
    """
    engine = LocalEngine.load({name: folder, **(others or {})}, **settings)
    url, end, _ = in_thread(make_app(engine, http or HttpConfig()), LimitsConfig())
    try:
        yield url
    finally:
        end()
        engine.close()
