"""S2P: stochastic two-point search (Algorithm 1) with its four step-size rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from typing_extensions import Unpack

from forwardtune.arguments import Params, check_integer, check_positive
from forwardtune.errors import InvalidArgumentError
from forwardtune.optimizer import LineSearch
from forwardtune.record import Decision
from forwardtune.run_options import RunOptions
from forwardtune.search import Memory, Search
from forwardtune.theory import step_sizes

StepSize = Literal["stationary", "dynamic", "stationary-relaxed", "dynamic-relaxed"]

CONSTANTS: dict[StepSize, tuple[str, ...]] = {
    "stationary": ("alpha0", "steps"),
    "dynamic": ("L",),
    "stationary-relaxed": ("L1", "steps"),
    "dynamic-relaxed": ("L0", "L1"),
}


def s2p(
    memory: Memory,
    *,
    lr: float,
    rho: float,
    step_size: StepSize,
    alpha0: float,
    steps: int,
    L: float,
    L0: float,
    L1: float,
    d: int,
) -> Search:
    gamma = None
    if step_size == "stationary":
        alpha = step_sizes.stationary(alpha0, steps, d)
    elif step_size == "stationary-relaxed":
        alpha = step_sizes.stationary_relaxed(L1, steps, d)
    else:
        gamma = ((yield +rho) - (yield -rho)) / (2 * rho)
        if step_size == "dynamic":
            alpha = step_sizes.dynamic(gamma, L, d)
        else:
            alpha = step_sizes.dynamic_relaxed(gamma, L0, L1, d)
    alpha *= lr
    plus, minus = (yield +alpha), (yield -alpha)
    return Decision(0.0 if plus == minus else +alpha if plus < minus else -alpha, gamma)


class S2P(LineSearch):
    r"""Moves to the better of two points, at a distance given by the theory. Two or four queries per step.

    .. math::
        x \leftarrow \arg\min \{ f(x + \alpha s), \; f(x - \alpha s) \}

    The distance is ``lr`` times one of

    ====================== === ================= ===========================================================
    step_size              no. constants         alpha
    ====================== === ================= ===========================================================
    ``stationary``         1   ``alpha0, steps`` ``alpha0 / sqrt(steps * d)``
    ``dynamic``            2   ``L``             ``abs(gamma) / (L * d)``
    ``stationary-relaxed`` 3   ``L1, steps``     ``sqrt(2) / (B * L1 * sqrt(d * steps))``
    ``dynamic-relaxed``    4   ``L0, L1``        ``abs(gamma) / ((A*L0 + sqrt(2)*B*L1*abs(gamma)) * d)``
    ====================== === ================= ===========================================================

    with d the number of elements tuned and gamma the slope measured at ``rho`` (which costs the dynamic rules two more
    queries). A and B are the exact constants of :mod:`forwardtune.theory` for d (rule 4) or for ``steps`` (rule 3).

    Args:
        params: parameters, named parameters or group dicts to tune.
        lr: multiplies alpha, so that a scheduler can decay it.
        step_size: the rule, by its name or its number in the paper; there is no usual one.
        alpha0, steps, L, L0, L1: the constants that the rule needs; ``steps`` is the length of the run.
        rho: half the distance between the two probes of the dynamic rules' slope.
        **run: see :class:`forwardtune.RunOptions`; the scale is absolute by default, as the theory has it.

    >>> import torch
    >>> x = torch.tensor([3.0, -2.0])
    >>> optimizer = S2P([x], step_size="dynamic", L=2.0)
    >>> for _ in range(60):
    ...     loss = optimizer.step(lambda: x @ x)
    >>> bool(loss < 1e-3)
    True
    """

    search = staticmethod(s2p)
    usual_scale = "absolute"

    def __init__(
        self,
        params: Params,
        lr: float = 1.0,
        *,
        step_size: StepSize | Literal[1, 2, 3, 4] | None = None,
        alpha0: float | None = None,
        steps: int | None = None,
        L: float | None = None,
        L0: float | None = None,
        L1: float | None = None,
        rho: float = 1e-3,
        **run: Unpack[RunOptions],
    ) -> None:
        rule = rule_by_number(step_size)
        constants = {"alpha0": alpha0, "steps": steps, "L": L, "L0": L0, "L1": L1}
        super().__init__(params, {"lr": lr, "rho": rho, "step_size": rule, **constants}, **run)

    def check(self, group: Mapping[str, Any]) -> None:
        super().check(group)
        rule = group["step_size"]
        if rule != self.defaults["step_size"]:
            raise InvalidArgumentError("all groups share one step_size; give them different constants or another lr")
        needed = CONSTANTS[rule]
        for name in ("alpha0", "steps", "L", "L0", "L1"):
            if (group[name] is None) == (name in needed):
                verb = "needs" if name in needed else "does not use"
                raise InvalidArgumentError(f"step_size={rule!r} {verb} {name}; its constants are {', '.join(needed)}")
        check_positive(**{name: group[name] for name in needed})
        if group["steps"] is not None:
            check_integer(1, steps=group["steps"])
        check_positive(rho=group["rho"])


def rule_by_number(step_size: str | int | None) -> StepSize:
    """A rule's name, given the name or its number in the paper."""
    names = tuple(CONSTANTS)
    if step_size is None:
        rules = ", ".join(f"{name!r} with {' and '.join(needed)}" for name, needed in CONSTANTS.items())
        raise InvalidArgumentError(f"S2P needs a step_size, its rule, and what that needs: {rules}")
    if isinstance(step_size, int) and not isinstance(step_size, bool) and 1 <= step_size <= len(names):
        return names[step_size - 1]
    if step_size not in names:
        raise InvalidArgumentError(f"unknown step_size {step_size!r}; choose one of {', '.join(names)}, or 1 to 4")
    return step_size
