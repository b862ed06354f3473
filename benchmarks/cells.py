"""What the benchmarks of resuming share: cells that are run once, and the half-trained jobs that they start from."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from daypack.training.checkpoint import load_checkpoint, resume, save_checkpoint
from daypack.training.config import TrainConfig
from daypack.training.corpus import Corpus
from daypack.training.loop import Job

RESULTS = Path(__file__).parent / "results"
CACHE = Path("runs") / "half-trained"
STEPS, CUT, SEEDS = 1500, 750, (0, 1, 2)


def config(optimizer: str, seed: int) -> TrainConfig:
    """The tiny job at AdamW's best rate."""
    return TrainConfig(
        optimizer=optimizer, lr=4e-3, model="tiny", seed=seed, steps=STEPS, eval_every=50, eval_tokens=32_768, threads=1
    )


def half_trained(optimizer: str, seed: int, corpus: Corpus) -> Job:
    """The job after `CUT` steps; trained once, then read from a checkpoint."""
    path = CACHE / f"{optimizer}-{seed}.pt"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        job = Job(config(optimizer, seed), corpus)
        while job.step < CUT:
            job.advance()
        save_checkpoint(path, job)
    return resume(load_checkpoint(path), corpus=corpus)


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
