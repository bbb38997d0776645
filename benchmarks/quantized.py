"""A causal language model with packed weights against bfloat16: megabytes, the loss on a story, a forward pass.

python -m benchmarks.quantized --model DIR [--json FILE]
"""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.harness import Row, arguments, finish, interleaved, ratios, show
from forwardtune.integrations.huggingface import footprint
from forwardtune.tasks.texts.models import PretrainedModel

BASELINE = "bfloat16"
DTYPES = (BASELINE, "float32", "int8", "nf4")
STORY = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the sunshine. One day, she saw "
    "a big, red ball in the park. She wanted to play with it."
)
TEXTS = 8


@torch.no_grad()
def main() -> None:
    parser = arguments("Weights in 16, 32, 8 and 4 bits.")
    parser.add_argument("--model", required=True, help="its folder")
    options = parser.parse_args()
    passes, megabytes = {}, {}
    for dtype in DTYPES:
        language = PretrainedModel(options.model, "prompt", "none", dtype)
        model, _ = language.build(2)
        tokens = torch.tensor([language.tokenizer(STORY)["input_ids"]])
        megabytes[dtype] = footprint(model).memory / 1e6
        print(f"{dtype}: loss {model(input_ids=tokens, labels=tokens).loss.item():.3f} on {tokens.shape[1]} tokens")
        passes[dtype] = partial(model.base_model, input_ids=tokens.repeat(TEXTS, 1))
    weights: list[Row] = [
        {"name": dtype, "baseline": BASELINE, "ratio": size / megabytes[BASELINE], "megabytes": size}
        for dtype, size in megabytes.items()
    ]
    show("weights", weights)
    times = ratios(interleaved(passes, options.rounds), BASELINE)
    show(f"one forward pass of {TEXTS} texts, without the head", times)
    finish([*weights, *times], options.json)


if __name__ == "__main__":
    main()
