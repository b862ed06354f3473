"""Whether tensors are laid out as they were before: asked of every tensor of an optimizer at every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class Layouts:
    """Python type, device, dtype, shape and strides of each of ``tensors`` (and whether it is a negated view)."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._count = len(tensors)
        self._check = _guards(tensors) or _compare(tensors)

    def hold(self, tensors: Sequence[object]) -> bool:
        """Whether ``tensors`` are as many tensors of the same layouts; anything else among them means no."""
        return len(tensors) == self._count and self._check(*tensors)


def _guards(tensors: Sequence[Tensor]) -> Callable[..., bool] | None:
    """The check that `torch.compile` makes before it runs compiled code: ten times faster than asking from Python, but
    not a public interface; None where this torch has none or another one."""
    try:
        from torch._C._dynamo.guards import TensorGuards

        guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        check: Callable[..., bool] = guards.check
        return check if check(*tensors) is True and check(*[None] * len(tensors)) is not bool(tensors) else None
    except Exception:
        return None


def _compare(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """The same check in Python."""
    expected = list(map(_layout, tensors))
    return lambda *found: list(map(_layout, found)) == expected


def _layout(tensor: object) -> tuple[Any, ...] | None:
    if not isinstance(tensor, Tensor):
        return None
    strides = tensor.stride() if tensor.layout == torch.strided else None
    return type(tensor), tensor.layout, tensor.device, tensor.dtype, tensor.shape, strides, tensor.is_neg()
