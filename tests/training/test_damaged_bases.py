"""A base model whose files are damaged is refused in words, with what to do, before anything is trained."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AddedToken

from common import write_base_model, write_pairs
from rewardlab.artifact.base import open_base
from rewardlab.cli import main
from rewardlab.core.errors import ModelError
from rewardlab.data.chat import load_tokenizer
from rewardlab.data.config import RenderingConfig
from rewardlab.model.config import BackboneConfig
from rewardlab.model.files import require_whole_files, told, weight_files

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize 437951328\n".format("a" * 64)
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model and pairs."""
    folder = tmp_path_factory.mktemp("bases")
    write_base_model(folder / "base")
    write_pairs(folder / "pairs.jsonl", 8)
    return folder


@pytest.fixture
def base(sound: Path, tmp_path: Path) -> Path:
    """A copy of the base, to be damaged."""
    return Path(shutil.copytree(sound / "base", tmp_path / "base"))


def cut_off(base: Path) -> None:
    path = base / WEIGHTS
    path.write_bytes(path.read_bytes()[:-1000])


def cut_in_the_header(base: Path) -> None:
    path = base / WEIGHTS
    path.write_bytes(path.read_bytes()[:100])


def empty(base: Path) -> None:
    (base / WEIGHTS).write_bytes(b"")


def pointer(name: str) -> Callable[[Path], None]:
    return lambda base: (base / name).write_text(POINTER) and None


def edited(**changes: object) -> Callable[[Path], None]:
    def edit(base: Path) -> None:
        values = json.loads((base / "config.json").read_text()) | changes
        (base / "config.json").write_text(json.dumps(values))

    return edit


def text(name: str, content: str) -> Callable[[Path], None]:
    return lambda base: (base / name).write_text(content) and None


