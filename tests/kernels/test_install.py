"""The package builds where no C++ compiler is, and steps on the torch reference then."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

STEP = """
import logging, torch, daypack
lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())
logging.getLogger("daypack").addHandler(handler)
p = torch.nn.Parameter(torch.randn(8, 300))
p.grad = torch.randn(8, 300)
optimizer = daypack.Gefen([p])
before = p.detach().clone()
optimizer.step()
optimizer.step()
assert not torch.equal(p, before)
assert optimizer.kernels() == {p: "reference"}
assert len(lines) == 1 and lines[0].startswith("no native kernels"), lines
"""


def test_without_a_compiler_the_package_builds_and_steps(tmp_path: Path) -> None:
    unusable = os.environ | {"CC": "/bin/false", "CXX": "/bin/false"}
    build = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", tmp_path / "lib", "--build-temp", tmp_path]
    built = subprocess.run(build, cwd=ROOT, env=unusable, capture_output=True, text=True, check=True)
    assert "the native kernels were not built" in built.stderr
    missing = tmp_path / "lib" / "daypack" / "kernels" / "_native.so"
    assert not missing.exists()
    child = os.environ | {"DAYPACK_NATIVE": str(missing), "LD_PRELOAD": ""}
    ran = subprocess.run([sys.executable, "-c", STEP], env=child, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_commands_work_without_kernels(tmp_path: Path) -> None:
    child = os.environ | {"DAYPACK_NATIVE": str(tmp_path / "none.so"), "LD_PRELOAD": ""}
    command = [sys.executable, "-m", "daypack", "compare", "--task", "graph", "--steps", "3", "--name", "plain"]
    ran = subprocess.run(command, cwd=tmp_path, env=child, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert '"kernels": "torch"' in (tmp_path / "runs" / "plain" / "config.json").read_text()
