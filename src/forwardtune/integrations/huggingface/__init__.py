"""Hugging Face: a Trainer that needs only forward passes, with or without peft's adapters."""

from forwardtune.integrations.huggingface.arguments import ForwardTrainingArguments
from forwardtune.integrations.huggingface.footprint import Footprint, footprint
from forwardtune.integrations.huggingface.trainer import ForwardTrainer

__all__ = ["Footprint", "ForwardTrainer", "ForwardTrainingArguments", "footprint"]
