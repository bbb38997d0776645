"""The page with the paper's numbers, made from results that are made up here."""

import json
import math
import re

import pytest

from forwardtune import presets
from forwardtune.errors import ExperimentError
from forwardtune.experiments.evidence import Evidence
from forwardtune.experiments.plan import plan
from forwardtune.experiments.result import Base, Circumstances, Code, Curve, Host
from forwardtune.experiments.scoring import chosen_rates
from forwardtune.experiments.store import Store
from forwardtune.reproduction.comparisons import PRINTED
from forwardtune.reproduction.page import page
from forwardtune.tasks import Scores
from forwardtune.tasks.task import DataFacts
from tests.helpers.comparisons import made_up

NONE = "no results"
PRIME = "\N{PRIME}"


def make_up(folder, name, outcome):
    """Results for a preset; an outcome is told by the run: its losses from the start on, and what else it has."""
    spec, store = presets.load(name), Store(folder / name)
    for _ in range(2):  # rates may be chosen by the first runs
        for run in plan(spec, chosen_rates(spec, store)):
            told = outcome(run)
            if told == NONE or store.result(run.id):
                continue
            losses, (before, after) = told["losses"], told.get("scores", (0.1, 0.5))
            metric = told.get("metric", "accuracy")
            scores = [Scores(loss, loss, {metric: before if i == 0 else after}) for i, loss in enumerate(losses)]
            host = Host("a host", "a CPU", 2, "Linux")
            times = "2026-01-01T03:04:05+00:00", "2026-01-02T03:04:05+00:00"
            store.save(
                made_up(
                    Curve(tuple(range(0, 10 * len(losses), 10)), tuple(scores)),
                    id=run.id,
                    run=run.description,
                    status=told.get("status", "finished"),
                    metrics=(metric,),
                    data=DataFacts(run.workload.data, 777, 400, "", majority=told.get("majority")),
                    code=Code({"torch": "2.0"}, "0123456789abcdef", True),
                    base=Base("0", "0", {metric: told["before"]} if "before" in told else {}),
                    threads=2,
                    circumstances=Circumstances(host, *times, 1, told.get("seconds", 60.0), told.get("memory", 1)),
                )
            )
    return spec, store


def flat(loss, **more):
    return {"losses": (4.0, loss, loss, loss), **more}


def by_grid(run):
    """VS2P is best at its largest rate, the others at their first."""
    index = run.method.lr.index(run.lr)
    return flat(2 - 0.1 * index if run.method.label == "VS2P" else 2 + 0.1 * index, scores=(0.1, 0.5 + 0.01 * run.seed))


def table(text, title, number=0):
    """The rows of a table after a title."""
    lines = re.findall(r"(?:^\|.*\n)+", text.split(title)[1], re.MULTILINE)[number].splitlines()
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if "---" not in line]


CLAIM = f"## Does VS2P need fewer queries than MeZO and STP{PRIME}?"
GAIN = "## Does tuning improve a pretrained model in an hour of two cores?"
COST = "## What does it cost beside backpropagation?"
DECIDE = "decide/mnist-resnet18"

ENDS = {
    "VS2P": (0.90, 0.95, 1.15),
    "MeZO": (1.0, 1.1, 1.2),
    "STP": (2.0, 2.1, 2.2),
    "VS2P auto": (0.5, 0.6, 0.7),
}


def second_rate(run):
    """What a pilot comes to if the second of a method's rates is the best, so that its grid need not be extended."""
    grid = presets.load(DECIDE).method(run.method.label).lr
    return flat(1.0 if run.lr in ("auto", *grid[1:2]) else 2.0)


def decided(run):
    """The pilot chooses the second rates; VS2P is at its end after two thirds of its queries, and twice as fast.

    Backpropagation has no results.
    """
    if run.method.method == "AdamW":
        return NONE
    if run.workload.name == "pilot":
        return second_rate(run)
    loss = ENDS[run.method.label][run.seed]
    seconds = 60.0 if run.method.method == "VS2P" else 120.0
    return {"losses": (4.0, loss + 1, loss, loss), "seconds": seconds, "scores": (0.1, 0.6)}


