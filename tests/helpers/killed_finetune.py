"""`forwardtune finetune`, killed again and again and always started by the same command.

    python -m tests.helpers.killed_finetune FOLDER KILLS

The folder has a model and a table. Prints how many runs were killed, as JSON. The processes are forked from one that
has loaded all code and has no other thread.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

import forwardtune.finetuning.tune  # noqa: F401
from forwardtune._compat.transformers import transformers
from forwardtune.cli import tuning  # noqa: F401
from forwardtune.cli.main import main as command

QUESTION = ["--template", "{text} It was", "--word", "bad", "--word", "good"]
LENGTH = ["--steps", "30", "--evaluations", "5", "--batch", "4", "--threads", "1", "--keep", "last", "--quiet"]


def start(out: str) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.dup2(os.open(f"{out}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
        sys.argv = ["forwardtune", "finetune", "--model", "model", "--train", "train.jsonl", *QUESTION, *LENGTH]
        sys.argv += ["--out", out]
        command()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def main() -> None:
    os.chdir(Path(sys.argv[1]))
    torch.set_num_threads(1)
    transformers.LlamaForCausalLM  # noqa: B018 (loads its module)
    begun = time.monotonic()
    assert os.waitpid(start("whole"), 0)[1] == 0
    whole, chance, killed = time.monotonic() - begun, random.Random(0), 0
    for _ in range(int(sys.argv[2])):
        child = start("killed")
        time.sleep(chance.uniform(0, 0.8 * whole))
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        killed += os.WIFSIGNALED(status)
        assert os.WIFSIGNALED(status) or status == 0
    assert os.waitpid(start("killed"), 0)[1] == 0
    print(json.dumps({"killed": killed}))


if __name__ == "__main__":
    main()
