"""Going on without optimizer state: how large the bump of the loss is, how long it lasts, and what avoids it.

    python benchmarks/resume.py run       # cells (optimizer x remedy x seed) that results/resume.jsonl lacks
    python benchmarks/resume.py report    # a table in Markdown
    python benchmarks/resume.py plot      # docs/resume.png

The state is dropped after 750 of 1,500 steps; all remedies of a seed go on from the same weights on the same batches.
"""

from __future__ import annotations

from typing import Any

from cells import CUT, RESULTS, SEEDS, draw, gaps, half_trained, main, pick, proceed, read, run_cells, show
from daypack.checkpoint import Rewarm
from daypack.lab.loop import build_optimizer, thread_count

PATH = RESULTS / "resume.jsonl"
OPTIMIZERS = ("adamw", "gefen")
LENGTH = 150
#: Steps at learning rate 0 and of rise; None: the state is kept.
REMEDIES: dict[str, tuple[int, int] | None] = {
    "state kept": None,
    "dropped": (0, 0),
    "rise over 50": (0, 50),
    "observe 10": (10, 0),
    "observe 30": (30, 0),
    "observe 10, rise over 50": (10, 50),
}
WINDOWS = ((1, 5), (6, 20), (21, 50), (51, 100), (101, 150))


def cell(optimizer: str, remedy: str, seed: int) -> dict[str, Any]:
    steps = REMEDIES[remedy]
    with thread_count(1):
        job = half_trained(optimizer, seed)
        if steps is not None:
            job.optimizer = build_optimizer(job.config, job.model)
            if any(steps):
                Rewarm(job.optimizer, *steps)
        return proceed(job, LENGTH)


def report() -> None:
    cells = read(PATH)
    heads = " | ".join(f"steps {first} - {last}" for first, last in WINDOWS)
    print(f"| optimizer | after step {CUT} | largest of one step | {heads} |")
    print("|---|---|---|" + "---|" * len(WINDOWS))
    for optimizer in OPTIMIZERS:
        base = pick(cells, optimizer=optimizer, remedy="state kept")
        for remedy in list(REMEDIES)[1:]:
            mine = pick(cells, optimizer=optimizer, remedy=remedy)
            each = [[gaps([one], base, step, step)[0] for step in range(1, 101)] for one in mine]
            largest = show([max(values) for values in each])
            print(f"| {optimizer} | {remedy} | {largest} | {' | '.join(show(gaps(mine, base, *w)) for w in WINDOWS)} |")


def plot() -> None:
    cells = read(PATH)
    panels = {
        optimizer: {
            remedy: (
                pick(cells, optimizer=optimizer, remedy=remedy),
                pick(cells, optimizer=optimizer, remedy="state kept"),
            )
            for remedy in list(REMEDIES)[1:]
        }
        for optimizer in OPTIMIZERS
    }
    draw("resume.png", panels, "above the run with its state")


def measure(_: list[str]) -> None:
    keys = [{"optimizer": o, "remedy": r, "seed": s} for s in SEEDS for o in OPTIMIZERS for r in REMEDIES]
    run_cells(PATH, keys, cell)


if __name__ == "__main__":
    main(report, plot, measure)
