"""Small models and data for tests of the Trainer; run as a command, it trains in several processes."""

import sys
from pathlib import Path

import torch

from forwardtune._compat.transformers import transformers
from forwardtune.integrations.huggingface import ForwardTrainer, ForwardTrainingArguments

SIZE = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


def classifier(classes=2, seed=0, **config):
    transformers.set_seed(seed)
    config = transformers.LlamaConfig(**SIZE | {"num_labels": classes} | config)
    return transformers.LlamaForSequenceClassification(config).double()


def causal(seed=0, **config):
    transformers.set_seed(seed)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZE | config)).double()


def sentences(n=64, length=8, classes=2):
    """Sequences of tokens, the last of which determines the class."""
    tokens = torch.randint(1, 64, (n, length), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": int(row[-1]) * classes // 64} for row in tokens]


def ragged(n=64):
    """Texts for a causal model, with different numbers of labels."""
    rows = torch.randint(1, 64, (n, 10), generator=torch.Generator().manual_seed(1))
    hidden = torch.arange(n) % 7
    return [
        {"input_ids": row, "labels": row.masked_fill(torch.arange(10) < k, -100)}
        for row, k in zip(rows, hidden, strict=True)
    ]


def trainer(folder, model, data, *, micro=16, accumulation=1, objective="loss", more=None, **settings):
    options = {"method": "VS2P", "learning_rate": 2.0, "rho": 1e-2, "scale": "absolute"}
    options |= {"max_steps": 10, "seed": 3, "logging_steps": 1}
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "save_strategy": "no"}
    sizes = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": accumulation}
    args = ForwardTrainingArguments(str(folder), **quiet | sizes | options | settings)
    return ForwardTrainer(model, args, train_dataset=data, objective=objective, **more or {})


def trained(folder, model, data, **settings):
    """The weights after training."""
    trainer(folder, model, data, **settings).train()
    return weights(model)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


if __name__ == "__main__":
    folder, objective = Path(sys.argv[1]), sys.argv[2]
    model = classifier()
    made = trainer(folder, model, sentences(), micro=8, objective=objective, ledger=str(folder / "run.ledger"))
    if made.accelerator.process_index:  # only the first process's weights count
        with torch.no_grad():
            model.model.norm.weight.add_(1.0)
    made.train()
    torch.save(weights(model), folder / f"weights{made.accelerator.process_index}.pt")
    torch.distributed.destroy_process_group()
