"""Probes that never touch the weights: while they last, every example of the batch sees weights of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from forwardtune.errors import InvalidArgumentError
from forwardtune.layers.prompts import RepeatedRow, is_prompt
from forwardtune.layers.rules import Nudge, rule_of
from forwardtune.layers.usage import Usage, numbered, tuned_in
from forwardtune.noise.outer import Factors
from forwardtune.noise.types import Slot

INSTEAD = "use common lines (directions=1), or freeze it with requires_grad_(False)"


class Perturbation:
    """The perturbed layers of one step.

    `factors_of` makes the factors of as many lines as there are examples; with `shared` all examples see the first.
    With `watch` parameters that are used outside their layers are refused. `names` are those of the slots, for errors.
    `examples` is the size of the batch, known once a layer was called.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        names: Sequence[str],
        factors_of: Callable[[int], Sequence[Factors]],
        *,
        shared: bool = False,
        watch: bool = False,
    ) -> None:
        self._slots, self._names, self._factors_of, self._shared = slots, names, factors_of, shared
        self._numbers = numbered(slots)
        self._outside: set[int] = set()
        self._usage = Usage(slots, self._outside.add) if watch else None
        self._factors: Sequence[Factors] = ()
        self._amplitudes: list[float] = []
        self._covered: set[int] = set()
        self.examples: int | None = None

    @contextmanager
    def at(self, offsets: Sequence[float]) -> Iterator[None]:
        """While it lasts, each example sees weights at an offset along its line, one offset per group."""
        self._amplitudes = [offsets[slot.group] * slot.scale for slot in self._slots]
        watching = self._usage.watching() if self._usage else nullcontext()
        with register_module_forward_hook(self._perturb), watching:
            yield
        if self._outside:
            name = self._names[min(self._outside)]
            raise InvalidArgumentError(
                f"{name} is used outside its layer, by a function of its own, so that examples cannot see it perturbed "
                f"there; {INSTEAD}"
            )
        missed = [name for number, name in enumerate(self._names) if number not in self._covered]
        if missed:
            raise InvalidArgumentError(
                f"no layer that is known to use {missed[0]} was called ({len(missed)} such parameters), so that "
                f"examples cannot see it perturbed; {INSTEAD}"
            )

    def _perturb(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if is_prompt(layer):
            return self._prompt(layer, *args)
        tuned = tuned_in(layer, self._numbers)
        if not tuned:
            return None
        rule = rule_of(layer)
        name = self._names[next(iter(tuned.values()))]
        if rule is None or not args or not isinstance(output, Tensor):
            raise InvalidArgumentError(
                f"examples cannot have lines of their own in {name}, since a {type(layer).__name__} is not among the "
                f"layers that forwardtune can perturb example by example; {INSTEAD}"
            )
        x, y = self._rows(args[0], output, name)
        nudges = {own: Nudge(self._amplitudes[number], self._factors[number]) for own, number in tuned.items()}
        self._covered |= set(tuned.values())
        return rule(layer, x, y, nudges)

    def _prompt(self, layer: Any, x: Tensor) -> Tensor | None:
        """A prompt whose row is repeated later; its embedding, called with one row, may have passed for the batch."""
        embedding: nn.Module = layer.embedding
        if layer.embedding.weight.data_ptr() not in self._numbers:
            return None
        if self.examples == 1:
            self.examples = None
        with torch._C.DisableTorchFunction():  # which usage would watch
            row: Tensor = embedding.forward(x)
        return RepeatedRow.of(row, lambda n: self._perturb(embedding, (x.expand(n, -1),), row.repeat(n, 1, 1)))

    def _rows(self, x: Tensor, y: Tensor, name: str) -> tuple[Tensor, Tensor]:
        """Input and output with one row per example."""
        if self.examples is None:
            self.examples = n = len(x) if x.ndim else 0
            own = self._factors_of(1 if self._shared else n)
            self._factors = [tuple(f.expand(n, -1) for f in of) for of in own] if self._shared else own
        if len(x) == 1 and self.examples > 1:  # the same for all, such as positions
            return x.expand(self.examples, *x.shape[1:]), y.repeat(self.examples, *[1] * (y.ndim - 1))
        if len(x) != self.examples or len(y) != self.examples:
            raise InvalidArgumentError(
                f"the layer with {name} got {len(x)} rows, and the first layer {self.examples}: which of them belong "
                f"to which example is not known; {INSTEAD}"
            )
        return x, y


def example_losses(losses: Any, examples: int | None = None) -> list[float]:
    """The losses of all examples, checked; also their number, if it is known."""
    if not isinstance(losses, Tensor) or losses.ndim != 1 or len(losses) != (examples or max(1, len(losses))):
        got = f"a tensor of shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
        wanted = f", {examples} of them" if examples else ""
        raise InvalidArgumentError(
            f"with lines of their own the closure must return one loss per example{wanted}, not {got}; for instance "
            'F.cross_entropy(model(x), y, reduction="none"), with the whole batch in every forward pass'
        )
    values: list[float] = losses.detach().to(torch.float64).tolist()
    return values
