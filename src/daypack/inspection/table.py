"""What is in optimizer state, and what differs between two states, as tables on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from rich import box
from rich.table import Table

from daypack.inspection.difference import ParamDiff, StateDiff
from daypack.inspection.result import ParamStats, StateInspection, Total

#: Warnings that are shown; JSON and page have all.
SHOWN = 40

#: What a table can be sorted by: the key, and whether the largest comes first.
SORTS: Mapping[str, tuple[Callable[[ParamStats], float | str], bool]] = {
    "name": (lambda p: p.name, False),
    "bytes": (lambda p: p.total_bytes, True),
    "bytes-per-param": (lambda p: p.bytes_per_param, True),
    "step": (lambda p: p.step or 0, True),
    "first": (lambda p: _norm(p, squares=False), True),
    "second": (lambda p: _norm(p, squares=True), True),
    "update": (lambda p: p.update or 0.0, True),
    "ratio": (lambda p: p.ratio or 0.0, True),
    "error": (lambda p: p.error or 0.0, True),
    "dead": (lambda p: p.unused, True),
}


def _norm(param: ParamStats, squares: bool) -> float:
    return next((each.norm for each in param.moments if each.squares == squares), 0.0)


def sorted_params(params: Sequence[ParamStats], by: str | None) -> list[ParamStats]:
    """Sort ``params`` by one of `SORTS`; None: as they are."""
    if by is None:
        return list(params)
    key, largest = SORTS[by]
    return sorted(params, key=key, reverse=largest)


def shape_text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def number(value: float | None, spec: str = ".3g") -> str:
    return "" if value is None else format(value, spec)


def percent(value: float | None) -> str:
    """Write ``value`` as a percentage; empty if it is not known."""
    return "" if value is None else "exact" if value == 0 else f"{value:.2%}"


#: A column: title, whether it is aligned to the right, and the cell of a parameter.
Column = tuple[str, bool, Callable[[ParamStats], str]]
#: Columns before those of the moments.
COLUMNS: tuple[Column, ...] = (
    ("parameter", False, lambda p: p.name),
    ("shape", False, lambda p: shape_text(p.shape)),
    ("role", False, lambda p: p.role),
    ("rule", False, lambda p: p.rule),
    ("stored as", False, lambda p: p.format),
    ("bytes", True, lambda p: f"{p.total_bytes:,}"),
    ("B/param", True, lambda p: f"{p.bytes_per_param:.3f}"),
    ("step", True, lambda p: number(p.step, ",")),
)
#: Columns behind them.
FURTHER_COLUMNS: tuple[Column, ...] = (
    ("error", True, lambda p: percent(p.error)),
    ("update\nRMS", True, lambda p: number(p.update)),
    ("lr update\n/ weight", True, lambda p: number(p.ratio, ".2g")),
    ("dead\nrows", True, lambda p: f"{p.unused:,}" if p.unused else ""),
    ("not\nfinite", True, lambda p: f"{sum(p.nonfinite.values()):,}" if p.nonfinite else ""),
)
#: Columns that are left out where all their cells are empty, or (the rule) the same.
_OPTIONAL = ("lr update\n/ weight", "dead\nrows", "not\nfinite", "error", "update\nRMS")


#: Which columns go first where a terminal is too narrow; those of the moments follow.
_DROPPED = ("rule", "bytes", "role", "step", "update\nRMS", "error", "stored as")


def columns_for(params: Sequence[ParamStats]) -> list[Column]:
    """Choose the columns that tell something about ``params``."""
    rules = {param.rule for param in params}
    return [
        column
        for column in (*COLUMNS, *_moment_columns(params), *FURTHER_COLUMNS)
        if not (column[0] == "rule" and len(rules) == 1)
        and not (column[0] in _OPTIONAL and not any(column[2](param) for param in params))
    ]


def _moment_columns(params: Sequence[ParamStats]) -> list[Column]:
    """Make a column of norms for each moment that any parameter keeps."""

    def column(name: str, symbol: str) -> Column:
        return f"|{symbol}|", True, lambda p: number(each.norm) if (each := p.moment(name)) else ""

    found = {each.moment: each for param in params for each in param.moments}
    ordered = sorted(found.values(), key=lambda each: each.squares)  # as one thinks of them: m before v
    return [column(each.moment, each.symbol) for each in ordered]


def inspection_table(params: Sequence[ParamStats], fits: Callable[[Table], bool]) -> tuple[Table, tuple[str, ...]]:
    """Make a table of one row per parameter. Returns it, and the titles of columns dropped until it ``fits``."""
    shown, dropped = columns_for(params), list[str]()
    moments = [title for title, *_ in reversed(_moment_columns(params))]
    for title in (None, *_DROPPED, *moments):
        if title is not None and any(column[0] == title for column in shown):
            shown = [column for column in shown if column[0] != title]
            dropped.append(title.replace("\n", " "))
        rows = ([cell(p) for *_, cell in shown] for p in params)
        table = _table([(title, right) for title, right, _ in shown], rows)
        if fits(table):
            break
    return table, tuple(dropped)


def totals_table(title: str, totals: Mapping[str, Total], whole: Total) -> Table:
    """Make a table of one row per kind of parameter: number, elements, bytes, share of all bytes."""
    rows = (
        [name, f"{t.params:,}", f"{t.elements:,}", f"{t.bytes:,}", f"{t.bytes_per_param:.3f}", _share(t.bytes, whole)]
        for name, t in [*totals.items(), ("total", whole)]
    )
    heads = ("tensors", "elements", "bytes", "B/param", "share")
    return _table([(title, False), *((head, True) for head in heads)], rows)


def _share(part: int, whole: Total) -> str:
    return f"{part / whole.bytes:.1%}" if whole.bytes else ""


def warning_lines(inspection: StateInspection) -> Iterator[str]:
    """Yield a line for each warning, `SHOWN` at most."""
    found = inspection.warnings
    for each in found[:SHOWN]:
        yield f"{each.kind}: {each.param}: {each.text}"
    if len(found) > SHOWN:
        yield f"... and {len(found) - SHOWN} more; --json has all"


def diff_table(diff: StateDiff) -> Table:
    """Make a table of one row per parameter that is not the same in both."""
    differing = [param for param in diff.params if not param.equal]
    symbols = {each.moment: each.symbol for param in differing for each in param.moments}
    titles = [title for symbol in symbols.values() for title in (f"{symbol}: |a-b|/max", "cosine")]
    columns = [("parameter", False), ("changed", False), *((title, True) for title in (*titles, "bits"))]
    return _table(columns, (_diff_row(param, symbols) for param in differing))


def _diff_row(param: ParamDiff, moments: Iterable[str]) -> list[str]:
    cells, found = list[str](), {each.moment: each for each in param.moments}
    for name in moments:
        each = found.get(name)
        cells += [number(each.distance, ".3g"), number(each.cosine, ".6f")] if each else ["", ""]
    changed = [what[:-1] for what in param.changes] + list(param.options)
    note = [param.note] if param.note and "shapes" not in param.changes else []
    return [param.name, ", ".join([*changed, *note]), *cells, "same" if param.identical else "differ"]


def _table(columns: Sequence[tuple[str, bool]], rows: Iterable[list[str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for title, right in columns:
        table.add_column(title, justify="right" if right else "left", overflow="fold", no_wrap=right)
    for row in rows:
        table.add_row(*row)
    return table
