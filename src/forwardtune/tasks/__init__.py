"""What is tuned: data, models, base weights, and how a model is evaluated.

workload   what workloads of all kinds have in common
task       a workload made ready: data in memory, loss, evaluation, base weights
sources    where data and weights are read from
identity   hashes that identify descriptions and files
images/    networks on image datasets
texts/     transformers on texts, labelled or plain
own/       models, data and losses of the user's own
"""

from forwardtune._compat import check_transformers
from forwardtune.tasks.images.task import ImageTask
from forwardtune.tasks.images.workload import IMAGES, ImageWorkload
from forwardtune.tasks.own.task import OwnTask, UserTask
from forwardtune.tasks.own.workload import OwnWorkload
from forwardtune.tasks.sources import Sources
from forwardtune.tasks.task import Scores, Task
from forwardtune.tasks.texts.workload import LM, TEXTS, TextWorkload
from forwardtune.tasks.workload import Workload

__all__ = [
    "IMAGES", "TEXTS", "ImageWorkload", "OwnTask", "OwnWorkload", "Scores", "Sources", "Task", "Tasks", "TextWorkload",
    "Workload", "kind_of", "prepare",
]  # fmt: skip


def kind_of(data: str) -> type[Workload]:
    """The kind of workload that a dataset belongs to."""
    return ImageWorkload if data in IMAGES else TextWorkload


def prepare(workload: Workload, sources: Sources, device: str) -> Task:
    """The workload made ready: its data in memory, its model known."""
    if isinstance(workload, ImageWorkload):
        return ImageTask(workload, sources, device)
    if isinstance(workload, OwnWorkload):
        return UserTask(workload, sources, device)
    assert isinstance(workload, TextWorkload)
    check_transformers()
    from forwardtune.tasks.texts.task import LanguageTask, TextTask

    return (LanguageTask if workload.setup == LM else TextTask)(workload, sources, device)


class Tasks:
    """The tasks of a comparison, each prepared when it is first asked for, and once."""

    def __init__(self, sources: Sources, device: str) -> None:
        self.sources, self.device = sources, device
        self._prepared: dict[Workload, Task] = {}

    def __getitem__(self, workload: Workload) -> Task:
        if workload not in self._prepared:
            self._prepared[workload] = prepare(workload, self.sources, self.device)
        return self._prepared[workload]
