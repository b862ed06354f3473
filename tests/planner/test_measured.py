"""Plan against the memory of a process, on a few of the models of `benchmarks/planner.py`."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "planner.py"
MODELS = ["mlp", "conv net", "llama, checkpointing"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads resident memory as Linux reports it")
@pytest.mark.parametrize("model", MODELS)
def test_the_plan_is_what_the_process_takes(model):
    """State to the byte; weights, gradients, state and activations together, and the peak, within 5 %."""
    if model.startswith("llama") and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    run = subprocess.run(
        [sys.executable, SCRIPT, model, "--here"],
        capture_output=True, text=True, timeout=300, check=True,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["how"] == "measured"
    assert found["planned_state"] == found["state"]
    assert found["planned"] == pytest.approx(found["measured"], rel=0.05)
    assert found["planned_peak"] == pytest.approx(found["measured_peak"], rel=0.05)
