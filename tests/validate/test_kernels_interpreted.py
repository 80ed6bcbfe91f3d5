"""Numerics of the kernels in Triton's interpreter, in a process of its own: see interpreter/."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

HERE = Path(__file__).parent
TIMEOUT_S = 600


@pytest.mark.parametrize("file", sorted(path.name for path in (HERE / "interpreter").glob("test_*.py")))
def test_interpreter(file: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "TRITON_DEFAULT_FP_FUSION": "1"}
    answer = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", HERE / "interpreter" / file],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    # 5 is "no tests collected": then the variable did not reach them.
    assert answer.returncode == 0, answer.stdout[-6000:] + answer.stderr[-2000:]
