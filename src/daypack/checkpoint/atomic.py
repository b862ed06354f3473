"""Files that are either there whole or not there at all."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary name beside `path`, then rename it to `path`.

    Whatever happens in between, `path` holds its old content or the new one. A kill leaves the temporary file behind;
    the next call reuses its name.

    Args:
        path: the file to replace or create; its folder exists.
        write: called with the temporary path, which it must create.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        write(temporary)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())  # before the rename, or a power cut could leave the new name on empty content
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def write_text_whole(path: Path, text: str) -> None:
    """Write a text with `write_whole`."""
    write_whole(path, lambda temporary: _write_text(temporary, text))


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _sync_folder(folder: Path) -> None:
    # Makes the rename itself durable. Not every platform can open a folder; there the rename is still atomic.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
