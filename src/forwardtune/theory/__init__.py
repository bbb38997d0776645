"""The theory behind the methods, as plain functions on floats; `docs/paper.md` has the derivations."""

from forwardtune.theory import complexity, smoothness, step_sizes

__all__ = ["complexity", "smoothness", "step_sizes"]
