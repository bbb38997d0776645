"""STP: the stochastic three-point method."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from typing_extensions import Unpack

from forwardtune.arguments import Params
from forwardtune.optimizer import LineSearch
from forwardtune.record import Decision
from forwardtune.run_options import RunOptions
from forwardtune.search import Memory, Search


def stp(memory: Memory, *, lr: float) -> Search:
    plus, minus, stay = (yield +lr), (yield -lr), (yield 0.0)
    if stay <= min(plus, minus):
        return Decision(0.0)
    return Decision(+lr if plus < minus else -lr)


class STP(LineSearch):
    r"""Moves to the best of three points, one of them the old weights. Three queries per step.

    .. math::
        x \leftarrow \arg\min \{ f(x + \mathrm{lr} \, s), \; f(x - \mathrm{lr} \, s), \; f(x) \}

    Args:
        params: parameters, named parameters or group dicts to tune.
        lr: the step size, or ``"auto"`` (default) to find it while training; see :mod:`forwardtune.auto`.
        **run: see :class:`forwardtune.RunOptions`.

    >>> import torch
    >>> x = torch.tensor([3.0, -2.0])
    >>> optimizer = STP([x], lr=0.02)
    >>> for _ in range(400):
    ...     loss = optimizer.step(lambda: x @ x)
    >>> bool(loss < 1e-3)
    True
    """

    search = staticmethod(stp)

    def __init__(self, params: Params, lr: float | Literal["auto"] = "auto", **run: Unpack[RunOptions]) -> None:
        super().__init__(params, {"lr": lr}, **run)

    def settings_at(self, r: float, slope: float, settings: Mapping[str, Any]) -> dict[str, Any]:
        return {**settings, "lr": settings["lr"] * r}
