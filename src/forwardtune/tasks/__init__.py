"""What runs are made on: data, models, base weights, and how well a model does.

workload   what a workload of any kind says
task       a workload made ready: data in memory, loss, evaluation, base weights
sources    where data and weights are found
identity   what descriptions and files are known by
images/    networks on sets of images
texts/     transformers on labelled texts
"""

from forwardtune._compat import check_transformers
from forwardtune.tasks.images.task import ImageTask
from forwardtune.tasks.images.workload import IMAGES, ImageWorkload
from forwardtune.tasks.sources import Sources
from forwardtune.tasks.task import Scores, Task
from forwardtune.tasks.texts.workload import TEXTS, TextWorkload
from forwardtune.tasks.workload import Workload

__all__ = [
    "IMAGES", "TEXTS", "ImageWorkload", "Scores", "Sources", "Task", "TextWorkload", "Workload", "kind_of", "prepare",
]  # fmt: skip


def kind_of(data: str) -> type[Workload]:
    """The kind of workload that a set of examples makes."""
    return ImageWorkload if data in IMAGES else TextWorkload


def prepare(workload: Workload, sources: Sources, device: str) -> Task:
    """The workload with its data in memory."""
    if isinstance(workload, ImageWorkload):
        return ImageTask(workload, sources, device)
    assert isinstance(workload, TextWorkload)
    check_transformers()
    from forwardtune.tasks.texts.task import TextTask

    return TextTask(workload, sources, device)
