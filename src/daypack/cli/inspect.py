"""`daypack inspect` and `daypack diff`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from daypack.checkpoint.atomic import write_text_whole
from daypack.cli.progress import make_console
from daypack.cli.state import From
from daypack.inspection import StateDiff, StateInspection, diff_states, inspect_state
from daypack.inspection.table import (
    SORTS,
    diff_table,
    inspection_table,
    sorted_params,
    totals_table,
    warning_lines,
)

DIFFERENT = 1  # exit code of `daypack diff` where the states differ, as diff has it
#: Width for a table that is not shown on a terminal, so that nothing in it is cut or wrapped.
UNBROKEN = 10_000
STATE = (
    "A file of daypack.checkpoint.save_file (or the folder of its shards), of torch.save(optimizer.state_dict()) "
    "(alone, or as 'optimizer' in a dict), or of daypack train (or its folder)."
)


def inspect(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help=STATE)],
    weights: Annotated[
        Path | None,
        typer.Option(
            help="The model's weights (safetensors, or torch.save of its state_dict()), to compare updates with.",
            show_default="those in the checkpoint",
        ),
    ] = None,
    source: From = None,
    match: Annotated[
        list[str] | None,
        typer.Option(help="Only parameters of such names, as '*.mlp.*'; repeatable.", show_default="all"),
    ] = None,
    sort: Annotated[
        str | None, typer.Option(help=f"Order of the table: {', '.join(SORTS)}.", show_default="that of the state")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, everything in it.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page with figures of it all to this file.")] = None,
) -> int:
    """Say what is in optimizer state: bytes, steps, norms, errors, updates against weights, and what looks wrong.

    Reads state of daypack's optimizers, of torch's Adam, AdamW and SGD, of bitsandbytes and of torchao. Nothing in a
    file is run. |m| is the norm of the first moment, |√v| that of the root of the second. Warnings come last; they do
    not change the exit code.

    Example: daypack inspect runs/gefen --sort bytes --html state.html
    """
    if sort is not None and sort not in SORTS:
        raise ValueError(f"--sort must be one of {', '.join(SORTS)}, got {sort!r}")
    if html is not None:
        _require_page(html)
    found = inspect_state(checkpoint, weights, match or (), source, pictures=html is not None)
    if html is not None:
        from daypack.inspection.page import render_inspection

        write_text_whole(html, render_inspection(found))
    if as_json:
        print(json.dumps(found.to_dict(), indent=2, allow_nan=False))
    else:
        _show(found, sort, html)
    return 0


def diff(
    first: Annotated[Path, typer.Argument(metavar="A", help=STATE)],
    second: Annotated[Path, typer.Argument(metavar="B", help="Likewise.")],
    source: From = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, everything in it.")] = False,
) -> int:
    """Say what differs between two states: parameters, shapes, options, formats, steps, moments.

    Moments are compared as numbers: the distance |a - b| / max(|a|, |b|) and the cosine; 'bits' says whether all that
    is stored is the same to the bit.

    Exit code: 0 if the states are equal in all of it, 1 if they differ, 2 on an error.

    Example: daypack diff runs/a/checkpoint.pt runs/b/checkpoint.pt
    """
    found = diff_states(first, second, source)
    if as_json:
        print(json.dumps(found.to_dict(), indent=2, allow_nan=False))
    else:
        _show_diff(found)
    return 0 if found.equal else DIFFERENT


INSPECT_COMMANDS: dict[Callable[..., Any], str] = {inspect: "[OPTIONS]", diff: "[OPTIONS]"}


def _require_page(html: Path) -> None:
    if html.suffix not in (".html", ".htm"):
        raise ValueError(f"--html writes HTML files, got {html}; give a name that ends in .html")
    if not html.parent.is_dir():
        raise ValueError(f"{html.parent} is not a folder; make it first")


def _show(found: StateInspection, sort: str | None, html: Path | None) -> None:
    console, total = make_console(UNBROKEN), found.total
    which = "" if total.params == found.of else f" of {found.of:,}"
    rules = sorted({param.rule for param in found.params})
    console.print(
        f"{found.source}: {found.optimizer} (rule {', '.join(rules)}), {total.params:,}{which} parameters, "
        f"{total.bytes:,} bytes of state, {total.bytes_per_param:.3f} B/param",
        soft_wrap=True,
    )
    unbroken = console.options.update(width=UNBROKEN)
    table, dropped = inspection_table(
        sorted_params(found.params, sort),
        lambda table: console.measure(table, options=unbroken).maximum <= console.width,
    )
    kinds = ("stored as", found.by_format), ("role", found.by_role)
    for each in (table, *(totals_table(title, totals, total) for title, totals in kinds)):
        console.print()
        console.print(each)
    console.print()
    if dropped:
        console.print(f"- columns that this terminal is too narrow for: {', '.join(dropped)}", soft_wrap=True)
    for note in found.notes:
        console.print(f"- {note}", soft_wrap=True)
    for line in warning_lines(found):
        console.print(f"warning: {line}", soft_wrap=True)
    if not found.warnings:
        console.print("no warnings")
    if html is not None:
        console.print(f"page: {html}", soft_wrap=True)


def _show_diff(found: StateDiff) -> None:
    console = make_console(UNBROKEN)
    console.print(f"A: {found.sources[0]}\nB: {found.sources[1]}", soft_wrap=True)
    console.print(str(found), soft_wrap=True)
    if any(not param.equal for param in found.params):
        console.print()
        console.print(diff_table(found))
