"""Every Python snippet of the documentation runs as it is printed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from forwardtune._compat.torchvision import HOOK
from tests.helpers.run_snippet import snippets

HOME = Path(__file__).parents[1]
DOCUMENTS = [HOME / "README.md", HOME / "CONTRIBUTING.md", *sorted((HOME / "docs").glob("*.md"))]
EVERY = [(document, number) for document in DOCUMENTS for number in range(len(snippets(document)))]


@pytest.fixture(scope="module")
def hooked(tmp_path_factory):
    """A folder that makes torchvision importable in the processes, as `make install` does for the environment."""
    folder = tmp_path_factory.mktemp("hook")
    (folder / "sitecustomize.py").write_text(HOOK)
    return folder


@pytest.mark.parametrize(("document", "number"), EVERY, ids=[f"{document.stem}-{n}" for document, n in EVERY])
def test_a_snippet_runs_as_printed(document, number, hooked, tmp_path):
    path = os.pathsep.join([str(hooked), *sys.path])
    command = [sys.executable, "-m", "tests.helpers.run_snippet", str(document), str(number)]
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_there_are_snippets():
    assert len(EVERY) > 12
