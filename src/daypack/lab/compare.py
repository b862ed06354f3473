"""Several optimizers on the same model, from the same start, on the same batches."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from daypack.lab.config import TrainConfig
from daypack.lab.loop import Record, RunResult, build_optimizer, run
from daypack.lab.tasks import Task, load_task


@dataclass(frozen=True)
class Mean:
    """A mean over runs.

    Attributes:
        value: the mean.
        error: its standard error; None for a single run.
    """

    value: float
    error: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Mean":
        """Compute mean and standard error of at least one value."""
        error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
        return cls(statistics.fmean(values), error)

    def __str__(self) -> str:
        return f"{self.value:.4f}" if self.error is None else f"{self.value:.4f} ± {self.error:.4f}"


@dataclass(frozen=True)
class Memory:
    """What one process holds all the time, bytes: parameters and buffers, gradients, optimizer state."""

    weights: int
    gradients: int
    state: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.state


@dataclass(frozen=True)
class OptimizerSummary:
    """What the runs of one optimizer came to.

    Attributes:
        label: the optimizer with its options.
        task: the task's name.
        lr: peak learning rate.
        steps: optimizer steps of a run.
        seeds: number of runs.
        diverged: how many of them ended on a loss that is not finite.
        loss: last validation loss of the others, nats per prediction; None if all diverged.
        accuracy: percentage of the held-out part that they predict right; None likewise.
        gap: `loss` minus the first optimizer's, paired by seed; None for the first one itself or without a pair.
        bytes_per_param: measured optimizer state per parameter element.
        optimizer_ms: median time of one `optimizer.step()`, milliseconds, averaged over runs.
        seconds: wall time of one run, averaged over runs.
        memory: what one process holds, measured after the last step.
        step_ratio: `optimizer_ms` over the first optimizer's, within a seed; None for the first one itself.
        first_step_ms: time of the first `optimizer.step()`, averaged over runs.
        optimizer_share: fraction of a run's time that went into `optimizer.step()`, averaged over runs.
    """

    label: str
    task: str
    lr: float
    steps: int
    seeds: int
    diverged: int
    loss: Mean | None
    accuracy: Mean | None
    gap: Mean | None
    bytes_per_param: float
    optimizer_ms: float
    seconds: float
    memory: Memory
    step_ratio: Mean | None
    first_step_ms: float
    optimizer_share: float


def grid(
    base: TrainConfig, optimizers: Sequence[str], seeds: int, lrs: Mapping[str, float] | None = None
) -> list[TrainConfig]:
    """Return list the runs of a comparison: for each seed, every optimizer in turn.

    Args:
        base: what all runs share; its seed is the first one.
        optimizers: names for `daypack.create`.
        seeds: number of seeds.
        lrs: learning rates that differ from `base.lr`, by optimizer.

    Raises:
        ValueError: no optimizer, one named twice, no seed, or a learning rate for an optimizer that does not take part.
    """
    if not optimizers or len(set(optimizers)) < len(optimizers):
        raise ValueError(f"optimizers must be one or more different names, got {', '.join(optimizers) or 'none'}")
    if seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {seeds}")
    lrs = lrs or {}
    if strangers := sorted(set(lrs) - set(optimizers)):
        raise ValueError(
            f"lr given for {', '.join(strangers)}, which is not among the optimizers {', '.join(optimizers)}"
        )
    return [
        replace(base, optimizer=name, lr=lrs.get(name, base.lr), seed=base.seed + seed)
        for seed in range(seeds)
        for name in optimizers
    ]


def compare(
    configs: Iterable[TrainConfig],
    task: Task | None = None,
    on_record: Callable[[TrainConfig, Record], None] | None = None,
) -> list[RunResult]:
    """Run `configs` one after another, once every optimizer has been found to exist and to take its options.

    Args:
        configs: the runs, such as `grid` returns.
        task: the data of all runs, if it is loaded already; otherwise each task's is loaded once.
        on_record: called after every step of every run.

    Raises:
        ValueError: see `daypack.lab.loop.Job`.
    """
    configs = list(configs)
    for config in configs:
        build_optimizer(config, nn.Linear(1, 1, device="meta"))
    tasks: dict[tuple[str, str | None], Task] = {}
    results = []
    for config in configs:
        key = config.task, config.data
        if task is None and key not in tasks:
            tasks[key] = load_task(config)
        data = tasks[key] if task is None else task

        def report(record: Record, config: TrainConfig = config) -> None:
            if on_record is not None:
                on_record(config, record)

        results.append(run(config, data, report))
    return results


def summarise_runs(results: Sequence[RunResult]) -> list[OptimizerSummary]:
    """Summarise runs of one label and learning rate, in order of first appearance; gaps are to the first one."""
    groups: dict[tuple[str, float], list[RunResult]] = {}
    for result in results:
        groups.setdefault((result.config.label, result.config.lr), []).append(result)
    baseline = _finite_losses(next(iter(groups.values()))) if groups else {}
    times = {run.config.seed: run.optimizer_ms for run in next(iter(groups.values()), [])}
    return [
        _summary(runs, baseline if index else {}, times if index else {}) for index, runs in enumerate(groups.values())
    ]


def _summary(runs: Sequence[RunResult], baseline: Mapping[int, float], times: Mapping[int, float]) -> OptimizerSummary:
    losses = _finite_losses(runs)
    rights = [100 * run.accuracy for run in runs if run.config.seed in losses and math.isfinite(run.accuracy)]
    ratios = [run.optimizer_ms / times[run.config.seed] for run in runs if times.get(run.config.seed)]
    gaps = [loss - baseline[seed] for seed, loss in losses.items() if seed in baseline]
    return OptimizerSummary(
        label=runs[0].config.label,
        task=runs[0].config.task,
        lr=runs[0].config.lr,
        steps=runs[0].config.steps,
        seeds=len(runs),
        diverged=len(runs) - len(losses),
        loss=Mean.of(list(losses.values())) if losses else None,
        accuracy=Mean.of(rights) if rights else None,
        gap=Mean.of(gaps) if gaps else None,
        bytes_per_param=runs[0].bytes_per_param,
        optimizer_ms=statistics.fmean(run.optimizer_ms for run in runs),
        seconds=statistics.fmean(run.seconds for run in runs),
        memory=Memory(runs[0].weight_bytes, runs[0].gradient_bytes, runs[0].state_bytes),
        step_ratio=Mean.of(ratios) if ratios else None,
        first_step_ms=statistics.fmean(run.first_step_ms for run in runs),
        optimizer_share=statistics.fmean(run.optimizer_share for run in runs),
    )


def _finite_losses(runs: Iterable[RunResult]) -> dict[int, float]:
    """Return the last validation losses that are finite, by seed."""
    return {run.config.seed: run.validation_loss for run in runs if math.isfinite(run.validation_loss)}
