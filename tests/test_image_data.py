"""Images read from the files in which the datasets are published."""

import gzip
import pickle

import numpy as np
import pytest
import torch

from forwardtune.errors import ExperimentError
from forwardtune.tasks import Sources
from forwardtune.tasks.images.data import cifar10, load, mnist
from tests.helpers.comparisons import DATA, needs_data


def idx(array):
    head = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4) for n in array.shape)
    return head + array.astype(np.uint8).tobytes()


@pytest.fixture
def mnist_files(tmp_path):
    """5 training and 3 test images in MNIST's format, two files gzipped and two not."""
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


def test_a_missing_file_is_named_with_its_folder_and_the_remedy(mnist_files):
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
    with pytest.raises(
        ExperimentError, match=r"train-labels-idx1-ubyte is not an IDX file of MNIST; delete it and get it again"
    ):
        mnist(folder)
    packed = folder / "mnist" / "train-images-idx3-ubyte.gz"
    packed.write_bytes(packed.read_bytes()[:20])
    with pytest.raises(ExperimentError, match=r"train-images-idx3-ubyte.gz cannot be read"):
        mnist(folder)


def test_labels_and_images_must_belong_together(mnist_files):
    folder, _ = mnist_files
    (folder / "mnist" / "t10k-labels-idx1-ubyte").write_bytes(idx(np.arange(4)))
    with pytest.raises(ExperimentError, match=r"the images and labels of mnist in .* do not belong together"):
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


def test_without_a_data_folder(tmp_path):
    with pytest.raises(ExperimentError, match="--data DIR or in the environment variable FORWARDTUNE_DATA"):
        Sources().images("mnist")
    with pytest.raises(ExperimentError, match=r"the data folder .*nowhere does not exist; .* --data DIR"):
        Sources(tmp_path / "nowhere").images("mnist")


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
