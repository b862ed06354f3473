"""Final loss against bytes of state per parameter: docs/loss-and-state.png, from the tables of docs/quality.md.

    python benchmarks/figure.py

Nothing is measured here; the tables under "Three tasks, every optimizer" are read as they stand.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.ticker import FixedLocator, NullLocator
from matplotlib.transforms import Bbox

matplotlib.use("Agg")
import matplotlib.pyplot as plt

DOCS = Path(__file__).parents[1] / "docs"
TASKS = {"text": "text: a small transformer, 3 seeds", "images": "images: a small conv net, 5 seeds"}
BASELINE, OURS = "adamw", "gefen"
#: Where a name may stand beside its point, the best place first: points to the right and up, and its alignment.
PLACES = (
    (7, 0, "left"), (-7, 0, "right"), (0, 11, "center"), (0, -11, "center"), (7, 9, "left"), (-7, 9, "right"),
    (7, -9, "left"), (-7, -9, "right"), (9, 20, "left"), (9, -20, "left"), (-9, 20, "right"), (-9, -20, "right"),
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """An optimizer on a task; ``error`` is the standard deviation of its loss over seeds."""

    name: str
    bytes_per_param: float
    loss: float
    error: float


def rows(task: str) -> list[Row]:
    """The table of ``task`` in docs/quality.md, without what is there to tell rules from compression (``bits 32``)."""
    text = (DOCS / "quality.md").read_text(encoding="utf-8")
    table = text.split(f"\n**{task}**", 1)[1].split("\n**", 1)[0]
    line = re.compile(r"\| ([^|]+) \| [\d.]+ \| ([\d.]+) \| ([\d.]+) ± ([\d.]+) \|")
    return [Row(name, *map(float, numbers)) for name, *numbers in line.findall(table) if "bits 32" not in name]


def draw(axes: Axes, found: list[Row]) -> None:
    """Draw every optimizer's point, AdamW's loss as a line, and names where they hide nothing."""
    base = next(row for row in found if row.name == BASELINE)
    axes.axhline(base.loss, color="0.6", linewidth=0.8, zorder=0)
    axes.axhspan(base.loss - base.error, base.loss + base.error, color="0.93", zorder=-1)
    for row in found:
        colour = {BASELINE: "#0072b2", OURS: "#d55e00"}.get(row.name, "#555555")
        axes.errorbar(
            row.bytes_per_param,
            row.loss,
            yerr=row.error,
            fmt="o",
            markersize=4.5,
            capsize=2,
            linewidth=0.9,
            color=colour,
            ecolor=(*to_rgb(colour), 0.45),
            zorder=3 if row.name in (BASELINE, OURS) else 2,
        )
    axes.set_xscale("log")
    axes.set_xlim(0.07, 16)
    ticks = (0.1, 0.25, 0.5, 1, 2, 4, 8)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([f"{tick:g}" for tick in ticks])
    axes.set_xlabel("bytes of state per parameter")
    axes.grid(alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def name(axes: Axes, found: list[Row]) -> None:
    """Write names beside their points, in the first place that is free."""
    at = [axes.transData.transform((row.bytes_per_param, row.loss)) for row in found]
    taken = [Bbox.from_bounds(x - 4, y - 4, 8, 8) for x, y in at]
    frame = axes.get_window_extent()
    for row in found:
        bold = row.name in (BASELINE, OURS)
        label = axes.annotate(
            row.name, (row.bytes_per_param, row.loss), (0, 0), textcoords="offset points", va="center", fontsize=7.5,
            weight="bold" if bold else "normal",
        )  # fmt: skip
        for x, y, side in PLACES:
            label.set(position=(x, y), ha=side)
            box = label.get_window_extent()
            if frame.x0 <= box.x0 and box.x1 <= frame.x1 and not any(box.overlaps(other) for other in taken):
                break
        taken.append(box)


def main() -> None:
    figure, both = plt.subplots(1, len(TASKS), figsize=(10, 4.2), layout="constrained", dpi=100)
    for axes, (task, title) in zip(both, TASKS.items(), strict=True):
        draw(axes, rows(task))
        axes.set_title(title, fontsize=10)
    both[0].set_ylabel("validation loss, nats")
    figure.draw_without_rendering()
    for axes, task in zip(both, TASKS, strict=True):
        name(axes, rows(task))
    figure.savefig(DOCS / "loss-and-state.png", metadata={"Software": None})


if __name__ == "__main__":
    main()
