"""Loss curves: validation and training loss over steps, and the gap to the first optimizer."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from daypack.lab.loop import RunResult
from daypack.lab.tasks import task_info
from daypack.presentation.figure import LIGHT, Theme, style


def save_curve(results: Sequence[RunResult], path: Path) -> None:
    """Write the figure as a PNG of 1500 x 675 pixels."""
    draw(results, LIGHT, wide=True).savefig(path, format="png", dpi=150, facecolor=LIGHT.background)


def draw(results: Sequence[RunResult], theme: Theme, *, wide: bool) -> Figure:
    """Draw both panels: side by side if `wide`, else one above the other for a narrow screen."""
    groups: dict[str, list[RunResult]] = defaultdict(list)
    for result in results:
        groups[_name(result, results)].append(result)
    compared = len(groups) > 1
    panels = 2 if compared else 1
    figure = Figure(figsize=(10, 4.5) if wide else (4.6, 3.6 * panels), layout="constrained")
    grid = figure.subplots(1, panels, squeeze=False) if wide else figure.subplots(panels, 1, squeeze=False)
    axes: list[Axes] = list(grid.flat)
    baseline = next(iter(groups.values()))
    for (label, runs), colour in zip(groups.items(), _cycle(theme.lines, len(groups)), strict=True):
        _draw_losses(axes[0], label, runs, colour)
        if compared:
            _draw_gap(axes[1], label, runs, baseline, colour)
    axes[0].set_title(f"Loss, nats per {task_info(results[0].config.task).unit}")
    axes[0].legend(frameon=False, labelcolor=theme.text)
    if compared:
        axes[1].set_title(f"Validation loss minus {next(iter(groups))}'s")
    for panel in axes:
        style(panel, theme, "step")
    return figure


def _name(result: RunResult, results: Sequence[RunResult]) -> str:
    """Return the label, with the learning rate where it alone tells two curves apart."""
    rates = {other.config.lr for other in results if other.config.label == result.config.label}
    return result.config.label if len(rates) == 1 else f"{result.config.label}, lr {result.config.lr:g}"


def _cycle(colours: tuple[str, ...], count: int) -> list[str]:
    return [colours[index % len(colours)] for index in range(count)]


def _draw_losses(axes: Axes, label: str, runs: Sequence[RunResult], colour: str) -> None:
    """Draw means over seeds: training loss faint and smoothed, validation loss strong with its range."""
    steps = [record.step for record in runs[0].records]
    if all(len(run.records) == len(steps) for run in runs):
        train = np.mean([_smooth([record.loss for record in run.records]) for run in runs], axis=0)
        axes.plot(steps, train, color=colour, alpha=0.35, linewidth=1)
    points, values = _validation(runs)
    axes.plot(points, values.mean(axis=0), color=colour, marker="o", markersize=3.5, label=label)
    axes.fill_between(points, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.15, linewidth=0)


def _draw_gap(axes: Axes, label: str, runs: Sequence[RunResult], baseline: Sequence[RunResult], colour: str) -> None:
    """Draw the mean difference of validation losses, paired by seed, with its standard error."""
    other = {run.config.seed: run for run in baseline}
    pairs = [(run, other[run.config.seed]) for run in runs if run.config.seed in other]
    if not pairs:
        return
    points, own = _validation([run for run, _ in pairs])
    gaps = own - _validation([base for _, base in pairs])[1]
    mean = gaps.mean(axis=0)
    axes.plot(points, mean, color=colour, marker="o", markersize=3.5, label=label)
    if len(pairs) > 1:
        error = gaps.std(axis=0, ddof=1) / len(pairs) ** 0.5
        axes.fill_between(points, mean - error, mean + error, color=colour, alpha=0.15, linewidth=0)


def _validation(runs: Sequence[RunResult]) -> tuple[list[int], np.ndarray]:
    """Return the evaluated steps, and losses `[runs, steps]`."""
    return [step for step, _ in runs[0].validation_curve], np.array(
        [[loss for _, loss in run.validation_curve] for run in runs]
    )


def _smooth(losses: Sequence[float]) -> np.ndarray:
    """Average over the last 2 % of the steps, over fewer at the start."""
    window = max(1, len(losses) // 50)
    total = np.concatenate(([0.0], np.cumsum(losses)))
    end = np.arange(1, len(losses) + 1)
    begin = np.maximum(0, end - window)
    return np.asarray((total[end] - total[begin]) / (end - begin))
