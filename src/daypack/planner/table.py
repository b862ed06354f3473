"""A memory plan as a table on the terminal."""

from __future__ import annotations

from rich import box
from rich.table import Table

from daypack.planner.result import MemoryPlan, table_cells, unit


def memory_table(plan: MemoryPlan) -> Table:
    """Make a table of one row per optimizer; the first title names the unit of sizes (GB = 1e9 bytes)."""
    header, *rows = table_cells(plan)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for index, title in enumerate(header):
        # Titles may wrap, numbers may not.
        if index == 0:
            _, size = unit(max((row.total for row in plan.planned), default=0))
            table.add_column(f"optimizer\n(sizes in {size})", overflow="fold")
        else:
            table.add_column(title.replace(" ", "\n"), justify="right", no_wrap=True)
    for row in rows:
        style = "bold" if row[0] == plan.recommended else None
        table.add_row(*row, style=style)
    return table