def test_the_claim_is_answered_with_intervals(tmp_path):
    make_up(tmp_path, DECIDE, decided)
    text = page(tmp_path)
    answer = text.split(CLAIM)[1].split(GAIN)[0]
    assert "**Where it is decided, yes.**" in answer
    # differences -0.1, -0.15, -0.05 of 1.1: -0.1 give or take 4.303 * 0.05 / sqrt(3) = 0.124
    assert "- VS2P against MeZO, 1 workload: not decided (at most 20% lower or 2% higher).\n" in answer
    assert f"- VS2P against STP{PRIME}, 1 workload: lower.\n" in answer
    assert "- VS2P auto against VS2P, 1 workload: lower.\n" in answer
    assert table(text, CLAIM) == [
        ["final training loss", "queries", "seeds", "VS2P", "MeZO", f"STP{PRIME}", "VS2P auto"],
        [
            DECIDE,
            "30",
            "3",
            "1.00 ± 0.13 (2)",
            "1.10 ± 0.10 (2e-05)",
            "2.10 ± 0.10 (0.00075)",
            "0.600 ± 0.10",
        ],
    ]
    header, mezo, stp, auto, *_ = table(text, CLAIM, 1)
    assert header == ["", "workload", "difference", "decided?", "acceleration", "paper", "by the clock"]
    # at MeZO's end after 20 of 30 queries, and after 40 of its 120 seconds
    names, numbers = ["VS2P against MeZO", DECIDE], ["-0.100 [-0.224, +0.0242]", "no: at most 20% better or 2% worse"]
    assert mezo == [*names, *numbers, "1.5", "1.6", "3.0"]
    assert stp[2:] == ["-1.10 [-1.22, -0.976]", "yes: 46% to 58% better", "3.0", "1.4", "6.0"]
    assert auto[0] == "VS2P auto against VS2P"
    assert auto[5] == ""  # the paper has no such method
    assert "pilot" not in answer.replace("a pilot", "")


def test_evidence_makes_the_same_page_as_a_store(tmp_path):
    spec, store = make_up(tmp_path / "a", DECIDE, decided)
    evidence = Evidence(tmp_path / "b" / f"{DECIDE}.jsonl")
    evidence.keep(plan(spec, chosen_rates(spec, store)), store)
    assert page(tmp_path / "b").replace(str(tmp_path / "b"), "") == page(tmp_path / "a").replace(
        str(tmp_path / "a"), ""
    )


@pytest.mark.parametrize(
    ("vs2p", "answer", "told"),
    [
        ((2.0, 2.1, 2.2), "No.", "VS2P against MeZO, 1 workload: higher"),
        ((0.1, 0.2, 0.3), "Yes.", "VS2P against MeZO, 1 workload: lower"),
        ((2.0, 1.0, 3.0), "Not decided.", "VS2P against MeZO, 1 workload: not decided (at most"),
    ],
)
def test_the_answer_follows_the_numbers(tmp_path, vs2p, answer, told):
    others = (1.0, 1.15, 1.2)

    def outcome(run):
        if run.workload.name == "pilot":
            return second_rate(run)
        return flat(vs2p[run.seed] if run.method.method == "VS2P" else others[run.seed])

    make_up(tmp_path, DECIDE, outcome)
    text = page(tmp_path)
    assert f"**{answer}**" in text
    assert told in text


