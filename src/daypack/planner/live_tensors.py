"""Which tensors are alive while code runs on the meta device: exact memory of any module, without memory."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_CONVOLUTIONS = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)


class LiveTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, counts the bytes of the storages that operations create, for as long as each of them lives.

    A convolution also holds one copy of its weight, or of the weight's gradient, while it runs: libraries (oneDNN,
    cuDNN with tensor cores) have a layout of their own for it.

    Args:
        known: tensors that count as nothing, because they are counted elsewhere (parameters, gradients).

    Attributes:
        bytes: alive now. Views share their storage and count once.
        peak: the most that were alive at once.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0
        self.peak = 0
        # Keeping the tensors keeps the addresses of their storages from being given to others.
        self._kept = list(known)
        self._known = {t.untyped_storage()._cdata for t in self._kept}
        self._alive: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta and args[0].dtype == torch.bool:
            # Models ask this to take a shorter path where a mask masks nothing; the plan assumes that path.
            return True
        result = func(*args, **(kwargs or {}))
        self.note(value for value in tree_leaves(result) if isinstance(value, Tensor))
        if func in _CONVOLUTIONS:
            weight = args[2 if func is torch.ops.aten.convolution_backward.default else 1]
            self.peak = max(self.peak, self.bytes + weight.nbytes)
        return result

    def note(self, tensors: Iterable[Tensor]) -> None:
        """Count ``tensors`` from now on, unless they are known or counted already."""
        for tensor in tensors:
            self._note(tensor)

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or key in self._alive:
            return

        def free(_: object) -> None:
            self.bytes -= size
            del self._alive[key]

        self._alive[key] = weakref.ref(storage, free)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)
