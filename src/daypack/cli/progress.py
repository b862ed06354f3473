"""Live progress on a terminal, plain lines anywhere else."""

import os
import sys
from typing import Any, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from daypack.lab.config import TrainConfig
from daypack.lab.loop import Record


class PipeConsole(Console):
    """A console whose reader may leave (`| head`): the job goes on, and what it would have printed is dropped."""

    def on_broken_pipe(self) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


def make_console(width: int = 100) -> Console:
    """Make a console for results, on stdout: colours on a terminal, plain text of ``width`` columns otherwise."""
    return _console(sys.stdout, width=width)


def progress_console(quiet: bool = False) -> Console:
    """Make a console for progress, on stderr: live on a terminal, plain lines otherwise. ``quiet``: none."""
    return _console(sys.stderr, width=100, quiet=quiet)


def _console(stream: TextIO, width: int, quiet: bool = False) -> Console:
    common: dict[str, Any] = {"highlight": False, "markup": False, "quiet": quiet, "stderr": stream is sys.stderr}
    if stream.isatty():
        return Console(**common)
    return PipeConsole(**common, force_terminal=False, no_color=True, width=width)


class Display:
    """Shows the runs as they go on.

    On a terminal, one bar for all runs and one for the current run; the lines of its evaluations scroll by above.
    """

    def __init__(self, console: Console, total_steps: int, done: int = 0) -> None:
        self.console = console
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=console.quiet or not console.is_terminal,
        )
        self._all = self._bars.add_task("all runs", total=total_steps, completed=done, loss="")
        self._current: tuple[str, TaskID] | None = None

    def __enter__(self) -> "Display":
        self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bars.stop()

    def show(self, config: TrainConfig, record: Record) -> None:
        """Show one step."""
        title = f"{config.label}, seed {config.seed}"
        if self._current is None or self._current[0] != title:
            if self._current is not None:
                self._bars.remove_task(self._current[1])
            self._current = title, self._bars.add_task(title, total=config.steps, completed=record.step - 1, loss="")
        self._bars.update(self._current[1], completed=record.step, loss=f"loss {record.loss:.3f}")
        self._bars.advance(self._all)
        if record.validation is not None:
            self.console.print(
                f"{title}: step {record.step}/{config.steps}  training loss {record.loss:.3f}  "
                f"validation loss {record.validation:.4f}  {record.seconds:.0f} s"
            )
