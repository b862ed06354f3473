"""Colours and frame that all figures share, and a figure as SVG."""

from __future__ import annotations

import io
from dataclasses import dataclass

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure


@dataclass(frozen=True)
class Theme:
    """Colours of a figure."""

    text: str
    grid: str
    background: str
    lines: tuple[str, ...]


# Okabe and Ito's colours, told apart by colour-blind readers too; lighter ones where the page is dark.
LIGHT = Theme(
    "#24292f", "#d8dee4", "#ffffff", ("#0072b2", "#d55e00", "#009e73", "#aa4499", "#8a6d00", "#555555", "#56b4e9")
)
DARK = Theme(
    "#e6edf3", "#30363d", "#0d1117", ("#56b4e9", "#ff9d4d", "#33c79a", "#e38ac8", "#f0e442", "#b0b0b0", "#9d8cff")
)


def to_svg(figure: Figure) -> bytes:
    """Write ``figure`` as an SVG with a transparent background; the same figure gives the same bytes."""
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "daypack"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return buffer.getvalue()


def style(axes: Axes, theme: Theme, below: str) -> None:
    """Give ``axes``, whose x axis is named ``below``, the colours and the frame of all figures."""
    axes.set_xlabel(below, color=theme.text)
    axes.title.set_color(theme.text)
    axes.title.set_fontsize(11)
    axes.tick_params(colors=theme.text)
    axes.grid(color=theme.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.patch.set_alpha(0)
    for side, spine in axes.spines.items():
        spine.set_color(theme.grid)
        spine.set_visible(side in ("left", "bottom"))
