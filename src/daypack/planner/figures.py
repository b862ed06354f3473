"""A memory plan as stacked bars."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from daypack.planner.result import MemoryPlan, OptimizerPlan, unit
from daypack.presentation.figure import LIGHT, Theme


def save_bars(plan: MemoryPlan, path: Path) -> None:
    """Write the stacked bars as a PNG, 1500 pixels wide."""
    draw_bars(plan, LIGHT).savefig(path, format="png", dpi=150, facecolor=LIGHT.background)


def draw_bars(plan: MemoryPlan, theme: Theme) -> Figure:
    """Draw a bar for each optimizer, its parts side by side, and a line where the GPU's memory ends."""
    rows = plan.planned
    figure = Figure(figsize=(10, 1.9 + 0.42 * len(rows)), layout="constrained")
    axes = figure.subplots()
    names = [row.optimizer for row in rows]
    scale, name = unit(max((row.total for row in rows), default=0))
    left = [0.0] * len(rows)
    for index, title in enumerate(_parts(rows[0]) if rows else {}):
        sizes = [_parts(row)[title] / scale for row in rows]
        if any(sizes):
            axes.barh(names, sizes, left=left, color=theme.lines[index % len(theme.lines)], label=title, height=0.66)
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    if plan.memory is not None:
        axes.axvline(plan.memory / scale, color=theme.text, linestyle="--", linewidth=1.2, label="memory of a GPU")
    axes.invert_yaxis()
    axes.set_xlabel(f"{name} per GPU, at the peak", color=theme.text)
    axes.set_title(plan.title, color=theme.text, fontsize=10, loc="left", wrap=True)
    axes.tick_params(colors=theme.text)
    axes.grid(axis="x", color=theme.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_color(theme.grid)
        spine.set_visible(side in ("left", "bottom"))
    figure.legend(loc="outside lower center", ncols=4, frameon=False, labelcolor=theme.text, fontsize=9)
    return figure


def _parts(row: OptimizerPlan) -> dict[str, int]:
    """Return the parts of a bar. Activations and the step's temporaries are never there together: only the larger
    counts.
    """
    activations = row.activations if row.activations >= row.temporaries else 0
    return {
        "weights": row.weights,
        "gradients": row.gradients,
        "state": row.state,
        "copies of weights": row.copies,
        "gathered or in buckets": row.communication,
        "activations": activations,
        "temporaries of the step": row.total - row.resident - activations,
    }
