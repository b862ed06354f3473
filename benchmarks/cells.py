"""What the benchmarks of resuming share: cells that are run once, and the half-trained jobs that they start from."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from daypack.lab.checkpoint import load_checkpoint, resume, save_checkpoint
from daypack.lab.config import TrainConfig
from daypack.lab.loop import Job, build_optimizer

RESULTS = Path(__file__).parent / "results"
DOCS = Path(__file__).parents[1] / "docs"
CACHE = Path("runs") / "half-trained"
STEPS, CUT, SEEDS = 1500, 750, (0, 1, 2)


def config(optimizer: str, seed: int) -> TrainConfig:
    """The tiny job at AdamW's best rate."""
    return TrainConfig(
        optimizer=optimizer, lr=4e-3, model="tiny", seed=seed, steps=STEPS, eval_every=50, eval_tokens=32_768, threads=1
    )


def half_trained(optimizer: str, seed: int, steps: int = CUT) -> Job:
    """The job after ``steps`` steps; trained once, then read from a checkpoint."""
    path = CACHE / f"{optimizer}-{seed}-{steps}.pt"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        job = Job(config(optimizer, seed))
        while job.step < steps:
            job.advance()
        save_checkpoint(path, job)
    return resume(load_checkpoint(path))


def exchange(job: Job, model: Any) -> None:
    """Let the job go on with another model, under a fresh optimizer."""
    job.model, job._loss = model, job.ranks.wrap(model)
    job.optimizer = build_optimizer(job.config, model)


def proceed(job: Job, steps: int) -> dict[str, Any]:
    """Train on; the training loss of each step, and the validation loss by step."""
    records = [job.advance() for _ in range(steps)]
    return {
        "loss": [round(record.loss, 5) for record in records],
        "validation": {record.step: record.validation for record in records if record.validation is not None},
    }


def run_cells(path: Path, keys: Iterable[dict[str, Any]], run: Callable[..., dict[str, Any]]) -> None:
    """Run the cells that ``path`` (JSON lines) lacks, appending each when it is done."""
    path.parent.mkdir(parents=True, exist_ok=True)
    done = [cell["key"] for cell in read(path)]
    for key in keys:
        if key not in done:
            result = run(**key)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, **result}) + "\n")
            print(key, flush=True)


def main(report: Callable[[], None], plot: Callable[[], None], measure: Callable[[list[str]], None]) -> None:
    """What a script was asked for: ``report``, ``plot``, or to measure what is missing (words then say of what)."""
    chosen = {"report": report, "plot": plot}.get(" ".join(sys.argv[1:]))
    if chosen:
        chosen()
    else:
        measure(sys.argv[1:])


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def pick(cells: list[dict[str, Any]], **key: Any) -> list[dict[str, Any]]:
    return [cell for cell in cells if all(cell["key"].get(name) == value for name, value in key.items())]


def gaps(cells: list[dict[str, Any]], base: list[dict[str, Any]], first: int, last: int) -> list[float]:
    """Mean training loss of steps ``first`` to ``last`` (from 1) above that of ``base``, by seed."""
    by_seed = {cell["key"]["seed"]: cell["loss"] for cell in base}
    return [
        statistics.fmean(cell["loss"][first - 1 : last])
        - statistics.fmean(by_seed[cell["key"]["seed"]][first - 1 : last])
        for cell in cells
        if cell["key"]["seed"] in by_seed
    ]


def show(values: list[float]) -> str:
    """Mean and standard error."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):+.4f} ± {error:.4f}"


Curves = dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]]


def draw(name: str, panels: dict[str, Curves], what: str, until: Sequence[int | None] = (), smooth: int = 10) -> None:
    """Save docs/``name``: in each panel, by label, the gap of cells to base cells, paired by seed, mean and spread.

    The spread is one standard error over seeds; curves are means over ``smooth`` steps, up to step ``until``.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(panels), figsize=(4.2 * len(panels), 3.2), sharey=True, squeeze=False)
    ends = [*until] or [None] * len(panels)
    for axis, (title, curves), end in zip(axes[0], panels.items(), ends, strict=True):
        for label, (cells, base) in curves.items():
            last = (end or len(cells[0]["loss"])) - smooth + 2
            steps = range(1, last, max(1, last // 100))
            values = [gaps(cells, base, step, step + smooth - 1) for step in steps]
            middle = [statistics.fmean(each) for each in values]
            error = [statistics.stdev(each) / len(each) ** 0.5 for each in values]
            at = [step + (smooth - 1) / 2 for step in steps]
            (line,) = axis.plot(at, middle, label=label, linewidth=1.2)
            low = [m - e for m, e in zip(middle, error, strict=True)]
            high = [m + e for m, e in zip(middle, error, strict=True)]
            axis.fill_between(at, low, high, alpha=0.2, color=line.get_color(), linewidth=0)
        axis.axhline(0, color="0.4", linewidth=0.8)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("steps after")
        axis.grid(alpha=0.25)
        axis.legend(fontsize=8)
    axes[0][0].set_ylabel(f"training loss, nats/byte\n{what}", fontsize=9)
    figure.tight_layout()
    figure.savefig(DOCS / name, dpi=90, metadata={"Software": None})
