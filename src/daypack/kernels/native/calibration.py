"""Calibration in the C++ kernels: what `daypack.calibration` computes, faster."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from daypack.calibration import codebook
from daypack.calibration.blocks import candidates
from daypack.geometry import Geometry
from daypack.kernels.native.library import address, is_plain, loaded
from daypack.kernels.native.tables import TYPES


def reads(grad: Tensor) -> bool:
    """Return whether `histogram` and `block_scores` can take ``grad``."""
    return grad.dtype in TYPES and grad.layout == torch.strided and is_plain(grad)


def histogram(grad: Tensor, view: Geometry, block_size: int) -> Tensor:
    """Compute the same numbers as `daypack.calibration.codebook.histogram`."""
    counts = torch.zeros(codebook.BINS, dtype=torch.int64, device="cpu")
    sizes = (view.matrices * view.rows, view.cols, max(1, min(block_size, view.cols)))
    loaded().daypack_histogram(
        ctypes.c_void_p(grad.data_ptr()),
        *map(ctypes.c_int64, (TYPES[grad.dtype], *sizes)),
        torch.get_num_threads(),
        ctypes.c_void_p(counts.data_ptr()),
    )
    return counts


def block_scores(grad: Tensor, view: Geometry) -> list[float]:
    """Compute `daypack.calibration.blocks.block_scores`, equal to about 1e-6."""
    sizes = np.array(candidates(view.cols), np.int64)
    scores = np.zeros(len(sizes))
    if len(sizes) and grad.numel():
        loaded().daypack_block_scores(
            ctypes.c_void_p(grad.data_ptr()),
            *map(ctypes.c_int64, (TYPES[grad.dtype], view.matrices * view.rows, view.cols)),
            address(sizes),
            ctypes.c_int64(len(sizes)),
            torch.get_num_threads(),
            address(scores),
        )
    found: list[float] = scores.tolist()
    return found


def optimal_levels(weights: NDArray[np.float64], levels: int) -> NDArray[np.float64]:
    """Compute the same bits as `daypack.calibration.codebook.optimal_levels`."""
    weights, found = np.ascontiguousarray(weights), np.empty(levels)
    count = loaded().daypack_codebook(
        address(weights), ctypes.c_int64(len(weights)), ctypes.c_int64(levels), torch.get_num_threads(), address(found)
    )
    return codebook.with_pinned(found[:count], levels)
