"""Wrote the golden files of version 1, once. They are never written again: what reads them must not change.

python -m tests.checkpoint.golden.make
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

import daypack
from daypack.checkpoint import save_file

from ...conformance.scene import parameters, train

FOLDER = Path(__file__).parent
SHAPES = {"matrix": (12, 64), "conv": (16, 3, 3, 3), "vector": (20,), "scalar": (), "unused": (2, 20)}
KINDS: dict[str, dict[str, Any]] = {
    "gefen-factored": {"name": "gefen", "second_moment": "factored", "block_size": 64},
    "gefen-blocks": {"name": "gefen", "second_moment": "blocks"},
    "adamw": {"name": "adamw"},
}
STEPS, LATER = 3, 6


def make(kind: str) -> tuple[Any, dict[str, Any]]:
    params = parameters(shapes=SHAPES)
    named = list(params.items())
    groups = [{"params": named[:3], "weight_decay": 0.1}, {"params": named[3:], "weight_decay": 0.0}]
    return daypack.create(params=groups, lr=1e-2, **KINDS[kind]), params


def flat(params: dict[str, Any]) -> torch.Tensor:
    """All parameters end to end, fp32."""
    return torch.cat([p.detach().reshape(-1) for p in params.values()])


def main() -> None:
    for kind in KINDS:
        optimizer, params = make(kind)
        train(optimizer, params, range(STEPS), without=("unused",))
        save_file(optimizer, FOLDER / f"{kind}.safetensors", {"steps": str(STEPS)})
        state = copy.deepcopy({"optimizer": optimizer.state_dict(), "weights": flat(params)})
        train(optimizer, params, range(STEPS, LATER), without=("unused",))
        torch.save({**state, "later": flat(params)}, FOLDER / f"{kind}.pt")


if __name__ == "__main__":
    main()
