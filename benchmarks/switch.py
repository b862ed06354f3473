"""Switching a running AdamW job to Gefen: AdamW for 750 steps, then AdamW, converted Gefen, or Gefen without state.

    python benchmarks/switch.py run       # cells (kind x seed) that results/switch.jsonl lacks
    python benchmarks/switch.py report    # a table in Markdown
    python benchmarks/switch.py plot      # docs/switch.png

All kinds of a seed go on from the same weights on the same batches; gaps are paired by seed.
"""

from __future__ import annotations

import statistics
from typing import Any

import daypack
from cells import CUT, RESULTS, SEEDS, STEPS, draw, gaps, half_trained, main, pick, proceed, read, run_cells, show
from daypack.lab.loop import thread_count

PATH = RESULTS / "switch.jsonl"
KINDS = ("adamw", "gefen, converted", "gefen, no state", "gefen blocks, converted")
WINDOWS = ((1, 10), (11, 50), (51, 100), (101, 300), (301, 750))


def cell(kind: str, seed: int) -> dict[str, Any]:
    with thread_count(1):
        job = half_trained("adamw", seed)
        converted = (
            daypack.convert(job.optimizer, "gefen", second_moment="blocks" if "blocks" in kind else "factored")
            if kind != "adamw"
            else None
        )
        if converted is not None:
            if kind.endswith("no state"):
                converted = type(converted)(converted.param_groups)
            job.optimizer = converted
        return proceed(job, STEPS - CUT)


def report() -> None:
    cells = read(PATH)
    base = pick(cells, kind="adamw")
    heads = " | ".join(f"steps {first} - {last}" for first, last in WINDOWS)
    print(f"| after step {CUT} | {heads} | validation at {STEPS} |")
    print("|---|" + "---|" * (len(WINDOWS) + 1))
    for kind in KINDS:
        mine = pick(cells, kind=kind)
        shown = ["" if kind == "adamw" else show(gaps(mine, base, *window)) for window in WINDOWS]
        loss = statistics.fmean(cell["validation"][str(STEPS)] for cell in mine)
        print(f"| {kind} | {' | '.join(shown)} | {loss:.4f} |")


def plot() -> None:
    cells = read(PATH)
    base = pick(cells, kind="adamw")
    curves = {kind: (pick(cells, kind=kind), base) for kind in KINDS if kind != "adamw"}
    draw("switch.png", {f"all of it (steps after {CUT})": curves, "the beginning": curves}, "above AdamW", (None, 60))


def measure(_: list[str]) -> None:
    run_cells(PATH, [{"kind": kind, "seed": seed} for seed in SEEDS for kind in KINDS], cell)


if __name__ == "__main__":
    main(report, plot, measure)
