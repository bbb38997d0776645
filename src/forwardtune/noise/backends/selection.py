"""Chooses the backend that moves the tensors of a device."""

from __future__ import annotations

import warnings
from importlib import import_module

import torch

from forwardtune.errors import BackendError, InvalidArgumentError
from forwardtune.noise.backends.interface import Backend

BACKENDS = {
    "numba": ("cpu_numba", "CpuNumba"),
    "triton": ("cuda_triton", "CudaTriton"),
    "reference": ("reference", "Reference"),
}
PREFERRED = {"cpu": "numba", "cuda": "triton"}
"""The preferred backend by type of device; on all others the reference runs."""


def choose(name: str, device: torch.device) -> type[Backend]:
    """The backend for tensors on a device. One requested by name is used or refused, never replaced."""
    if name == "auto":
        preferred = PREFERRED.get(device.type, "reference")
        try:
            return _load(preferred)
        except ImportError as error:
            warnings.warn(
                f"{preferred} cannot be loaded ({error}), so the slow reference backend is used. "
                f"To be fast, run: pip install {preferred}",
                RuntimeWarning,
                stacklevel=2,
            )
            return _load("reference")
    if name not in BACKENDS:
        raise InvalidArgumentError(f"unknown backend {name!r}; choose one of auto, {', '.join(BACKENDS)}")
    try:
        backend = _load(name)
    except ImportError as error:
        raise BackendError(f"the backend {name!r} cannot be loaded ({error}); run: pip install {name}") from error
    if not backend.runs_on(device):
        raise BackendError(f"the backend {name!r} cannot move a parameter on {device}; leave it out, or use 'auto'")
    return backend


def _load(name: str) -> type[Backend]:
    module, attribute = BACKENDS[name]
    backend: type[Backend] = getattr(import_module(f"forwardtune.noise.backends.{module}"), attribute)
    return backend
