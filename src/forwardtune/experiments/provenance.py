"""What a result says of where it comes from: code, machine, memory."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import subprocess
import sys
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from forwardtune.experiments.result import Code, Host

PACKAGES = ("forwardtune", "torch", "numpy", "numba", "torchvision")


@cache
def code() -> Code:
    """What runs now."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    changes = _git("status", "--porcelain", "--", str(Path(__file__).parents[1]))
    return Code(versions, _git("rev-parse", "HEAD"), None if changes is None else bool(changes))


def _git(*command: str) -> str | None:
    here = Path(__file__).parent
    try:
        top = subprocess.run(["git", "ls-files", "--error-unmatch", __file__], cwd=here, capture_output=True)
        if top.returncode:
            return None
        return subprocess.run(["git", *command], cwd=here, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


@cache
def host() -> Host:
    return Host(platform.node(), _cpu(), os.cpu_count(), platform.platform())


def _cpu() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def reset_peak_memory(device: torch.device) -> None:
    """Starts the peak over, where the system can, without what earlier runs have left to be used again."""
    gc.collect()
    with suppress(OSError, AttributeError):  # glibc's
        ctypes.CDLL(None).malloc_trim(0)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory(device: torch.device) -> int:
    """Bytes: of the device for CUDA, else of this process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
