"""MeZO: the two-sided random gradient estimate (GA), in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from typing_extensions import Unpack

from forwardtune.arguments import Params, check_positive
from forwardtune.optimizer import LineSearch, RunOptions
from forwardtune.record import Decision
from forwardtune.search import Memory, Search


def mezo(memory: Memory, *, lr: float, rho: float) -> Search:
    gamma = ((yield +rho) - (yield -rho)) / (2 * rho)
    return Decision(-lr * gamma, gamma=gamma)


class MeZO(LineSearch):
    r"""Moves against the slope measured along a random direction. Two queries per step.

    .. math::
        \gamma = \frac{f(x + \rho s) - f(x - \rho s)}{2 \rho}, \qquad x \leftarrow x - \mathrm{lr} \, \gamma \, s

    Args:
        params: parameters, named parameters or group dicts to tune.
        lr: the step size.
        rho: half the distance between the two probes.
        **run: see :class:`forwardtune.RunOptions`.

    >>> import torch
    >>> x = torch.tensor([3.0, -2.0])
    >>> optimizer = MeZO([x], lr=0.1, rho=1e-2)
    >>> for _ in range(200):
    ...     loss = optimizer.step(lambda: x @ x)
    >>> bool(loss < 1e-3)
    True
    """

    search = staticmethod(mezo)

    def __init__(self, params: Params, lr: float = 1e-4, *, rho: float = 1e-3, **run: Unpack[RunOptions]) -> None:
        super().__init__(params, {"lr": lr, "rho": rho}, **run)

    def check(self, group: Mapping[str, Any]) -> None:
        super().check(group)
        check_positive(rho=group["rho"])
