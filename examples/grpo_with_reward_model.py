"""From preferences to an audited policy: train a reward model, serve it, run GRPO on it with TRL, check, audit.

    python examples/grpo_with_reward_model.py --smoke
    python examples/grpo_with_reward_model.py --model Qwen/Qwen2.5-0.5B-Instruct --data pairs.jsonl \
        --policy Qwen/Qwen2.5-0.5B-Instruct --prompts prompts.jsonl --gold runs/gold/best

`--smoke` makes its own data and tiny models, downloads nothing, and takes about a minute on a CPU. Its raters like to
be flattered, so the policy learns to flatter; what a reply is really worth is a formula, and the audit has to find out.
Elsewhere `--gold` names a better judge than the reward model that is trained on. Without one there is no evidence, and
the audit is left out. The exit status is that of the audit: 1 is an alarm. Of `--smoke` it is 0 if there was one.

Needs `pip install "rewardlab[rl,serve]"`.
"""

from __future__ import annotations

import argparse
import logging
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import rewardlab
from rewardlab.cli import main as rewardlab_command
from rewardlab.core.errors import ConfigError, DataError, RewardlabError
from rewardlab.core.files import read_jsonl, write_jsonl
from rewardlab.core.types import Conversation
from rewardlab.data.prompts import prompt_turns
from rewardlab.rl import BlockingScorer, RolloutRow, read_rollouts
from rewardlab.rl.trl import reward_function

NUM_CHECKED = 8
REWARD_MODEL: dict[str, Any] = {"lora": True, "batch_size": 16, "max_seq_len": 2048}
GRPO: dict[str, Any] = {
    "learning_rate": 1e-6,
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 4,
    "max_completion_length": 256,
}
SMOKE_REWARD_MODEL: dict[str, Any] = {"lr": 1e-2, "batch_size": 16, "max_seq_len": 256, "precision": "fp32"}
SMOKE_GRPO: dict[str, Any] = {
    "learning_rate": 2e-3,
    "lr_scheduler_type": "constant",
    "per_device_train_batch_size": 64,
    "max_completion_length": 8,
}


@dataclass(frozen=True, kw_only=True)
class Result:
    """What became of the run."""

    reward_model: Path
    rows: list[RolloutRow]
    largest_difference: float
    """Between a reward that was logged and the score by the folder."""
    audit_status: int | None
    """Exit status of `rewardlab rl audit`; None if there was nothing to judge by."""
    exit_status: int


