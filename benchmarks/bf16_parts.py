"""Where the error of a score in bfloat16 comes from: the same model with one part after the other in float32.

    scripts/bench bf16_parts

The linear layers always compute in bfloat16. In float32 instead can be what is between them: the sums that go from
layer to layer, with the norms that read them, and the head. Conversations are those of one_score but the long ones, the
head is drawn, and scores and states are compared with those of the same weights in float32.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from harness import machine, results, workload
from harness.conversations import cases

LONGEST: Final = 200
"""Most tokens of a conversation that is taken."""
HALF, FULL = torch.bfloat16, torch.float32
VARIANTS: Final[dict[str, tuple[torch.dtype, torch.dtype]]] = {
    "all of it in bfloat16": (HALF, HALF),
    "sums between layers and norms in float32": (FULL, HALF),
    "head in float32": (HALF, FULL),
    "sums between layers, norms and head in float32": (FULL, FULL),
}
"""Name -> dtype of (the sums between layers and the norms, the head)."""


def norm(layer: Any, states: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A norm of Llama in `dtype`, with its sum of squares in float32 as everywhere."""
    wide = states.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + layer.variance_epsilon)
    return layer.weight.to(dtype) * scaled.to(dtype)


def forward(model: Any, ids: Sequence[int], sums: torch.dtype, head: torch.dtype) -> tuple[float, list[torch.Tensor]]:
    """The score of one conversation, and the last token's state before each layer and after the last."""
    body, count = model.model, len(ids)
    states = body.embed_tokens(torch.tensor([ids])).to(sums)
    places = body.rotary_emb(torch.zeros(1, count, 1, dtype=HALF), torch.arange(count)[None])
    mask = torch.full((count, count), float("-inf")).triu(1)[None, None].to(HALF)
    seen = [states[0, -1].float()]
    for layer in body.layers:
        given = norm(layer.input_layernorm, states, sums).to(HALF)
        states = states + layer.self_attn(given, position_embeddings=places, attention_mask=mask)[0].to(sums)
        states = states + layer.mlp(norm(layer.post_attention_layernorm, states, sums).to(HALF)).to(sums)
        seen.append(states[0, -1].float())
    last = norm(body.norm, states[0, -1], sums).to(head)
    return float(last @ model.score.weight[0].to(head)), seen


@torch.no_grad()
def measure(folder: str) -> dict[str, Any]:
    """Scores of every variant, of transformers itself, and of float32; and how far states are apart, layer by layer."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=HALF).eval()
    width = model.config.hidden_size
    head = torch.randn(1, width, generator=torch.Generator().manual_seed(0)) / (width + 1) ** 0.5
    model.score.weight.copy_(head)
    texts = {case.name: tokenizer.apply_chat_template(case.messages, tokenize=False) for case in cases()}
    ids = {name: tokenizer(text, add_special_tokens=False)["input_ids"] for name, text in texts.items()}
    ids = {name: one for name, one in ids.items() if len(one) <= LONGEST}
    scores = {"transformers, all of it in bfloat16": [float(model(torch.tensor([one])).logits) for one in ids.values()]}
    states: dict[str, list[list[torch.Tensor]]] = {}
    for name, (sums, dtype) in VARIANTS.items():
        found = [forward(model, one, sums, dtype) for one in ids.values()]
        scores[name], states[name] = [score for score, _ in found], [seen for _, seen in found]
        print(f"{name}: done", flush=True)
    model.float()
    exact = [model(torch.tensor([one]), output_hidden_states=True) for one in ids.values()]
    # The state after the last layer is there behind its norm alone, so it is left out.
    wanted = [[state[0, -1] for state in one.hidden_states[:-1]] for one in exact]
    apart = {
        name: np.mean(
            [
                [float((a - b).norm() / b.norm()) for a, b in zip(one, right, strict=False)]
                for one, right in zip(found, wanted, strict=True)
            ],
            axis=0,
        ).tolist()
        for name, found in states.items()
    }
    return {
        "conversations": list(ids),
        "float32": [float(one.logits) for one in exact],
        "scores": scores,
        "states": apart,
    }


def page_of(found: dict[str, Any], model: str) -> list[str]:
    """The page."""
    exact = np.array(found["float32"])
    rows = []
    for name, scores in found["scores"].items():
        error = np.array(scores) - exact
        layers = found["states"].get(name)
        rows.append(
            [
                name,
                f"**{np.abs(error).max():.3f}**",
                f"{np.abs(error).mean():.3f}",
                f"{error.mean():+.3f}",
                "–"
                if layers is None
                else ", ".join(f"{layers[n]:.4f}" for n in (1, len(layers) // 2, len(layers) - 1)),
            ]
        )
    head = [
        "linear layers in bfloat16, and",
        "largest",
        "mean",
        "shift",
        "states: after layer 1, in the middle, at the end",
    ]
    return [
        f"# Where the error of bfloat16 comes from: {model}",
        "",
        f"{len(exact)} conversations of at most {LONGEST} tokens, a drawn head, scores with a standard deviation of "
        f"{exact.std():.2f}. Differences from the same weights in float32: of scores, and relative ones of the last "
        f"token's states.",
        "",
        results.table(head, rows),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="of Llama's architecture")
    results.add_flags(parser)
    options = parser.parse_args(arguments)
    load = machine.load_average()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        found = measure(workload.model_folder(options.model, Path(scratch), layers=None))
    name = Path(options.model).name
    results.write(
        "bf16_parts",
        name,
        page=page_of(found, name),
        data=found,
        options=options,
        device=torch.device("cpu"),
        load=(load, machine.load_average()),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
