"""`daypack compare`."""

import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import daypack
from daypack.cli import INTERRUPTED, TERMINATED, Interrupted
from daypack.cli.lr import parse_lr
from daypack.cli.options import default_of, with_options
from daypack.cli.progress import Display, make_console, progress_console
from daypack.cli.signals import Terminated, terminated
from daypack.lab import Record, RunResult, Task, TrainConfig, grid, load_task, summarise_runs
from daypack.lab import compare as run_all
from daypack.lab.config import with_threads
from daypack.lab.environment import versions
from daypack.lab.folder import RecordWriter, has_records, require_free, run_folder, staged, write_report
from daypack.lab.options import COMPARE
from daypack.lab.page import Provenance
from daypack.lab.parallel import only_first, processes
from daypack.lab.table import comparison_table
from daypack.lab.verdict import caveat, headline

OUT = Path("runs")  # the folder that new runs go below


def command_line() -> str:
    """Return the command as it can be typed again."""
    return shlex.join(["daypack", *sys.argv[1:]])


def provenance(name: str, task: Task, threads: int | None) -> Provenance:
    """Say how to get the result of this process again."""
    return Provenance(name, command_line(), task.source, task.fingerprint, versions(threads))


def config_of(given: Mapping[str, Any]) -> TrainConfig:
    """Build the config of a new run; options that are None keep their defaults."""
    return with_threads(TrainConfig(**{key: value for key, value in given.items() if value is not None}))


@with_options(COMPARE)
def compare(
    *,
    optimizers: Annotated[
        str,
        typer.Option(help=f"Comma-separated names; the first is the baseline. Known: {', '.join(daypack.names())}."),
    ] = "adamw,gefen",
    seeds: Annotated[int, typer.Option(help="Runs per optimizer; more than one gives standard errors.")] = 1,
    lr: Annotated[
        str | None,
        typer.Option(
            help="Peak learning rate: one, or one each as in adamw=2e-3,sgd=0.1.", show_default=default_of("lr")
        ),
    ] = None,
    given: Mapping[str, Any],
    out: Annotated[Path, typer.Option(help="Folder that results go below.")] = OUT,
    name: Annotated[str, typer.Option(help="Folder of this comparison below --out.")] = "compare",
) -> int:
    """Train one model with several optimizers, from the same start on the same batches, and compare them.

    Shows loss and accuracy on held-out data, measured bytes of optimizer state per parameter, time per optimizer step
    and wall time. Writes report.html, loss.png, metrics.jsonl and config.json to OUT/NAME once all runs are done; an
    earlier comparison of that name is replaced then, anything else there is refused. Progress goes to stderr, the
    result to stdout.

    Example: daypack compare --optimizers adamw,gefen --seeds 3 --model tiny, or with --task images
    """
    base = config_of(given)
    with (
        processes(base.parallel, base.device) as ranks,  # of several the first one prints and writes
        only_first(ranks, out) as out,
    ):
        progress = progress_console(quiet=not ranks.first)
        return _run(base, progress, optimizers=optimizers, seeds=seeds, lr=lr, out=out, name=name)


def _run(
    base: TrainConfig, progress: Console, *, optimizers: str, seeds: int, lr: str | None, out: Path, name: str
) -> int:
    folder = run_folder(out, name)
    require_free(folder, "compare")
    names = [part.strip() for part in optimizers.split(",") if part.strip()]
    configs = grid(base, names, seeds, parse_lr(lr, names, base.lr))
    task = load_task(base)
    console = make_console()
    console.print(f"{base.model} model, {base.steps} steps, {task.about}", soft_wrap=True)
    started = time.perf_counter()
    with terminated(), staged(folder) as stage:
        try:
            results = _train(configs, task, stage, progress)
            write_report(stage, "compare", provenance(name, task, base.threads), results)
        except KeyboardInterrupt as error:
            kept = f"; what was measured so far is in {stage}" if has_records(stage) else ""
            raise Interrupted(kept, TERMINATED if isinstance(error, Terminated) else INTERRUPTED) from None
    summaries = summarise_runs(results)
    console.print(comparison_table(summaries))
    console.print(headline(summaries), soft_wrap=True)
    console.print(caveat(summaries), soft_wrap=True)
    console.print(f"{time.perf_counter() - started:.0f} s in all; report: {folder / 'report.html'}", soft_wrap=True)
    return 0


def _train(configs: list[TrainConfig], task: Task, stage: Path, progress: Console) -> list[RunResult]:
    total = sum(config.steps for config in configs)
    with RecordWriter(stage) as writer, Display(progress, total) as display:

        def on_record(config: TrainConfig, record: Record) -> None:
            writer.write(config, record)
            display.show(config, record)

        return run_all(configs, task, on_record)
