"""Networks at 32 x 32 pixels, base weights from files that fit or are refused, and pretraining."""

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from forwardtune import VS2P
from forwardtune._compat.torchvision import torchvision
from forwardtune.errors import ExperimentError
from forwardtune.tasks import Sources
from forwardtune.tasks.images import networks
from forwardtune.tasks.images.data import digits
from forwardtune.tasks.images.workload import Pretrain
from tests.helpers.comparisons import DATA, needs_data
from tests.helpers.images import base_of, task_of


def random_weights(network):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return torchvision().models.get_model(network, weights=None).state_dict()


def test_an_evaluation_is_over_all_its_examples(tmp_path):
    task = task_of(test_examples=0)
    model = task.start(base_of(task, tmp_path))
    with torch.no_grad():
        logits = model(task.images.test_x.float() / 16)
    scores = task.evaluate(model)
    assert scores.test_loss == pytest.approx(F.cross_entropy(logits, task.images.test_y).item(), rel=1e-5)
    assert scores.metrics == {"accuracy": (logits.argmax(1) == task.images.test_y).double().mean().item()}


def test_norms_biases_and_the_head_are_tuned_alone_in_evaluation_mode(tmp_path):
    task = task_of("resnet18", "random", tune="norms", mode="eval")
    model = task.start(base_of(task, tmp_path))
    tuned = {name for name, p in model.named_parameters() if p.requires_grad}
    norms = {
        f"{name}.{p}" for name, m in model.named_modules() if isinstance(m, nn.BatchNorm2d) for p in ("weight", "bias")
    }
    assert tuned == norms | {"fc.weight", "fc.bias"}
    assert not any(module.training for module in model.modules())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    batch = task.batch(torch.arange(4))
    VS2P(model.parameters(), lr=1.0).step(lambda: task.loss(model, batch))
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == tuned


def test_all_weights_are_tuned_in_training_mode_unless_a_workload_says_otherwise(tmp_path):
    task = task_of("resnet18", "random")
    model = task.start(base_of(task, tmp_path))
    assert all(p.requires_grad for p in model.parameters())
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize(
    ("network", "suffix"), [("resnet18", "pth"), ("densenet121", "safetensors"), ("vit_b_16", "pth")]
)
def test_weights_from_a_file_but_for_the_head(network, suffix, tmp_path):
    """From a checkpoint with ImageNet's 1000 classes and 224 x 224 pixels."""
    weights = random_weights(network)
    file = tmp_path / f"base.{suffix}"
    if suffix == "pth":
        torch.save(weights, file)
    else:
        save_file(weights, file)
    task, head = task_of(network, file.name, Sources(None, tmp_path)), networks.HEADS[network]
    base = base_of(task, tmp_path)
    new = (f"{head}.weight", f"{head}.bias", "running_mean", "running_var", "num_batches_tracked", "pos_embedding")
    assert all(name.endswith(new) for name in load_file(base))  # what the file has is not written again
    for name, tensor in task.start(base).state_dict().items():
        if name.startswith(f"{head}."):
            assert tensor.shape[0] == 10
        elif name == "encoder.pos_embedding":
            assert tensor.shape == (1, 5, 768)
            assert torch.equal(tensor[:, 0], weights[name][:, 0])  # that of the class token is not interpolated
        elif not name.endswith(("running_mean", "running_var", "num_batches_tracked")):
            assert torch.equal(tensor, weights[name]), name
        elif name.endswith("running_mean"):  # estimated on the training images
            assert not torch.equal(tensor, weights[name]), name


def test_an_old_checkpoint_of_densenet():
    """Its keys have one dot more than today's."""
    weights = random_weights("densenet121")
    old = {name.replace("norm1.", "norm.1.").replace("conv2.", "conv.2."): tensor for name, tensor in weights.items()}
    assert old.keys() != weights.keys()
    kept = networks.backbone(networks.build("densenet121", digits()), "densenet121", old, "old")
    assert kept.keys() == {name for name in weights if not name.startswith("classifier.")}
    name = "features.denseblock1.denselayer2.conv2.weight"
    assert torch.equal(kept[name], weights[name])