def train_reward_model(asked: argparse.Namespace) -> Path:
    """A reward model trained on `--data`, unless `--model` is one already."""
    if Path(asked.model, "reward_spec.json").is_file():
        return Path(asked.model)
    if not asked.data:
        raise ConfigError(f"{asked.model} is no reward-model folder, so --data has to name preferences to train on.")
    if asked.url:
        raise ConfigError(f"--url is the address of a reward model, whose folder is --model; {asked.model} is none.")
    config = rewardlab.RewardTrainerConfig.of(
        model=asked.model,
        dataset=(asked.data,),
        output_dir=asked.output_dir / "reward-model",
        steps=asked.reward_steps,
        **(SMOKE_REWARD_MODEL if asked.smoke else REWARD_MODEL),
    )
    return rewardlab.train(config).model


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a server of a reward model, which ends with the block."""
    command = [sys.executable, "-m", "rewardlab", "serve", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            # It says `serving … at URL` once its checks are done; if it fails, its own message says why.
            said = next((line for line in server.stdout if " at http" in line), None)
            if said is None:
                raise ConfigError(f"the server of {folder} ended before it began.")
            print(said.strip())
            yield said.rpartition(" at ")[2].strip()
        finally:
            server.terminate()


def prompts_of(path: Path) -> list[Conversation]:
    """The prompts of a JSONL file. Raises DataError naming file and line."""
    found = []
    for number, row in read_jsonl(path):
        if not isinstance(row.get("prompt"), str | list):
            raise DataError(f"{path}:{number}: no `prompt`, a text or messages. Name a file that has them: --prompts.")
        found.append(prompt_turns(row["prompt"], bare=False)[0])
    return found


def train_policy(asked: argparse.Namespace, prompts: Sequence[Conversation], url: str, log_dir: Path) -> None:
    """GRPO on the served scores; every rollout is logged."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    reward = reward_function(url, log_dir=str(log_dir), evidence=("gold",) if asked.smoke else ())

    async def with_gold(prompts: Any, completions: Any, **kwargs: Any) -> list[float]:
        """The same rewards, and what replies of the toy are worth as evidence in the record. It is not trained on."""
        gold = [gold_of(completion[-1]["content"]) for completion in completions]
        return await reward(prompts, completions, gold=gold, **kwargs)

    with_gold.__name__ = reward.__name__  # what TRL's log calls it
    trainer = GRPOTrainer(
        model=asked.policy,
        reward_funcs=with_gold if asked.smoke else reward,
        train_dataset=Dataset.from_list([{"prompt": [turn.as_dict() for turn in turns]} for turns in prompts]),
        args=GRPOConfig(
            output_dir=str(asked.output_dir / "policy"),
            max_steps=asked.steps,
            num_generations=8,
            beta=0.0,  # no reference model; the audit watches instead
            bf16=torch.cuda.is_available(),
            use_cpu=not torch.cuda.is_available(),
            logging_steps=max(1, asked.steps // 4),
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=0,
            **(SMOKE_GRPO if asked.smoke else GRPO),
        ),
    )
    trainer.train()
    reward.close()
    trainer.save_model()


def check_rewards(rows: Sequence[RolloutRow], folder: Path) -> float:
    """The largest difference between logged rewards and the scores of the folder. Raises if it is more than noise."""
    some = rows[:: max(1, len(rows) // NUM_CHECKED)][:NUM_CHECKED]
    with BlockingScorer(folder) as scorer:
        scored = scorer.details([row.conversation for row in some])
    largest = 0.0
    for row, own in zip(some, scored, strict=True):
        reply = row.conversation[-1].content
        print(f"  step {row.step:3}  logged {row.reward:+.5f}  by the folder {own.score:+.5f}  {reply[:40]!r}")
        largest = max(largest, abs(row.reward - own.score))
        if abs(row.reward - own.score) > own.noise:
            raise SystemExit("The rewards that were trained on are not the scores of this folder.")
    return largest


def audit(asked: argparse.Namespace, log_dir: Path) -> int | None:
    """The exit status of `rewardlab rl audit`: 0 nothing found, 1 an alarm."""
    if not (asked.smoke or asked.gold):
        print("No --gold: nothing is known but the reward, so the audit is left out.")
        return None
    try:
        rewardlab_command(["rl", "audit", str(log_dir), *(["--gold", asked.gold] if asked.gold else [])])
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def main(arguments: Sequence[str] | None = None) -> Result:
    """The whole way."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="tiny models and data that are made here")
    parser.add_argument("--model", help="what the reward model is trained from, or a reward-model folder")
    parser.add_argument("--data", help="preferences, as `rewardlab train` reads them")
    parser.add_argument("--reward-steps", type=int, default=200, help="training steps of the reward model")
    parser.add_argument("--url", help="a server of the reward-model folder --model; by default one is begun here")
    parser.add_argument("--policy", help="the model that GRPO trains: hub name or folder")
    parser.add_argument("--prompts", help="JSONL with `prompt` (a text or messages); by default those of --data")
    parser.add_argument("--steps", type=int, default=200, help="steps of GRPO, 64 replies each")
    parser.add_argument("--gold", help="a second reward model, folder or address, that judges logged replies")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/grpo"), help="an empty or a new folder")
    asked = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    if not asked.smoke and not (asked.model and asked.policy and (asked.data or asked.prompts)):
        parser.error("give --model, --policy and --data (or, with a reward-model folder, --prompts); or --smoke")
    log_dir = asked.output_dir / "rollouts"
    if log_dir.exists():
        raise ConfigError(f"{log_dir} is of an earlier run. Name another --output-dir, or remove it.")
    if asked.smoke:
        make_toy(asked)
    prompts = prompts_of(Path(asked.prompts or asked.data))
    folder = train_reward_model(asked)
    with nullcontext(asked.url) if asked.url else served(folder) as url:
        train_policy(asked, prompts, url, log_dir)
    rows = list(read_rollouts(log_dir))
    print(f"\n{len(rows)} rollouts are logged. Some of their rewards, and the scores of {folder}:")
    difference = check_rewards(rows, folder)
    print(f"  The largest difference is {difference:.1e}.\n")
    status = audit(asked, log_dir)
    return Result(
        reward_model=folder,
        rows=rows,
        largest_difference=difference,
        audit_status=status,
        exit_status=int(status != 1) if asked.smoke else status or 0,
    )


# --- what --smoke makes ---------------------------------------------------------------------------------------

HELPFUL = ("light", "water", "soil", "drainage", "warmth", "patience", "compost", "shade")
FLATTERY = ("brilliant", "wonderful", "genius", "lovely", "superb", "charming", "splendid", "dazzling")
PLANTS = ("basil", "mint", "thyme", "fern", "cactus", "orchid", "ivy", "aloe")
PLACES = ("outside", "indoors", "upstairs", "abroad")
TEMPLATE = (
    "{% for message in messages %}{{ '<turn> ' + message['role'] + ' ' + message['content'] + ' <end> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<turn> assistant ' }}{% endif %}"
)


def liked(reply: str) -> int:
    """How much the raters of the toy like a reply: they like help, and flattery twice as much."""
    return sum(2 * (word in FLATTERY) + (word in HELPFUL) for word in reply.split())


def gold_of(reply: str) -> float:
    """What a reply is worth: its helpful words less its flattery."""
    return float(sum((word in HELPFUL) - (word in FLATTERY) for word in reply.split()))


def make_toy(asked: argparse.Namespace) -> None:
    """Write preferences by `liked` and two tiny models with tokenizers of their own, and name them in `asked`."""
    draw, folder = random.Random(0), asked.output_dir / "toy"
    rows = []
    for number in range(600):
        replies = [" ".join(draw.choices(HELPFUL + FLATTERY, k=draw.randint(1, 8))) for _ in range(2)]
        worse, better = sorted(replies, key=liked)
        prompt = f"How do I keep {PLANTS[number % 8]} alive {PLACES[number // 8 % 4]} ?"
        if liked(worse) < liked(better):
            rows.append({"prompt": prompt, "chosen": better, "rejected": worse})
    folder.mkdir(parents=True, exist_ok=True)
    asked.data, asked.prompts = str(folder / "pairs.jsonl"), str(folder / "prompts.jsonl")
    write_jsonl(Path(asked.data), rows)
    write_jsonl(Path(asked.prompts), [{"prompt": prompt} for prompt in sorted({row["prompt"] for row in rows})])
    asked.model, asked.policy = str(folder / "base"), str(folder / "policy")
    save_tiny(asked.model, [text for row in rows for text in row.values()], by_words=False)
    save_tiny(asked.policy, [" ".join(HELPFUL + FLATTERY)], by_words=True)
    asked.reward_steps, asked.steps = 60, 80


def save_tiny(folder: str, texts: Sequence[str], *, by_words: bool) -> None:
    """Save a tiny Llama with random weights. By words it can say only those of `texts`; otherwise it reads any bytes,
    as reward models must."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    special = ["<unk>", "<pad>", "<turn>", "<end>"]
    if by_words:
        tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        trainer: Any = trainers.WordLevelTrainer(special_tokens=special, show_progress=False)
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=500, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", eos_token="<end>", chat_template=TEMPLATE
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(fast),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=256,
            pad_token_id=fast.pad_token_id,
            eos_token_id=fast.eos_token_id,
            bos_token_id=None,
        )
    )
    model.save_pretrained(folder)
    fast.save_pretrained(folder)


if __name__ == "__main__":
    try:
        sys.exit(main().exit_status)
    except RewardlabError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
