"""A tuned model whose run was killed again and again is that of a run that was never killed, bit for bit."""

import json
import os
import subprocess
import sys

import pytest

from forwardtune import ledger
from tests.helpers import tiny
from tests.helpers.texts import write_jsonl


@pytest.mark.skipif(os.name != "posix", reason="kills processes by signals")
def test_killed_at_random_moments(tmp_path):
    tiny.causal(tmp_path / "model")
    write_jsonl(tmp_path / "train.jsonl", tiny.reviews(30))
    command = [sys.executable, "-m", "tests.helpers.killed_finetune", tmp_path, "4"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert json.loads(done.stdout)["killed"] >= 2
    ours, theirs = (
        {file.name: file.read_bytes() for file in (tmp_path / name).iterdir() if file.is_file()}
        for name in ("killed", "whole")
    )
    for found in (ours, theirs):  # a resumed run's ledger has more anchors
        found.pop("run.ledger")
    assert ours == theirs
    assert "model.safetensors" in ours
    assert not ledger.diff(tmp_path / "killed" / "run.ledger", tmp_path / "whole" / "run.ledger")
