"""`daypack train`: one optimizer, with checkpoints."""

import math
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from signal import SIGTERM
from typing import Annotated, Any

import typer
from torch.optim import Optimizer

from daypack.cli.compare import OUT, config_of, provenance
from daypack.cli.options import with_options
from daypack.cli.progress import Display, make_console, progress_console
from daypack.cli.signals import StopRequest
from daypack.lab import Job, Record, TrainConfig, summarise_runs
from daypack.lab import checkpoint as checkpoints
from daypack.lab.folder import (
    RecordWriter,
    require_free,
    require_resumable,
    rewind_records,
    run_folder,
    watched,
    write_config,
    write_report,
)
from daypack.lab.loop import finish, thread_count
from daypack.lab.options import TRAIN, flag, option_of
from daypack.lab.parallel import only_first, processes
from daypack.lab.table import comparison_table

CHECKPOINT = "checkpoint.pt"
DIVERGED = 1  # exit code of a run whose loss ended on something that is not finite
MAY_DIFFER = tuple(entry.name for entry in fields(TrainConfig) if option_of(entry).may_differ)


@dataclass(frozen=True)
class Every:
    """Steps from one checkpoint to the next, and from one reading of the optimizer to the next; None: no readings."""

    checkpoint: int
    reading: int | None

    def __post_init__(self) -> None:
        for option, value in (("--checkpoint-every", self.checkpoint), ("--monitor", self.reading)):
            if value is not None and value < 1:
                raise ValueError(f"{option} must be at least 1, got {value}")


@with_options(TRAIN)
def train(
    *,
    given: Mapping[str, Any],
    out: Annotated[Path | None, typer.Option(help="Folder that results go below.", show_default=str(OUT))] = None,
    name: Annotated[
        str | None, typer.Option(help="Folder of this run below --out.", show_default="the optimizer")
    ] = None,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 100,
    monitor: Annotated[
        int | None,
        typer.Option(
            help="Steps between readings of the optimizer (state, updates, codes, time), which go to monitor.jsonl.",
            show_default="none",
        ),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            help="Go on from a run's folder or its checkpoint.pt, bit for bit. The checkpoint has all settings; only "
            f"{', '.join(map(flag, MAY_DIFFER))} may differ (--data if the same text has moved); --parallel, "
            "--checkpoint-every and --monitor are to be given again, --out and --name left out."
        ),
    ] = None,
) -> int:
    """Train one model with one optimizer, with checkpoints.

    Writes checkpoint.pt, metrics.jsonl, and at the end report.html and loss.png, to OUT/NAME, which must be new. Ctrl-C
    (or SIGTERM) finishes the step, saves, and exits with code 130 (143); --resume goes on from there. A run that
    diverges exits with code 1. Progress goes to stderr, the result to stdout.

    Example: daypack train --optimizer gefen --steps 2000, later: daypack train --resume runs/gefen
    """
    every = Every(checkpoint_every, monitor)
    for option, value in (("--out", out), ("--name", name)):
        if resume is not None and value is not None:
            raise ValueError(
                f"{option} {value} has no meaning with --resume {resume}, which goes on in its own folder; "
                f"leave {option} out"
            )
    given = {**given, "parallel": given.get("parallel") or "none"}
    if resume is None:
        config_of(given)  # what is wrong with it alone is said before anything is set up
    with processes(given["parallel"], given.get("device") or "cpu") as ranks:  # of several the first prints and writes
        if resume is None:
            with only_first(ranks, out or OUT) as out:
                return begin(given, out=out, name=name, every=every)
        path = resume / CHECKPOINT if resume.is_dir() else resume
        with only_first(ranks, path.parent) as folder:
            return go_on(given, path=path, folder=folder, every=every)


def begin(given: Mapping[str, Any], *, out: Path, name: str | None, every: Every) -> int:
    """Begin a run in a new folder, and return the exit code."""
    config = config_of(given)
    folder = run_folder(out, name or config.optimizer)
    require_free(folder, "train")
    with thread_count(config.threads):
        job = Job(config)
        folder.mkdir(parents=True, exist_ok=True)
        write_config(folder, "train", provenance(folder.name, job.task, config.threads), [{"config": config.to_dict()}])
        return _train(job, folder / CHECKPOINT, [], every)


