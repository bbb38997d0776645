"""Wide heads: what they read, that nothing changes before a fit, what a fit brings, and what is refused."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import forwardtune as ft
from forwardtune._compat.torchvision import torchvision
from forwardtune.errors import InvalidArgumentError
from forwardtune.heads import fit_head
from forwardtune.tasks import Sources
from forwardtune.wide import averaged, widen_head
from tests.helpers.comparisons import DATA, needs_data
from tests.helpers.images import base_of, task_of

HEADS = {"resnet18": "fc", "vgg11": "classifier.6", "densenet121": "classifier", "vit_b_16": "heads.head"}
READ = {
    "resnet18": [("relu", 5), ("layer1", 5), ("layer2", 4), ("layer3", 2)],
    "vgg11": [("features.1", 5), ("features.4", 3), ("features.9", 2), ("features.14", 1), ("features.19", 1)],
    "densenet121": [("features.relu0", 5), *((f"features.transition{i}.conv", c) for i, c in ((1, 4), (2, 2), (3, 2)))],
    "vit_b_16": [(f"encoder.layers.encoder_layer_{i}", 1) for i in (0, 1, 2, 3, 5, 6, 7, 8, 9, 11)],
}


def network(name, device="cpu"):
    torch.manual_seed(0)
    size = {"image_size": 32} if name == "vit_b_16" else {}
    with torch.device(device):
        return torchvision().models.get_model(name, weights=None, num_classes=10, **size).eval()


def small():
    """A network whose maps shrink once."""
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 6, 3, padding=1), nn.ReLU()
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3))


@pytest.mark.parametrize("name", HEADS)
def test_the_last_layer_at_each_resolution_or_blocks_are_read(name):
    model, x = network(name), torch.randn(2, 3, 32, 32)
    before = model(x)
    wide = widen_head(model, HEADS[name], x)
    assert [(reading.layer, reading.cells) for reading in wide.readings] == READ[name]
    torch.testing.assert_close(model(x), before, atol=1e-5, rtol=1e-5)
    again = network(name, "meta")
    widen_head(again, HEADS[name], torch.empty(2, 3, 32, 32, device="meta"))
    assert {k: v.shape for k, v in again.state_dict().items()} == {k: v.shape for k, v in model.state_dict().items()}


def test_the_head_sees_its_input_and_the_means_over_grids():
    model, x = small(), torch.randn(5, 1, 8, 8)
    wide = widen_head(model, model[7], x, width=40)
    assert [(reading.layer, reading.cells) for reading in wide.readings] == [("1", 2), ("4", 1)]
    early, late = model[:2](x), model[:5](x)
    cells = torch.stack([early[:, :, i : i + 4, j : j + 4].mean((2, 3)) for i in (0, 4) for j in (0, 4)], 2)
    inputs = torch.cat([late.mean((2, 3)), cells.flatten(1), late.mean((2, 3))], 1)
    nn.init.normal_(wide.linear.weight)
    torch.testing.assert_close(model(x), wide.linear(inputs))


def test_sequences_are_averaged_over_positions_and_rows_are_as_they_are():
    x = torch.randn(2, 3, 4)
    assert torch.equal(averaged(x, 1), (x[:, 0] + x[:, 1] + x[:, 2]) / 3)
    assert torch.equal(averaged(x[:, 0], 1), x[:, 0])


def test_copies_and_pickles_read_their_own_layers():
    model, x = small(), torch.randn(5, 1, 8, 8)
    nn.init.normal_(widen_head(model, "7", x).linear.weight)
    expected = model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        model[0].weight.data.zero_()
        torch.testing.assert_close(other(x), expected)


def test_a_layer_that_works_in_place_does_not_change_what_was_read():
    def network(inplace):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 4), nn.ReLU(inplace=inplace), nn.Linear(4, 3))

    x = torch.randn(5, 2)
    ours, theirs = network(True), network(False)
    for model in (ours, theirs):
        torch.manual_seed(1)
        nn.init.normal_(widen_head(model, "2", x, layers=["0"]).linear.weight)
    torch.testing.assert_close(ours(x), theirs(x))


def test_a_pass_that_stops_early_leaves_nothing_in_copies():
    model, x = small(), torch.randn(2, 1, 8, 8)
    wide = widen_head(model, "7", x)
    model[:4](x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(InvalidArgumentError, match="did not run before it"):
            other[7](torch.zeros(2, 6))
    assert wide.readings[0].layer == "1"


def test_threads_do_not_read_each_others_layers():
    model = small()
    nn.init.normal_(widen_head(model, "7", torch.randn(2, 1, 8, 8)).linear.weight)
    batches = [torch.randn(4, 1, 8, 8) for _ in range(40)]
    expected = [model(x) for x in batches]
    with ThreadPoolExecutor(4) as pool:
        for ours, theirs in zip(pool.map(model, batches), expected, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_a_fit_finds_what_only_early_layers_know():
    """The class is where the bright pixel is, which the last layer's mean over all positions does not tell."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(3, (300,), generator=generator)
    x = 0.05 * torch.randn(300, 1, 12, 12, generator=generator)
    x[torch.arange(300), 0, 4 + 2 * y, 6] += 1.0
    narrow, model = small(), small()
    plain = fit_head(narrow, "7", [(x, y)])
    widen_head(model, "7", x[:2], width=600)
    wide = fit_head(model, "7", [(x, y)])
    assert wide.held_out_loss < 0.05 < 0.8 < plain.held_out_loss
    assert torch.equal(model(x).argmax(1), y)
    assert torch.equal(model[0].weight, narrow[0].weight)


