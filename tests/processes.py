"""Python processes that start in a tenth of a second: forked from a server that has imported what takes seconds."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

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


def python(
    code: str,
    *arguments: str,
    cwd: Path | None = None,
    together: Sequence[Mapping[str, str]] = ({},),
    timeout: float = 200,
) -> subprocess.CompletedProcess[str]:
    """``python -c code arguments``, but for how the interpreter starts and ends; what it printed is collected.

    Args:
        together: environment variables of each of the processes that run it at the same time.

    Raises:
        AssertionError: not done after ``timeout`` seconds. No process is left behind.
    """
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, "stdout"), Path(folder, "stderr")]
        started = [
            fresh().Process(target=_main, args=(code, arguments, str(cwd or Path.cwd()), dict(environment), paths))
            for environment in together
        ]
        for process in started:
            process.start()
        late = join(started, timeout)
        shown, errors = (path.read_text(encoding="utf-8") if path.exists() else "" for path in paths)
        assert not late, f"{late} of {len(started)} were not done after {timeout} s: {errors}"
        worst = next((process.exitcode for process in started if process.exitcode), 0)
        return subprocess.CompletedProcess([code, *arguments], worst, shown, errors)


def _main(code: str, arguments: Sequence[str], cwd: str, environment: Mapping[str, str], paths: Sequence[Path]) -> None:
    for stream, path in ((sys.stdout, paths[0]), (sys.stderr, paths[1])):
        stream.flush()
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, stream.fileno())
        os.close(file)
    os.environ.update(environment)
    os.chdir(cwd)
    sys.argv = ["-c", *arguments]
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
