"""The page on rates that are found while training, from results that are made up here."""

import pytest

from forwardtune import presets
from forwardtune.errors import ExperimentError
from forwardtune.experiments.plan import plan
from forwardtune.experiments.result import Circumstances, Code, Curve, Host
from forwardtune.experiments.store import Store
from forwardtune.reproduction.rates_page import rates_page
from forwardtune.tasks import Scores
from tests.helpers.comparisons import made_up

LOSSES = {"VS2P auto": 0.9, "VS2P relative": 1.0, "VS2P": 2.0, "MeZO relative": 1.5, "MeZO": 3.0}


def make_up(folder, name, metric="accuracy", **fields):
    """The first rate of every grid is the best, and each further one a tenth worse; seeds differ by a hundredth."""
    store = Store(folder / name)
    for run in plan(presets.load(name)):
        best = LOSSES.get(run.method.label, 4.0) * (1 + 0.1 * run.method.lr.index(run.lr))
        loss = best + 0.01 * run.seed * (1 if run.method.is_auto else 2)
        before, after = Scores(5.0, 5.0, {metric: 0.1}), Scores(loss, loss, {metric: 0.5})
        host = Circumstances(Host("a host", "a CPU", 2, "Linux"), "", "2026-01-02T03:04:05+00:00", 1, 36, 1)
        curve = Curve((0, 10, 20, 30), (before, after, after, after))
        code = Code({"torch": "2.0"}, "0123456789", True)
        store.save(
            made_up(curve, id=run.id, run=run.description, code=code, circumstances=host, metrics=(metric,), **fields)
        )


def test_auto_stands_beside_every_grid(tmp_path):
    make_up(tmp_path, "auto/digits")
    text = rates_page(tmp_path)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    by_name = {row[0]: row[1:] for row in rows}
    # of VS2P's twenty rates the best has 1.04 and the median is 1.99, between its relative and its absolute ones
    assert ["auto/digits", "VS2P auto", "-12%", "-40%", "-77%", "-54%", "-64%", "-81%"] in rows
    assert by_name["auto/digits"] == ["-49%", "-49%", "+0%"]
    assert by_name["**VS2P auto**"] == ["none", "0.920 ± 0.016", "50.0 ± 0.0", "found", ""]
    # ten rates: the median of 1.0 to 1.9 (and 0.04 for the seeds) is 1.49
    assert by_name["VS2P relative"] == ["10", "1.04 ± 0.032", "50.0 ± 0.0", "2, an end of its grid", "1.49"]
    assert by_name["VS2P"][1] == "2.04 ± 0.032"
    assert by_name["STP\N{PRIME}"][0] == "5"
    # by seed the differences are 0.1, 0.11, ... 0.14: 0.12 of 1.04, give or take 2.776 * 0.0158 / sqrt(5)
    assert (
        "- VS2P auto against VS2P relative at its best rate: -12% training loss (-13% to -10%); against a guess of its "
        "rate -38%." in text
    )
    assert "- VS2P relative against VS2P at its best rate: -49% training loss" in text
    assert "- VS2P auto, own lines against VS2P auto: +337% training loss" in text  # 4.02 and 0.92
    assert "training loss is 5.00, the test accuracy 10.0%" in text


def test_perplexities_and_agreement_are_told_as_they_are(tmp_path):
    make_up(tmp_path, "lines/texts", "perplexity", agreement=0.25)
    text = rates_page(tmp_path)
    assert "| method | rates | training loss | perplexity | best rate | a guess | agreement |" in text
    assert "| **VS2P auto** | none | 0.920 ± 0.016 | 0.5 ± 0 | found |  | 0.25 ± 0.00 |" in text
    assert "the test perplexity 0.1.\n" in text


def test_without_results_there_is_no_page(tmp_path):
    with pytest.raises(ExperimentError, match="auto/digits"):
        rates_page(tmp_path)
