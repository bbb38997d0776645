"""What a start takes: processes that import forwardtune, against one that imports torch.

    python -m benchmarks.startup [--json FILE]

An optimizer also loads numba and its cache of compiled code.
"""

from __future__ import annotations

import subprocess
import sys

from benchmarks.harness import arguments, finish, interleaved, ratios, show

BASELINE = "import torch"
STARTS = {
    BASELINE: ["-c", "import torch"],
    "import forwardtune": ["-c", "import forwardtune"],
    "its public names": ["-c", "import forwardtune as ft; ft.VS2P"],
    "an optimizer": ["-c", "import torch, forwardtune as ft; ft.VS2P([torch.ones(3)])"],
    "torch's AdamW": ["-c", "import torch; torch.optim.AdamW([torch.ones(3, requires_grad=True)])"],
    "forwardtune --help": ["-m", "forwardtune", "--help"],
}


def main() -> None:
    options = arguments(__doc__.splitlines()[0]).parse_args()

    def start(command: list[str]) -> None:
        subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)

    candidates = {name: lambda command=command: start(command) for name, command in STARTS.items()}
    rows = ratios(interleaved(candidates, options.rounds), BASELINE)
    show("one process", rows)
    finish(rows, options.json)


if __name__ == "__main__":
    main()
