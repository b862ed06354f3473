"""Functions run on several local processes that talk through gloo."""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(world: int, function: Callable[..., Any], *args: Any, timeout: float = 100) -> list[Any]:
    """``function(*args)`` on ``world`` ranks, each with a default process group; what each returned.

    Raises:
        AssertionError: a rank failed (with its traceback), or they were not done after ``timeout`` seconds. No process
            is left behind.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("spawn")
        ranks = [context.Process(target=_rank, args=(rank, world, folder, function, args)) for rank in range(world)]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + timeout
        try:
            for process in ranks:
                process.join(max(0.0, deadline - time.monotonic()))
            late = [rank for rank, process in enumerate(ranks) if process.is_alive()]
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()
                    process.join()
        errors = [path.read_text(encoding="utf-8") for path in sorted(Path(folder).glob("error*"))]
        assert not errors, "\n".join(errors)
        assert not late, f"ranks {late} were not done after {timeout} s"
        assert all(process.exitcode == 0 for process in ranks), [process.exitcode for process in ranks]
        return [torch.load(Path(folder) / f"result{rank}", weights_only=False) for rank in range(world)]


def _rank(rank: int, world: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update(OMP_NUM_THREADS="1", RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    try:
        store = dist.FileStore(f"{folder}/store", world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
        result = function(*args)
        torch.save(result, Path(folder) / f"result{rank}")
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        Path(folder, f"error{rank}").write_text(f"rank {rank}:\n{traceback.format_exc()}", encoding="utf-8")
        sys.exit(1)
