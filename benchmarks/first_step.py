"""What calibration costs: codebook learning, and a first step against later ones, in one run.

python benchmarks/first_step.py
"""

from __future__ import annotations

import statistics
import time

import torch

import daypack
from daypack.calibration import codebook
from daypack.kernels import dispatch

SHAPES = [(1024, 1024), (2816, 1024), (1024, 2816), (4096, 512), (1024,), (256, 64, 3, 3)]
ROUNDS = 5


def seconds(work: object) -> float:
    started = time.perf_counter()
    work()  # type: ignore[operator]
    return time.perf_counter() - started


def main() -> None:
    torch.set_num_threads(1)
    learn, first, later = [], {}, {}
    levels = dispatch.tools(torch.zeros(1)).optimal_levels
    for round_ in range(ROUNDS):
        generator = torch.Generator().manual_seed(round_)
        counts = torch.randint(0, 10_000, (codebook.BINS,), generator=generator)
        learn.append(seconds(lambda counts=counts: codebook.learn(counts, 256, levels)))
        for second_moment in ("factored", "blocks"):
            params = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator)
            optimizer = daypack.Gefen(params, second_moment=second_moment)
            first.setdefault(second_moment, []).append(seconds(optimizer.step))
            later.setdefault(second_moment, []).extend(seconds(optimizer.step) for _ in range(3))
    book = statistics.median(learn)
    print(f"codebook, {codebook.BINS} bins, {codebook.LEVELS} levels: {book * 1e3:.0f} ms (median of {ROUNDS})")
    for second_moment, times in first.items():
        step = statistics.median(later[second_moment])
        excess = (statistics.median(times) - book) / step
        print(f"{second_moment}: first step = codebook + {excess:.2f} x a later step ({step * 1e3:.0f} ms)")


if __name__ == "__main__":
    main()
