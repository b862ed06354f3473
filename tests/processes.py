"""Python processes that start in a tenth of a second: forked from a server that has imported what takes seconds."""

from __future__ import annotations

import ctypes
import io
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

Stream: TypeAlias = "Path | Connection"

#: What takes seconds to import, and what most processes of tests need. Nothing of it starts a thread.
PRELOADED = [
    "daypack.checkpoint",
    "daypack.cli.app",
    "hypothesis",
    "matplotlib.figure",
    "pytest",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.tensor",
]


@lru_cache(maxsize=1)
def fresh() -> Any:
    """A context whose processes have nothing of this one, as after "spawn".

    Their server has done nothing but import; it starts once and ends with this process.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def join(processes: Sequence[Any], timeout: float) -> list[int]:
    """Wait for ``processes``, and end those that are not done after ``timeout`` seconds; the numbers of these."""
    deadline = time.monotonic() + timeout
    try:
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        return [number for number, process in enumerate(processes) if process.is_alive()]
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()


def start(
    code: str,
    *arguments: str,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    stdout: Stream,
    stderr: Stream,
) -> Any:
    """Start ``python -c code arguments``: a process that writes where it is told and ends as an interpreter ends.

    Args:
        environment: what it has beside the variables of this session.
        stdout: a file to append to, or the writing end of a pipe.
        stderr: the same.
    """
    process = fresh().Process(
        target=_main, args=(code, arguments, str(cwd or Path.cwd()), dict(environment or {}), (stdout, stderr))
    )
    process.start()
    return process


def python(
    code: str,
    *arguments: str,
    cwd: Path | None = None,
    together: Sequence[Mapping[str, str]] = ({},),
    timeout: float = 200,
) -> subprocess.CompletedProcess[str]:
    """Run `start`'s ``code`` to its end; what it printed is collected.

    Args:
        together: environment variables of each of the processes that run it at the same time.

    Raises:
        AssertionError: not done after ``timeout`` seconds. No process is left behind.
    """
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, name) for name in ("stdout", "stderr")]
        started = [
            start(code, *arguments, cwd=cwd, environment=each, stdout=paths[0], stderr=paths[1]) for each in together
        ]
        late = join(started, timeout)
        shown, errors = (path.read_text(encoding="utf-8") if path.exists() else "" for path in paths)
        assert not late, f"{late} of {len(started)} were not done after {timeout} s: {errors}"
        worst = next((process.exitcode for process in started if process.exitcode), 0)
        return subprocess.CompletedProcess([code, *arguments], worst, shown, errors)


def _main(
    code: str, arguments: Sequence[str], cwd: str, environment: Mapping[str, str], streams: tuple[Stream, Stream]
) -> None:
    for number, stream in enumerate(streams, start=1):
        file = os.open(stream, os.O_WRONLY | os.O_CREAT | os.O_APPEND) if isinstance(stream, Path) else stream.fileno()
        os.dup2(file, number)
        if isinstance(stream, Path):
            os.close(file)
    for stream in streams:
        if not isinstance(stream, Path):
            stream.close()
    # As an interpreter has them when it starts, whatever those of the server are.
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    raw = open(1, "wb", buffering=0 if unbuffered else -1, closefd=False)  # noqa: SIM115
    sys.stdout = io.TextIOWrapper(raw, write_through=unbuffered)
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(environment)
    os.chdir(cwd)
    sys.argv = ["-c", *arguments]
    # Ends threads, runs what is registered for the end, and fails (120) where what was printed cannot be written.
    ctypes.pythonapi.Py_Exit(_exit_code(code))


def _exit_code(code: str) -> int:
    try:
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0