def test_one_seed_missing_runs_and_runs_that_diverged(tmp_path):
    """Of four networks one has all its runs, one diverged with MeZO, one has no results; of two there is one seed."""

    def outcome(run):
        if run.workload.network == "vgg11" or (run.workload.network == "vit_b_16" and run.method.label == "STP"):
            return NONE
        gone = run.workload.network == "resnet18" and run.method.label == "MeZO" and run.seed == 1
        return {**by_grid(run), "status": "diverged" if gone else "finished"}

    make_up(tmp_path, "reduced/mnist-200", outcome)
    text = page(tmp_path)
    assert "- VS2P against MeZO, 3 workloads: lower on 1, not decided on 1 with one seed and not compared on 1 " in text
    assert "since runs diverged.\n" in text
    _, *rows = table(text, CLAIM)
    assert [row[0].split(", ")[1] for row in rows] == ["densenet121", "resnet18", "vit_b_16"]
    assert rows[1][4].startswith("1 of 3 diverged (")
    assert rows[2][5] == "missing"
    assert "\n| VS2P against MeZO | reduced/mnist-200, resnet18 |  | MeZO: 1 of 3 diverged | ∞ [3.0, ∞] |" in text
    assert "\n| VS2P against MeZO | reduced/mnist-200, vit_b_16 | -0.300 | no: one seed | 3.0 | N/A |" in text
    assert "16 runs missing." in text


GAINS = """
title = "What tuning brings"
queries = 600
batch = 8
seeds = [0, 1, 2]
evaluations = 3
test_examples = 100

[[workloads]]
name = "sst2"
data = "sst2"
network = "transformer"
weights = "model"

[[methods]]
method = "VS2P"
label = "VS2P auto"
lr = "auto"

[[methods]]
method = "AdamW"
lr = [1e-4]
"""


@pytest.fixture
def gains(tmp_path, monkeypatch):
    """A preset gains/sst2 that has backpropagation."""
    file = tmp_path / "sst2.toml"
    file.write_text(GAINS)
    shipped = {**presets.files(), "gains/sst2": file}
    monkeypatch.setattr(presets, "files", lambda: shipped)
    return file


def test_a_gain_has_an_interval_of_seeds_and_test_set(tmp_path, gains):
    def outcome(run):
        return flat(1.0, scores=(0.5, 0.6 + 0.01 * run.seed), seconds=90.0)

    make_up(tmp_path, "gains/sst2", outcome)
    text = page(tmp_path)
    header, row = table(text, GAIN)
    # over seeds 11 give or take 4.303 / sqrt(3) = 2.48; of the test set 1.96 sqrt(0.25 + 0.61 * 0.39) / 10 = 13.69
    half = math.hypot(4.302652729911275 / math.sqrt(3), 196 * math.sqrt((0.25 + 0.61 * 0.39) / 100))
    assert f"{half:.2f}" == "13.91"
    assert dict(zip(header, row, strict=True)) == {
        "workload": "gains/sst2",
        "method": "VS2P auto",
        "metric": "accuracy (%)",
        "at the start": "50.0",
        "after": "61.0 ± 1.0",
        "gain": "+11.0 [-2.9, +24.9]",
        "better?": "not decided",
        "queries": "30",
        "minutes": "1.5",
        "threads": "2",
        "test examples": "100",
    }
    assert "**Not decidedly.** On 1 workload no gain within the hour has an interval that leaves out zero." in text
    gains.write_text(GAINS.replace("test_examples = 100", "test_examples = 1000"))  # of which there are 400
    make_up(tmp_path, "gains/sst2", outcome)
    text = page(tmp_path)
    assert table(text, GAIN)[1][5:7] == ["+11.0 [+3.7, +18.3]", "yes"]
    assert (
        "**Yes.** The largest gains whose interval leaves out zero: gains/sst2 by VS2P auto, accuracy from 50.0 to"
        in text
    )
    assert "to 61.0%. A run took 1.5 minutes on 2 threads.\n" in text


