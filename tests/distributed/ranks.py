"""Functions run on several local processes that talk through gloo."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from daypack.calibration import tools
from daypack.kernels.native import calibration, library

from ..processes import fresh, join


def run(world: int, function: Callable[..., Any], *args: Any, timeout: float = 100) -> list[Any]:
    """``function(*args)`` on ``world`` ranks, each with a default process group; what each returned.

    Raises:
        AssertionError: a rank failed (with its traceback), or they were not done after ``timeout`` seconds. No process
            is left behind.
    """
    with tempfile.TemporaryDirectory() as folder:
        torch.save((function, args), Path(folder) / "work")  # tensors among arguments would be shared, each by a file
        ranks = [fresh().Process(target=_rank, args=(rank, world, folder)) for rank in range(world)]
        for process in ranks:
            process.start()
        late = join(ranks, timeout)
        errors = [path.read_text(encoding="utf-8") for path in sorted(Path(folder).glob("error*"))]
        assert not errors, "\n".join(errors)
        assert not late, f"ranks {late} were not done after {timeout} s"
        assert all(process.exitcode == 0 for process in ranks), [process.exitcode for process in ranks]
        return [torch.load(Path(folder) / f"result{rank}", weights_only=False) for rank in range(world)]


def _rank(rank: int, world: int, folder: str) -> None:
    os.environ.update(OMP_NUM_THREADS="1", RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    if library.library() is not None:  # the same bits as the numpy programme's (tests/kernels/test_calibration.py)
        tools.REFERENCE = replace(tools.REFERENCE, optimal_levels=calibration.optimal_levels)
    try:
        store = dist.FileStore(f"{folder}/store", world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
        function, args = torch.load(Path(folder) / "work", weights_only=False)
        result = function(*args)
        torch.save(result, Path(folder) / f"result{rank}")
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        Path(folder, f"error{rank}").write_text(f"rank {rank}:\n{traceback.format_exc()}", encoding="utf-8")
        sys.exit(1)
