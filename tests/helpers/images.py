"""Small image tasks for tests."""

from forwardtune.tasks import ImageWorkload, Sources, prepare


def task_of(network="cnn", weights="random", sources=None, **changes):
    fixed = {"name": "w", "data": "digits", "network": network, "weights": weights, "batch": 4, "seeds": (0,)}
    sizes = {"queries": 6, "evaluations": 1, "train_examples": 8, "test_examples": 8}
    return prepare(ImageWorkload(**fixed | sizes | changes), sources or Sources(), "cpu")


def base_of(task, folder):
    """The file of base weights."""
    file = folder / f"{task.base_id}.safetensors"
    task.make_base(file)
    return file
