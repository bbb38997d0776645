"""The last norm of a language model, fitted to texts: the one layer below the logits whose gradient needs no backward
pass.

The logits are `W (m h + b)`, with `h` what the norm returns for a token and `W` the output embeddings. In `m`, and in
`b` where the norm has a bias, the cross entropy of the next tokens is convex with an explicit gradient,

    min  mean_i loss(W (m h_i + b), y_i) + penalty/2 (norm(m - 1)^2 + norm(b/rms(h))^2)

and `m` and `b` are folded into the norm's weights. The penalty is chosen as for a head (`forwardtune.heads`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forwardtune.errors import ExperimentError
from forwardtune.heads import FittedHead, is_left_out

PENALTIES = tuple(10.0**-k for k in range(1, 4))
"""Tried from the strongest to the weakest, until tokens left out are predicted worse."""
ITERATIONS = 8
"""Of L-BFGS, at each penalty from where the one before ended."""
CHUNK = 512
"""Tokens whose logits are held at a time."""

_REMEDY = "leave the fit out (fit = 0, of the command --fit 0)"

Batch = tuple[dict[str, Tensor], Tensor]
"""A model's inputs, and the tokens that follow, negative where there is none."""


@torch.no_grad()
def fit_last_norm(model: nn.Module, batches: Iterable[Batch]) -> tuple[list[str], FittedHead]:
    """Fits the weights of the last norm in place, by one forward pass per batch; returns their names in the model."""
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    if type(head) is not nn.Linear or not head.weight.is_floating_point():
        raise ExperimentError(f"the output embeddings of this model cannot be read; {_REMEDY}")
    name, h, y = "", [], []
    for inputs, nexts in batches:
        found, hidden = _before(model, head, inputs)
        name = name or found
        h.append(hidden[nexts >= 0].float())
        y.append(nexts[nexts >= 0])
    hidden, nexts = torch.cat(h), torch.cat(y)
    norm: Any = model.get_submodule(name)
    before = norm(_probe(norm))
    fit = _Fit(head, hidden, nexts, has_bias=getattr(norm, "bias", None) is not None)
    told = fit.solve()
    m, b = fit.solution()
    old = {key: weight.clone() for key, weight in norm.named_parameters(recurse=False)}
    wanted = before.float() * m + b
    for one in (0.0, 1.0):  # Gemma's norms add one to their weights
        norm.weight.copy_((old["weight"].float() + one) * m - one)
        if "bias" in old:
            norm.bias.copy_(old["bias"].float() * m + b)
        if torch.allclose(norm(_probe(norm)).float(), wanted, rtol=2e-2, atol=2e-2 * wanted.abs().max().item()):
            return [f"{name}.{key}" for key in old], told
    for key, weight in old.items():
        getattr(norm, key).copy_(weight)
    raise ExperimentError(f"{name} does not multiply by its weight; {_REMEDY}")


def _before(model: nn.Module, head: nn.Module, inputs: dict[str, Tensor]) -> tuple[str, Tensor]:
    """The name of the norm whose output is the head's input, and that output."""
    outputs: list[tuple[str, Tensor]] = []
    seen: list[Tensor] = []
    hooks = [
        module.register_forward_hook(lambda module, args, output, name=name: outputs.append((name, output)))
        for name, module in model.named_modules()
        if type(module).__name__.endswith("Norm")
    ]
    hooks.append(head.register_forward_pre_hook(lambda module, args: seen.append(args[0])))
    try:
        logits = model(**inputs).logits
    finally:
        for hook in hooks:
            hook.remove()
    name, hidden = outputs[-1] if outputs else ("", None)
    if hidden is None or not seen or not torch.equal(hidden, seen[-1]):
        raise ExperimentError(f"no norm comes right before the output embeddings; {_REMEDY}")
    if not torch.allclose(head(hidden[:1, :1]).float(), logits[:1, :1].float(), rtol=1e-2, atol=1e-2):
        raise ExperimentError(f"the logits are not the output embeddings' alone; {_REMEDY}")
    return name, hidden


def _probe(norm: Any) -> Tensor:
    """Any input of a norm."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4, norm.weight.numel(), generator=generator).to(norm.weight)


class _Fit:
    """Multipliers less one in the first row and, where there is a bias, shifts in units of the root mean square."""

    def __init__(self, head: nn.Linear, hidden: Tensor, nexts: Tensor, *, has_bias: bool) -> None:
        self.weight, self.bias = head.weight.float(), None if head.bias is None else head.bias.float()
        self.hidden, self.nexts, self.size = hidden, nexts, hidden.square().mean().sqrt()
        self.parameters = hidden.new_zeros(2 if has_bias else 1, hidden.shape[1])

    def solve(self) -> FittedHead:
        out = is_left_out(len(self.nexts)).to(self.nexts.device)
        penalty, best = PENALTIES[0], float("inf")
        for tried in PENALTIES:
            self._minimize(~out, tried)
            loss = self._loss(out, self.parameters).item()
            if not loss < best:
                break
            penalty, best = tried, loss
        self._minimize(torch.ones_like(out), penalty)
        return FittedHead(len(self.nexts), penalty, best)

    def solution(self) -> tuple[Tensor, Tensor]:
        shift = self.size * self.parameters[1] if len(self.parameters) > 1 else torch.zeros_like(self.parameters[0])
        return 1 + self.parameters[0], shift

    def _minimize(self, chosen: Tensor, penalty: float) -> None:
        solution = self.parameters.clone().requires_grad_()
        optimizer = torch.optim.LBFGS([solution], max_iter=ITERATIONS, line_search_fn="strong_wolfe")

        @torch.no_grad()
        def closure() -> float:
            solution.grad = penalty * solution
            loss = self._loss(chosen, solution, solution.grad)
            return (loss + penalty / 2 * solution.square().sum()).item()

        optimizer.step(closure)  # type: ignore[no-untyped-call]
        self.parameters = solution.detach()

    def _loss(self, chosen: Tensor, parameters: Tensor, gradient: Tensor | None = None) -> Tensor:
        """The mean cross entropy of the chosen tokens; its gradient is added to one that is given."""
        m, shift = 1 + parameters[0], self.size * parameters[1] if len(parameters) > 1 else 0.0
        indices, total = chosen.nonzero()[:, 0], parameters.new_zeros(())
        for some in indices.split(CHUNK):  # type: ignore[no-untyped-call]
            h, y = self.hidden[some], self.nexts[some]
            logits = F.linear(h * m + shift, self.weight, self.bias)
            total += F.cross_entropy(logits, y, reduction="sum")
            if gradient is not None:
                residual = logits.softmax(1)
                residual[torch.arange(len(y)), y] -= 1
                by_input = residual @ self.weight / len(indices)
                gradient[0] += (by_input * h).sum(0)
                gradient[1:] += self.size * by_input.sum(0)
        return total / len(indices)
