"""The triton kernels compile ahead of time for A100 and H100, with every float operation rounded on its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_without_fused_or_approximate_operations(capability, tmp_path):
    script = Path(__file__).parent / "helpers" / "compile_triton.py"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, str(script), str(capability)], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    rows = [line.split() for line in result.stdout.splitlines()]
    assert len(rows) == 17
    for name, size, *unwanted in rows:
        assert int(size) > 1000, name
        assert unwanted == ["0", "0", "0"], name
