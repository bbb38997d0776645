"""What is not imported before it is needed, by name: imports are what a start takes."""

import subprocess
import sys

import pytest

ALWAYS_LATE = {"torchvision", "transformers", "peft", "datasets", "sklearn", "scipy", "matplotlib", "triton"}
COMMAND = """
import sys
from forwardtune.cli import main
sys.argv = ["forwardtune", *sys.argv[1:]]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
"""


def imported(code, *arguments):
    """The names of all modules that a fresh process has imported after running the code."""
    tell = "\nimport sys\nprint('MODULES', *sys.modules)"
    command = [sys.executable, "-c", code + tell, *arguments]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return set(output.splitlines()[-1].split()[1:])


def test_importing_the_package_imports_no_torch():
    assert not imported("import forwardtune as ft") & {"torch", "numpy", "importlib.metadata"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["compare", "--help"],
        ["finetune", "--help"],
        ["sweep", "--help"],
        ["ledger", "replay", "--help"],
    ],
    ids=" ".join,
)
def test_a_command_that_only_tells_imports_no_torch(arguments):
    modules = imported(COMMAND, *arguments)
    assert "typer" in modules
    assert not modules & {"torch", "numpy", "numba", *ALWAYS_LATE}


def test_public_names_import_torch_and_nothing_else_that_is_large():
    modules = imported("import forwardtune as ft\nft.VS2P, ft.Ledger")
    assert "torch" in modules
    assert not modules & {"torch._dynamo", "numba", "typer", "rich", *ALWAYS_LATE}


def test_a_step_does_not_import_the_compiler_of_torch():
    modules = imported(
        "import torch, forwardtune as ft\n"
        "x = torch.ones(3)\n"
        "optimizer = ft.VS2P([x])\n"
        "optimizer.step(lambda: x @ x)\n"
        "optimizer.add_param_group({'params': [torch.ones(2)]})\n"
    )
    assert "numba" in modules
    assert not modules & ({"torch._dynamo", "torch._inductor", *ALWAYS_LATE} - {"scipy"})  # numba looks at its version
