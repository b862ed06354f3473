"""Every optimizer on three small tasks, each at its own learning rate: text, images and a graph.

Cells (task x optimizer x learning rate x seed) are appended to a JSON-lines file as they finish, and cells found there
are not run again, so that a stopped run continues where it was:

    python benchmarks/tasks.py run [--task text] [--optimizers "adamw; gefen"]
    python benchmarks/tasks.py paged           # paged Gefen against resident Gefen, bit for bit
    python benchmarks/tasks.py report          # tables, in Markdown

The learning rate climbs a doubling grid on seeds of its own until both neighbours end on a higher loss; seeds 1, 2, ...
then run at the best one. All cells of a task and seed start from the same weights and see the same batches.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from daypack.lab import TASKS, Job, Task, TrainConfig, load_task, run
from daypack.lab.loop import json_number

RESULTS = Path(__file__).parent / "results" / "tasks.jsonl"
BASELINE = "adamw"
SEEDS = {"text": range(1, 4), "images": range(1, 6), "graph": range(1, 11)}
#: Seeds that learning rates are chosen on, apart from the others. One would choose for its own labelled nodes on the
#: graph, and by chance on images.
TUNING_SEEDS = {"text": [0], "images": [0, 101, 102], "graph": [0, 101, 102, 103, 104]}
#: 97.5 % quantiles of Student's t, by number of values.
STUDENT = {3: 4.303, 4: 3.182, 5: 2.776, 9: 2.306, 10: 2.262}
SETTINGS: dict[str, dict[str, Any]] = {
    "text": {"model": "tiny", "steps": 300, "batch": 8, "warmup": 30},
    "images": {"model": "small", "steps": 200, "warmup": 20},
    "graph": {"model": "small", "steps": 100, "warmup": 10},
}


@dataclass(frozen=True)
class Entry:
    """An optimizer with its options.

    Attributes:
        optimizer: its registered name.
        start: where its learning rate begins to climb.
        options: for all tasks; ``rank``: GaLore's, by task, about a quarter of the hidden width.
        horizon: options that are set to the number of steps.
        weight_decay: 0 where decay would be an L2 penalty, for which 0.1 is far too much.
    """

    optimizer: str
    start: float = 8e-3
    options: dict[str, Any] = field(default_factory=dict)
    weight_decay: float = 0.1
    rank: dict[str, int] = field(default_factory=dict)
    horizon: tuple[str, ...] = ()


RANK = {"text": 16, "images": 8, "graph": 8}
LOW_RANK = {"update_proj_gap": 50}
ENTRIES: dict[str, Entry] = {
    "adamw": Entry("adamw"),
    "gefen": Entry("gefen"),
    "adamw8bit": Entry("adamw8bit"),
    "adam_mini": Entry("adam_mini"),
    "adam_mini, bits 8": Entry("adam_mini", options={"bits": 8}),
    "lamb": Entry("lamb", 1.6e-2),
    "adafactor": Entry("adafactor", 6.4e-2),
    "adafactor, beta1 0.9, bits 8": Entry("adafactor", 6.4e-2, {"beta1": 0.9, "bits": 8}),
    "galore": Entry("galore", 1.6e-2, LOW_RANK, rank=RANK),
    "galore around gefen": Entry("galore", 1.6e-2, {**LOW_RANK, "inner": "gefen"}, rank=RANK),
    "lion8bit": Entry("lion8bit", 1e-3),
    "adam": Entry("adam", weight_decay=0.0),
    "adam8bit": Entry("adam8bit", weight_decay=0.0),
    "sgd, momentum 0.9": Entry("sgd", 0.256, {"momentum": 0.9}, 0.0),
    "sgd8bit, momentum 0.9": Entry("sgd8bit", 0.256, {"momentum": 0.9}, 0.0),
    "muon": Entry("muon"),
    "muon beside adamw, bits 32": Entry("muon", options={"beside": "adamw", "bits": 32}),
    "adopt": Entry("adopt"),
    "adopt, bits 32, dense": Entry("adopt", options={"bits": 32, "second_moment": "dense"}),
    "ademamix": Entry("ademamix", horizon=("alpha_warmup", "beta3_warmup")),
    "ademamix, bits 32, dense": Entry(
        "ademamix", options={"bits": 32, "second_moment": "dense"}, horizon=("alpha_warmup", "beta3_warmup")
    ),
}


@dataclass(frozen=True)
class Cell:
    task: str
    optimizer: str
    lr: float
    seed: int

    def config(self, **options: Any) -> TrainConfig:
        entry, settings = ENTRIES[self.optimizer], SETTINGS[self.task]
        rank = {"rank": entry.rank[self.task]} if entry.rank else {}
        return TrainConfig(
            optimizer=entry.optimizer,
            options={**entry.options, **rank, **dict.fromkeys(entry.horizon, settings["steps"]), **options},
            lr=self.lr,
            weight_decay=entry.weight_decay,
            seed=self.seed,
            eval_every=settings["steps"],
            threads=1,
            task=self.task,
            **settings,
        )


Results = dict[Cell, dict[str, Any]]


def load_results() -> Results:
    if not RESULTS.exists():
        return {}
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    return {Cell(**row["cell"]): row for row in rows}


def loss_of(cell: Cell, data: Task) -> float:
    """The loss that ``cell`` ends on, infinite if it diverges; run now unless the file has it."""
    found = load_results()  # read anew each time: another process may be filling the same file
    if cell not in found:
        result = run(cell.config(), data)
        row = {
            "cell": asdict(cell),
            "loss": json_number(result.validation_loss),
            "accuracy": json_number(result.accuracy),
            "bytes_per_param": result.bytes_per_param,
            "parameters": result.parameters,
            "versions": f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}",
        }
        RESULTS.parent.mkdir(exist_ok=True)
        with RESULTS.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{cell}: {result.validation_loss:.4f}, {result.accuracy:.1%}", flush=True)
        found[cell] = row
    loss = found[cell]["loss"]
    return math.inf if loss is None else float(loss)


def best_rate(task: str, optimizer: str, data: Task) -> float:
    """The learning rate whose half and double both end on a higher mean loss over the tuning seeds."""
    rate = ENTRIES[optimizer].start
    while True:
        losses = {
            lr: statistics.fmean(loss_of(Cell(task, optimizer, lr, seed), data) for seed in TUNING_SEEDS[task])
            for lr in (rate, rate / 2, 2 * rate)
        }
        best = min(losses, key=lambda lr: losses[lr])
        if best == rate:
            return rate
        rate = best


def run_all(task: str, optimizers: list[str]) -> None:
    data = load_task(TrainConfig(task=task))
    for optimizer in optimizers:
        rate = best_rate(task, optimizer, data)
        for seed in SEEDS[task]:
            loss_of(Cell(task, optimizer, rate, seed), data)


def paged() -> Iterator[str]:
    """Whether paged and resident Gefen have the same weights and state after 50 steps, for each task."""
    for task in TASKS:
        cell = Cell(task, "gefen", 8e-3, 1)
        jobs = [Job(cell.config(placement=placement)) for placement in ("resident", "paged")]
        for job in jobs:
            for _ in range(50):
                job.advance()
        one, other = ([*job.model.parameters(), *tensors(job.optimizer.state_dict()["state"])] for job in jobs)
        equal = len(one) == len(other) and all(map(torch.equal, one, other))
        verdict = "equal" if equal else "DIFFER"
        yield f"{task}: {len(one)} tensors of weights and state {verdict} after {jobs[0].step} steps"


def tensors(state: dict[Any, dict[str, Any]]) -> list[torch.Tensor]:
    return [value for entries in state.values() for value in entries.values() if isinstance(value, torch.Tensor)]


def report() -> Iterator[str]:
    """A Markdown table for each task, and the grids of learning rates."""
    found = load_results()
    for task in TASKS:
        chosen = {optimizer: rate for optimizer in ENTRIES if (rate := chosen_rate(found, task, optimizer)) is not None}
        base = seeds(found, task, BASELINE, chosen[BASELINE]) if BASELINE in chosen else {}
        if not chosen:
            continue
        parameters = next(row["parameters"] for cell, row in found.items() if cell.task == task)
        yield f"\n**{task}**: {SETTINGS[task]['steps']} steps, {parameters:,} parameters\n"
        yield f"| optimizer | lr | B/param | loss, nats/{TASKS[task].unit} | gap to AdamW | right, % | seeds |"
        yield "|---|---|---|---|---|---|---|"
        for optimizer, rate in chosen.items():
            rows = seeds(found, task, optimizer, rate)
            yield line(optimizer, rate, rows, base)
    yield "\n| optimizer | " + " | ".join(TASKS) + " |"
    yield "|---" * (len(TASKS) + 1) + "|"
    for optimizer in ENTRIES:
        yield f"| {optimizer} | " + " | ".join(grid(found, task, optimizer) for task in TASKS) + " |"


def line(optimizer: str, rate: float, rows: dict[int, dict[str, Any]], base: dict[int, dict[str, Any]]) -> str:
    """A row: means and standard deviations over seeds; the paired gap with its standard error."""
    losses = [row["loss"] for row in rows.values() if row["loss"] is not None]
    rights = [100 * row["accuracy"] for row in rows.values() if row["loss"] is not None]
    pairs = [(row["loss"], base[seed]["loss"]) for seed, row in rows.items() if seed in base]
    gaps = [own - other for own, other in pairs if None not in (own, other)]
    gap = "" if optimizer == BASELINE else mean_error(gaps)
    count = f"{len(rows)}" if len(losses) == len(rows) else f"{len(rows)}, {len(rows) - len(losses)} diverged"
    nbytes = next(iter(rows.values()))["bytes_per_param"]
    spread = f"{statistics.stdev(losses):.4f}" if len(losses) > 1 else "-"
    if not losses:
        return f"| {optimizer} | {rate:g} | {nbytes:.3f} | diverged | | | {count} |"
    return (
        f"| {optimizer} | {rate:g} | {nbytes:.3f} | {statistics.mean(losses):.4f} ± {spread} | {gap} | "
        f"{statistics.mean(rights):.1f} ± {statistics.stdev(rights) if len(rights) > 1 else 0:.1f} | {count} |"
    )


def chosen_rate(found: Results, task: str, optimizer: str) -> float | None:
    """The best rate of the grid, once a seed was run at it."""
    rates = tuned(found, task, optimizer)
    best = min(rates, key=lambda lr: rates[lr], default=None)
    return best if best is not None and seeds(found, task, optimizer, best) else None


def tuned(found: Results, task: str, optimizer: str) -> dict[float, float]:
    """Mean loss over the tuning seeds by learning rate, rising; infinite where one diverged."""
    rates = sorted({cell.lr for cell in found if (cell.task, cell.optimizer) == (task, optimizer)})
    means = {}
    for lr in rates:
        rows = [found.get(Cell(task, optimizer, lr, seed)) for seed in TUNING_SEEDS[task]]
        losses = [math.inf if row["loss"] is None else row["loss"] for row in rows if row is not None]
        if len(losses) == len(rows):
            means[lr] = statistics.fmean(losses)
    return means


def seeds(found: Results, task: str, optimizer: str, rate: float) -> dict[int, dict[str, Any]]:
    """Rows by seed, tuning seeds left out."""
    cells = {seed: Cell(task, optimizer, rate, seed) for seed in SEEDS[task]}
    return {seed: found[cell] for seed, cell in cells.items() if cell in found}


def grid(found: Results, task: str, optimizer: str) -> str:
    """Loss on the tuning seeds by learning rate."""
    return ", ".join(
        f"{lr:g}: {f'{loss:.3f}' if math.isfinite(loss) else 'diverged'}"
        for lr, loss in tuned(found, task, optimizer).items()
    )


def mean_error(values: list[float]) -> str:
    """Mean and standard error of the mean, signed; bold where a 95 % interval of Student's t leaves out 0."""
    if len(values) < 2:
        return "-"
    mean, error = statistics.mean(values), statistics.stdev(values) / len(values) ** 0.5
    text = f"{mean:+.4f} ± {error:.4f}"
    return f"**{text}**" if abs(mean) > STUDENT.get(len(values), 12.7) * error else text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "paged", "report"])
    parser.add_argument("--task", choices=list(TASKS), help="for run; default: all")
    parser.add_argument("--optimizers", help=f"for run, separated by semicolons; default: {'; '.join(ENTRIES)}")
    args = parser.parse_args()
    if args.what != "run":
        print("\n".join(paged() if args.what == "paged" else report()))
        return
    optimizers = args.optimizers.split(";") if args.optimizers else list(ENTRIES)
    for task in [args.task] if args.task else list(TASKS):
        run_all(task, [name.strip() for name in optimizers])


if __name__ == "__main__":
    main()
