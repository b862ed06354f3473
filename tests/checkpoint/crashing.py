"""Ends a process at every single act on the disk while it replaces a checkpoint: ``python -m tests.checkpoint.crashing
FOLDER``.

For each old form (none, whole, two or three shards) and each new one, a forked child is ended before its first write,
then before its second, and so on until one gets through. What is found after each is the old state or the new one,
whole. Prints the number of ended children.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import daypack
from daypack.checkpoint import file as files
from daypack.checkpoint import load_file, save_file, split

from ..conformance.scene import parameters, same, train

SHAPES = {"matrix": (24, 520), "vector": (130,), "few": (3, 64)}
ENDED = 9


def make() -> tuple[Any, dict[str, Any]]:
    params = parameters(shapes=SHAPES)
    return daypack.Gefen(params.items()), params


def found(path: Path) -> dict[str, Any]:
    optimizer, params = make()
    load_file(optimizer, path)
    return {name: dict(optimizer.state[p]) for name, p in params.items()}


def write(kind: int, source: Path, path: Path) -> None:
    """Let ``path`` be the state in ``source``, whole or in ``kind`` shards."""
    if kind > 1:
        split(source, kind, path.parent)
    elif kind == 1:
        optimizer, _ = make()
        load_file(optimizer, source)
        save_file(optimizer, path)


def end_at(act: int) -> None:
    """Let this process end before the act of that number: a file opened, a tensor's bytes, half of an index and the
    rest, a flush, a new name, a removal."""
    left = act

    def count() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            os._exit(ENDED)

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any, **options: Any) -> Any:
            count()
            return function(*args, **options)

        return counting

    def write_halves(path: Path, content: bytes) -> None:
        with path.open("wb", buffering=0) as file:
            for half in (content[: len(content) // 2], content[len(content) // 2 :]):
                count()
                file.write(half)

    files._write_tensor, files._write_bytes, Path.open = counted(files._write_tensor), write_halves, counted(Path.open)
    os.fsync, os.replace, Path.unlink = counted(os.fsync), counted(os.replace), counted(Path.unlink)


def child(act: int, kind: int, source: Path, path: Path) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            end_at(act)
            write(kind, source, path)
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    # Here processes end, not machines: a flush is an act to be ended at, and need not reach the disk.
    os.fsync = lambda _: None
    optimizer, params = make()
    states = []
    for step, name in enumerate(("old", "new")):
        train(optimizer, params, [step])
        (folder / name).mkdir()
        save_file(optimizer, folder / name / "state.safetensors")
        states.append(found(folder / name / "state.safetensors"))
    ended = 0
    for old in (0, 1, 2, 3):
        (folder / f"old{old}").mkdir()
        write(old, folder / "old" / "state.safetensors", folder / f"old{old}" / "state.safetensors")
        for new in (1, 2, 3):
            begun, act, code = False, 0, ENDED
            while code == ENDED:
                place = folder / "place"
                shutil.rmtree(place, ignore_errors=True)
                shutil.copytree(folder / f"old{old}", place)
                path = place / "state.safetensors"
                code = child(act, new, folder / "new" / path.name, path)
                ended += code == ENDED
                act += 1
                assert code in (0, ENDED), code
                if old == 0 and not path.exists():
                    assert not begun
                    continue
                now = found(path)
                # The new state, and from then on at every later act.
                assert same(now, states[1]) or (same(now, states[0]) and not begun), (old, new, act)
                begun = begun or same(now, states[1])
            assert begun, (old, new)
            # What is left behind is gone after the next save.
            child(act // 2, new, folder / "new" / path.name, path)
            write(new, folder / "new" / path.name, path)
            assert len(list(place.iterdir())) == (1 if new == 1 else new + 1), list(place.iterdir())
    print(ended)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
