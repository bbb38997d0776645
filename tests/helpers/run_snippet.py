"""Executes one Python snippet of a document as it is printed, in the present folder; its own process.

    python -m tests.helpers.run_snippet DOCUMENT NUMBER

Its imports come first, as they stand. Then names and files that a snippet takes from its reader are put there, as small
as possible; a line of three dots is training.
"""

import ast
import copy
import sys
from pathlib import Path


def snippets(document):
    """The Python code in a document: each block's number of lines before it, and its text."""
    blocks, lines = [], document.read_text("utf-8").splitlines()
    for number, line in enumerate(lines):
        if line == "```python":
            blocks.append((number + 1, lines[number + 1 : lines.index("```", number)]))
    return [(first, "\n".join(block)) for first, block in blocks]


def weights_and_batches():
    """A small network and data, as a training script has them."""
    import torch
    import torch.nn.functional as F

    import forwardtune as ft

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    base = copy.deepcopy(model)
    data = torch.utils.data.TensorDataset(torch.randn(256, 4), torch.randint(0, 3, (256,)))
    optimizer = ft.VS2P(model.parameters(), lr=0.5)

    def training(names, steps=501):
        for _ in range(steps):
            names["optimizer"].step(lambda: F.cross_entropy(names["model"](data.tensors[0]), data.tensors[1]))

    return {
        **{name: getattr(ft, name) for name in ft.__all__},
        "ft": ft,
        "torch": torch,
        "F": F,
        "model": model,
        "base_model": base,
        "another_base": copy.deepcopy(base),
        "load_base_model": lambda: copy.deepcopy(base),
        "data": data,
        "x": data.tensors[0],
        "y": data.tensors[1],
        "loader": torch.utils.data.DataLoader(data, 64),
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000),
        "training": training,
    }


def recorded_run():
    """What a run of a hundred steps left behind."""
    names = weights_and_batches()
    with names["ft"].Ledger("run.ledger", names["model"]) as ledger:
        names["optimizer"].recorder = ledger
        names["training"](names, 101)
    return names


def language_model():
    """A small causal model, texts, and arguments for training."""
    from forwardtune.integrations.huggingface import ForwardTrainer, ForwardTrainingArguments
    from tests.helpers.trainers import causal, ragged

    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True}
    args = ForwardTrainingArguments("out", max_steps=20, ledger="out/run.ledger", **quiet)
    model, train = causal(), ragged()

    def training(names):
        ForwardTrainer(names["model"], names["args"], train_dataset=train).train()

    named = {"ForwardTrainer": ForwardTrainer, "ForwardTrainingArguments": ForwardTrainingArguments}
    return {**named, "model": model, "args": args, "train": train, "test": train[:8], "training": training}


def comparison():
    """A store with a finished run, whose id stands for "ID", and a spec."""
    from tests.helpers.comparisons import TEXT, finished

    text = TEXT.replace("seeds = [0, 1]", "seeds = [0]").replace("lr = [1, 4]", "lr = [1]")
    _, store = finished(Path("results/digits"), text)
    run = next(store.runs.glob("*.json"))
    Path("mine.toml").write_text(text)
    return {"ID": run.stem}


NEEDS = {
    "ForwardTrainer": language_model,
    "start.safetensors": language_model,
    "forwardtune.experiments": comparison,
    "ledger.read": recorded_run,
}
"""By a word in the snippet; others need the network and its data."""


def execute(document, number):
    first, source = snippets(document)[number]
    tree = ast.increment_lineno(ast.parse(source), first)
    needs = next((needs for word, needs in NEEDS.items() if word in source), weights_and_batches)
    names, prepared = {"__name__": "__main__"}, False
    for node in tree.body:
        if not prepared and not isinstance(node, ast.Import | ast.ImportFrom):
            names, prepared = {**needs(), **names}, True
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and node.value.value is ...:
            names["training"](names)
        else:
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and part.value == "ID":
                    part.value = names["ID"]
            exec(compile(ast.Module([node], []), document, "exec"), names)


if __name__ == "__main__":
    execute(Path(sys.argv[1]), int(sys.argv[2]))