@pytest.mark.parametrize(
    ("told", "cells", "answer"),
    [
        # 4, 5 and 6 lower: 5 give or take 4.303 / sqrt(3)
        (lambda seed: ((30.0, 26.0 - seed), 60.0), ["+5.00 [+2.52, +7.48]", "yes"], "perplexity from 30 to 25. A run"),
        (lambda seed: ((30.0, 34.0 + seed), 60.0), ["-5.00 [-7.48, -2.52]", "no, worse"], "In 1 of 1 row the score is"),
        (lambda seed: ((30.0, 26.0 - seed), 3601.0), ["+5.00 [+2.52, +7.48]", "yes"], "**Not decidedly.**"),
        (lambda seed: ((30.0, math.inf), 60.0), ["", ""], "**Not decidedly.**"),
        (lambda seed: NONE if seed else ((30.0, 26.0), 60.0), ["+4.00", "one seed"], "**Not decidedly.**"),
    ],
)
def test_a_perplexity_gains_where_it_falls(tmp_path, gains, told, cells, answer):
    def outcome(run):
        if (seen := told(run.seed)) == NONE:
            return NONE
        return flat(1.0, metric="perplexity", scores=seen[0], seconds=seen[1])

    make_up(tmp_path, "gains/sst2", outcome)
    text = page(tmp_path)
    rows = dict(zip(*table(text, GAIN), strict=True))
    assert [rows.get("gain", ""), rows.get("better?", "")] == cells
    assert answer in text


def test_what_a_fit_brings_is_told_apart_from_what_tuning_does(tmp_path, gains):
    def outcome(run):
        return flat(1.0, before=0.1, scores=(0.5, 0.6 + 0.01 * run.seed))

    make_up(tmp_path, "gains/sst2", outcome)
    text = page(tmp_path)
    told = dict(zip(*table(text, GAIN), strict=True))
    assert (told["at the start"], told["fitted"], told["after"]) == ("10.0", "50.0", "61.0 ± 1.0")
    # of the test set 1.96 sqrt(0.09 + 0.61 * 0.39) / 10 = 11.22 against the start; against the fit as above
    assert (told["gain"], told["better?"]) == ("+51.0 [+39.5, +62.5]", "yes, by the fit")
    assert told["since the fit"] == "+11.0 [-2.9, +24.9]"
    assert "gains/sst2 by VS2P auto, accuracy from 10.0 (fitted 50.0) to 61.0%." in text
    assert "What was fitted first is made decidedly better by tuning in 0 of 1 row, and worse in 0." in text
    gains.write_text(GAINS.replace("test_examples = 100", "test_examples = 400"))
    make_up(tmp_path, "gains/sst2", outcome)
    text = page(tmp_path)
    assert "What was fitted first is made decidedly better by tuning in 1 of 1 row, and worse in 0." in text
    assert dict(zip(*table(text, GAIN), strict=True))["better?"] == "yes"
    make_up(tmp_path / "spoilt", "gains/sst2", lambda run: flat(1.0, before=0.1, scores=(0.9, 0.6 + 0.01 * run.seed)))
    text = page(tmp_path / "spoilt")
    assert "What was fitted first is made decidedly better by tuning in 0 of 1 row, and worse in 1." in text
    assert dict(zip(*table(text, GAIN), strict=True))["better?"] == "yes, by the fit"


def test_costs_stand_beside_those_of_backpropagation(tmp_path, gains):
    def outcome(run):
        backward = run.method.method == "AdamW"
        return flat(0.5 if backward else 1.0, seconds=20.0 if backward else 10.0, memory=(3 if backward else 1) * 10**9)

    make_up(tmp_path, "gains/sst2", outcome)
    text = page(tmp_path)
    assert (
        "Backpropagation ends with the lower training loss, compared with the best method without it on the same "
        "budget of queries. It takes 3.0 times as much memory, and 2.0 times as long per query.\n" in text
    )
    header, auto, backward = table(text, COST)
    assert header == [
        "workload",
        "method",
        "training loss",
        "score",
        "queries",
        "seconds",
        "queries/s",
        "peak memory (MB)",
    ]
    assert auto[1:] == ["VS2P auto", "1.00 ± 0.0", "accuracy 50.0 ± 0.0%", "30", "10", "3", "1,000"]
    assert backward[1:] == [
        "AdamW (backpropagation)",
        "0.500 ± 0.0",
        "accuracy 50.0 ± 0.0%",
        "30",
        "20",
        "1.5",
        "3,000",
    ]
    assert len(table(text, GAIN)) == 2  # by forward passes alone


