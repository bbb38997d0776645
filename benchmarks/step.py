"""A whole training step, against its forward passes alone, the published MeZO recipe and backpropagation.

    python -m benchmarks.step [--json FILE]

Two bare forward passes under `inference_mode` are the least a two-point step can cost.
"""

from __future__ import annotations

from benchmarks import models
from benchmarks.harness import arguments, interleaved, ratios, report

BASELINE = "two forward passes"


def main() -> None:
    options = arguments(__doc__.splitlines()[0]).parse_args()
    rows = []
    for name, build, repeats in (("CNN, batch 32", models.cnn, 100), ("GPT-2, batch 32 x 64", models.gpt2, 1)):
        model, closure = build()
        # Each rival gets the same weights in turn; what it leaves in them does not change what a pass costs.
        steps = {
            BASELINE: models.two_forward_passes(model, closure),
            "VS2P, rademacher": models.vs2p(model, closure),
            "VS2P, normal": models.vs2p(model, closure, distribution="normal"),
            "published MeZO": models.published_mezo(model, closure),
            "AdamW with backward": models.adamw(model, closure),
        }
        repeated = {key: lambda step=step, n=repeats: [step() for _ in range(n)] for key, step in steps.items()}
        seconds = {key: value / repeats for key, value in interleaved(repeated, options.rounds).items()}
        rows += [
            {**row, "name": f"{name}: {row['name']}", "baseline": f"{name}: {BASELINE}"}
            for row in ratios(seconds, BASELINE)
        ]
    report("one training step", rows, options.json)


if __name__ == "__main__":
    main()
