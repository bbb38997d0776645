"""A whole training step, against its forward passes alone, the published MeZO recipe and backpropagation.

    python -m benchmarks.step [--json FILE]

Two bare forward passes under `inference_mode` are the minimum cost of a two-point step. The small networks have about
20,000 weights and a batch of 32. With `lr="auto"` every tenth step makes two more queries and goes through the ten
before it, so that stretches of steps are timed.
"""

from __future__ import annotations

from benchmarks import models
from benchmarks.harness import arguments, finish, interleaved, ratios, show

BASELINE = "two forward passes"
WORKLOADS = {
    "CNN, 28 x 28 pixels": (lambda: models.cnn(28), 50),
    "CNN, 8 x 8 pixels": (lambda: models.cnn(8), 100),
    "148 small tensors": (models.deep, 50),
    "GPT-2, 32 x 64 tokens": (models.gpt2, 1),
}


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--only", choices=WORKLOADS, help="measure one model")
    options = parser.parse_args()
    rows = []
    for name in [options.only] if options.only else WORKLOADS:
        build, repeats = WORKLOADS[name]
        model, closure = build()
        # All rivals tune the same weights in turn; the values do not change what a pass costs.
        steps = {
            BASELINE: models.two_forward_passes(model, closure),
            "VS2P, rademacher": models.vs2p(model, closure, scale="absolute"),
            "VS2P, relative": models.vs2p(model, closure, scale="relative"),
            "VS2P, auto": models.vs2p(model, closure, lr="auto"),
            "VS2P, normal": models.vs2p(model, closure, scale="absolute", distribution="normal"),
            "published MeZO": models.published_mezo(model, closure),
            "AdamW with backward": models.adamw(model, closure),
        }
        if repeats == 1:
            del steps["VS2P, auto"]
        repeated = {key: lambda step=step, n=repeats: [step() for _ in range(n)] for key, step in steps.items()}
        seconds = {key: value / repeats for key, value in interleaved(repeated, options.rounds).items()}
        table = ratios(seconds, BASELINE)
        show(f"one training step, {name}", table)
        rows += [{**row, "name": f"{name}: {row['name']}", "baseline": f"{name}: {BASELINE}"} for row in table]
    finish(rows, options.json)


if __name__ == "__main__":
    main()