def test_our_accuracies_stand_beside_the_papers(tmp_path):
    make_up(tmp_path, "reduced/mnist-200", by_grid)
    section = page(tmp_path).split("## MNIST, reduced from 200 epochs")[1]
    header, start, vs2p, mezo, *_ = table(section, "Preset")
    assert header == ["network", "method", "lr", "training loss", "test accuracy (%)", "paper", "queries/s"]
    assert start == ["densenet121", "at the start", "", "4.00", "10.0", "", ""]
    assert vs2p == ["densenet121", "VS2P", "27 ▸", "1.70 ± 0.0", "50.5 ± 0.7", "86.6 ± 2.4", "0.5"]
    assert mezo[5] == "72.7 ± 3.3"
    differences = table(section, "What differs from the paper's settings:")
    assert differences[2][1:4] == ["600 queries (paper 200 epochs)", "64 (paper 1024)", "3"]
    assert differences[2][5:] == ["777 / 400 (paper 60,000 / 10,000)", "500 / 1000"]
    assert "- Rates of VS2P: 1, 3, 9, 27 (paper 1, 1.5, 3, 5)\n" in section
    assert (
        "84 runs, 1.4 hours in all if made one after the other, on 2 cores of a CPU, torch 2.0, forwardtune at "
        "0123456789+, 2026-01-02." in section
    )
    assert "- `full/mnist-200`: MNIST, 200 epochs\n" in section.split("## Not run")[1]


def test_accuracies_above_the_majority_class(tmp_path):
    make_up(tmp_path, "reduced/sst2", lambda run: {**by_grid(run), "majority": 0.4})
    section = page(tmp_path).split("## SST-2, reduced")[1]
    header, start, vs2p, *_ = table(section, "Preset")
    assert header[5:] == ["above the majority class", "queries/s"]
    # 10, 11 and 12 points above: 11 give or take 4.303 / sqrt(3)
    assert (start[5], vs2p[5]) == ("-30.0", "+11.0 [+8.5, +13.5]")
    assert "weights/stories15M, prompt, all weights (paper gpt2, head, all weights)" in section


def test_a_page_of_what_is_there(tmp_path):
    make_up(tmp_path, "full/vgg11-failure", by_grid)
    text = page(tmp_path)
    sections = re.findall(r"^## (.*)", text, re.MULTILINE)
    assert sections == [CLAIM[3:], GAIN[3:], COST[3:], "MeZO on VGG11 and MNIST", "Not run"]
    assert "No comparison of these methods has results of all its runs at some rate.\n" in text
    assert "There are no results yet that could tell.\n" in text
    assert "No workload has results both with backpropagation and without.\n" in text
    assert "What differs" not in text
    with pytest.raises(ExperimentError, match="holds no results of the paper's presets"):
        page(tmp_path / "nothing")


def test_a_pilot_alone_answers_nothing(tmp_path):
    make_up(tmp_path, DECIDE, lambda run: second_rate(run) if run.workload.name == "pilot" else NONE)
    text = page(tmp_path)
    assert "No comparison of these methods has results" in text
    section = text.split("## ResNet18 on MNIST, with a budget that decides")[1].split("## Not run")[0]
    pilots = sum(len(method.lr) for method in presets.load(DECIDE).methods)
    assert f"15 runs missing.\n\n{pilots} runs, " in section


def test_the_printed_numbers_are_complete():
    assert PRINTED.keys() == {"mnist-200", "cifar10-200"}
    for networks in PRINTED.values():
        assert networks.keys() == {"densenet121", "resnet18", "vgg11", "vit_b_16"}
        for entry in networks.values():
            assert entry["accuracy"].keys() == {"VS2P", "MeZO", "STP"}
            assert entry["acceleration"].keys() == {"MeZO", "STP"}
    assert json.dumps(PRINTED).count("N/A") == 4