class Bomb:
    """What runs code when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("raise SystemExit('the pickle was run')",)


def refused_pickle(base: Path) -> None:
    (base / WEIGHTS).unlink()
    (base / "pytorch_model.bin").write_bytes(pickle.dumps({"a": Bomb()}, protocol=2))


def no_pickle(base: Path) -> None:
    (base / WEIGHTS).unlink()
    (base / "pytorch_model.bin").write_bytes(b"nothing of the kind" * 100)


def shard_missing(base: Path) -> None:
    (base / WEIGHTS).unlink()
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (base / "model.safetensors.index.json").write_text(json.dumps(index))


def broken_index(base: Path) -> None:
    (base / WEIGHTS).unlink()
    (base / "model.safetensors.index.json").write_text('{"weight_map": [1]}')


def no_weights(base: Path) -> None:
    (base / WEIGHTS).unlink()


def narrower(base: Path) -> None:
    weights = load_file(base / WEIGHTS)
    weights["model.layers.1.mlp.up_proj.weight"] = torch.zeros(40, 32)
    save_file(weights, base / WEIGHTS, metadata={"format": "pt"})


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut off": (cut_off, "model.safetensors: damaged, or cut off"),
    "cut in the header": (cut_in_the_header, "model.safetensors: damaged, or cut off: its 100 bytes are not"),
    "empty": (empty, "model.safetensors: damaged, or cut off: its 0 bytes"),
    "a pointer for weights": (pointer(WEIGHTS), "this is a git-lfs pointer, not the file itself. Run `git lfs pull`"),
    "a pointer for a tokenizer": (pointer("tokenizer.json"), "tokenizer.json: this is a git-lfs pointer"),
    "a shard that is missing": (shard_missing, "model-00001-of-00002.safetensors is missing, which model.safe"),
    "an index that is none": (broken_index, "model.safetensors.index.json: weight_map: expected an object"),
    "a pickle that runs code": (refused_pickle, "a damaged pickle, or one that would run code, which is never"),
    "what is no pickle": (no_pickle, "a damaged pickle, or one that would run code, which is never"),
    "no weights": (no_weights, "cannot be loaded as LlamaForSequenceClassification"),
    "quantised files": (edited(quantization_config={"quant_method": "gptq", "bits": 4}), "are quantised (gptq)"),
    "config.json cut off": (text("config.json", '{"model_type": "lla'), "config.json: not valid JSON"),
    "config.json a list": (text("config.json", "[]"), "config.json: expected an object, found a list"),
    "a wrong type": (edited(num_attention_heads="four"), "its config.json cannot be read (Strict"),
    "a wrong size": (edited(hidden_size=64), "model.embed_tokens.weight has the shape [384, 64] by config.json"),
    "a size without end": (edited(hidden_size=4 * 10**12), "model.embed_tokens.weight has the shape"),
    "layers without end": (edited(num_hidden_layers=10**9), "num_hidden_layers: expected at most 100000, found 1e+09"),
    "many layers": (edited(num_hidden_layers=90_000), "describes a model of more than"),
    "labels without end": (edited(num_labels=10**9), "num_labels: expected at most 100000"),
    "a narrower weight": (narrower, "has the shape [48, 32] by config.json and [40, 32] in model.safetensors"),
    "a tokenizer that is none": (text("tokenizer.json", "[]"), "no tokenizer for"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_base_is_refused_in_words(sound, base, tmp_path, capsys, case):
    damage, said = DAMAGES[case]
    damage(base)
    line = f"train --model {base} --dataset {sound / 'pairs.jsonl'} --output-dir {tmp_path / 'run'} --max-seq-len 128"
    with pytest.raises(SystemExit) as stop:
        main(
            [
                *line.split(),
                "--precision",
                "fp32",
                "--steps",
                "1",
                "--batch-size",
                "4",
                "--eval-fraction",
                "0",
                "--no-baselines",
            ]
        )
    assert stop.value.code == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: ")
    assert said in errors
    assert "Traceback" not in errors


def test_sound_bases_pass_whole_and_in_shards(base):
    require_whole_files(base)
    weights = load_file(base / WEIGHTS)
    names = sorted(weights)
    index = {}
    for number, part in enumerate((names[:5], names[5:])):
        save_file({name: weights[name] for name in part}, base / f"{number}.safetensors", metadata={"format": "pt"})
        index |= dict.fromkeys(part, f"{number}.safetensors")
    (base / WEIGHTS).unlink()
    (base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    require_whole_files(base)
    assert [path.name for path in weight_files(base)] == ["0.safetensors", "1.safetensors"]
    (base / "1.safetensors").write_text(POINTER)
    with pytest.raises(ModelError, match=r"1.safetensors: this is a git-lfs pointer"):
        require_whole_files(base)


@pytest.mark.parametrize(("name", "is_written"), [("<|turn|>", True), ("zebra", False), ("<|padding|>", False)])
def test_tokens_without_embeddings_are_named_before_training(
    base: Path, caplog: pytest.LogCaptureFixture, *, name: str, is_written: bool
) -> None:
    """A tokenizer to which tokens were added, and a model that was not enlarged for them."""
    tokenizer = load_tokenizer(str(base))
    tokenizer.add_tokens(["x" * size for size in range(30, 30 + 384 - len(tokenizer))])
    tokenizer.add_tokens([AddedToken(name, special=name.startswith("<"))])
    if is_written:
        tokenizer.chat_template = tokenizer.chat_template.replace("<|im_end|>", name)
    tokenizer.save_pretrained(str(base))
    model = BackboneConfig(model=str(base))
    if is_written:
        with pytest.raises(
            ModelError, match=r"hold '<\|turn\|>' \(384\), which the model cannot read.*384 tokens.*385"
        ):
            open_base(model, RenderingConfig(max_seq_len=128))
    else:
        open_base(model, RenderingConfig(max_seq_len=128))
    told = [said for said in caplog.messages if "cannot be read" in said]
    assert len(told) == (name == "zebra")
    assert all("texts with 'zebra' cannot be read" in said for said in told)


def test_a_package_that_is_not_installed_is_named():
    with (
        pytest.raises(
            ModelError, match=r"^base: it cannot be loaded: .*timm.* Install what is missing, or use another"
        ),
        told("base", "it cannot be loaded"),
    ):
        raise ImportError("TimmWrapperModel requires the timm library.")
