"""Layers whose examples see weights of their own: the one place that knows what a layer computes."""

from forwardtune.layers.perturbation import Perturbation

__all__ = ["Perturbation"]
