"""Memory of well-known GPUs, from their makers' data sheets."""

from __future__ import annotations

import re

#: Names and GB. Taken as 1e9 bytes: where a maker's GB is 2^30, the 7 % between the two is about what the context of
#: the process, its libraries' workspaces and the allocator's fragmentation take, which no plan can know.
GPUS: dict[str, float] = {
    "rtx3060": 12,
    "rtx3080": 10,
    "rtx3090": 24,
    "rtx4060": 8,
    "rtx4070": 12,
    "rtx4080": 16,
    "rtx4090": 24,
    "rtx5080": 16,
    "rtx5090": 32,
    "rtxa6000": 48,
    "rtx6000ada": 48,
    "t4": 16,
    "v100": 16,
    "v100-16": 16,
    "v100-32": 32,
    "a10": 24,
    "a30": 24,
    "a40": 48,
    "l4": 24,
    "l40": 48,
    "l40s": 48,
    "a100": 80,
    "a100-40": 40,
    "a100-80": 80,
    "h100": 80,
    "h200": 141,
    "gh200": 96,
    "b200": 192,
    "b300": 288,
    "mi210": 64,
    "mi250": 128,
    "mi300x": 192,
    "mi325x": 256,
}


def gpu_memory(name: str) -> int:
    """Return the memory of the GPU called ``name``, in bytes; ``"RTX 4090"``, ``"4090"`` and ``"rtx4090"`` are the
    same.

    Raises:
        ValueError: it is not in the table.
    """
    key = re.sub(r"(?<=[0-9])gb?$", "", re.sub(r"[\s_]+", "", name.lower()).removeprefix("nvidia").removeprefix("amd"))
    plain = key.replace("-", "")
    for known, size in GPUS.items():
        name_only = known.replace("-", "")
        if plain in (name_only, name_only.removeprefix("rtx"), f"{name_only}{size:g}"):
            return int(size * 1e9)
    raise ValueError(f"unknown GPU {name!r}; give --memory instead, or one of {', '.join(GPUS)}")
