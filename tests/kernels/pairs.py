"""A native step beside a step of the torch reference, from the same parameters, state and gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import daypack
from daypack import kernels
from daypack.kernels.native import library as native

from ..conformance.scene import Params, gradient, noise

needs_native = pytest.mark.skipif(native.library() is None, reason="the native kernels were not built")

#: Ragged and whole blocks, convolution, experts, prime and short rows, rows over a tile, many rows, vectors, nothing.
SHAPES: dict[str, tuple[int, ...]] = {
    "matrix": (24, 520),
    "convolution": (16, 16, 3, 3),
    "experts": (4, 24, 64),
    "prime": (5, 1009),
    "short": (300, 32),
    "column": (64, 33),
    "wide": (3, 17000),  # several tiles in both passes
    "line": (1, 5000),  # codes beside a dense second moment
    "tall": (5000, 40),  # two parts of rows
    "both": (150, 4500),
    "vector": (130,),
    "long": (70001,),
    "one": (1,),
    "scalar": (),
    "empty": (0, 8),
    "thin": (2, 3),
}
#: Every rule with every way to store its moments, in options that reach all of its arithmetic (Gefen: elsewhere).
CELLS: dict[str, dict[str, Any]] = {
    "adamw8bit": {"name": "adamw8bit", "weight_decay": 0.1, "min_8bit_size": 1},
    "adamw8bit-linear": {"name": "adamw8bit", "map": "linear", "block_size": 100, "maximize": True, "min_8bit_size": 1},
    "adamw8bit-companded": {"name": "adamw8bit", "map": "companded", "betas": (0.8, 0.9), "weight_decay": 0.0},
    # A large eps: gradient and decay may nearly cancel, and m / sqrt(v) would show what is left of their last bits.
    "adam8bit": {"name": "adam8bit", "weight_decay": 0.1, "eps": 0.1, "maximize": True, "min_8bit_size": 1},
    "sgd8bit": {"name": "sgd8bit", "momentum": 0.9, "weight_decay": 0.1, "nesterov": True, "min_8bit_size": 1},
    "sgd8bit-dampened": {"name": "sgd8bit", "momentum": 0.8, "dampening": 0.3, "block_size": 64},
    "lion8bit": {"name": "lion8bit", "lr": 7e-3, "weight_decay": 0.1, "min_8bit_size": 1},
    "adam-mini": {"name": "adam_mini", "weight_decay": 0.1},
    "adam-mini-8bit": {"name": "adam_mini", "bits": 8},
    "adafactor": {"name": "adafactor", "weight_decay": 0.1},
    "adafactor-beta1": {"name": "adafactor", "beta1": 0.9, "scale_parameter": False, "eps": (1e-3, 1e-3)},
    "adafactor-8bit": {"name": "adafactor", "beta1": 0.9, "bits": 8, "relative_step": False, "maximize": True},
    "lamb": {"name": "lamb", "weight_decay": 0.1},
    "lamb-factored": {"name": "lamb", "second_moment": "factored", "maximize": True},
    "lamb-8bit": {"name": "lamb", "bits": 8, "second_moment": "factored"},
    "lamb-8bit-dense": {"name": "lamb", "bits": 8, "trust_ratio": False},
}
for _options in CELLS.values():
    _options.setdefault("lr", 1e-2)
    if _options["name"] == "adam_mini":
        _options["partition"] = [("matrix", "head:8"), ("wide", "tensor"), ("both", "column"), ("experts", "column")]
TYPES = (torch.float32, torch.bfloat16, torch.float16)


def available() -> list[str]:
    """The instruction sets that this machine can run."""
    found = []
    for name in ("portable", "avx2", "avx512") if native.library() else ():
        try:
            native.use_cpu(name)
        except ValueError:
            continue
        found.append(name)
    if found:
        native.use_cpu(None)
    return found


@pytest.fixture(params=available() or [pytest.param(None, marks=pytest.mark.skip("the kernels were not built"))])
def cpu(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set in turn."""
    native.use_cpu(request.param)
    yield request.param
    native.use_cpu(None)


def parameters(dtype: torch.dtype, shapes: dict[str, tuple[int, ...]] = SHAPES) -> Params:
    return {name: Parameter((0.5 * noise(shape, name)).to(dtype)) for name, shape in shapes.items()}


def set_gradient(p: Parameter, g: Tensor) -> None:
    """A gradient of any floating-point dtype."""
    p.grad = None
    if g.dtype != p.dtype:
        p.grad_dtype = g.dtype  # type: ignore[attr-defined]
    p.grad = g


@dataclass
class Pair:
    """One parameter after one step, ours and the reference's."""

    name: str
    grad: Tensor
    before: Tensor
    ours: Tensor
    theirs: Tensor
    state: dict[str, Any]
    reference: dict[str, Any]


Gradient = Callable[[str, tuple[int, ...], int], Tensor]


def small_gradient(name: str, shape: tuple[int, ...], step: int) -> Tensor:
    return gradient(name, shape, step)


def create(params: Params, options: dict[str, Any]) -> Any:
    if "partition" in options:  # of the parameters that are here
        options = {**options, "partition": [entry for entry in options["partition"] if entry[0] in params]}
    return daypack.create(params=params.items(), **{"name": "gefen", **options})


def twin(params: Params, optimizer: Any, options: dict[str, Any]) -> tuple[Params, Any]:
    """Copies of the parameters under an optimizer with a copy of the state."""
    copies = {name: Parameter(p.detach().clone()) for name, p in params.items()}
    other = create(copies, options)
    if optimizer.state:
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return copies, other


def compare(
    params: Params, dtype: torch.dtype, options: dict[str, Any], steps: int, make: Gradient = small_gradient
) -> Iterator[Pair]:
    """Step ``params`` natively and, each time from the same state, with the reference."""
    optimizer = create(params, options)
    for step in range(steps):
        copies, reference = twin(params, optimizer, options)
        before = {name: p.detach().clone() for name, p in params.items()}
        for name, p in params.items():
            g = make(name, tuple(p.shape), step).to(dtype)
            set_gradient(p, g)
            set_gradient(copies[name], g.clone())
        with kernels.use("native"):
            optimizer.step()
        with kernels.use("reference"):
            reference.step()
        for name, p in params.items():
            q = copies[name]
            states = dict(optimizer.state[p]), dict(reference.state[q])
            yield Pair(name, cast(Tensor, p.grad), before[name], p.detach(), q.detach(), *states)
