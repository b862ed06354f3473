"""Time of one optimizer step on the CPU: ours beside torch's AdamW, and torchao's and bitsandbytes' where installed.

All contenders of a workload step in turn, round after round, on the same gradients; figures are medians over the rounds
and ratios medians of the ratios within a round, so that other work on the machine weighs on all alike. Bytes are those
that a step must move between memory and processor: parameter, gradient (ours is read twice, three times where a rule
measures whole tensors, once by GaLore's projection) and state, both ways.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn import Parameter

import daypack
from daypack.kernels.native import library as native

Shapes = list[tuple[int, ...]]

WORKLOADS: dict[str, Shapes] = {
    "gpt2-124m": [(50257, 768), (1024, 768), (768,), (768,)]
    + 12 * [(768, 2304), (2304,), (768, 768), (768,), (768, 3072), (3072,), (3072, 768), *5 * [(768,)]],
    "llama-layer": [*4 * [(3072, 3072)], (8192, 3072), (8192, 3072), (3072, 8192), (3072,), (3072,)],
    "one-64m": [(8192, 8192)],
    "mlp-768": 12 * [(768, 3072)],
    "1000-small": 1000 * [(32, 32)],
}


#: Label -> name in the registry, options, and bytes per element that a step moves beside parameter and gradient.
OURS: dict[str, tuple[str, dict[str, Any], float]] = {
    "gefen": ("gefen", {}, 2),
    "gefen-blocks": ("gefen", {"second_moment": "blocks"}, 2),
    "adam-mini": ("adam_mini", {}, 8),
    "adam-mini-8bit": ("adam_mini", {"bits": 8}, 2),
    "adamw8bit": ("adamw8bit", {}, 4),
    "adam8bit": ("adam8bit", {}, 4),
    "sgd8bit": ("sgd8bit", {"momentum": 0.9}, 2),
    "lion8bit": ("lion8bit", {}, 2),
    "adafactor": ("adafactor", {}, 0),
    "adafactor-beta1": ("adafactor", {"beta1": 0.9}, 8),
    "adafactor-8bit": ("adafactor", {"beta1": 0.9, "bits": 8}, 3),
    "lamb": ("lamb", {}, 24),
    "lamb-factored": ("lamb", {"second_moment": "factored"}, 12),
    "lamb-8bit": ("lamb", {"bits": 8, "second_moment": "factored"}, 3),
    # Between refreshes. Rank 96 is an eighth of GPT-2's width; matrices that it does not make smaller step whole.
    "galore": ("galore", {"rank": 96, "update_proj_gap": 1_000_000}, 4),
    "galore-gefen": ("galore", {"rank": 96, "update_proj_gap": 1_000_000, "inner": "gefen"}, 2),
    "galore-128": ("galore", {"rank": 128, "update_proj_gap": 1_000_000}, 5),
}


def _ours(name: str, options: dict[str, Any], _: float) -> Callable[[Iterable[Parameter]], torch.optim.Optimizer]:
    return lambda ps: daypack.create(name, ps, **options)


def contenders() -> dict[str, Callable[[Iterable[Parameter]], torch.optim.Optimizer]]:
    found: dict[str, Callable[[Iterable[Parameter]], torch.optim.Optimizer]] = {
        **{name: _ours(*choice) for name, choice in OURS.items()},
        "adamw-fused": lambda ps: torch.optim.AdamW(ps, fused=True),
        "adamw-foreach": lambda ps: torch.optim.AdamW(ps, foreach=True),
    }
    try:
        from torchao.optim import AdamW8bit  # type: ignore[import-not-found]

        found["torchao-8bit"] = lambda ps: AdamW8bit(ps)
    except ImportError:
        pass
    try:
        import bitsandbytes  # type: ignore[import-not-found]

        found["bitsandbytes-8bit"] = lambda ps: bitsandbytes.optim.AdamW8bit(ps)
    except ImportError:
        pass
    return found


def moved(name: str, dtype: torch.dtype) -> float:
    """Bytes per parameter that a step reads and writes."""
    if name in OURS:
        passes = {"adafactor": 6, "lamb": 6, "galore": 3}  # parameter and gradient once more; the gradient once
        return passes.get(OURS[name][0], 4) * dtype.itemsize + OURS[name][2]  # parameter both ways, gradient twice
    return 7 * dtype.itemsize if name.startswith("adamw") else 3 * dtype.itemsize + 4


def seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _copy(source: torch.Tensor, target: torch.Tensor) -> float:
    """Seconds per byte read or written."""
    return seconds(lambda: target.copy_(source)) / (2 * source.nbytes)


def run(workload: str, dtype: torch.dtype, names: list[str], rounds: int) -> None:
    shapes, every = WORKLOADS[workload], contenders()
    torch.manual_seed(0)
    start = [torch.randn(shape) * 0.02 for shape in shapes]
    grads = [(torch.randn(shape) * 1e-3).to(dtype) for shape in shapes]
    total = sum(g.numel() for g in grads)
    optimizers, first = {}, {}
    for name in names:
        params = [Parameter(p.to(dtype)) for p in start]
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        optimizers[name] = every[name](params)
        first[name] = seconds(optimizers[name].step)
        optimizers[name].step()
    del start
    source = torch.zeros(min(total, 1 << 26))
    target = source + 1
    times: dict[str, list[float]] = {name: [] for name in ["copy", *names]}
    for _ in range(rounds):
        times["copy"].append(_copy(source, target))
        for name in names:
            times[name].append(seconds(optimizers[name].step))
    copy = statistics.median(times["copy"])
    print(f"\n{workload}, {str(dtype)[6:]}, {total / 1e6:.1f} M parameters; copy {1e-9 / copy:.1f} GB/s")
    print(f"{'':20}{'ns/param':>9}{'B/param':>9}{'of copy':>9}{'to fused':>9}{'first/step':>11}{'first ms':>9}")
    for name in names:
        step, nbytes = statistics.median(times[name]), moved(name, dtype)
        ratio = statistics.median(a / b for a, b in zip(times[name], times["adamw-fused"], strict=True))
        print(
            f"{name:20}{1e9 * step / total:>9.3f}{nbytes:>9.0f}{nbytes * copy * total / step:>9.0%}{ratio:>9.3f}"
            f"{first[name] / step:>11.1f}{1e3 * first[name]:>9.1f}"
        )
    del optimizers, grads
    gc.collect()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--optimizers", default="")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    names = options.optimizers.split(",") if options.optimizers else list(contenders())
    names += [] if "adamw-fused" in names else ["adamw-fused"]
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} processors, {options.threads} threads, torch "
        f"{torch.__version__}, kernels {native.cpu()}, load {os.getloadavg()[0]:.1f}, {options.rounds} rounds"
    )
    for workload in options.workloads.split(","):
        for dtype in options.dtypes.split(","):
            run(workload, getattr(torch, dtype), names, options.rounds * (5 if workload == "1000-small" else 1))


if __name__ == "__main__":
    main()
