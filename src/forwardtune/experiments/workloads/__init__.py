"""What runs are made on: data, networks, base weights, and how well a network does."""

from forwardtune.experiments.workloads.task import Evaluation, Sources, Task, digest, prepare

__all__ = ["Evaluation", "Sources", "Task", "digest", "prepare"]
