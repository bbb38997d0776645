"""Data read from its published files, networks at 32 x 32, and weights that fit or are refused."""

import gzip
import pickle
import shutil

import numpy as np
import pytest
import torch
from tests.helpers.comparisons import DATA, needs_data, parse
from safetensors.torch import load_file, save_file

from forwardtune.errors import ExperimentError
from forwardtune.experiments.comparison import Machine, compare
from forwardtune.experiments.plan import plan
from forwardtune.experiments.runner import base_of, execute
from forwardtune.experiments.store import Store
from forwardtune.tasks import Sources, networks, prepare
from forwardtune.tasks.images.data import cifar10, digits, load, mnist
from forwardtune._compat.torchvision import torchvision

NETWORKS = ("densenet121", "resnet18", "vgg11", "vit_b_16")
WEIGHTS = {
    "cnn": 21_546,
    "densenet121": 6_964_106,
    "resnet18": 11_181_642,
    "vgg11": 128_807_306,
    "vit_b_16": 85_658_890,
}


def idx(array):
    head = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4) for n in array.shape)
    return head + array.astype(np.uint8).tobytes()


@pytest.fixture
def mnist_files(tmp_path):
    """A set of 5 and 3 images in MNIST's format, two files packed and two not."""
    rng = np.random.default_rng(0)
    arrays = {
        "train-images-idx3-ubyte": rng.integers(0, 256, (5, 28, 28)),
        "train-labels-idx1-ubyte": np.arange(5),
        "t10k-images-idx3-ubyte": rng.integers(0, 256, (3, 28, 28)),
        "t10k-labels-idx1-ubyte": np.arange(3),
    }
    (tmp_path / "mnist").mkdir()
    for i, (name, array) in enumerate(arrays.items()):
        if i % 2:
            (tmp_path / "mnist" / name).write_bytes(idx(array))
        else:
            (tmp_path / "mnist" / f"{name}.gz").write_bytes(gzip.compress(idx(array)))
    return tmp_path, arrays


def test_mnist_is_read_from_idx_files(mnist_files):
    folder, arrays = mnist_files
    images = mnist(folder)
    assert images.train_x.shape == (5, 1, 28, 28)
    assert np.array_equal(images.train_x[:, 0].numpy(), arrays["train-images-idx3-ubyte"])
    assert images.test_y.tolist() == [0, 1, 2]


def test_a_missing_file_is_named_with_its_place_and_the_remedy(mnist_files):
    folder, _ = mnist_files
    (folder / "mnist" / "train-labels-idx1-ubyte").unlink()
    with pytest.raises(
        ExperimentError, match=r"needs the file train-labels-idx1-ubyte, which is not in .*mnist, .*--download"
    ):
        mnist(folder)


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b"x" + b[1:], lambda b: b""])
def test_a_damaged_file_is_refused(mnist_files, damage):
    folder, _ = mnist_files
    file = folder / "mnist" / "train-labels-idx1-ubyte"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ExperimentError, match="is not the IDX file of MNIST"):
        mnist(folder)
    packed = folder / "mnist" / "train-images-idx3-ubyte.gz"
    packed.write_bytes(packed.read_bytes()[:20])
    with pytest.raises(ExperimentError, match="cannot be read"):
        mnist(folder)


def test_labels_and_images_must_belong_together(mnist_files):
    folder, _ = mnist_files
    (folder / "mnist" / "t10k-labels-idx1-ubyte").write_bytes(idx(np.arange(4)))
    with pytest.raises(ExperimentError, match="do not belong together"):
        mnist(folder)


def test_cifar_is_read_from_either_layout(tmp_path):
    rng = np.random.default_rng(0)
    batches = {
        name: rng.integers(0, 256, (4, 3072), dtype=np.uint8) for name in ("data_batch_1", "data_batch_3", "test_batch")
    }
    labels = [3, 1, 4, 1]
    for kind in ("bin", "py"):
        (tmp_path / kind / f"cifar-10-batches-{kind}").mkdir(parents=True)
    for name, pixels in batches.items():
        rows = np.concatenate([np.array(labels, np.uint8)[:, None], pixels], axis=1)
        (tmp_path / "bin" / "cifar-10-batches-bin" / f"{name}.bin").write_bytes(rows.tobytes())
        content = {b"data": pixels, b"labels": labels}
        (tmp_path / "py" / "cifar-10-batches-py" / name).write_bytes(pickle.dumps(content, protocol=2))
    one, other = cifar10(tmp_path / "bin"), cifar10(tmp_path / "py")
    assert one.digest == other.digest
    assert one.train_x.shape == (8, 3, 32, 32)
    assert torch.equal(one.train_x[4, 2, 31], torch.tensor(batches["data_batch_3"][0, -32:]))
    assert one.note.startswith("3 of CIFAR-10's 5 training batches are not in")


