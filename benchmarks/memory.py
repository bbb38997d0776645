"""Peak resident memory of a training step on GPT-2, against one forward pass; each in its own process.

    python -m benchmarks.memory [--json FILE]

Also of Hugging Face's Trainer with AdamW and of ForwardTrainer, on the same model and batch.
"""

from __future__ import annotations

import resource
import subprocess
import sys

import torch

from benchmarks import models
from benchmarks.harness import arguments, finish, show

BASELINE = "one forward pass"


def one_forward_pass(model, closure):
    return torch.inference_mode()(closure)


CANDIDATES = {
    BASELINE: one_forward_pass,
    "VS2P": models.vs2p,
    "published MeZO": models.published_mezo,
    "AdamW with backward": models.adamw,
    "ForwardTrainer": models.forward_trainer,
    "Trainer with AdamW": models.trainer,
}


def measure(name: str) -> None:
    """Prints the peak memory of this process after three steps, in bytes."""
    step = CANDIDATES[name](*models.gpt2())
    for _ in range(3):
        step()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--only", choices=CANDIDATES, help="measure one candidate, in this process")
    options = parser.parse_args()
    if options.only:
        measure(options.only)
        return
    peaks = {}
    for name in CANDIDATES:
        command = [sys.executable, "-m", "benchmarks.memory", "--only", name]
        peaks[name] = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])
    rows = [
        {"name": name, "baseline": BASELINE, "ratio": peak / peaks[BASELINE], "megabytes": peak / 1e6}
        for name, peak in peaks.items()
    ]
    show("peak memory on GPT-2, batch 32 x 64, float32", rows)
    finish(rows, options.json)


if __name__ == "__main__":
    main()
