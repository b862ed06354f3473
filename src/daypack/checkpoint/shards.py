"""Files put together and taken apart, one tensor at a time, without a process group."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from daypack.checkpoint import file as files
from daypack.checkpoint.snapshot import ParamState, Snapshot, Stored
from daypack.training.files import write_whole


def consolidate(shards: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]) -> None:
    """Write all shards of one checkpoint as one file, the one that a single process would have saved.

    Raises:
        ValueError: a file is damaged, missing, or of another checkpoint.
    """
    snapshot = files.read_shards([_existing(Path(path)) for path in shards])
    write_whole(Path(out), lambda temporary: files.write(temporary, snapshot))


def split(path: str | os.PathLike[str], count: int, folder: str | os.PathLike[str]) -> list[Path]:
    """Write a checkpoint as ``count`` shards, the ones that ``count`` ranks would have saved, into ``folder``.

    Rows are divided as torch shards dim 0: evenly, rounded up; the last shards may have fewer rows or none.

    Returns:
        The files that were written.

    Raises:
        ValueError: ``path`` is damaged, or ``count`` below 1.
    """
    if count < 1:
        raise ValueError(f"the number of shards must be at least 1, got {count}")
    path, folder = Path(path), Path(folder)
    snapshot = files.read(path)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for index in range(count):
        written.append(files.shard_path(folder / path.name, index, count))
        write_whole(written[-1], partial(files.write, snapshot=_part(snapshot, index, count), index=index, count=count))
    return written


def _part(snapshot: Snapshot, index: int, count: int) -> Snapshot:
    def cut(entry: ParamState) -> ParamState:
        state = {k: _rows(v, index, count) if isinstance(v, Stored) else v for k, v in entry.state.items()}
        return replace(entry, state=state)

    return replace(snapshot, params={name: cut(entry) for name, entry in snapshot.params.items()})


def _rows(value: Stored, index: int, count: int) -> Stored:
    rows = value.shape[0]
    each = -(-rows // count)
    return value.part(min(index * each, rows), min((index + 1) * each, rows)) if value.follows else value


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise ValueError(f"no checkpoint at {path}; check the path")
    return path
