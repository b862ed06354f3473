"""Seeds faults into a copy of the package, one at a time, and says which of them the tests catch.

    python -m tests.mutations [--list] [NAME ...]

A fault is a replacement that must match exactly once, so that it fails loudly when the source has changed. The copy
comes first on PYTHONPATH. Each fault is caught if one of its tests fails; without a fault all of them must pass. Takes
about three minutes. Faults of what native kernels do by themselves are not seeded: those are compared with
the reference, which is mutated here.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Fault(NamedTuple):
    """One replacement in one file of the package, and the tests that must notice."""

    name: str
    file: str
    old: str
    new: str
    tests: str


MATH, LOAD, FORMATS = (
    "tests/conformance/test_gefen_math.py",
    "tests/conformance/test_load.py",
    "tests/formats/test_block_quantized.py",
)
RANKS = "tests/distributed/test_step.py::test_equals_one_process"
GROUPS = "tests/distributed/test_step.py::test_shards_of_several_process_groups_equal_one_process"
FAULTS = [
    # ------------------------------------------------------------------ step
    Fault(
        "bias correction is a step ahead",
        "rules/base.py",
        "1 - self.beta2**self.step",
        "1 - self.beta2**(self.step + 1)",
        MATH,
    ),
    Fault(
        "decay is applied twice",
        "kernels/reference.py",
        "(p * (1 - hyper.shrink))",
        "(p * (1 - hyper.shrink)**2)",
        MATH,
    ),
    Fault(
        "a skipped parameter counts a step",
        "optim/admission.py",
        "skipped[item.name] += 1",
        'skipped[item.name] += 1; item.state and item.state["step"].add_(1)',
        "tests/conformance/test_nonfinite.py",
    ),
    # ----------------------------------------------------------------- codec
    Fault(
        "scale is rounded to nearest, not up", "formats/block_quantized.py", "bits + 0xFFFF", "bits + 0x7FFF", FORMATS
    ),
    Fault(
        "dither is one element off", "formats/block_quantized.py", "(view.origin + (", "(view.origin + 1 + (", FORMATS
    ),
    Fault("zero may become the next level", "formats/block_quantized.py", ") > limit", ") >= limit", FORMATS),
    # ------------------------------------------------------------------ load
    Fault(
        "shapes are not checked",
        "optim/validate.py",
        "if any(wanted not in (ANY, size) for",
        "if any(False for",
        LOAD,
    ),
    Fault(
        "names are matched by position",
        "optim/state_dict.py",
        "[keys[name] for name in wanted]",
        "list(keys.values())",
        LOAD,
    ),
    # -------------------------------------------------------------- exchange
    Fault(
        "each rank goes by its own gradient",
        "optim/exchange.py",
        "present[k] = has_grad > 0",
        "present[k] = item.whole.grad is not None",
        RANKS,
    ),
    Fault(
        "statistics stay a rank's own",
        "optim/exchange.py",
        "torch.split(sums[i][_FLAGS:]",
        "torch.split(entries[i][_FLAGS:]",
        RANKS,
    ),
    Fault(
        "sums stop at the first process group",
        "sharding.py",
        "    for group in groups:\n",
        "    for group in groups[:1]:\n",
        GROUPS,
    ),
    Fault(
        "only one set of process groups is added up",
        "sharding.py",
        "in self._members.items():",
        "in [*self._members.items()][:1]:",
        GROUPS,
    ),
]


def seed(package: Path, fault: Fault) -> None:
    path = package / fault.file
    text = path.read_text(encoding="utf-8")
    found = text.count(fault.old)
    if found != 1:
        sys.exit(f"{fault.name}: {fault.old!r} is {found} times in {fault.file}, not once; adapt {Path(__file__).name}")
    path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")


def run(faults: list[Fault], tests: list[str]) -> tuple[int, str]:
    """The exit code of pytest on a copy with ``faults``, and the end of what it printed."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "daypack"
        shutil.copytree(ROOT / "src" / "daypack", package, ignore=shutil.ignore_patterns("__pycache__"))
        for fault in faults:
            seed(package, fault)
        environment = {**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        where = [sys.executable, "-c", "import daypack; print(daypack.__file__)"]
        used = subprocess.run(where, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
        if Path(used.strip()).parent != package:
            sys.exit(f"the copy in {package} is not what tests import, but {used.strip()}")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "--no-header",
            "--tb=line",
            *tests,
        ]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults whose names hold one of these; all if none")
    parser.add_argument("--list", action="store_true", help="only check that every fault can be seeded")
    arguments = parser.parse_args()
    chosen = [f for f in FAULTS if not arguments.names or any(name in f.name for name in arguments.names)]
    with tempfile.TemporaryDirectory() as folder:
        for fault in chosen:
            package = Path(folder) / "daypack"
            shutil.copytree(ROOT / "src" / "daypack", package, dirs_exist_ok=True)
            seed(package, fault)
            print(f"{fault.file:30} {fault.name}") if arguments.list else None
    if arguments.list:
        return
    missed = []
    code, output = run([], sorted({fault.tests for fault in chosen}))
    if code:
        sys.exit(f"without any fault the tests fail already:\n{output[-3000:]}")
    for fault in chosen:
        start = time.monotonic()
        code, output = run([fault], [fault.tests])
        # 1: tests failed. Any other code but 0 is no verdict of theirs.
        word = {0: "NOT CAUGHT", 1: "caught"}.get(code, f"pytest ended with {code}")
        first = next((line for line in output.splitlines() if line.startswith("FAILED")), "").partition(" - ")[0]
        print(
            f"{word:12} {time.monotonic() - start:4.0f} s  {fault.name:40} {first.removeprefix('FAILED ')}", flush=True
        )
        if code != 1:
            missed.append(fault.name)
    print(f"{len(chosen) - len(missed)} of {len(chosen)} caught")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
