"""VS2P: the practical variant of stochastic two-point search (Algorithm 2, with the sign that descends)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from typing_extensions import Unpack

from forwardtune.arguments import Params, check_integer, check_positive, probe_distance
from forwardtune.optimizer import LineSearch
from forwardtune.record import Decision
from forwardtune.run_options import RunOptions
from forwardtune.search import Memory, Search


def vs2p(memory: Memory, *, lr: float, rho: float, tau_a: float, tau_b: float, window: int) -> Search:
    gamma = ((yield +rho) - (yield -rho)) / (2 * rho)
    recent = memory["recent"] = (*memory.get("recent", ()), gamma)[-window:]
    sigma = spread(recent)
    if gamma == 0:
        return Decision(0.0, gamma, sigma)
    alpha = lr * rho / (tau_b * sigma / abs(gamma) + tau_b / tau_a)
    return Decision(-math.copysign(alpha, gamma), gamma, sigma)


def spread(recent: Sequence[float]) -> float:
    """The standard deviation of the recent gammas; of a single one, its size, as gamma is symmetric about zero."""
    n, largest = len(recent), max(map(abs, recent))
    if n == 1 or largest == 0 or not math.isfinite(largest):
        return largest
    if largest > 1e150:  # squares would overflow
        return largest * spread([gamma / largest for gamma in recent])
    mean = math.fsum(recent) / n
    return math.sqrt(math.fsum([(gamma - mean) ** 2 for gamma in recent]) / (n - 1))


class VS2P(LineSearch):
    r"""Takes a step that grows with the slope, but less and less. Two queries per step.

    .. math::
        \gamma = \frac{f(x + \rho s) - f(x - \rho s)}{2 \rho}, \quad
        \alpha = \frac{\mathrm{lr} \, \rho}{\tau_b \sigma / |\gamma| + \tau_b / \tau_a}, \quad
        x \leftarrow x - \mathrm{sign}(\gamma) \, \alpha \, s

    with :math:`\sigma` the sample standard deviation of the recent gammas, this step's included. On the first step
    :math:`\sigma = |\gamma|`; if the losses are equal, nothing moves. The step never exceeds
    ``lr * rho * tau_a / tau_b`` and does not change when the loss is multiplied by a constant.

    Args:
        params: parameters, named parameters or group dicts to tune.
        lr: ``"auto"`` (default), to find the size of steps and probes while training (see :mod:`forwardtune.auto`), or
            the step size in units of rho, 1 in the paper; above 1, the sign of the slope is trusted further than it was
            measured.
        rho: half the distance between the two probes; by default 1e-2, and 1e-3 in absolute units.
        tau_a: slopes above ``tau_a * sigma`` are damped.
        tau_b: how many sigmas make a full step.
        window: the number of recent gammas in sigma.
        **run: see :class:`forwardtune.RunOptions`.

    >>> import torch
    >>> x = torch.tensor([3.0, -2.0])
    >>> optimizer = VS2P([x], lr=2.0)
    >>> for _ in range(400):
    ...     loss = optimizer.step(lambda: x @ x)
    >>> bool(loss < 1e-2)
    True
    """

    search = staticmethod(vs2p)

    def __init__(
        self,
        params: Params,
        lr: float | Literal["auto"] = "auto",
        *,
        rho: float | None = None,
        tau_a: float = 3.0,
        tau_b: float = 3.0,
        window: int = 50,
        **run: Unpack[RunOptions],
    ) -> None:
        distance = probe_distance(lr, rho, run.get("scale", self.usual_scale))
        settings = {"lr": lr, "rho": distance, "tau_a": tau_a, "tau_b": tau_b, "window": window}
        super().__init__(params, settings, **run)

    def settings_at(self, r: float, slope: float, settings: Mapping[str, Any]) -> dict[str, Any]:
        return {**settings, "rho": r}

    def check(self, group: Mapping[str, Any]) -> None:
        super().check(group)
        check_positive(rho=group["rho"], tau_a=group["tau_a"], tau_b=group["tau_b"])
        check_integer(2, window=group["window"])
