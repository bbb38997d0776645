"""`forwardtune compare`, killed again and again, ends with the store of one that was not disturbed."""

import json
import os
import random
import signal
import subprocess
import sys

import pytest

from forwardtune import ledger
from tests.helpers.comparisons import TEXT, outcomes

PRETRAIN = 'pretrain = {data = "digits", steps = 30}'
SPEC = (
    TEXT.replace("queries = 60", "queries = 6000").replace("[1, 4]", "[1]").replace('"random"', f'"random"\n{PRETRAIN}')
)


def command(spec, out):
    """The comparison as a process, its events line by line."""
    arguments = ["compare", str(spec), "--out", str(out), "--json", "--workers", "2", "--threads", "1"]
    return subprocess.Popen(
        [sys.executable, "-m", "forwardtune", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # also where the tests run in the background
    )


def workers_of(process):
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    return [int(child) for child in children]


@pytest.mark.skipif(os.name != "posix", reason="kills processes by signals")
def test_killed_at_random_moments(tmp_path):
    spec = tmp_path / "spec.toml"
    spec.write_text(SPEC)
    whole = command(spec, tmp_path / "whole")
    out, err = whole.communicate(timeout=300)
    assert whole.returncode == 0, err
    draw = random.Random(0)
    kills = 0
    for _ in range(6):
        process = command(spec, tmp_path / "killed")
        for _ in range(draw.randrange(1, 12)):  # events, of which there are several a second
            if not process.stdout.readline():
                break
        if process.poll() is not None:
            break
        kind = ("kill", "interrupt", "worker")[kills % 3]
        if kind == "worker":
            victims = workers_of(process)
            os.kill(draw.choice(victims), signal.SIGKILL) if victims else process.kill()
        elif kind == "kill":
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, err = process.communicate(timeout=60)
        if process.returncode == 0:
            break
        kills += 1
        if kind == "interrupt":
            assert process.returncode == 130
            assert "the same command resumes where it left off" in err
        elif kind == "worker" and process.returncode == 1:
            assert "a worker process died" in err
        assert "Traceback" not in err
    assert kills >= 3
    last = command(spec, tmp_path / "killed")
    out, err = last.communicate(timeout=300)
    assert last.returncode == 0, err
    assert json.loads(out.splitlines()[0])["event"] == "plan"
    killed, undisturbed = outcomes(tmp_path / "killed"), outcomes(tmp_path / "whole")
    assert len(undisturbed) == 4
    assert killed == undisturbed
    for name in killed:
        file = name.replace(".json", ".ledger")
        assert not ledger.diff(tmp_path / "killed" / "runs" / file, tmp_path / "whole" / "runs" / file)
