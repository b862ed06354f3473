"""What every optimizer of version 0.1.0 saved, and twenty steps of each, step by step.

Written once, before rules had their own recurrences, and never again: what reads these files must not change.

python -m tests.golden.make
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import daypack
from daypack.checkpoint import save_file

from ..conformance.scene import FLOATS, SHAPES, noise, parameters, set_gradients, train

FOLDER = Path(__file__).parent
#: Options by label: the variants of the conformance suite as they were.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gefen-factored": ("gefen", {"second_moment": "factored"}),
    "gefen-blocks": ("gefen", {"second_moment": "blocks"}),
    "adamw8bit": ("adamw8bit", {"min_8bit_size": 64}),
    "adamw8bit-learned": ("adamw8bit", {"map": "learned", "min_8bit_size": 64}),
    "adam8bit": ("adam8bit", {"min_8bit_size": 64, "map": "linear"}),
    "sgd8bit": ("sgd8bit", {"momentum": 0.9, "nesterov": True, "min_8bit_size": 64}),
    "lion8bit": ("lion8bit", {"min_8bit_size": 64, "map": "companded"}),
    "adam_mini": ("adam_mini", {"partition": (("matrix", "head:3"),)}),
    "adam_mini-8bit": ("adam_mini", {"bits": 8}),
    "adafactor": ("adafactor", {}),
    "adafactor-coded": ("adafactor", {"beta1": 0.9, "bits": 8}),
    "lamb": ("lamb", {}),
    "lamb-coded": ("lamb", {"bits": 8, "second_moment": "factored", "trust_ratio": False}),
    "galore-whole": ("galore", {"inner": "gefen", "placement": "paged"}),
    "galore-low": ("galore", {"rank": 4, "update_proj_gap": 2, "scale": 1.0}),
    "galore-gefen": ("galore", {"rank": 4, "update_proj_gap": 3, "inner": "gefen"}),
    "adamw": ("adamw", {}),
    "adam": ("adam", {}),
    "sgd": ("sgd", {"momentum": 0.9}),
}
OURS = tuple(label for label, (name, _) in CASES.items() if name not in ("adamw", "adam", "sgd"))
SMALL = {"matrix": (12, 64), "conv": (16, 3, 3, 3), "vector": (20,), "scalar": (), "unused": (2, 20)}
STEPS, LATER, WAY = 3, 6, 20
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATS}


def make(label: str, shapes: dict[str, tuple[int, ...]] = SMALL, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    name, options = CASES[label]
    params = parameters(dtype, shapes)
    named = list(params.items())
    groups = [{"params": named[:3], "weight_decay": 0.1}, {"params": named[3:], "weight_decay": 0.0}]
    return daypack.create(name, groups, lr=1e-2, **options), params


def digest(optimizer: torch.optim.Optimizer, params: dict[str, Any]) -> str:
    """All bits of parameters and of what ``state_dict()`` shows, in a few characters."""
    found = hashlib.sha256()
    for p in params.values():
        found.update(_bytes(p))
    for key, state in sorted(optimizer.state_dict()["state"].items()):
        for name, value in sorted(state.items()):
            found.update(f"{key}.{name}".encode())
            found.update(_bytes(value) if isinstance(value, torch.Tensor) else repr(value).encode())
    return found.hexdigest()[:16]


def _bytes(x: torch.Tensor) -> bytes:
    return x.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def size(params: dict[str, Any]) -> list[list[float]]:
    """Sum and norm of each parameter."""
    return [[float(x.sum()), float(x.norm())] for x in (p.detach().double() for p in params.values())]


def way(label: str, dtype: torch.dtype, fused: bool | None) -> Iterator[tuple[Any, Any]]:
    """Twenty steps with changing rates, a gradient that is not finite, one of zeros, and parameters without any."""
    optimizer, params = make(label, SHAPES, dtype)
    for step in range(WAY):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (1 - step / 25)
            group["fused"] = fused
        set_gradients(params, step, without=("vector",) if step < 2 else ("conv",) if step == 7 else ())
        if step == 5:
            params["prime"].grad[1, 3] = float("nan")
        if step == 0:
            params["experts"].grad.zero_()
        optimizer.step()
        yield optimizer, params


def arithmetic() -> str:
    """What this machine's torch makes of sums, products, roots and decompositions, in a few characters.

    Vector widths decide in which order numbers are added, so machines of another kind may differ in last bits.
    """
    x, found = noise((300, 520), "probe").float(), hashlib.sha256()
    for y in (
        *(x.sum(), x.sum(-1), x.sum(-2), x.square().mean(-1), x @ x.T, x.abs().sqrt(), x.exp(), x.bfloat16().sum(0)),
        *(
            x[:24].double().T @ x[:24].double(),
            torch.linalg.eigh((x[:16] @ x[:16].T).double())[1],
            torch.lerp(x, -x, 0.3),
        ),
    ):
        found.update(_bytes(y))
    return found.hexdigest()[:16]


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def main() -> None:
    from daypack.kernels.native import library as native

    record: dict[str, Any] = {"torch": torch.__version__, "arithmetic": arithmetic(), "cpu": native.cpu(), "way": {}}
    for label in CASES:
        optimizer, params = make(label)
        train(optimizer, params, range(STEPS), without=("unused",))
        save_file(optimizer, FOLDER / f"{label}.safetensors", {"steps": str(STEPS)})
        saved = copy.deepcopy(
            {"optimizer": optimizer.state_dict(), "weights": {k: p.detach() for k, p in params.items()}}
        )
        train(optimizer, params, range(STEPS, LATER), without=("unused",))
        torch.save({**saved, "later": {k: p.detach() for k, p in params.items()}}, FOLDER / f"{label}.pt")
    for label in OURS:
        for dtype in DTYPES:
            for kernel, fused in (("any", None), ("reference", False)):
                last, digests = {}, []
                for optimizer, params in way(label, DTYPES[dtype], fused):
                    digests.append(digest(optimizer, params))
                    last = params
                record["way"][f"{label}/{dtype}/{kernel}"] = {"digests": digests, "size": size(last)}
    (FOLDER / "way.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    with one_thread():
        main()
