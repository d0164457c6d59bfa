"""The examples of the pages run and print what they say, and every public name has one."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import chdir
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

import rewardlab
import rewardlab.training.run as run_module
from common import write_base_model, write_pairs
from pages import DOCS, Block, blocks, read
from rewardlab.training.settings.config import (
    RewardTrainerConfig,
)


def promised_lines(page: str) -> dict[int, str]:
    """Line number -> what its comment says it prints."""
    return {
        block.line + number: line.rpartition("  # -> ")[2]
        for block in blocks(page, "python")
        for number, line in enumerate(block.text.splitlines())
        if "  # -> " in line
    }


def run_examples(name: str, namespace: dict[str, Any]) -> dict[int, str]:
    """Run every python block of a page in one namespace; line number -> what was printed there last."""
    printed: dict[int, str] = {}
    source = str(DOCS / name)

    def note(*values: object) -> None:
        caller: FrameType = sys._getframe(1)
        if caller.f_code.co_filename == source:  # examples also hand `print` to functions, as a log
            printed[caller.f_lineno] = " ".join(map(str, values))

    namespace["print"] = note
    for block in blocks(read(name), "python"):
        code = compile("\n" * (block.line - 1) + block.text, source, "exec")
        exec(code, namespace)
    return printed


API_PAGES = ("api.md", "api-metrics.md", "api-parts.md")
"""In the order in which their examples run."""


class Session(NamedTuple):
    """The examples of the API pages after they ran."""

    folder: Path
    namespace: dict[str, Any]
    printed: Mapping[str, dict[int, str]]
    """Page -> line -> what it printed last."""


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    """One thread, as in every test; and the last check of a run is made here instead of in a new process."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module, "verify_in_clean_process", rewardlab.verify)
        yield


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    """Runs the API pages on a tiny model and forty pairs."""
    folder = tmp_path_factory.mktemp("docs")
    namespace: dict[str, Any] = {
        "__name__": "docs_api",
        "base_model": write_base_model(folder / "base"),
        "pairs": write_pairs(folder / "pairs.jsonl", 40),
    }
    with chdir(folder):
        printed = {page: run_examples(page, namespace) for page in API_PAGES}
    return Session(folder, namespace, printed)


@pytest.mark.slow
def test_every_example_of_the_api_pages_runs_and_prints_what_it_says(session: Session) -> None:
    promised = {page: promised_lines(read(page)) for page in API_PAGES}
    assert sum(map(len, promised.values())) > 20
    printed = {page: {line: session.printed[page].get(line) for line in lines} for page, lines in promised.items()}
    assert printed == promised


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A base model and a reward-model folder with adapters."""
    folder = tmp_path_factory.mktemp("adapted")
    base = write_base_model(folder / "base")
    config = RewardTrainerConfig.of(
        model=str(base),
        dataset=(str(write_pairs(folder / "pairs.jsonl", 20)),),
        output_dir=folder / "run",
        eval_fraction=0.0,
        steps=3,
        lr=1e-2,
        max_seq_len=128,
        precision="fp32",
        lora=True,
    )
    return {"base_model": base, "folder": rewardlab.train(config).model}


def test_the_examples_without_rewardlab_run_and_print_what_they_say(adapted: dict[str, Any]) -> None:
    promised = promised_lines(read("plain-transformers.md"))
    printed = run_examples("plain-transformers.md", adapted)
    assert len(promised) == 3
    assert {line: printed.get(line) for line in promised} == promised


def test_adapters_have_the_weights_that_their_page_counts(adapted: dict[str, Any]) -> None:
    namespace: dict[str, Any] = {}
    promised = promised_lines(read("lora.md"))
    printed = run_examples("lora.md", namespace)
    assert len(promised) == 3
    assert {line: printed.get(line) for line in promised} == promised
    own = AutoConfig.from_pretrained(adapted["base_model"])
    weights = load_file(adapted["folder"] / "adapter" / "adapter_model.safetensors")
    found = sum(weight.numel() for name, weight in weights.items() if "lora_" in name)
    assert found == namespace["adapter_weights"](
        RewardTrainerConfig.of(model="m", dataset=("d",), lora=True).model.lora_rank,
        layers=own.num_hidden_layers,
        width=own.hidden_size,
        inner=own.intermediate_size,
        keys=own.hidden_size // own.num_attention_heads * own.num_key_value_heads,
    )


def test_a_wrong_promise_on_a_page_would_be_noticed() -> None:
    page = "text\n```python\nx = 1\nprint(x)  # -> 2\n```\n"
    assert promised_lines(page) == {4: "2"}
    assert list(blocks(page, "python")) == [Block(3, "x = 1\nprint(x)  # -> 2\n")]


def test_every_public_name_is_on_the_api_page_and_can_be_imported() -> None:
    table, _, rest = "\n".join(map(read, API_PAGES)).partition("\n## ")
    code = "".join(block.text for block in blocks(f"## {rest}", "python"))
    for name in rewardlab.__all__:
        assert f"`{name}`" in table, f"{name} is not in the table at the head of the page"
        assert re.search(rf"\b{name}\b", code + rest), f"{name} is nowhere below it"
        assert getattr(rewardlab, name) is not None
    named = set(re.findall(r"`(\w+)`", "".join(line for line in table.splitlines() if line.startswith("| ["))))
    assert named == set(rewardlab.__all__)


def test_every_public_name_has_a_place_in_the_reference() -> None:
    pages = "".join(path.read_text(encoding="utf-8") for path in sorted((DOCS / "reference").glob("*.md")))
    assert sorted(re.findall(r"^::: rewardlab\.(\w+)$", pages, re.MULTILINE)) == sorted(rewardlab.__all__)


def test_dir_lists_the_public_names_and_others_are_refused() -> None:
    assert dir(rewardlab) == sorted(rewardlab.__all__)
    assert set(rewardlab._HOME) == set(rewardlab.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nosuch'"):
        _ = rewardlab.nosuch


def test_importing_rewardlab_alone_imports_no_torch() -> None:
    program = "import sys, rewardlab; dir(rewardlab); print([m for m in ('torch', 'transformers') if m in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