def test_what_is_missing_is_downloaded_and_nothing_else(tmp_path, monkeypatch):
    """The layout with more batches is read, also when a download has added it."""
    asked = []

    def fetch(name, folder):
        asked.append(name)
        (folder / "cifar-10-batches-py").mkdir()
        content = pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [0, 1]}, protocol=2)
        for part in ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"):
            (folder / "cifar-10-batches-py" / part).write_bytes(content)

    monkeypatch.setattr("forwardtune.tasks.images.data._download", fetch)
    (tmp_path / "cifar-10-batches-bin").mkdir()
    for part in ("data_batch_1", "test_batch"):
        (tmp_path / "cifar-10-batches-bin" / f"{part}.bin").write_bytes(bytes(3073))
    assert len(load("cifar10", tmp_path).train_y) == 1
    assert len(load("cifar10", tmp_path, download=True).train_y) == 10
    assert len(load("cifar10", tmp_path, download=True).train_y) == 10
    assert asked == ["cifar10"]


def test_a_batch_that_is_no_data_is_refused_and_not_run(tmp_path):
    home = tmp_path / "cifar-10-batches-py"
    home.mkdir()
    for name in ("data_batch_1", "test_batch"):
        (home / name).write_bytes(pickle.dumps({b"data": print}))
    with pytest.raises(
        ExperimentError, match=r"data_batch_1 is not a Python batch of CIFAR-10 \(it asks for builtins.print\)"
    ):
        cifar10(tmp_path)
    with pytest.raises(ExperimentError, match=r"CIFAR-10 needs the file data_batch_1.bin"):
        cifar10(tmp_path / "nowhere")


def test_no_folder_of_data():
    with pytest.raises(ExperimentError, match="--data DIR or in the environment variable FORWARDTUNE_DATA"):
        Sources().images("mnist")


@needs_data
def test_the_real_sets():
    images = mnist(DATA)
    assert (len(images.train_y), len(images.test_y)) == (60_000, 10_000)
    assert images.train_y[:5].tolist() == [5, 0, 4, 1, 9]
    assert images.train_x.float().mean() / 255 == pytest.approx(0.1307, abs=1e-4)
    images = cifar10(DATA)
    assert torch.bincount(images.train_y).tolist() == [1000] * 10
    assert images.train_x.shape[1:] == (3, 32, 32)
    mean = images.train_x.float().mean((0, 2, 3)) / 255
    assert mean.tolist() == pytest.approx([0.4914, 0.4822, 0.4465], abs=0.01)


def text_for(network, weights="random", more=""):
    return f"""
title = "a few steps"
queries = 6
batch = 4
seeds = [0]
evaluations = 1
train_examples = 8
test_examples = 8

[[workloads]]
data = "digits"
network = "{network}"
weights = "{weights}"
{more}

[[methods]]
method = "VS2P"
lr = [1]

[[methods]]
method = "STP"
lr = [1e-3]
"""


@pytest.mark.parametrize("network", ["cnn", *NETWORKS])
def test_all_networks_take_a_few_steps(network, tmp_path):
    spec, store = parse(text_for(network)), Store(tmp_path / "store")
    for run in plan(spec):
        result = execute(run, store, Sources())
        assert (result["status"], result["queries"], result["weights"]) == ("finished", 6, WEIGHTS[network])
        first, last = result["curve"]["train_loss"]
        assert first != last
        assert result["curve"]["queries"] == [0, 6]
    task = prepare(spec.workloads[0], Sources(), "cpu")
    shape = (3, 32, 32) if network != "cnn" else (1, 8, 8)
    assert task.batch(torch.arange(4))[0].shape == (4, *shape)
    shutil.rmtree(tmp_path / "store")  # half a gigabyte


def random_weights(network, **settings):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return torchvision().models.get_model(network, weights=None, **settings).state_dict()


@pytest.mark.parametrize(("network", "end"), [("resnet18", "pth"), ("densenet121", "safetensors"), ("vit_b_16", "pth")])
def test_weights_from_a_file_but_for_the_head(network, end, tmp_path):
    """From a checkpoint with ImageNet's 1000 classes and 224 x 224 pixels."""
    weights = random_weights(network)
    file = tmp_path / f"base.{end}"
    if end == "pth":
        torch.save(weights, file)
    else:
        save_file(weights, file)
    spec = parse(text_for(network, file.name), tmp_path)
    task = prepare(spec.workloads[0], Sources(None, tmp_path), "cpu")
    base = load_file(base_of(task, Store(tmp_path / "store")))
    head = networks.HEADS[network]
    for name, tensor in base.items():
        if name.startswith(f"{head}."):
            assert tensor.shape[0] == 10
        elif name == "encoder.pos_embedding":
            assert tensor.shape == (1, 5, 768)
            assert torch.equal(tensor[:, 0], weights[name][:, 0])  # the class token's place is not interpolated
        elif not name.endswith(("running_mean", "running_var", "num_batches_tracked")):
            assert torch.equal(tensor, weights[name]), name
        elif name.endswith("running_mean"):  # estimated on the training images
            assert not torch.equal(tensor, weights[name])


