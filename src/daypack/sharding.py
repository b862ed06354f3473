"""The only file that knows distributed tensors."""

from __future__ import annotations

import sys

from torch import Tensor
from torch.nn import Parameter


def is_distributed(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a DTensor; asks without importing torch.distributed.tensor, which costs a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_flat_partition(tensor: Tensor) -> bool:
    """Whether ``tensor`` looks like a flat piece of other parameters: what ZeRO and FSDP1 hand to an optimizer.

    They mark it, or hand over a vector that is not an `nn.Parameter`.
    """
    marked = getattr(tensor, "_is_flat_param", False) or getattr(tensor, "_fsdp_flattened", False)
    return tensor.ndim == 1 and bool(marked or not isinstance(tensor, Parameter))
