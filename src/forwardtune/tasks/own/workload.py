"""A workload of the user's own: a function that a spec names, and what it is called with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from forwardtune.errors import ExperimentError
from forwardtune.tasks.workload import Workload


@dataclass(frozen=True, kw_only=True)
class OwnWorkload(Workload):
    """What a function of the user's own gives: a model, its data and its loss.

    task: the function as ``"MODULE:FUNCTION"``; the module is a file in the spec's folder, or an installed one.
    options: what the function is called with, by keyword.
    """

    task: str
    options: Mapping[str, object] | None = field(hash=False, default=None)
    data: str = field(init=False, default="")
    network: str = field(init=False, default="")
    weights: str = field(init=False, default="the task's own")
    objective: str = field(init=False, default="loss")
    fit: int = field(init=False, default=0)
    compute: str = field(init=False, default="float32")

    def __post_init__(self) -> None:
        super().__post_init__()
        module, _, function = self.task.partition(":")
        if not (function.isidentifier() and all(part.isidentifier() for part in module.split("."))):
            raise ExperimentError(f'task must be "MODULE:FUNCTION", as in "mine:make", not {self.task!r}')
        try:
            json.dumps(self.options, allow_nan=False)
        except (TypeError, ValueError):
            raise ExperimentError(
                "options must be texts, finite numbers, true, false, and lists and tables of those"
            ) from None

    @property
    def subject(self) -> str:
        return self.name