def test_checkpoints_for_another_architecture_are_refused():
    model = networks.build("resnet18", digits())
    weights = random_weights("resnet18")
    cases = {
        "it lacks 'layer1.0.conv1.weight'": {k: v for k, v in weights.items() if k != "layer1.0.conv1.weight"},
        "it has 'layer9', which resnet18 does not": {**weights, "layer9": torch.zeros(1)},
        r"'conv1.weight' has shape \(1,\) instead of \(64, 3, 7, 7\)": {**weights, "conv1.weight": torch.zeros(1)},
    }
    for complaint, wrong in cases.items():
        with pytest.raises(ExperimentError, match=f"mine is a checkpoint for another architecture.*{complaint}"):
            networks.backbone(model, "resnet18", wrong, "mine")
    vit = {**random_weights("vit_b_16"), "encoder.pos_embedding": torch.zeros(1, 12, 768)}
    with pytest.raises(ExperimentError, match=r"mine is a checkpoint for another .* vit_b_16: .*not a perfect square"):
        networks.backbone(model, "vit_b_16", vit, "mine")


def test_files_that_hold_no_weights_are_refused(tmp_path):
    torch.save([1, 2], tmp_path / "list.pth")
    with pytest.raises(ExperimentError, match=r"list.pth does not hold a state dict"):
        networks.read_weights(tmp_path / "list.pth")
    for name in ("bad.pth", "bad.safetensors"):
        (tmp_path / name).write_bytes(b"nothing")
        with pytest.raises(ExperimentError, match=f"the weights .*{name} cannot be read"):
            networks.read_weights(tmp_path / name)
    (tmp_path / "text.pth").write_text("just text\nmore\n")
    with pytest.raises(ExperimentError, match=r"the weights .*text.pth cannot be read"):
        networks.read_weights(tmp_path / "text.pth")
    task = task_of("resnet18", "other.pth", Sources(None, tmp_path))
    with pytest.raises(ExperimentError, match=r"there is no file at .*other.pth; put it there, or set weights to"):
        task.check()


def test_torchvisions_weights_are_not_downloaded_unasked():
    with pytest.raises(ExperimentError, match="downloaded from the internet; allow it with --download"):
        task_of("resnet18", "torchvision").check()


@needs_data
def test_the_real_weights_of_resnet18(tmp_path):
    """Starting from ImageNet's weights, the network learns handwritten digits in a few steps of backpropagation."""
    recipe = Pretrain(data="digits", steps=25, batch=32, lr=3e-4, head="keep")
    file = "weights/resnet18_imagenet_fp16.safetensors"
    task = task_of("resnet18", file, Sources(DATA), pretrain=recipe, test_examples=0)
    model = task.start(base_of(task, tmp_path))
    assert task.evaluate(model).metrics["accuracy"] > 0.8


def test_pretraining_can_shift_and_invert_and_renew_the_head(tmp_path):
    bases = {}
    for head in ("keep", "new"):
        for change in ({}, {"shift": 1}, {"invert": True}):
            task = task_of(pretrain=Pretrain(data="digits", steps=2, head=head, **change))
            bases[head, *change] = load_file(base_of(task, tmp_path))
    for (head, *change), base in bases.items():
        assert torch.equal(base["conv1.weight"], bases["keep", *change]["conv1.weight"])
        assert torch.equal(base["conv1.weight"], bases[head,]["conv1.weight"]) == (not change)
        assert torch.equal(base["head.weight"], bases["keep", *change]["head.weight"]) == (head == "keep")


@needs_data
def test_cnn_is_pretrained_on_images_of_one_shape(tmp_path):
    task = task_of(sources=Sources(DATA), pretrain=Pretrain(data="cifar10", steps=2))
    with pytest.raises(ExperimentError, match="pretrain on digits, or use another network"):
        task.check()
    with pytest.raises(ExperimentError, match="pretrain on digits, or use another network"):
        base_of(task, tmp_path)