@pytest.mark.parametrize("directions", [1, "per-example"])
def test_a_wide_head_is_tuned_like_any_layer(directions):
    model, y = small(), torch.arange(15) % 3
    x = torch.randn(15, 1, 8, 8) + 2 * y[:, None, None, None]
    wide = widen_head(model, "7", x, width=40)
    optimizer = ft.VS2P(wide.parameters(), lr=2.0, rho=0.1, directions=directions)

    def closure():
        losses = F.cross_entropy(model(x), y, reduction="none")
        return losses if directions == "per-example" else losses.mean()

    before = closure().mean()
    for _ in range(200):
        optimizer.step(closure)
    assert closure().mean() < 0.8 * before


def test_what_is_refused():
    model, x = small(), torch.randn(2, 1, 8, 8)
    with pytest.raises(InvalidArgumentError, match="the head 'x' is no layer of the model; name the Linear"):
        widen_head(model, "x", x)
    with pytest.raises(InvalidArgumentError, match="the head '0' is a Conv2d"):
        widen_head(model, "0", x)
    with pytest.raises(InvalidArgumentError, match="width must be at least 1, not 0"):
        widen_head(model, "7", x, width=0)
    with pytest.raises(InvalidArgumentError, match="has no layer '9' to read"):
        widen_head(model, "7", x, layers=["9"])
    with pytest.raises(InvalidArgumentError, match="'7' cannot be read: it must run once, before the head"):
        widen_head(model, "7", x, layers=["7"])
    for layers in ([], ["1", "1"]):
        with pytest.raises(InvalidArgumentError, match="name layers to read, each once"):
            widen_head(model, "7", x, layers=layers)
    with pytest.raises(InvalidArgumentError, match="no maps and no blocks to read below the head; name layers"):
        widen_head(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "1", torch.zeros(3, 2))
    by_token = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(2), nn.Linear(36, 2))
    with pytest.raises(InvalidArgumentError, match=r"the head '2' returns \(2, 4, 2\); it must run once, with one row"):
        widen_head(by_token, "2", x)
    twice = lambda x: model(x) + model(x)  # noqa: E731
    with pytest.raises(InvalidArgumentError, match=r"the head '7' runs 2 times; it must run once"):
        widen_head(model, "7", x, forward=twice)
    assert type(model[7]) is nn.Linear
    assert type(by_token[2]) is nn.Linear
    assert not any(module._forward_hooks for module in model.modules())
    widen_head(model, "7", x)
    with pytest.raises(InvalidArgumentError, match="the head '7' is a WideHead"):
        widen_head(model, "7", x)
    with pytest.raises(InvalidArgumentError, match="reads '1', which did not run before it; call the whole model"):
        model[7](torch.zeros(2, 6))


def test_layers_are_named_by_the_user():
    model, x = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 3)), torch.randn(5, 2)
    before = model(x)
    wide = widen_head(model, "3", x, layers=["1", "0"])
    assert wide.linear.in_features == 12
    torch.testing.assert_close(model(x), before)
    model.train()
    assert widen_head(nn.Sequential(model[0], nn.Linear(4, 1)), "1", x, layers=["0"]).training


def test_workloads_with_wide_heads_have_bases_of_their_own(tmp_path):
    narrow, wide = task_of(fit=200), task_of(fit=200, head="wide")
    assert narrow.base_id != wide.base_id
    file = base_of(wide, tmp_path)
    model = wide.start(file)
    assert model.head.linear.in_features > 32
    assert wide.evaluate(model).train_loss < narrow.evaluate(narrow.start(base_of(narrow, tmp_path))).train_loss
    batch = wide.batch(torch.arange(4))
    assert torch.equal(wide.loss(model, batch), wide.loss(wide.start(file), batch))


@needs_data
def test_a_wide_head_tells_digits_apart_on_imagenet_weights(tmp_path):
    """With the network's own head it is below 70% on as many images."""
    file, scores = "weights/resnet18_imagenet_fp16.safetensors", {}
    for head in ("linear", "wide"):
        sizes = {"fit": 1000, "train_examples": 10, "test_examples": 500}
        task = task_of("resnet18", file, Sources(DATA), data="mnist", mode="eval", head=head, **sizes)
        scores[head] = task.evaluate(task.start(base_of(task, tmp_path))).metrics["accuracy"]
    assert scores["wide"] > 0.9 > 0.7 > scores["linear"]
