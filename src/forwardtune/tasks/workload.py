"""What all workloads have in common."""

from __future__ import annotations

from dataclasses import dataclass

from forwardtune.errors import ExperimentError
from forwardtune.heads import FEWEST
from forwardtune.metrics import OF_CLASSES
from forwardtune.tasks.computing import COMPUTE
from forwardtune.toml_tables import at_least, is_name, one_of

OBJECTIVES = ("loss", *OF_CLASSES)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is tuned on what and for how long, and how often it is evaluated.

    weights: what tuning starts from; each kind of workload says what it may be.
    queries, epochs: the budget of a run, as either; an epoch is that of a method with two queries per step.
    objective: what is minimized on each batch: ``"loss"``, or one minus ``"accuracy"`` or ``"f1"``, which have no
        gradient.
    fit: to how many training examples a new head is fitted before the runs begin or, where the model is asked in
        its own terms, how its answers are read; 0 leaves both as they are.
    compute: what layers compute in, ``"float32"`` or ``"bfloat16"``; weights and losses are in float32 either way.
    evaluations: how often, at equal intervals, the model is evaluated, not counting the start.
    train_examples, test_examples: on how many fixed examples of each set; 0 means all.
    """

    name: str
    data: str
    network: str
    weights: str
    batch: int
    seeds: tuple[int, ...]
    queries: int | None = None
    epochs: int | None = None
    objective: str = "loss"
    fit: int = 0
    compute: str = "float32"
    evaluations: int = 40
    train_examples: int = 0
    test_examples: int = 0

    def __post_init__(self) -> None:
        is_name("name", self.name)
        if (self.queries is None) == (self.epochs is None):
            raise ExperimentError("the budget is given by either queries or epochs")
        for name in ("batch", "evaluations", "queries", "epochs"):
            if (given := getattr(self, name)) is not None:
                at_least(1, **{name: given})
        one_of("objective", self.objective, OBJECTIVES)
        one_of("compute", self.compute, COMPUTE)
        if self.fit and self.fit < FEWEST:
            raise ExperimentError(f"fit must be 0 or a number of examples, at least {FEWEST}, not {self.fit}")
        at_least(0, train_examples=self.train_examples, test_examples=self.test_examples)
        if len(set(self.seeds)) < len(self.seeds) or not all(0 <= seed < 2**63 for seed in self.seeds):
            raise ExperimentError(f"seeds must be different whole numbers from 0 to 2^63, not {list(self.seeds)}")

    @property
    def subject(self) -> str:
        """What tells it apart from its neighbours in a report."""
        return self.network

    def budget(self, examples: int) -> int:
        """The number of queries a run may use, given the size of the training set."""
        if self.batch > examples:
            raise ExperimentError(
                f"{self.name}: a batch of {self.batch} is more than the {examples:,} training examples; lower the batch"
            )
        return self.queries or 2 * (self.epochs or 0) * (examples // self.batch)
