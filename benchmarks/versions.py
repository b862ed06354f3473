"""Steps of two checkouts of daypack in one run, interleaved: medians and their ratio.

    git worktree add ../before <commit>     # and build its kernels there, or copy them
    python benchmarks/versions.py ../before

Each checkout runs in a process of its own, which waits while the other one is timed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
#: name -> (shapes, dtype)
MODELS: dict[str, tuple[list[tuple[int, ...]], str]] = {
    "1,000 of 32 x 32": ([(32, 32)] * 1000, "float32"),
    "1,000 of 32 x 32, bf16": ([(32, 32)] * 1000, "bfloat16"),
    "GPT-2 124 M": (
        [(50257, 768), (1024, 768), *[(2304, 768), (768, 768), (3072, 768), (768, 3072), *[(768,)] * 8] * 12],
        "float32",
    ),
    "one of 4096 x 4096": ([(4096, 4096)], "float32"),
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "gefen": {},
    "adamw8bit": {"min_8bit_size": 64},
    "adam_mini": {},
    "lamb": {"bits": 8, "second_moment": "factored"},
    "gefen, reference": {"fused": False},
}


def worker() -> None:
    """Time one step whenever a line comes in; the line names model and optimizer."""
    import time

    import torch

    import daypack

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    known: dict[str, Any] = {}
    for line in sys.stdin:
        model, name = line.rstrip("\n").split("\t")
        if line not in known:
            known.clear()
            shapes, dtype = MODELS[model]
            params = [torch.nn.Parameter(torch.zeros(s, dtype=getattr(torch, dtype))) for s in shapes]
            for p in params:
                p.grad = torch.randn(p.shape).to(p.dtype).mul_(1e-3)
            optimizer = daypack.create(name.split(",")[0], params, **OPTIMIZERS[name])
            for _ in range(3):
                optimizer.step()
            known[line] = optimizer
        started = time.perf_counter()
        known[line].step()
        print(time.perf_counter() - started, flush=True)


def ask(process: subprocess.Popen[str], line: str) -> float:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(line)
    process.stdin.flush()
    return float(process.stdout.readline())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, nargs="?", help="the other checkout")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker()
        return
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
    before, after = (
        subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, "--worker"],
            env={**environment, "PYTHONPATH": str(root / "src")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for root in (options.before, HERE)
    )
    print("| model | optimizer | before, ms | after, ms | after / before |\n|---|---|---|---|---|")
    for model, (shapes, _) in MODELS.items():
        for name in OPTIMIZERS:
            if "reference" in name and len(shapes) < 1000:
                continue  # what runs on without kernels is Python and torch, and shows in small parameters
            times: dict[int, list[float]] = {0: [], 1: []}
            for _ in range(options.rounds):
                for i, process in enumerate((before, after)):
                    times[i].append(ask(process, f"{model}\t{name}\n"))
            old, new = (statistics.median(times[i]) * 1e3 for i in (0, 1))
            ratio = statistics.median(b / a for a, b in zip(times[0], times[1], strict=True))
            print(f"| {model} | {name} | {old:.2f} | {new:.2f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
