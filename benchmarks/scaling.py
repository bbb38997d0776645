"""One pass of noise over one million to one billion weights: the cost is linear.

    python -m benchmarks.scaling [--json FILE]

Prints the time per weight at each size, and the slope of time against size on logarithmic axes.
"""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.harness import arguments, finish, interleaved, show
from forwardtune import Field
from forwardtune.noise import Term

SIZES = (1_000_000, 10_000_000, 100_000_000, 1_000_000_000)


def main() -> None:
    options = arguments(__doc__.splitlines()[0]).parse_args()
    rows = []
    for distribution in ("rademacher", "normal"):
        seconds = {}
        for size in SIZES:
            weights = torch.zeros(size)
            field = Field([[weights]], distribution=distribution)
            repeats = max(1, 20_000_000 // size)
            mover, terms = field.mover, [Term(0, [1e-3], [-1e-3])]
            run = {"pass": lambda mover=mover, terms=terms, n=repeats: [mover.move(0, terms) for _ in range(n)]}
            seconds[size] = interleaved(run, options.rounds)["pass"] / repeats
        last = f"{SIZES[-1]:,} weights"
        costs = [
            {
                "name": f"{distribution}, {size:,} weights",
                "baseline": f"the time per weight among {last}",
                "ratio": value / size / (seconds[SIZES[-1]] / SIZES[-1]),
                "seconds": value,
            }
            for size, value in seconds.items()
        ]
        slope = float(np.polyfit(np.log(SIZES), np.log(list(seconds.values())), 1)[0])
        show(f"one pass, {distribution}: slope {slope:.3f} on logarithmic axes", costs)
        rows += [*costs, {"name": f"{distribution}, slope", "baseline": "a linear cost", "ratio": slope}]
    finish(rows, options.json)


if __name__ == "__main__":
    main()
