"""Files put together and taken apart, one tensor at a time, without a process group."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from daypack.checkpoint import file as files
from daypack.checkpoint.atomic import write_whole
from daypack.checkpoint.snapshot import ParamState, Snapshot, Stored


def consolidate(shards: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]) -> None:
    """Write all shards of one checkpoint as one file, the one that a single process would have saved.

    Args:
        shards: all of them in any order, or their index.

    Raises:
        ValueError: a file is damaged, missing, or of another checkpoint.
    """
    given = [member for path in shards for member in files.members(_existing(Path(path)))]
    snapshot = files.read_shards(list(dict.fromkeys(map(_existing, given))))
    write_whole(Path(out), lambda temporary: files.write(temporary, snapshot))


def split(path: str | os.PathLike[str], count: int, folder: str | os.PathLike[str]) -> list[Path]:
    """Write a checkpoint as ``count`` shards, the ones that ``count`` ranks would have saved, into ``folder``.

    Rows are divided as torch shards dim 0: evenly, rounded up; the last shards may have fewer rows or none. Their index
    takes the name of ``path`` when all of them are there. What ``folder`` holds under that name, a whole file or shards
    with their index, is replaced.

    Returns:
        The shards.

    Raises:
        ValueError: ``path`` is damaged or in ``folder``, ``folder`` holds shards of that name without their index, or
            ``count`` is below 1 or above the largest dim 0.
    """
    path, folder = Path(path), Path(folder)
    if count < 1:
        raise ValueError(f"the number of shards must be at least 1, got {count}")
    snapshot, target = files.read(path), folder / path.name
    rows = max((value.shape[0] for value in _divided(snapshot)), default=1)
    if count > min(rows, files.MOST_SHARDS):
        raise ValueError(
            f"cannot split {path} into {count:,} shards: no parameter has more than {rows:,} rows, and shards beyond "
            f"them would be empty; give at most {min(rows, files.MOST_SHARDS):,}"
        )
    if target.exists() and target.samefile(path):
        raise ValueError(f"{folder} holds {path.name} itself, whose name the index of the shards takes; give another")
    stray = [] if target.exists() else files.shards_of(target)
    if stray:
        raise ValueError(
            f"{folder} holds shards of {path.name} without their index, such as {stray[0].name}; give another folder, "
            "or delete them first"
        )
    folder.mkdir(parents=True, exist_ok=True)
    slot = files.free_slot(target, count)
    written = [files.shard_path(target, index, count, slot) for index in range(count)]
    try:
        for index, shard in enumerate(written):
            write_whole(shard, partial(files.write, snapshot=_part(snapshot, index, count), index=index, count=count))
    except BaseException:
        for shard in written:
            shard.unlink(missing_ok=True)
        raise
    files.commit(target, written)
    return written


def _divided(snapshot: Snapshot) -> Iterator[Stored]:
    """Yield the tensors whose rows are divided among shards."""
    for param in snapshot.params.values():
        yield from (value for value in param.state.values() if isinstance(value, Stored) and value.follows)


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
