"""The backend of C++ kernels for CPUs: which parameters it takes."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from daypack.calibration.tools import REFERENCE, Tools
from daypack.kernels.native import calibration
from daypack.kernels.native.batch import Batch
from daypack.kernels.native.library import cpu, is_plain, library
from daypack.kernels.native.tables import TYPES, refusal_of_formats
from daypack.param import ParamStep


class Native:
    """See `daypack.kernels.backend.Backend`."""

    name: ClassVar[str] = "native"
    fused: ClassVar[bool] = True

    def about(self) -> str | None:
        return None if library() is None else cpu()

    def refusal(self, item: ParamStep) -> str | None:
        p = item.param
        if p.device.type != "cpu":
            return f"no native kernel on {p.device}"
        if library() is None:
            return "the native kernels are not built"
        if refused := refusal_of_formats(item.plan):
            return refused
        if p.dtype not in TYPES or item.grad.dtype not in TYPES:
            return f"no native kernel for {p.dtype} parameters with {item.grad.dtype} gradients"
        tensors = [p, item.grad, *(value for value in item.state.values() if isinstance(value, Tensor))]
        if not all(map(is_plain, tensors)):
            return "a tensor is not contiguous, not aligned, or not an ordinary CPU tensor"
        return None

    def batch(self, items: list[ParamStep]) -> Batch:
        return Batch(items)

    def tools(self, grad: Tensor) -> Tools | None:
        if library() is None:
            return None
        if not calibration.reads(grad):
            return Tools(REFERENCE.histogram, REFERENCE.block_scores, calibration.optimal_levels)
        return Tools(calibration.histogram, calibration.block_scores, calibration.optimal_levels)
