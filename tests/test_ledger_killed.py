"""A run that is killed fifty times ends with the same bits as one that is never killed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from tests.helpers.runs import METHODS, same

CASES = [
    (m, d) for m in METHODS for d in ("float32", "bfloat16") if "auto" not in m or (m, d) == ("VS2P auto", "float32")
]


@pytest.mark.parametrize(("method", "dtype"), CASES)
def test_a_killed_run_ends_as_one_that_was_never_killed(tmp_path, method, dtype):
    command = [sys.executable, "-m", "tests.helpers.killed_run", tmp_path, method, dtype, "50"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["kills"] == 50
    assert seen["moments"] > 20
    killed, whole = (torch.load(tmp_path / name) for name in ("result.pt", "whole/result.pt"))
    assert same(killed.pop("model"), whole.pop("model"))
    assert torch.equal(killed.pop("generator"), whole.pop("generator"))
    assert killed == whole
