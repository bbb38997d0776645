"""Probes that never touch the weights: while they last, every example of the batch sees weights of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from forwardtune.errors import InvalidArgumentError, NoOwnLinesError
from forwardtune.layers.prompts import RepeatedRow, is_prompt
from forwardtune.layers.rules import Nudge, rule_of
from forwardtune.layers.usage import Usage, numbered, tuned_in
from forwardtune.noise.outer import Factors
from forwardtune.noise.types import Slot

NAMED = 4
"""Parameters that an error names at most."""


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
        self._strange: dict[str, set[int]] = {}
        self.examples: int | None = None

    @contextmanager
    def at(self, offsets: Sequence[float]) -> Iterator[None]:
        """While it lasts, each example sees weights at an offset along its line, one offset per group."""
        self._amplitudes = [offsets[slot.group] * slot.scale for slot in self._slots]
        watching = self._usage.watching() if self._usage else nullcontext()
        with register_module_forward_hook(self._perturb), watching:
            yield
        if self._strange:
            kinds = " and ".join(self._strange)
            raise NoOwnLinesError(
                f"examples cannot have lines of their own in {self._few(set().union(*self._strange.values()))}, since "
                f"{kinds} {'is' if len(self._strange) == 1 else 'are'} not among the layers that forwardtune can "
                "perturb example by example"
            )
        if self._outside:
            raise NoOwnLinesError(
                "examples cannot have lines of their own in parameters that are used outside their layers, by a "
                f"function, as {self._few(self._outside)} {'is' if len(self._outside) == 1 else 'are'}"
            )
        missed = set(range(len(self._names))) - self._covered
        if missed:
            raise NoOwnLinesError(
                f"examples cannot have lines of their own in {self._few(missed)}, which no layer was seen to use"
            )

    def _few(self, numbers: set[int]) -> str:
        """The names of some parameters, or of the first of many."""
        names = [self._names[number] for number in sorted(numbers)]
        if len(names) > NAMED:
            return f"{', '.join(names[:NAMED])} and {len(names) - NAMED} more"
        return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))

    def _perturb(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if is_prompt(layer):
            return self._prompt(layer, *args)
        tuned = tuned_in(layer, self._numbers)
        if not tuned:
            return None
        rule = rule_of(layer)
        name = self._names[next(iter(tuned.values()))]
        if rule is None or not args or not isinstance(output, Tensor):
            self._strange.setdefault(type(layer).__name__, set()).update(tuned.values())
            return None
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
            raise NoOwnLinesError(
                f"the layer with {name} got {len(x)} rows, and the first layer {self.examples}: which of them belong "
                "to which example is not known"
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
    if losses.is_complex():
        raise InvalidArgumentError(f"the losses must be real numbers, not {losses.dtype}")
    values: list[float] = losses.detach().to(torch.float64).tolist()
    return values
