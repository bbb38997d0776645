"""The page with the paper's numbers, made from results that are made up here."""

import json
import re
import tomllib

import pytest

from forwardtune import presets
from forwardtune.errors import ExperimentError
from forwardtune.experiments.plan import plan
from forwardtune.experiments.result import Circumstances, Code, Curve, Host
from forwardtune.experiments.store import Store
from forwardtune.reproduction.page import PRINTED, page
from forwardtune.tasks import Scores
from forwardtune.tasks.task import DataFacts
from tests.helpers.comparisons import made_up


def make_up(folder, name, but=()):
    """Results for a preset: accuracy and loss follow from the method, the rate and the seed."""
    spec = presets.load(name)
    store = Store(folder / name)
    for run in plan(spec):
        if run.workload.network in but:
            continue
        index = run.method.lr.index(run.lr)
        loss = 2 - 0.1 * index if run.method.label == "VS2P" else 2 + 0.1 * index
        before, after = Scores(4.0, 4.0, {"accuracy": 0.1}), Scores(loss, loss, {"accuracy": 0.5 + 0.01 * run.seed})
        store.save(
            made_up(
                Curve((0, 10, 20, 30), (before, after, after, after)),
                id=run.id,
                run=run.description,
                data=DataFacts(run.workload.data, 777, 55, "", "a batch is missing"),
                code=Code({"torch": "2.0"}, "0123456789abcdef", True),
                circumstances=Circumstances(
                    Host("a host", "a CPU", 2, "Linux"), "", "2026-01-02T03:04:05+00:00", 1, 3600 / len(plan(spec)), 1
                ),
            )
        )


def table(text, title):
    block = text.split(f"### {title}\n\n")[1].split("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]


def test_our_numbers_stand_beside_the_papers(tmp_path):
    make_up(tmp_path, "reduced/mnist-200")
    text = page(tmp_path)
    head, _, dense, resnet, vgg, _ = table(text, "Test accuracy (%)")
    assert head == ["network", "at the start", "VS2P", "paper", "MeZO", "paper", "STP\N{PRIME}", "paper"]
    assert dense == [
        "densenet121",
        "10.0",
        "50.5 ± 0.7",
        "86.6 ± 2.4",
        "50.5 ± 0.7",
        "72.7 ± 3.3",
        "50.5 ± 0.7",
        "84.1 ± 2.3",
    ]
    assert resnet[2:4] == ["51.0 ± 1.0", "72.8 ± 1.5"]
    assert vgg[2:6] == ["50.0", "68.8 ± 4.3", "50.0", "11.4 ± 0.0"]
    # VS2P is at 1.7 from the first of three evaluations on, and the others end at 2
    assert table(text, "Acceleration of VS2P")[2] == ["densenet121", "3.0", "4.2", "3.0", "1.6"]
    assert table(text, "Training loss")[2][:3] == ["densenet121", "4.00", "1.70 (lr 27, an end of its grid)"]
    differences = table(text, "What differs from the paper's settings")
    assert differences[3][1:4] == ["600 queries (paper 200 epochs)", "64 (paper 1024)", "3 (paper 3)"]
    assert differences[3][5:] == ["777 / 55 (paper 60,000 / 10,000)", "500 / 1000"]
    assert differences[4][6] == "200 / 200"
    assert "- VS2P: 1, 3, 9, 27 (paper 1, 1.5, 3, 5)" in text
    assert "1.0 hours in all" in text
    assert "0123456789+" in text
    assert "- `full/mnist-200`: MNIST, 200 epochs" in text


def test_a_page_of_what_is_there(tmp_path):
    make_up(tmp_path, "reduced/cifar10-100", but=("vgg11",))
    make_up(tmp_path, "full/vgg11-failure")
    text = page(tmp_path)
    sections = re.findall(r"^## (.*)", text, re.MULTILINE)
    assert sections == ["MeZO on VGG11 and MNIST", "CIFAR-10, reduced from 100 epochs", "Not run"]
    assert "12 runs missing." in text
    assert "vgg11 | missing | missing" in text
    assert "What differs" not in text.split("## CIFAR-10")[0]
    with pytest.raises(ExperimentError, match="holds no results of the paper's presets"):
        page(tmp_path / "nothing")


def test_the_printed_numbers_are_complete():
    printed = tomllib.loads(PRINTED.read_text())
    assert printed.keys() == {"mnist-200", "cifar10-200"}
    for networks in printed.values():
        assert networks.keys() == {"densenet121", "resnet18", "vgg11", "vit_b_16"}
        for entry in networks.values():
            assert entry["accuracy"].keys() == {"VS2P", "MeZO", "STP"}
            assert entry["acceleration"].keys() == {"MeZO", "STP"}
    assert json.dumps(printed).count("N/A") == 4
