"""State larger than the memory allowed: dense AdamW moments, resident and paged, under the same limit.

A model of bf16 parameters whose gradients share one buffer, so that nearly all memory is optimizer state. Each run is
a process of its own. ``--limit`` bounds private writable memory (RLIMIT_DATA: heap and anonymous maps), which is what
resident state takes; mapped files do not count towards it. The resident size is read from /proc, so: Linux.

    python benchmarks/paged.py --state 4 --limit 1.5
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch

import daypack

SHAPE = (2048, 4096)
GIB = 1 << 30


def status(field: str) -> int:
    """A size from the process's status, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def run(state: float, limit: float, placement: str, steps: int, spill_dir: str | None) -> dict[str, object]:
    """Train ``steps`` steps in this process; sizes in GiB."""
    elements = SHAPE[0] * SHAPE[1]
    grad = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).bfloat16()
    params = [
        torch.nn.Parameter(torch.zeros(SHAPE, dtype=torch.bfloat16)) for _ in range(round(state * GIB / 8 / elements))
    ]
    for p in params:
        p.grad = grad
    # GaLore without a rank is AdamW with dense moments, 8 bytes per parameter.
    optimizer = daypack.GaLore(params, placement=placement, spill_dir=spill_dir)  # type: ignore[arg-type]
    before = status("VmRSS")
    resource.setrlimit(resource.RLIMIT_DATA, (status("VmData") + int(limit * GIB),) * 2)
    times = []
    try:
        for _ in range(steps):
            start = time.perf_counter()
            optimizer.step()
            times.append(round(time.perf_counter() - start, 2))
    except (RuntimeError, MemoryError) as error:
        return {"placement": placement, "failed": str(error).splitlines()[0][:120]}
    report = daypack.state_report(optimizer)
    digest = torch.stack([p.detach().double().sum() for p in params]).sum()
    return {
        "placement": placement,
        "state": round(report.total_bytes / GIB, 2),
        "parameters and gradient": round((len(params) * 2 + 2) * elements / GIB, 2),
        "peak beyond them": round((status("VmHWM") - before) / GIB, 2),
        "seconds per step": times,
        "sum of parameters": digest.item(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=float, default=4.0, help="GiB of state")
    parser.add_argument("--limit", type=float, default=1.5, help="GiB of private memory beyond the model's")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--spill-dir", default=None)
    parser.add_argument("--placement", choices=("resident", "paged"), help="run this one alone, in this process")
    options = parser.parse_args()
    if options.placement:
        print(json.dumps(run(options.state, options.limit, options.placement, options.steps, options.spill_dir)))
        return
    print(f"{options.state} GiB of state, {options.limit} GiB of private memory allowed for it")
    for placement, limit in (("resident", options.limit), ("paged", options.limit), ("resident", 2 * options.state)):
        command = [sys.executable, __file__, "--state", str(options.state), "--limit", str(limit)]
        command += ["--steps", str(options.steps), "--placement", placement]
        command += ["--spill-dir", options.spill_dir] if options.spill_dir else []
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        print(done.stdout.strip() or done.stderr.strip().splitlines()[-1], f"(limit {limit} GiB)", flush=True)


if __name__ == "__main__":
    main()
