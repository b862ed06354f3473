"""What a result depends on beside its config."""

import os
import platform

import torch

import daypack


def versions(threads: int | None = None) -> dict[str, str]:
    """Versions, machine and threads, for people who want the same numbers again.

    Args:
        threads: CPU threads that were used; None for torch's present setting.
    """
    accelerator = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        "daypack": daypack.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        "accelerator": accelerator,
        "threads": str(threads or torch.get_num_threads()),
    }
