"""The one place where a backend is chosen."""

from __future__ import annotations

import warnings
from typing import Literal, get_args

import torch

from forwardtune.errors import BackendError, InvalidArgumentError
from forwardtune.noise.backends.interface import Backend
from forwardtune.noise.backends.reference import Reference

BackendName = Literal["auto", "numba", "reference"]


def choose(name: str, device: torch.device) -> type[Backend]:
    """The backend for tensors of a device. One asked for by name is used or refused, never replaced."""
    if name not in get_args(BackendName):
        raise InvalidArgumentError(f"unknown backend {name!r}; choose one of {', '.join(get_args(BackendName))}")
    if name == "reference" or (name == "auto" and device.type != "cpu"):
        return Reference
    if device.type != "cpu":
        raise BackendError(f"backend='numba' moves CPU tensors only, and a parameter is on {device}; use 'auto'")
    try:
        from forwardtune.noise.backends.cpu_numba import CpuNumba
    except ImportError as error:
        if name == "numba":
            raise BackendError(f"backend='numba' cannot be loaded ({error}); run: pip install numba") from error
        warnings.warn(
            f"numba cannot be loaded ({error}); using the reference backend, which is slow. Run: pip install numba",
            RuntimeWarning,
            stacklevel=2,
        )
        return Reference
    return CpuNumba
