"""Replies of a language model in this process, by transformers.

Each reply is drawn with a generator of its own, so that it does not depend on which others are drawn beside it, except
for the rounding of batched arithmetic.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import re
from collections.abc import Collection, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from rewardlab.core.errors import ModelError
from rewardlab.core.files import sha256_file, sha256_json
from rewardlab.core.spec import SPEC_FILE
from rewardlab.core.types import Conversation
from rewardlab.data.template_files import parse_arguments
from rewardlab.gold.files.rows import HALF, is_encodable
from rewardlab.gold.sampling.asks import Ask
from rewardlab.gold.sampling.config import DrawConfig, SamplerConfig
from rewardlab.gold.sampling.servers import Reply

logger = logging.getLogger("rewardlab")
DTYPES: Final = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "auto": "auto"}


class LocalSampler:
    """A model in this process as a source of replies; a part is a batch."""

    places = 1

    def __init__(self, model: str, draw: DrawConfig, config: SamplerConfig) -> None:
        self.name = model
        self.identity: dict[str, Any] = {}
        self._draw = draw
        self._arguments = parse_arguments(draw.template_arguments)
        self._precision = config.precision
        self._model: Any = None
        self._tokenizer: Any = None
        self._ends: tuple[int, ...] = ()
        self._pad = 0

    async def open(self) -> None:
        """Load the model. Raises ModelError if there is none, or it has no chat template."""
        await asyncio.to_thread(self._open)

    def _open(self) -> None:
        from transformers import AutoModelForCausalLM, GenerationConfig

        from rewardlab.data.chat import load_tokenizer
        from rewardlab.model.attention import leave_out_cudnn
        from rewardlab.model.builtin import resolve_model_name
        from rewardlab.model.files import told
        from rewardlab.model.hub import commit_of
        from rewardlab.model.load import quiet_transformers

        folder = resolve_model_name(self.name, logger.info)
        self._tokenizer = load_tokenizer(folder)
        self._require_template()
        # A batch goes on from the last position, so that is where every prompt has to end.
        self._tokenizer.padding_side = "left"
        with quiet_transformers(), told(self.name, "cannot be loaded as a language model"):
            self._model, info = AutoModelForCausalLM.from_pretrained(
                folder, dtype=DTYPES[self._precision], output_loading_info=True
            )
        self._require_whole(info["missing_keys"])
        self._model.eval().to(_device())
        leave_out_cudnn(self._model.device)
        given = self._model.generation_config.eos_token_id
        ends = given if isinstance(given, list) else [given]
        self._ends = tuple(one for one in [*ends, self._tokenizer.eos_token_id] if one is not None)
        if not self._ends:
            raise ModelError(f"{self.name}: neither the model nor its tokenizer says which token ends a reply.")
        pad = self._tokenizer.pad_token_id
        self._pad = self._ends[0] if pad is None else pad
        self._tokenizer.pad_token = self._tokenizer.convert_ids_to_tokens(self._pad)
        # A generation_config.json may bring a temperature, a penalty or a rule; only what the settings ask for applies.
        self._model.generation_config = GenerationConfig(eos_token_id=list(self._ends), pad_token_id=self._pad)
        self.identity = {
            "model": digest_of(Path(folder)) if Path(folder).is_dir() else folder,
            "dtype": str(self._model.dtype).removeprefix("torch."),
        }
        if not Path(folder).is_dir() and (commit := commit_of(folder)) is not None:
            self.identity["commit"] = commit

    def _require_template(self) -> None:
        """Raise ModelError unless there is a chat template that knows what the settings give it."""
        if not getattr(self._tokenizer, "chat_template", None):
            raise ModelError(
                f"{self.name}: its tokenizer has no chat template. Name a chat model, or a folder that has the "
                f"template, with which the model was trained, as chat_template.jinja."
            )
        template = self._tokenizer.get_chat_template()
        for name in self._arguments:
            if not re.search(rf"\b{name}\b", template):
                raise ModelError(
                    f"--template-arguments {name}: the chat template of {self.name} does not mention it, so it would "
                    f"do nothing. Look for its name in the template, or leave it out."
                )

    def _require_whole(self, missing: Collection[str]) -> None:
        """Raise ModelError for a reward model, and if weights are random since the files have none: that is noise.

        A reward model whose embeddings are tied lacks none, but was not trained to reply.
        """
        is_reward_model = (Path(self.name) / SPEC_FILE).is_file()
        if not missing and not is_reward_model:
            return
        lacks = f": its files have no {', '.join(sorted(missing)[:3])}" if missing else ""
        raise ModelError(
            f"{self.name}: {'is a reward model, which cannot reply' if is_reward_model else 'cannot reply'}{lacks}. "
            f"Name the language model that replies."
        )

    async def ask(self, items: Sequence[Ask]) -> Sequence[Reply]:
        """Return the replies, drawn together."""
        return await asyncio.to_thread(self._ask, list(items))

    def _ask(self, items: list[Ask]) -> list[Reply]:
        import torch

        several = {item.prompt: self._encoded(item.prompt) for item in items}
        encoded = [several[item.prompt] for item in items]
        replies: list[Reply] = [{"error": ids if isinstance(ids, str) else ""} for ids in encoded]
        chosen = [place for place, ids in enumerate(encoded) if not isinstance(ids, str)]
        if chosen:
            batch = self._tokenizer.pad(
                {"input_ids": [encoded[place] for place in chosen]}, return_tensors="pt", padding=True
            ).to(self._model.device)
            drawing = _Drawing([items[place].seed for place in chosen], self._draw)
            with torch.inference_mode():
                found = self._model.generate(
                    **batch,
                    **self._shared(batch, [items[place].prompt for place in chosen]),
                    max_new_tokens=self._draw.max_tokens,
                    # `drawing` leaves one token a row, which is then the greedy choice.
                    do_sample=False,
                    logits_processor=[drawing],
                )
            start = batch["input_ids"].shape[1]
            for row, place in enumerate(chosen):
                logprobs = [float(step[row]) for step in drawing.logprobs]
                replies[place] = self._reply(found[row, start:].tolist(), len(encoded[place]), logprobs)
        return replies

    def _encoded(self, prompt: Conversation) -> list[int] | str:
        """Return the tokens of a prompt, or why nothing can reply to it."""
        if not all(is_encodable(turn.content) for turn in prompt):
            return f"the prompt {HALF}."
        try:
            text = self._tokenizer.apply_chat_template(
                [turn.as_dict() for turn in prompt], tokenize=False, add_generation_prompt=True, **self._arguments
            )
        except Exception as error:
            # A template is a program by somebody else and may raise anything.
            roles = ", ".join(turn.role for turn in prompt)
            return f"the chat template refuses a prompt with roles [{roles}]: {error}"
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        limit, room = getattr(self._model.config, "max_position_embeddings", None) or 1 << 40, self._draw.max_tokens
        if len(ids) + room <= limit:
            return ids
        return (
            f"the prompt takes {len(ids)} tokens, and with {room} for the reply (--max-tokens) that is above the "
            f"{limit} of the model."
        )

    def _shared(self, batch: Any, prompts: list[Conversation]) -> dict[str, Any]:
        """Return keys and values of all tokens of the prompts but the last, with equal neighbours computed once.

        They stand under the name by which the model takes them. The result is empty where no prompt comes twice in a
        row, or the model keeps something other than keys and values.
        """
        import torch
        from transformers import DynamicCache

        sizes = [len(list(several)) for _, several in groupby(prompts)]
        if len(sizes) == len(prompts) or not getattr(self._model, "_supports_default_dynamic_cache", lambda: True)():
            return {}
        repeats = torch.tensor(sizes, device=batch["input_ids"].device)
        first = repeats.cumsum(0) - repeats
        mask = batch["attention_mask"][first, :-1]
        cache = DynamicCache(config=self._model.config)
        taken = {_cache_name(): cache}
        self._model(
            input_ids=batch["input_ids"][first, :-1],
            attention_mask=mask,
            position_ids=(mask.cumsum(-1) - 1).clamp(min=0),
            use_cache=True,
            logits_to_keep=1,
            **taken,
        )
        cache.batch_select_indices(torch.arange(len(sizes), device=repeats.device).repeat_interleave(repeats))
        return taken

    def _reply(self, tokens: list[int], prompt_tokens: int, logprobs: list[float]) -> Reply:
        """Return a reply from its tokens, which go on with padding after the end."""
        end = next((place for place, token in enumerate(tokens) if token in self._ends), None)
        num = len(tokens) if end is None else end + 1
        if not math.isfinite(logprob := sum(logprobs[:num])):
            return {"error": f"the model gives no finite log-probabilities in {self._precision}. See --precision."}
        return {
            "text": self._tokenizer.decode(tokens[:num], skip_special_tokens=True, clean_up_tokenization_spaces=False),
            "stop": "length" if end is None else "stop",
            "tokens": num,
            "prompt_tokens": prompt_tokens,
            "logprob": logprob,
        }

    async def close(self) -> None:
        """Let the model go."""
        self._model = None


def _cache_name() -> str:
    """Return the name under which models take keys and values: transformers renamed it in 5.24."""
    from transformers.generation import GenerationMixin

    taken = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    return "cache" if "cache" in taken else "past_key_values"


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


class _Drawing:
    """Leaves only the drawn one of the scores of the next token, for every row by its own seed.

    A token is drawn by inverting the distribution function at a number from the row's generator, so that a row needs
    one number a token whatever its neighbours do. transformers calls it as it calls its own logits processors.
    """

    def __init__(self, seeds: Sequence[int], draw: DrawConfig) -> None:
        import torch

        self.logprobs: list[Any] = []
        """The model's log-probability [rows] of what was drawn, for each step."""
        self._draw = draw
        # The generators are on the CPU, so that the numbers do not depend on the device.
        drawn = [
            torch.rand(draw.max_tokens, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            for seed in seeds
        ]
        self._numbers = torch.stack(drawn)

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Return scores [rows, tokens] of −∞ for all but the drawn token of each row, which has 0."""
        import torch

        if self._draw.temperature == 0:
            pick = scores.argmax(-1, keepdim=True)
        else:
            p = _nucleus(torch.softmax(scores.double() / self._draw.temperature, -1), self._draw.top_p)
            total = p.cumsum(-1)
            at = self._numbers[:, len(self.logprobs)].to(scores.device)[:, None] * total[:, -1:]
            pick = torch.searchsorted(total, at, right=True).clamp(max=scores.shape[-1] - 1)
        self.logprobs.append(torch.log_softmax(scores.float(), -1).gather(-1, pick)[:, 0].cpu())
        return torch.full_like(scores, float("-inf")).scatter(-1, pick, 0.0)


def _nucleus(p: Any, top_p: float) -> Any:
    """Return probabilities [rows, tokens] with 0 for all but the likeliest that together have `top_p`."""
    if top_p >= 1:
        return p
    ordered, places = p.sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    return p.new_zeros(p.shape).scatter(-1, places, ordered.masked_fill(before >= top_p, 0.0))


def digest_of(folder: Path) -> str:
    """Return a hash of everything in a model's folder that decides its replies."""
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and path.suffix not in (".md", ".lock")]
    return sha256_json({path.name: sha256_file(path) for path in files})