def go_on(given: Mapping[str, Any], *, path: Path, folder: Path, every: Every) -> int:
    """Go on with the run in ``path``, writing to ``folder``, and return the exit code."""
    checkpoint = checkpoints.load_checkpoint(path)
    require_resumable(folder)
    config = _merge(checkpoint, given)
    with thread_count(config.threads), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        job = checkpoints.resume(checkpoint, config)
    for warning in caught:
        print(f"daypack: warning: {warning.message}", file=sys.stderr)
    with thread_count(config.threads):
        records = rewind_records(folder, job.step)
        return _train(job, folder / path.name, records, every)


def _merge(checkpoint: checkpoints.Checkpoint, given: Mapping[str, Any]) -> TrainConfig:
    """Put the options that may differ into the checkpoint's config.

    Raises:
        ValueError: an option contradicts the checkpoint.
    """
    for entry in fields(TrainConfig):
        value, saved = given.get(entry.name), getattr(checkpoint.config, entry.name)
        if value is not None and value != saved and entry.name not in MAY_DIFFER:
            option = flag(entry.name)
            raise ValueError(
                f"{option} {value} does not match {checkpoint.path}, which was trained with {option} {saved}; "
                "leave the option out, or start a new run with --name"
            )
    return replace(checkpoint.config, **{key: given[key] for key in MAY_DIFFER if given.get(key) is not None})


def _train(job: Job, path: Path, records: list[Record], every: Every) -> int:
    """Train to the end or to a signal, saving to `path`, and return the exit code."""
    console, folder, config = make_console(), path.parent, job.config
    progress = progress_console(quiet=not job.ranks.first)
    if job.step:
        progress.print(f"{path}: going on after step {job.step} of {config.steps}", soft_wrap=True)
    saved = job.step if job.step else None
    with (
        StopRequest() as stop,
        RecordWriter(folder) as writer,
        watched(job.optimizer, folder, every.reading, job.step),
        Display(progress, config.steps, job.step) as display,
    ):
        while job.step < config.steps and not job.ranks.any(stop.signal is not None):
            record = job.advance()
            records.append(record)
            writer.write(config, record)
            display.show(config, record)
            if job.step % every.checkpoint == 0 and job.step < config.steps:
                writer.flush()  # a checkpoint must never be ahead of the records
                checkpoints.save_checkpoint(path, job)
                saved = job.step
        writer.flush()
        if saved != job.step:
            checkpoints.save_checkpoint(path, job)
    if job.step < config.steps:
        console.print(
            f"stopped and saved after step {job.step}; go on with: daypack train --resume {folder}", soft_wrap=True
        )
        return 128 + (stop.signal or SIGTERM)
    if not records:
        console.print(f"{path} is at its last step, {job.step}; nothing left to do", soft_wrap=True)
        return 0
    result = finish(job, records)
    write_report(folder, "train", provenance(folder.name, job.task, config.threads), [result])
    console.print(comparison_table(summarise_runs([result])))
    console.print(f"report: {folder / 'report.html'}  checkpoint: {path}", soft_wrap=True)
    cause = _divergence(job.optimizer, len(records), result.validation_loss)
    if cause is None:
        return 0
    if job.ranks.first:
        print(f"daypack: the run diverged: {cause} not finite; try a lower --lr", file=sys.stderr)
    return DIVERGED


def _divergence(optimizer: Optimizer, steps: int, loss: float) -> str | None:
    """Say what was not finite: the loss, or every gradient of most steps; None if the run went well."""
    if not math.isfinite(loss):
        return "its loss is"
    skipped = getattr(optimizer, "skipped", {})
    params = sum(len(group["params"]) for group in optimizer.param_groups)
    return "most gradients were" if len(skipped) == params and 2 * min(skipped.values()) > steps else None
