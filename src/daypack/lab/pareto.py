"""What each byte of state buys: final loss against bytes of state, one point for each optimizer."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from daypack.lab.compare import Mean, OptimizerSummary
from daypack.lab.tasks import task_info
from daypack.presentation.figure import Theme, style

#: Where the name of a point may stand beside it, the best place first: points to the right and up, and its alignment.
_PLACES = (
    (8, 8, "left"), (-8, 8, "right"), (8, -8, "left"), (-8, -8, "right"), (9, 0, "left"), (-9, 0, "right"),
    (0, 22, "center"), (0, -22, "center"), (9, 22, "left"), (9, -22, "left"), (-9, 22, "right"), (-9, -22, "right"),
)  # fmt: skip
#: Half the side of the square that a point takes, pixels.
_POINT = 6


def plottable(summaries: Sequence[OptimizerSummary]) -> list[tuple[OptimizerSummary, Mean]]:
    """Return the optimizers that have a point, with their loss: those that did not diverge."""
    return [(summary, summary.loss) for summary in summaries if summary.loss is not None]


def frontier(summaries: Sequence[OptimizerSummary]) -> list[tuple[float, float]]:
    """Return bytes of state per parameter and loss of the optimizers that none beats in both, by rising bytes."""
    best: list[tuple[float, float]] = []
    for point in sorted((summary.bytes_per_param, loss.value) for summary, loss in plottable(summaries)):
        if not best or point[1] < best[-1][1]:
            best.append(point)
    return best


def draw_pareto(summaries: Sequence[OptimizerSummary], theme: Theme, *, wide: bool) -> Figure:
    """Draw losses with standard errors over seeds, a line through the frontier, a name at every point."""
    figure = Figure(figsize=(10, 4.2) if wide else (4.6, 4.2), layout="constrained")
    axes = figure.subplots()
    best = frontier(summaries)
    axes.plot(*zip(*best, strict=True), drawstyle="steps-post", color=theme.text, alpha=0.35, linewidth=1, zorder=1)
    points = plottable(summaries)
    for index, summary in enumerate(summaries):
        if summary.loss is not None:
            colour, error = theme.lines[index % len(theme.lines)], summary.loss.error
            at = [summary.bytes_per_param], [summary.loss.value]
            axes.errorbar(*at, yerr=error, color=colour, marker="o", markersize=7, capsize=4, linewidth=1.4, zorder=2)
    style(axes, theme, "bytes of state per parameter")
    axes.set_ylabel(f"validation loss, nats per {task_info(summaries[0].task).unit}", color=theme.text)
    axes.margins(y=0.14)
    largest = max(summary.bytes_per_param for summary, _ in points) or 1.0
    axes.set_xlim(-0.08 * largest, 1.12 * largest)
    _name(figure, axes, points, theme)
    return figure


def _name(figure: Figure, axes: Axes, points: Sequence[tuple[OptimizerSummary, Mean]], theme: Theme) -> None:
    """Write names at their points, where they hide neither a point nor another name, if there is such a place."""
    figure.draw_without_rendering()  # places the axes
    frame, taken = axes.get_window_extent(), []
    for summary, loss in points:
        x, y = axes.transData.transform((summary.bytes_per_param, loss.value))
        taken.append(Bbox.from_bounds(x - _POINT, y - _POINT, 2 * _POINT, 2 * _POINT))
    for summary, loss in points:
        at = summary.bytes_per_param, loss.value
        label = axes.annotate(
            summary.label, at, (0, 0), textcoords="offset points", va="center", fontsize=9, color=theme.text
        )
        for x, y, side in _PLACES:
            label.set(position=(x, y), ha=side)
            box = label.get_window_extent()
            if box.x0 >= frame.x0 and box.x1 <= frame.x1 and not any(box.overlaps(other) for other in taken):
                break
        taken.append(box)
