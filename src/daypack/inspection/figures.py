"""Figures of optimizer state: histograms of the moments, codebooks with the use of their levels, maps of blocks."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imsave
from torch import Tensor

from daypack.inspection.result import ParamStats, Picture
from daypack.inspection.summary import EDGES
from daypack.presentation.figure import Theme, style


@dataclass(frozen=True)
class Book:
    """A codebook and how often its levels are used by all moments that share it."""

    title: str
    format: str
    levels: Tensor
    codes: Tensor
    params: int


def pictures(params: Sequence[ParamStats], moment: str) -> dict[str, Picture]:
    """Return what was measured for the figures of a moment, by parameter."""
    found = {param.name: param.moment(moment) for param in params}
    return {name: each.picture for name, each in found.items() if each is not None and each.picture is not None}


def histograms(params: Sequence[ParamStats], moment: str) -> dict[str, Tensor]:
    """Return the counts of a moment's magnitudes, by role."""
    result: dict[str, Tensor] = {}
    drawn = pictures(params, moment)
    for param in params:
        if param.name in drawn:
            counts = drawn[param.name].histogram
            result[param.role] = result[param.role] + counts if param.role in result else counts
    return {role: counts for role, counts in result.items() if counts.sum()}


def draw_histograms(drawn: Mapping[str, Mapping[str, Tensor]], theme: Theme, wide: bool) -> Figure:
    """Draw a panel for each moment, with a line for each role."""
    figure, panels = _panels(len(drawn), theme, wide)
    used = np.flatnonzero(np.sum([counts.numpy() for roles in drawn.values() for counts in roles.values()], axis=0))
    roles = list(dict.fromkeys(role for each in drawn.values() for role in each))
    for axes, (title, counts) in zip(panels, drawn.items(), strict=True):
        for role, histogram in counts.items():
            share = histogram.numpy() / int(histogram.sum())
            colour = theme.lines[roles.index(role) % len(theme.lines)]
            axes.stairs(100 * share, np.asarray(EDGES), color=colour, linewidth=1.6, label=role)
        axes.set_title(f"{title}, % of elements")
        axes.set_xlim(EDGES[used[0]] - 0.5, EDGES[used[-1] + 1] + 0.5)
        axes.legend(frameon=False, labelcolor=theme.text, fontsize=8)
        style(axes, theme, "log10 of the magnitude")
    return figure


def books(params: Sequence[ParamStats]) -> list[Book]:
    """Return the distinct codebooks; moments with equal levels share one."""
    found: dict[tuple[str, bytes], Book] = {}
    for param in params:
        for each in param.moments:
            picture = each.picture
            if picture is None or picture.levels is None or picture.codes is None or not _is_drawable(picture.levels):
                continue
            key = each.moment, picture.levels.numpy().tobytes()
            old = found.get(key)
            codes = picture.codes if old is None else old.codes + picture.codes
            found[key] = Book(each.title, each.format, picture.levels, codes, 1 if old is None else old.params + 1)
    return list(found.values())


def _is_drawable(levels: Tensor) -> bool:
    """Return whether levels rise; damaged ones (NaN) and ones not learned yet (all 0) do not."""
    return bool(levels.any() and levels.isfinite().all() and (levels.diff() >= 0).all())


def draw_book(book: Book, theme: Theme, wide: bool) -> Figure:
    """Draw the density of the stored values over [-1, 1], and the levels as ticks below."""
    figure, (axes,) = _panels(1, theme, wide)
    levels, counts = book.levels.double().numpy(), book.codes.double().numpy()
    middle = (levels[1:] + levels[:-1]) / 2
    edges = np.concatenate(([levels[0]], middle, [levels[-1]]))
    width = np.diff(edges)
    density = np.divide(counts / counts.sum(), width, out=np.zeros_like(counts), where=width > 0)
    axes.stairs(density, edges, color=theme.lines[0], fill=True, alpha=0.55, linewidth=0)
    if density.max() > 0:
        axes.set_yscale("log")
        axes.set_ylim(density[density > 0].min() / 30, density.max() * 2)
    axes.vlines(levels, 0, 0.07, transform=axes.get_xaxis_transform(), color=theme.lines[1], linewidth=0.7)
    axes.set_title("density of the codes' levels; ticks: the 256 levels")
    style(axes, theme, "value relative to the scale of its block")
    return figure


def _panels(count: int, theme: Theme, wide: bool) -> tuple[Figure, list[Axes]]:
    rows, cols = (1, count) if wide else (count, 1)
    figure = Figure(figsize=(10, 3.6) if wide else (4.6, 3.4 * rows), layout="constrained")
    return figure, list(figure.subplots(rows, cols, squeeze=False).flat)


def map_image(grid: Tensor) -> tuple[str, str]:
    """Draw a grid of magnitudes as a PNG, a pixel per cell. Returns its data URI, and the range of its colours in
    words.
    """
    values = grid.numpy()
    live = values[values > 0]
    if not live.size:
        low, high, shade = 0.0, 0.0, np.zeros_like(values)
    else:
        low, high = float(live.min()), float(live.max())
        span = np.log(high / low) or 1.0
        shade = 0.15 + 0.85 * np.log(np.where(values > 0, values, low) / low) / span
    colours = matplotlib.colormaps["inferno"](shade)
    colours[values <= 0] = (0, 0, 0, 1)
    buffer = io.BytesIO()
    imsave(buffer, np.ascontiguousarray(colours), format="png")
    text = f"{low:.2g} to {high:.2g}" if live.size else "0 everywhere"
    zero = int((values <= 0).sum())
    if zero and live.size:
        text += f", {zero / values.size:.1%} of the cells 0"
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode(), text
