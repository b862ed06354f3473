"""A comparison as a table on the terminal."""

from collections.abc import Sequence

from rich import box
from rich.table import Table

from daypack.lab.compare import OptimizerSummary
from daypack.lab.tasks import task_info


def comparison_table(summaries: Sequence[OptimizerSummary]) -> Table:
    """Make a table of one row per optimizer; gaps are measured from the first one."""
    # 80 columns hold two optimizers with standard errors; a label wraps before a number is cut.
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column(overflow="fold")
    unit = task_info(summaries[0].task).unit
    gap = f"gap to\n{summaries[0].label}"
    for title in ("lr", f"loss\nnats/{unit}", gap, "right\n%", "state\nB/param", "step\nms", "wall\ns/run"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in map(cells, summaries):
        table.add_row(*row)
    return table


def cells(summary: OptimizerSummary) -> tuple[str, ...]:
    """Return label, learning rate, loss, gap, accuracy, bytes per parameter, optimizer time, wall time."""
    loss = "diverged" if summary.loss is None else str(summary.loss)
    if summary.diverged and summary.loss is not None:
        loss += f" ({summary.diverged} of {summary.seeds} diverged)"
    gap = "" if summary.gap is None else f"{summary.gap.value:+.4f}"
    if summary.gap is not None and summary.gap.error is not None:
        gap += f" ± {summary.gap.error:.4f}"
    return (
        summary.label,
        f"{summary.lr:g}",
        loss,
        gap,
        "" if summary.accuracy is None else f"{summary.accuracy.value:.1f}",
        f"{summary.bytes_per_param:.3f}",
        f"{summary.optimizer_ms:.2f}",
        f"{summary.seconds:.1f}",
    )
