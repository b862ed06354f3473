"""What is in optimizer state as one self-contained HTML file, in the manner of `daypack.lab.page`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from daypack.inspection import figures
from daypack.inspection.result import MomentStats, ParamStats, StateInspection
from daypack.inspection.table import columns_for, shape_text
from daypack.optim.size import ADAMW_BYTES
from daypack.presentation.figure import DARK, LIGHT
from daypack.presentation.html import pictures, render

#: Parameters whose maps are shown, the largest first.
SHOWN_MAPS = 64


def render_inspection(found: StateInspection) -> str:
    """Render an inspection that was made with ``pictures=True`` as HTML."""
    columns, total = columns_for(found.params), found.total
    return render(
        "daypack.inspection",
        "inspection.html.j2",
        Path(found.source).name,
        source=found.source,
        headline=f"{found.optimizer}: {total.bytes_per_param:.3f} bytes of state per parameter",
        notes=found.notes,
        figures=_figures(found),
        warnings=found.warnings,
        memory=_memory(found),
        histograms=_histograms(found.params),
        codebooks=_books(found.params),
        heads=[(title, right) for title, right, _ in columns],
        rows=[[cell(param) for *_, cell in columns] for param in found.params],
        maps=(maps := _maps(found.params))[:SHOWN_MAPS],
        left_out=f" The {SHOWN_MAPS} largest of {len(maps)} parameters are shown." if len(maps) > SHOWN_MAPS else "",
    )


def _figures(found: StateInspection) -> list[tuple[str, str, str]]:
    """Return the numbers at the top: title, value, explanation."""
    total, steps = found.total, sorted({param.step for param in found.params if param.step is not None})
    which = "" if total.params == found.of else f" of {found.of:,}"
    against = (
        f"{ADAMW_BYTES * total.elements / total.bytes:.2f}x less than AdamW in fp32" if total.bytes else "no state"
    )
    span = "not counted" if not steps else f"{steps[0]:,}" if len(steps) == 1 else f"{steps[0]:,} – {steps[-1]:,}"
    return [
        ("Optimizer state", _bytes(total.bytes), f"{total.bytes:,} bytes, {against}"),
        ("Parameters", f"{total.elements:,}", f"in {total.params:,}{which} tensors"),
        ("Steps", span, f"rule {', '.join(sorted({param.rule for param in found.params}))}"),
        ("Warnings", f"{len(found.warnings):,}", "listed below" if found.warnings else "nothing stands out"),
    ]


def _bytes(count: int) -> str:
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"


def _memory(found: StateInspection) -> list[tuple[str, list[dict[str, Any]]]]:
    kinds = {
        "By role": {name: total.bytes for name, total in found.by_role.items()},
        "By form": {name: total.bytes for name, total in found.by_format.items()},
        "By stored tensor": found.components,
    }
    return [(title, _bars(sizes, found.total.bytes)) for title, sizes in kinds.items()]


def _bars(sizes: Mapping[str, int], whole: int) -> list[dict[str, Any]]:
    longest = max(sizes.values(), default=0) or 1
    return [
        {
            "label": label,
            "value": _bytes(size),
            "note": f"{size / whole:.1%}" if whole else "0 %",
            "percent": f"{100 * size / longest:.1f}",
            "light": LIGHT.lines[index % len(LIGHT.lines)],
            "dark": DARK.lines[index % len(DARK.lines)],
        }
        for index, (label, size) in enumerate(sizes.items())
    ]


def drawn_title(moment: MomentStats) -> str:
    """Return words for what is drawn of a moment."""
    return f"root of the {moment.title}" if moment.squares else moment.title


def _histograms(params: Sequence[ParamStats]) -> dict[str, str] | None:
    moments = {each.moment: drawn_title(each) for param in params for each in param.moments}
    drawn = {title: counts for name, title in moments.items() if (counts := figures.histograms(params, name))}
    if not drawn:
        return None
    return pictures(lambda theme, wide: figures.draw_histograms(drawn, theme, wide))


def _books(params: Sequence[ParamStats]) -> list[dict[str, Any]]:
    return [
        {
            "title": f"Codebook of the {book.title} ({book.format})",
            "picture": pictures(partial(figures.draw_book, book)),
            "text": f"All {int(book.codes.sum()):,} codes of {book.params} parameters with these levels; "
            f"{int((book.codes == 0).sum())} of the 256 levels are not used.",
        }
        for book in figures.books(params)
    ]


def _maps(params: Sequence[ParamStats]) -> list[dict[str, Any]]:
    """Return the maps of every parameter that has any, the largest first; images only for those that are shown."""
    found = []
    for param in sorted(params, key=lambda param: -param.elements):
        grids = []
        for each in param.moments:
            picture = each.picture
            if picture is not None and picture.scales is not None:
                grids.append((f"scales of the {each.title}", picture.scales))
            elif picture is not None and picture.grid is not None:
                grids.append((drawn_title(each), picture.grid))
        if grids:
            found.append((param, grids))
    return [_card(param, grids) if place < SHOWN_MAPS else {} for place, (param, grids) in enumerate(found)]


def _card(param: ParamStats, grids: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    images = []
    for title, grid in grids:
        source, span = figures.map_image(grid)
        images.append({"title": title, "source": source, "range": span})
    return {"name": param.name, "shape": shape_text(param.shape), "images": images}
