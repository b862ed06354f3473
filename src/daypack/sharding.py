"""The only file that knows distributed tensors."""

from __future__ import annotations

import sys

from torch import Tensor


def is_distributed(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a DTensor; asks without importing torch.distributed.tensor, which costs a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)
