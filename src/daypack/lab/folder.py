"""The folder `runs/<name>/` of a result: who may write into it, and what.

A comparison is written beside it first and moved into place when it has succeeded. It replaces the four files of an
earlier comparison of that name and nothing else; a folder that something else wrote is refused. A training run never
enters a folder that holds anything, except to go on.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from daypack.checkpoint.atomic import write_text_whole, write_whole
from daypack.lab.config import TrainConfig
from daypack.lab.curve import save_curve
from daypack.lab.loop import Record, RunResult, json_number
from daypack.lab.page import Provenance, render_page
from daypack.telemetry import monitor

CONFIG, METRICS, CURVE, PAGE = "config.json", "metrics.jsonl", "loss.png", "report.html"
READINGS = "monitor.jsonl"
_OWN = (METRICS, CURVE, PAGE, CONFIG)  # config.json last: it marks the folder as ours


def run_folder(out: Path, name: str) -> Path:
    """Return `out/name`.

    Raises:
        ValueError: `name` is not a plain folder name.
    """
    if not name or name.startswith(".") or Path(name).name != name:
        raise ValueError(f"--name must be a plain folder name that does not start with a dot, got {name!r}")
    return out / name


def job_in(folder: Path) -> str | None:
    """Return the job that wrote `folder`, "compare" or "train"; None for a folder of something else."""
    try:
        job = json.loads((folder / CONFIG).read_text(encoding="utf-8")).get("job")
    except (OSError, ValueError, AttributeError):
        return None
    return job if isinstance(job, str) else None


def require_free(folder: Path, job: str) -> None:
    """Check that `job` may write `folder`: it is not there, is empty, or for a comparison holds another comparison.

    Raises:
        ValueError: it holds anything else.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    found = job_in(folder)
    if job == "compare" and found == "compare":
        return
    if job == "train" and found == "train":
        raise ValueError(f"{folder} holds a training run; go on with --resume {folder} or choose another --name")
    raise ValueError(f"{folder} exists and was not written by daypack {job}; choose another --name")


def require_resumable(folder: Path) -> None:
    """Check that a training run may go on in `folder`: it wrote it, or none of the files it will write is there.

    Raises:
        ValueError: something else wrote them.
    """
    if job_in(folder) != "train" and any((folder / name).exists() for name in _OWN):
        raise ValueError(
            f"{folder} has files that daypack train did not write; "
            "copy the checkpoint to a folder of its own and resume it there"
        )


@contextlib.contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """Make a folder beside `folder` to write into; its files move to `folder` when the block ends without an exception.

    After an exception it stays if it holds records, and is removed if not.
    """
    # The process id keeps two comparisons of one name apart; what a dead process of the same id left is reused.
    stage = folder.with_name(f".{folder.name}.{os.getpid()}")
    stage.mkdir(parents=True, exist_ok=True)
    try:
        yield stage
        folder.mkdir(exist_ok=True)
        for name in _OWN:
            os.replace(stage / name, folder / name)
    finally:
        if not has_records(stage):
            shutil.rmtree(stage)


def has_records(folder: Path) -> bool:
    """Say whether `folder` holds a non-empty file of records."""
    metrics = folder / METRICS
    return metrics.exists() and metrics.stat().st_size > 0


class RecordWriter:
    """Appends records to `metrics.jsonl`, one JSON object a line: optimizer, seed, and the fields of `Record`."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / METRICS).open("a", encoding="utf-8")

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def write(self, config: TrainConfig, record: Record) -> None:
        """Append one record; it reaches the disk at the next evaluation."""
        line = {"optimizer": config.label, "seed": config.seed, **record.to_dict()}
        self._file.write(json.dumps(line) + "\n")
        if record.validation is not None:
            self.flush()

    def flush(self) -> None:
        """Hand everything written so far to the operating system."""
        self._file.flush()


def rewind_records(folder: Path, step: int) -> list[Record]:
    """Drop the records after `step` from `metrics.jsonl` of a training run, and return the others.

    A run that was killed has often recorded steps that its last checkpoint does not know. A last line that the kill cut
    short is dropped as well.
    """
    path = folder / METRICS
    if not path.exists():
        return []
    kept, records = [], []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            values = json.loads(line)
            record = Record.from_dict(values)
        except (TypeError, ValueError):
            break
        if record.step > step:
            break
        kept.append(line + "\n")
        records.append(record)
    write_text_whole(path, "".join(kept))
    return records


@contextlib.contextmanager
def watched(optimizer: Optimizer, folder: Path, interval: int | None, step: int) -> Iterator[None]:
    """Append `daypack.monitor`'s readings to `monitor.jsonl`, a line for each number.

    Args:
        interval: steps from one reading to the next; None for no readings.
        step: steps done; what an earlier process read after it is dropped.
    """
    path = folder / READINGS
    if path.exists():
        earlier = path.read_text(encoding="utf-8").splitlines(keepends=True)
        write_text_whole(path, "".join(line for line in earlier if _step_of(line) <= step))
    if interval is None:
        yield
        return
    with path.open("a", encoding="utf-8", buffering=1) as file:

        def write(tag: str, value: float, at: int) -> None:
            file.write(json.dumps({"step": at, "tag": tag, "value": json_number(value)}) + "\n")

        with monitor(optimizer, write, interval):
            yield


def _step_of(line: str) -> float:
    """Return the step of a line of readings; infinity for a broken line, such as a kill leaves."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def write_config(folder: Path, job: str, provenance: Provenance, results: Sequence[Mapping[str, Any]]) -> None:
    """Write `config.json`: what was run on what, and for each run its config and outcome."""
    content = {"job": job, **asdict(provenance), "runs": list(results)}
    write_text_whole(folder / CONFIG, json.dumps(content, indent=2) + "\n")


def write_report(folder: Path, job: str, provenance: Provenance, results: Sequence[RunResult]) -> None:
    """Write `config.json`, `loss.png` and `report.html`."""
    write_whole(folder / CURVE, lambda path: save_curve(results, path))
    write_text_whole(folder / PAGE, render_page(results, provenance))
    write_config(folder, job, provenance, [result.summary() for result in results])
