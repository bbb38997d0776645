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
    children = subprocess.run(
        ["pgrep", "-P", str(process.pid), "-f", "spawn_main"], capture_output=True, text=True
    ).stdout.split()
    return [int(child) for child in children]


@pytest.mark.skipif(os.name != "posix", reason="kills processes by signals")
def test_killed_at_random_moments(tmp_path):
    spec = tmp_path / "spec.toml"
    spec.write_text(SPEC)
    whole = command(spec, tmp_path / "whole")
    out, err = whole.communicate(timeout=300)
    assert whole.returncode == 0, err
    draw = random.Random(0)
    for kind in ("kill", "interrupt", "worker"):
        process = command(spec, tmp_path / "killed")
        for _ in range(draw.randrange(2, 12)):  # events, of which there are several a second
            assert process.stdout.readline()
        victims = workers_of(process)
        if kind == "worker" and victims:
            os.kill(draw.choice(victims), signal.SIGKILL)
        elif kind == "interrupt":
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        else:
            process.kill()
        _, err = process.communicate(timeout=60)
        assert process.returncode != 0
        if process.returncode != -signal.SIGKILL:  # then a worker that is just being spawned may complain
            assert "Traceback" not in err
        if kind == "interrupt":
            assert process.returncode == 130
            assert "the same command resumes where it left off" in err
        elif kind == "worker" and process.returncode == 1:
            assert "a worker process died" in err
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
