"""What runs are made on: data, networks, base weights, and how well a network does."""

from functools import lru_cache

from forwardtune.errors import ExperimentError
from forwardtune.experiments.spec import IMAGES, Workload
from forwardtune.experiments.workloads.image_task import ImageTask
from forwardtune.experiments.workloads.sources import Sources, digest
from forwardtune.experiments.workloads.task import Evaluation, Task

__all__ = ["Evaluation", "Sources", "Task", "check_transformers", "digest", "prepare"]


@lru_cache(maxsize=2)
def prepare(workload: Workload, sources: Sources, device: str) -> Task:
    """The workload with its data in memory."""
    if workload.data in IMAGES:
        return ImageTask(workload, sources, device)
    check_transformers()
    from forwardtune.experiments.workloads.text_task import TextTask

    return TextTask(workload, sources, device)


def check_transformers() -> None:
    """Imports it now, which takes seconds, or says how to install it."""
    try:
        from forwardtune.integrations.huggingface import library  # noqa: F401
    except ImportError as error:
        raise ExperimentError(str(error)) from None
