"""Moments decoded in numpy from the tensors of a live state alone, by their keys and shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from daypack.calibration import maps


def array(value: Tensor) -> np.ndarray:
    return value.detach().double().numpy()


def decoded_codes(state: dict[str, Any], key: str, block: int, codebook: str) -> np.ndarray:
    """``[rows, cols]``: levels[code] times the scale of its block of ``block`` elements of the row."""
    scale = array(state[key + "_scale"])
    scale = scale.reshape(-1, scale.shape[-1])
    codes = state[key + "_codes"].numpy().reshape(len(scale), -1)
    levels = array(state[key + "_codebook"] if codebook == "learned" else maps.levels(codebook))
    each = np.repeat(scale, min(block, codes.shape[1]), axis=1)[:, : codes.shape[1]]
    return levels[codes] * each


def first_norm(state: dict[str, Any], codebook: str) -> float:
    """Norm of the first moment, whatever it is stored as."""
    if "exp_avg_codes" in state:
        return float(np.linalg.norm(decoded_codes(state, "exp_avg", 256, codebook)))
    return float(np.linalg.norm(array(state["exp_avg" if "exp_avg" in state else "momentum_buffer"])))


def second_norm(state: dict[str, Any], elements: int, rows: int, codebook: str) -> float:
    """Norm of the root of the second moment: the root of the sum of v.

    Row means, column means and their rank-1 product sum up to (elements / number of means) times the sum of the means.
    """
    if "exp_avg_sq_codes" in state:
        return float(decoded_codes(state, "exp_avg_sq", 256, codebook).sum() ** 0.5)
    if "exp_avg_sq_block" in state:
        means = array(state["exp_avg_sq_block"]).reshape(rows, -1)
        cols = elements // rows
        size = int(state["exp_avg_sq_block_size"]) or min(cols, 256)
        counts = np.minimum(size, cols - size * np.arange(means.shape[1]))
        return float((means * counts).sum() ** 0.5)
    for key in ("exp_avg_sq_row", "exp_avg_sq_col"):
        if key in state:
            means = array(state[key])
            return float((elements / max(1, means.size) * means.sum()) ** 0.5)
    return float(array(state["exp_avg_sq"]).sum() ** 0.5)
