"""What a result depends on besides its config."""

import os
import platform
from pathlib import Path

import numpy
import torch

import daypack
from daypack.kernels import available


def versions(threads: int | None = None) -> dict[str, str]:
    """Name versions, machine and threads, for people who want the same numbers again.

    Args:
        threads: CPU threads that were used; None for torch's present setting.
    """
    accelerator = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        "daypack": daypack.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        "processor": _processor(),
        "kernels": next(iter(available().values())),
        "accelerator": accelerator,
        "threads": str(threads or torch.get_num_threads()),
    }


def _processor() -> str:
    """Return the processor's name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()
