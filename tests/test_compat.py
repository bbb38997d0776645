"""torchvision can be imported by anyone, in any order, also where its compiled operators cannot be loaded."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import forwardtune
from forwardtune._compat.torchvision import HOOK

SOURCES = Path(forwardtune.__file__).parents[1]


def python(code, *arguments):
    """Runs code without the hooks of the environment: what `-S` leaves out of the path is added by hand."""
    path = os.pathsep.join([str(SOURCES), sysconfig.get_path("purelib")])
    return subprocess.run(
        [sys.executable, "-S", "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_hook_makes_torchvision_importable_before_ours(tmp_path):
    (tmp_path / "hook.pth").write_text(HOOK)
    result = python(
        "import site, sys; site.addsitedir(sys.argv[1])\n"
        "assert sys.meta_path[0].__name__ == 'TorchvisionFinder'\n"
        "assert not {'torch', 'forwardtune'} & set(sys.modules)\n"
        "import json, torchvision\n"
        "assert 'forwardtune._compat.torchvision' in sys.modules\n"
        "print(sum(p.numel() for p in torchvision.models.resnet18().parameters()))\n",
        tmp_path,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["11689512"]


def test_peft_may_be_imported_first(tmp_path):
    (tmp_path / "hook.pth").write_text(HOOK)
    code = "import site, sys; site.addsitedir(sys.argv[1]); import peft; print(peft.LoraConfig(r=3).r)"
    result = python(code, tmp_path)
    assert result.stdout.split() == ["3"], result.stderr


def test_the_hook_is_left_only_where_it_is_needed(tmp_path):
    """As it is here, or not: it is there exactly if a plain import fails."""
    works = python("import torchvision").returncode == 0
    result = python(
        "import sys; from pathlib import Path; from forwardtune._compat.torchvision import install_hook\n"
        "install_hook(Path(sys.argv[1]))",
        tmp_path,
    )
    assert result.returncode == 0, result.stderr
    assert [file.name for file in tmp_path.iterdir()] == ([] if works else ["forwardtune_torchvision.pth"])


def test_an_environment_without_torchvision_needs_no_hook(tmp_path):
    code = "import sys; sys.modules['torchvision'] = None; from pathlib import Path\n"
    code += "from forwardtune._compat.torchvision import install_hook; install_hook(Path(sys.argv[1]))"
    assert python(code, tmp_path).returncode == 0
    assert not list(tmp_path.iterdir())
