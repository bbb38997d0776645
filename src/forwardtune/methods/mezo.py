"""MeZO: the two-sided random gradient estimate (GA), in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from typing_extensions import Unpack

from forwardtune.arguments import Params, check_positive, probe_distance
from forwardtune.optimizer import LineSearch
from forwardtune.record import Decision
from forwardtune.run_options import RunOptions
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
        lr: the step size, or ``"auto"`` (default) to find it while training; see :mod:`forwardtune.auto`. Published
            rates are in absolute units, ``scale="absolute"``.
        rho: half the distance between the two probes; by default 1e-2, and 1e-3 in absolute units.
        **run: see :class:`forwardtune.RunOptions`.

    >>> import torch
    >>> x = torch.tensor([3.0, -2.0])
    >>> optimizer = MeZO([x], lr=0.02)
    >>> for _ in range(200):
    ...     loss = optimizer.step(lambda: x @ x)
    >>> bool(loss < 1e-2)
    True
    """

    search = staticmethod(mezo)

    def __init__(
        self,
        params: Params,
        lr: float | Literal["auto"] = "auto",
        *,
        rho: float | None = None,
        **run: Unpack[RunOptions],
    ) -> None:
        distance = probe_distance(lr, rho, run.get("scale", self.usual_scale))
        super().__init__(params, {"lr": lr, "rho": distance}, **run)

    def settings_at(self, r: float, slope: float, settings: Mapping[str, Any]) -> dict[str, Any]:
        return {"lr": settings["lr"] * r / slope, "rho": r}

    def check(self, group: Mapping[str, Any]) -> None:
        super().check(group)
        check_positive(rho=group["rho"])
