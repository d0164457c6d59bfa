"""A command whose packages come with an extra says which one, where rewardlab was installed without it."""

from __future__ import annotations

import subprocess
import sys

import pytest

# A module that is None cannot be imported, and is not found either: as if its package were not installed.
PROGRAM = """
import sys
from rewardlab.cli import main
sys.modules |= dict.fromkeys(sys.argv[1].split(","))
main(sys.argv[2:])
"""
EXTRAS = "datasketch,fastapi,ftfy,httpx2,prometheus_client,py3langid,pydantic,stamina,uvicorn"


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("missing", "words", "said"),
    [
        (
            EXTRAS,
            "serve nowhere",
            'the server needs fastapi, uvicorn, prometheus_client, pydantic: pip install "rewardlab[serve]"',
        ),
        (
            EXTRAS,
            "verify http://127.0.0.1:9 --model nowhere",
            'a live endpoint needs the package pydantic. Install it with: pip install "rewardlab[client]"',
        ),
        ("pydantic", "serve nowhere", 'the server needs pydantic: pip install "rewardlab[serve]"'),
        (
            "stamina",
            "verify http://127.0.0.1:9 --model nowhere",
            'a live endpoint needs the package stamina. Install it with: pip install "rewardlab[client]"',
        ),
        (
            EXTRAS,
            "score --backend http --url http://127.0.0.1:9 --input {rows} --output {rows}.csv",
            "rewardlab.client.AsyncRewardClient needs the package pydantic. Install it with: pip install "
            '"rewardlab[client]"',
        ),
        (
            EXTRAS,
            "data audit {rows}",
            "finding near duplicates needs the package datasketch, which cannot be imported",
        ),
    ],
    ids=["serve", "verify", "serve, without one", "verify, without one", "score", "audit"],
)
def test_a_missing_package_is_named_with_its_extra(missing, words, said, pairs_file):
    command = [sys.executable, "-c", PROGRAM, missing, *words.format(rows=pairs_file).split()]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert answer.returncode == 2, answer.stderr[-2000:]
    (line,) = [line for line in answer.stderr.splitlines() if line.startswith("error: ")]
    assert said in line
    assert "Traceback" not in answer.stderr
