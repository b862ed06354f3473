"""DeepSpeed's ZeRO with our optimizer as its client; needs deepspeed, which is in no extra."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")


@needs_deepspeed
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_trains_at_a_byte_per_parameter_and_resumes(stage: int, tmp_path: Path) -> None:
    run = Path(__file__).with_name("deepspeed_run.py")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        str(run),
        str(stage),
        str(tmp_path),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        result = json.loads((tmp_path / f"result{rank}.json").read_text(encoding="utf-8"))
        assert result["bytes_per_param"] < 1.06
        assert result["last"] < 0.9 * result["first"]
        assert result["resumed"] == result["on"]
