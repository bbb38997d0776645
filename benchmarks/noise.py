"""One pass of noise over weights of GPT-2's size, against the memory limit and the published MeZO code.

    python -m benchmarks.noise [--json FILE]

The limit is torch's in-place addition of a number: one read and one write of every weight. The published code draws a
tensor of normal noise for each parameter and adds it, one parameter after the other. Each is timed over the three
passes of a two-point step (the sphere's scale is needed once per step) and divided by three.
"""

from __future__ import annotations

import itertools

import torch

from benchmarks.harness import arguments, finish, interleaved, ratios, show
from benchmarks.models import perturb
from forwardtune import Field
from forwardtune.noise import DISTRIBUTIONS, Term


def gpt2_shapes() -> list[tuple[int, ...]]:
    """The parameters of GPT-2 (124M), in order."""
    d, layer = 768, []
    layer += [(d,), (d,), (d, 3 * d), (3 * d,), (d, d), (d,)]
    layer += [(d,), (d,), (d, 4 * d), (4 * d,), (4 * d, d), (d,)]
    return [(50257, d), (1024, d), *layer * 12, (d,), (d,)]


def main() -> None:
    options = arguments(__doc__.splitlines()[0]).parse_args()
    parameters = [torch.zeros(shape) for shape in gpt2_shapes()]
    theirs = [torch.zeros(shape) for shape in gpt2_shapes()]
    fields = {name: Field([parameters], distribution=name) for name in DISTRIBUTIONS}
    steps = iter(range(2**32))

    def a_step(field):
        """The three passes of a two-point step: to one probe, to the other, and to the destination."""
        step = next(steps)
        for here, there in itertools.pairwise((0.0, 1e-3, -1e-3, 1e-4)):
            field.mover.move(step, [Term(0, [here], [there])])

    candidates = {"in-place add": lambda: [p.add_(1e-3) for _ in range(3) for p in parameters]}
    for name, field in fields.items():
        candidates[f"forwardtune, {name}"] = lambda field=field: a_step(field)
    candidates["published MeZO"] = lambda: [perturb(theirs, 0, 1e-3) for _ in range(3)]

    seconds = {name: value / 3 for name, value in interleaved(candidates, options.rounds).items()}
    count = sum(p.numel() for p in parameters)
    rows = ratios(seconds, "in-place add")
    show(f"one pass over {count / 1e6:.0f}M float32 weights", rows)
    finish(rows, options.json)


if __name__ == "__main__":
    main()
