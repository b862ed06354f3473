"""What a step of GaLore cannot be faster than: its two matrix products, as torch computes them, beside fused AdamW.

A matrix of rows x cols at rank r takes 4 r floating-point operations per parameter: down to the low rank and back.
Each round times both products with `torch.mm` in fp32 and bf16, a 1 x 1 convolution in fp32 (the same product through
oneDNN, which uses AVX-512 where MKL on AMD processors does not), fused AdamW and GaLore's whole step. Medians over the
rounds; ratios within a round.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

import daypack


def _pair(matrices: list[Tensor], low: Tensor, basis: Tensor) -> Callable[[], Any]:
    def both() -> None:
        for matrix in matrices:
            torch.mm(matrix, basis, out=low)
            matrix.addmm_(low, basis.T, beta=0.999, alpha=1e-9)

    return both


def _convolution(matrices: list[Tensor], basis: Tensor) -> Callable[[], Any]:
    weight = basis.T[:, :, None, None].contiguous()
    images = [matrix.view(1, matrix.shape[0], 1, matrix.shape[1]).permute(0, 3, 1, 2) for matrix in matrices]
    return lambda: [torch.nn.functional.conv2d(image, weight) for image in images]


def _optimizer(kind: Callable[..., torch.optim.Optimizer], matrices: list[Tensor], **options: Any) -> Callable[[], Any]:
    params = [Parameter(matrix.clone()) for matrix in matrices]
    for p in params:
        p.grad = torch.randn_like(p) * 1e-3
    optimizer = kind(params, **options)
    for _ in range(2):
        optimizer.step()
    return optimizer.step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=int, nargs=2, default=(3072, 768))
    parser.add_argument("--rank", type=int, default=96)
    parser.add_argument("--matrices", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    (rows, cols), rank = options.shape, options.rank
    torch.manual_seed(0)
    total = rows * cols * options.matrices
    for dtype in (torch.float32, torch.bfloat16):
        matrices = [torch.randn(rows, cols).mul_(0.02).to(dtype) for _ in range(options.matrices)]
        basis = torch.linalg.qr(torch.randn(cols, rank))[0].to(dtype)
        runs = {
            "AdamW, fused": (_optimizer(torch.optim.AdamW, matrices, fused=True), 0),
            "GaLore": (_optimizer(daypack.GaLore, matrices, rank=rank, update_proj_gap=10**6), 4),
            "both products, torch.mm": (_pair(matrices, torch.empty(rows, rank, dtype=dtype), basis), 4),
            "one product, convolution": (_convolution(matrices, basis), 2),
        }
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(options.rounds):
            for name, (function, _) in runs.items():
                start = time.perf_counter()
                function()
                times[name].append((time.perf_counter() - start) / total)
        print(
            f"\n{options.matrices} of {rows} x {cols}, rank {rank}, {str(dtype)[6:]}, {torch.get_num_threads()} threads"
        )
        for name, (_, products) in runs.items():
            middle = statistics.median(times[name])
            ratio = statistics.median(a / b for a, b in zip(times[name], times["AdamW, fused"], strict=True))
            rate = f"{products * rank / middle * 1e-9:8.0f} GFLOP/s" if products else ""
            print(f"{name:28}{1e9 * middle:8.3f} ns/param{ratio:8.2f} of AdamW{rate}")


if __name__ == "__main__":
    main()
