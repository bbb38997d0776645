"""A training run with groups, dropout, BatchNorm, a scheduler and a real DataLoader, killed again and again.

    python -m tests.helpers.killed_run FOLDER METHOD DTYPE KILLS

Prints what it saw as JSON. The processes are forked from one that has loaded all code and has no other thread.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import forwardtune as ft
from forwardtune.ledger import read

STEPS = 1500
METHODS = {
    "VS2P": lambda params, **run: ft.VS2P(params, lr=2.0, rho=1e-2, **run),
    "MeZO": lambda params, **run: ft.MeZO(params, lr=1e-3, rho=1e-2, **run),
    "STP": lambda params, **run: ft.STP(params, lr=1e-2, **run),
    "VS2P auto": lambda params, **run: ft.VS2P(params, lr="auto", **run),
    "S2P": lambda params, **run: ft.S2P(params, step_size="dynamic", L=1.0, rho=1e-2, **run),
}


def network(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3)
    return nn.Sequential(*layers).to(dtype)


def dataset() -> TensorDataset:
    x = torch.randn(256, 12, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :3].argmax(1))


def batches(data, size, step):
    """The same batches in the same order, from any step on, without loading those before it."""
    epoch, skip = divmod(step, len(data) // size)
    for number in itertools.count(epoch):
        order = RandomSampler(data, generator=torch.Generator().manual_seed(number))
        chosen = list(BatchSampler(order, size, drop_last=True))
        yield from DataLoader(data, batch_sampler=chosen[skip:], generator=torch.Generator())
        skip = 0


def train(folder: Path, method: str, dtype: torch.dtype, report, steps: int = STEPS) -> None:
    model, path = network(dtype), folder / "run.ledger"
    if path.exists():
        optimizer, step = ft.resume(model, path)
    else:
        groups = [{"params": list(layer.named_parameters())} for layer in model if list(layer.parameters())]
        ledger = ft.Ledger(path, model, checkpoint_every=100)
        optimizer, step = METHODS[method](groups, seed=3, recorder=ledger), 0
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    for _ in range(step):
        scheduler.step()
    for x, y in itertools.islice(batches(dataset(), 32, step), steps - step):
        optimizer.step(lambda x=x, y=y: F.cross_entropy(model(x.to(dtype)).float(), y))
        scheduler.step()
        step += 1
        report(step)
    result = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "generator": torch.get_rng_state(),
        "last_step": str(optimizer.last_step),
    }
    optimizer.recorder.close()
    torch.save(result, folder / "result.new")
    (folder / "result.new").rename(folder / "result.pt")


def start(folder: Path, method: str, dtype: torch.dtype) -> tuple[int, int]:
    """A training process, and the end of a pipe from which the steps it has done are read."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child:
        os.close(theirs)
        return child, ours
    code = 1
    try:
        train(folder, method, dtype, lambda step: os.write(theirs, step.to_bytes(4, "little")))
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def last_step(pipe: int, data: bytes = b"") -> int:
    """The last step that a process reported before it ended."""
    while piece := os.read(pipe, 1 << 16):
        data += piece
    os.close(pipe)
    return int.from_bytes(data[-4:], "little")


def main() -> None:
    folder, method, dtype, kills = Path(sys.argv[1]), sys.argv[2], getattr(torch, sys.argv[3]), int(sys.argv[4])
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever our own parent ignores, the forked ones do not
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    chance = random.Random(f"{method} {dtype}")
    path, done, moments = folder / "run.ledger", 0, set()
    (folder / "warm").mkdir()
    for steps in (2, 4):
        train(folder / "warm", method, dtype, lambda step: None, steps)
    for number in range(kills):
        child, pipe = start(folder, method, dtype)
        # every third is killed while it starts or replays, the others a few steps later
        first = b"" if number % 3 == 0 else os.read(pipe, 4)
        time.sleep(chance.uniform(0, 0.02))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), f"the process ended before kill {number}: {status}"
        done = max(done, last_step(pipe, first))
        recorded = read(path).end if path.exists() else 0
        assert recorded in (done, done + 1), f"{done} steps were done and {recorded} are recorded"
        moments.add(recorded)
        done = recorded
    child, pipe = start(folder, method, dtype)
    assert last_step(pipe) == STEPS
    assert os.waitpid(child, 0)[1] == 0
    (folder / "whole").mkdir()
    child, pipe = start(folder / "whole", method, dtype)
    assert last_step(pipe) == STEPS
    assert os.waitpid(child, 0)[1] == 0
    print(json.dumps({"kills": kills, "moments": len(moments), "killed_at": max(moments)}))


if __name__ == "__main__":
    main()
