"""Runs on every kind of workload: all networks, all adapters, and rates chosen on one workload for another."""

import pytest
import torch

from forwardtune.errors import ExperimentError
from forwardtune.experiments.comparison import Machine, compare
from forwardtune.experiments.events import Planned
from forwardtune.experiments.plan import plan
from forwardtune.experiments.scoring import chosen_rates, score
from forwardtune.experiments.store import Store
from forwardtune.tasks import Sources, Tasks
from tests.helpers.comparisons import make, parse
from tests.helpers.images import base_of
from tests.helpers.images import task_of as image_task
from tests.helpers.texts import models_and_tables
from tests.helpers.texts import task_of as text_task

WEIGHTS = {
    "cnn": 21_546,
    "densenet121": 6_964_106,
    "resnet18": 11_181_642,
    "vgg11": 128_807_306,
    "vit_b_16": 85_658_890,
}


def test_images_can_be_tuned_by_their_error_rate(tmp_path):
    task = image_task(objective="accuracy", batch=100, train_examples=50, test_examples=40)
    model = task.start(base_of(task, tmp_path))
    x, y = batch = task.batch(torch.arange(100))
    with torch.no_grad():
        assert task.loss(model, batch).item() == pytest.approx((model(x).argmax(1) != y).float().mean().item())
        scores = task.evaluate(model)
    assert scores.test_loss == pytest.approx(1 - scores.metrics["accuracy"], abs=1e-6)
    assert 0 < scores.train_loss < 1
    with pytest.raises(ExperimentError, match="objective"):
        image_task(objective="speed")


IMAGES = """
title = "a few steps"
queries = 6
batch = 4
seeds = [0]
evaluations = 1
train_examples = 8
test_examples = 8

[[workloads]]
data = "digits"
network = "NETWORK"
weights = "WEIGHTS"

[[methods]]
method = "VS2P"
lr = [1]

[[methods]]
method = "STP"
lr = [1e-3]
"""

ADAPTERS = """
title = "adapters"
queries = 20
batch = 8
seeds = [0]
evaluations = 2

[[workloads]]
name = "w"
data = "files"
network = "transformer"
weights = "causal"
train = "reviews.jsonl"
text = ["text"]
label = "label"
template = "{text} It was"
words = ["bad", "good"]
adapter = "ADAPTER"

[[methods]]
method = "VS2P"
lr = [3]
"""

RATES = """
title = "rates from one workload"
queries = 12
batch = 4
seeds = [0, 1]
evaluations = 2
network = "transformer"
weights = "causal"
train = "reviews.jsonl"
text = ["text"]
label = "label"
words = ["bad", "good"]
rates_from = "chooser"

[[workloads]]
name = "other"
data = "files"
template = "{text} It was"

[[workloads]]
name = "chooser"
data = "files"
template = "{text} Answer :"

[[methods]]
method = "VS2P"
lr = [1e-3, 50]

[[methods]]
method = "STP"
lr = [1e-4]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return models_and_tables(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("network", WEIGHTS)
def test_all_networks_take_a_few_steps(network, tmp_path):
    spec, store = parse(IMAGES.replace("NETWORK", network).replace("WEIGHTS", "random")), Store(tmp_path / "store")
    for run in plan(spec):
        result = make(run, store)
        assert (result.status, result.queries, result.weights) == ("finished", 6, WEIGHTS[network])
        first, last = result.curve.column("train_loss")
        assert first != last
        assert result.curve.queries == (0, 6)
    shape = (1, 8, 8) if network == "cnn" else (3, 32, 32)
    assert image_task(network).batch(torch.arange(4))[0].shape == (4, *shape)
    for file in store.bases.iterdir():  # half a gigabyte
        file.unlink()


def test_keys_of_texts_do_not_apply_to_images():
    text = IMAGES.replace("NETWORK", "resnet18").replace('"WEIGHTS"', '"random"\ntrain = "reviews.jsonl"')
    with pytest.raises(ExperimentError, match="train does not apply to digits; leave it out"):
        parse(text)


def test_torchvisions_weights_are_missed_before_anything_is_done(tmp_path):
    spec = parse(IMAGES.replace("NETWORK", "resnet18").replace("WEIGHTS", "torchvision"))
    with pytest.raises(ExperimentError, match="downloaded from the internet; allow it with --download"):
        compare(spec, Store(tmp_path / "store"), Tasks(Sources(), "cpu"), Machine())
    assert not (tmp_path / "store" / "spec.toml").exists()


@pytest.mark.parametrize("adapter", ["lora", "prefix", "prompt", "ia3"])
def test_adapters_are_tuned_and_nothing_else(tmp_path, folder, adapter):
    run = plan(parse(ADAPTERS.replace("ADAPTER", adapter), folder))[0]
    result = make(run, Store(tmp_path / "store"), sources=Sources(folder=folder))
    task = text_task(folder, "causal", adapter=adapter)
    network = task.make_base(tmp_path / "base.safetensors")
    tuned = [p for p in network.parameters() if p.requires_grad]
    assert result.weights == sum(p.numel() for p in tuned) < 0.6 * sum(p.numel() for p in network.parameters())
    assert result.status == "finished"
    assert result.curve.column("train_loss")[0] != result.final.train_loss
    batch = task.batch(torch.arange(8))
    with torch.no_grad():
        before = task.loss(network, batch).item()
        for p in tuned:
            p.add_(0.05)
        assert task.loss(network, batch).item() != before


def test_rates_come_from_one_workload(tmp_path, folder):
    spec, store = parse(RATES, folder), Store(tmp_path / "store")
    assert [run.workload.name for run in plan(spec)] == ["chooser"] * 6
    assert score(spec, store).missing == 6 + 4
    events = []
    compare(spec, store, Tasks(Sources(folder=folder), "cpu"), Machine(workers=1, threads=1), events.append)
    scores = score(spec, store)
    assert scores.missing == 0
    other, chooser = scores.workloads
    small, large = chooser.methods[0].rates
    best = small if small.mean_loss < large.mean_loss else large
    assert abs(small.mean_loss - large.mean_loss) > 1e-3  # the choice is no accident
    assert chosen_rates(spec, store) == {"VS2P": best.lr, "STP": 1e-4}
    assert [len(method.rates) for method in chooser.methods] == [2, 1]
    assert [[rate.lr for rate in method.rates] for method in other.methods] == [[best.lr], [1e-4]]
    assert [event.runs for event in events if isinstance(event, Planned)] == [6, 10]
    with pytest.raises(ExperimentError, match="workload 'nobody' is not known"):
        parse(RATES.replace('rates_from = "chooser"', 'rates_from = "nobody"'), folder)
