"""A spec as a list of runs, always the same, each known by a hash of all that decides its outcome."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property

from forwardtune.experiments.result import Description, Rate, rate_name
from forwardtune.experiments.spec import Backpropagation, Method, Spec
from forwardtune.noise import NOISE_VERSION
from forwardtune.tasks import Workload
from forwardtune.tasks.identity import RULES, brief, fingerprint


@dataclass(frozen=True)
class Run:
    """One method with one rate and seed on one workload."""

    workload: Workload
    method: Method
    lr: Rate
    seed: int
    decay: str

    @property
    def description(self) -> Description:
        return Description(
            workload=brief(self.workload, without=("name", "seeds")),
            method=self.method.method,
            settings=self._settings,
            lr=self.lr,
            seed=self.seed,
            decay=self.decay,
            noise=NOISE_VERSION,
            rules=RULES,
        )

    @property
    def _settings(self) -> dict[str, object]:
        """The method's; units are left out where they are those that a description without them has always meant.

        Of weights of 16 bits the rounding is told, which in a description without it is to nearest.
        """
        settings = {name: value for name, value in self.method.settings.items() if name != "scale"}
        is_short = getattr(self.workload, "dtype", "") in ("bfloat16", "float16")
        if is_short and not isinstance(self.method, Backpropagation):
            settings = {"rounding": "stochastic", **settings}
        implied = "relative" if self.lr == "auto" else "absolute"
        return settings if self.method.scale == implied else {**settings, "scale": self.method.scale}

    @cached_property
    def id(self) -> str:
        return fingerprint(asdict(self.description))

    @property
    def title(self) -> str:
        return f"{self.workload.name} {self.method.title} lr {rate_name(self.lr)} seed {self.seed}"


def plan(spec: Spec, chosen: Mapping[str, Rate] | None = None) -> tuple[Run, ...]:
    """Every run of the comparison, workload by workload.

    Where all rates come from one workload, the others have runs only for methods whose rate is `chosen`, by label.
    """
    return tuple(_runs(spec, chosen or {}))


def _runs(spec: Spec, chosen: Mapping[str, Rate]) -> Iterator[Run]:
    for workload in spec.workloads:
        for seed in workload.seeds:
            for method in spec.methods:
                for lr in rates(spec, workload, method, chosen):
                    yield run_of(spec, workload, method, lr, seed)


def run_of(spec: Spec, workload: Workload, method: Method, lr: Rate, seed: int) -> Run:
    """A run of a spec, of any rate; one that is found while training needs no decay."""
    return Run(workload, method, lr, seed, "none" if lr == "auto" else spec.decay)


def rates(spec: Spec, workload: Workload, method: Method, chosen: Mapping[str, Rate]) -> tuple[Rate, ...]:
    """Those at which a method is run on a workload."""
    if spec.rates_from in ("", workload.name) or method.is_auto:
        return method.lr
    return (chosen[method.label],) if method.label in chosen else ()