def test_an_old_checkpoint_of_densenet():
    """Its keys have a dot more than today's."""
    images = digits()
    model = networks.build("densenet121", images)
    weights = random_weights("densenet121")
    old = {name.replace("norm1.", "norm.1.").replace("conv2.", "conv.2."): tensor for name, tensor in weights.items()}
    assert old.keys() != weights.keys()
    found = networks.body(model, "densenet121", old, "old")
    name = "features.denseblock1.denselayer2.conv2.weight"
    assert torch.equal(found[name], weights[name])


def test_checkpoints_for_another_architecture_are_refused(tmp_path):
    images = digits()
    model = networks.build("resnet18", images)
    weights = random_weights("resnet18")
    cases = {
        "it lacks 'layer1.0.conv1.weight'": {k: v for k, v in weights.items() if k != "layer1.0.conv1.weight"},
        "it has 'layer9', which resnet18 does not": {**weights, "layer9": torch.zeros(1)},
        r"'conv1.weight' has shape \(1,\) instead of \(64, 3, 7, 7\)": {**weights, "conv1.weight": torch.zeros(1)},
    }
    for complaint, wrong in cases.items():
        with pytest.raises(ExperimentError, match=f"mine is a checkpoint for another architecture.*{complaint}"):
            networks.body(model, "resnet18", wrong, "mine")
    vit = {**random_weights("vit_b_16"), "encoder.pos_embedding": torch.zeros(1, 12, 768)}
    with pytest.raises(ExperimentError, match="mine is a checkpoint for another architecture than vit_b_16"):
        networks.body(model, "vit_b_16", vit, "mine")
    torch.save([1, 2], tmp_path / "list.pth")
    with pytest.raises(ExperimentError, match="does not hold a state dict"):
        networks.read_weights(tmp_path / "list.pth")
    for name in ("bad.pth", "bad.safetensors"):
        (tmp_path / name).write_bytes(b"nothing")
        with pytest.raises(ExperimentError, match=f"{name} cannot be read"):
            networks.read_weights(tmp_path / name)
    task = prepare(parse(text_for("resnet18", "other.pth")).workloads[0], Sources(None, tmp_path), "cpu")
    with pytest.raises(ExperimentError, match=r"there is no file at .*other.pth; put it there, or set weights to"):
        task.check()


def test_torchvisions_weights_are_asked_for_by_name_only(tmp_path):
    spec = parse(text_for("resnet18", "torchvision"))
    with pytest.raises(ExperimentError, match="fetched from the internet; allow it with --download"):
        compare(spec, Store(tmp_path / "store"), Sources(), Machine())
    assert not (tmp_path / "store" / "spec.toml").exists()  # noticed before anything was done


@needs_data
def test_the_real_weights_of_resnet18(tmp_path):
    """On ImageNet's weights the network tells handwritten digits apart after a few steps of backpropagation."""
    file = "weights/resnet18_imagenet_fp16.safetensors"
    more = 'pretrain = { data = "digits", steps = 25, batch = 32, lr = 3e-4, head = "keep" }'
    text = text_for("resnet18", file, more).replace("test_examples = 8", "test_examples = 0")
    task = prepare(parse(text).workloads[0], Sources(DATA), "cpu")
    base = base_of(task, Store(tmp_path / "store"))
    assert task.evaluate(task.start(base))["accuracy"] > 0.8


def test_pretraining_can_shift_and_invert_and_renew_the_head(tmp_path):
    bases = {}
    for head in ("keep", "new"):
        for change in ("", "shift = 1,", "invert = true,"):
            more = f'pretrain = {{ data = "digits", steps = 2, {change} head = "{head}" }}'
            task = prepare(parse(text_for("cnn", more=more)).workloads[0], Sources(), "cpu")
            bases[head, change] = load_file(base_of(task, Store(tmp_path / "store")))
    for (head, change), base in bases.items():
        plain = bases[head, ""]
        assert torch.equal(base["conv1.weight"], bases["keep", change]["conv1.weight"])
        assert torch.equal(base["conv1.weight"], plain["conv1.weight"]) == (change == "")
        assert torch.equal(base["head.weight"], bases["keep", change]["head.weight"]) == (head == "keep")


@needs_data
def test_cnn_is_pretrained_on_images_of_one_shape(tmp_path):
    more = 'pretrain = { data = "cifar10", steps = 2 }'
    task = prepare(parse(text_for("cnn", more=more)).workloads[0], Sources(DATA), "cpu")
    with pytest.raises(ExperimentError, match="pretrain on digits, or use another network"):
        base_of(task, Store(tmp_path / "store"))
