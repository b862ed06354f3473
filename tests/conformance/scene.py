"""Small training runs on random parameters and gradients, and comparisons that are exact to the bit."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from math import prod
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import Parameter

Params = dict[str, Parameter]

# Ragged and whole blocks, convolution, experts, a prime row, short rows, vectors, scalars, nothing at all.
SHAPES: dict[str, tuple[int, ...]] = {
    "matrix": (24, 520),
    "conv": (16, 16, 3, 3),
    "experts": (4, 24, 64),
    "prime": (5, 1009),
    "embedding": (300, 32),
    "vector": (130,),
    "one": (1,),
    "scalar": (),
    "empty": (0, 8),
    "thin": (2, 3),
}
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


Made = TypeVar("Made", bound=Callable[..., Tensor])


def remembered(make: Made) -> Made:
    """``make(shape, *key)``, which keeps what thousands of tests want again, and hands out copies."""
    kept = lru_cache(maxsize=1024, typed=True)(make)

    def made(shape: Sequence[int], *key: int | str) -> Tensor:
        shape = tuple(shape)
        return kept(shape, *key).clone() if prod(shape) < 1 << 16 else make(shape, *key)

    return cast(Made, made)


@remembered
def noise(shape: Sequence[int], *key: int | str) -> Tensor:
    """Normal fp64 numbers that depend on ``key`` alone; the global generator is not touched."""
    seed = hash_of(key)
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def hash_of(key: Iterable[int | str]) -> int:
    seed = 1469598103934665603
    for character in repr(tuple(key)):
        seed = ((seed ^ ord(character)) * 1099511628211) % 2**63
    return seed


def parameters(
    dtype: torch.dtype = torch.float32, shapes: dict[str, tuple[int, ...]] = SHAPES, seed: int = 0
) -> Params:
    return {name: Parameter((0.5 * noise(shape, name, seed)).to(dtype)) for name, shape in shapes.items()}


def gradient(name: str, shape: Sequence[int], step: int, seed: int = 0) -> Tensor:
    """A gradient whose rows and columns differ in size by orders of magnitude, as real ones do. fp64."""
    return _gradient(shape, name, step, seed)


@remembered
def _gradient(shape: Sequence[int], name: str, step: int, seed: int) -> Tensor:
    g = 0.01 * noise(shape, "grad", name, step, seed)
    if len(shape) >= 2:
        g = g * torch.exp(noise((shape[0],) + (1,) * (len(shape) - 1), "rows", name, seed))
        g = g * torch.exp(noise((shape[-1],), "columns", name, seed))
    return g


def structured(rows: int, cols: int, period: int, *key: int | str) -> Tensor:
    """A gradient whose size changes from one run of ``period`` columns to the next."""
    sizes = torch.exp(3 * noise((rows, cols // period), *key)).repeat_interleave(period, 1)
    return 1e-3 * sizes * noise((rows, cols), *key, "g")


def set_gradients(params: Params, step: int, seed: int = 0, without: Iterable[str] = ()) -> None:
    for name, p in params.items():
        p.grad = None if name in without else gradient(name, p.shape, step, seed).to(p.dtype)


def train(optimizer: torch.optim.Optimizer, params: Params, steps: Iterable[int], **keywords: Any) -> None:
    for step in steps:
        set_gradients(params, step, **keywords)
        optimizer.step()


def clone(params: Params) -> Params:
    return {name: Parameter(p.detach().clone(), requires_grad=p.requires_grad) for name, p in params.items()}


def same(a: Any, b: Any) -> bool:
    """Equal in type, dtype, shape and every bit (NaN equals NaN); tensors, numbers and containers of them."""
    if isinstance(a, Tensor):
        if not isinstance(b, Tensor) or a.dtype != b.dtype or a.shape != b.shape:
            return False
        return torch.equal(bits(a), bits(b))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and bool(a == b)


def bits(a: Tensor) -> Tensor:
    return a.detach().contiguous().reshape(-1).view(torch.uint8)


def assert_same(a: Any, b: Any, what: str = "") -> None:
    """`same`, with the place of the first difference in the message."""
    if isinstance(a, dict) and isinstance(b, dict):
        assert list(a) == list(b) or a.keys() == b.keys(), f"{what}: keys {sorted(map(str, a.keys() ^ b.keys()))}"
        for key in a:
            assert_same(a[key], b[key], f"{what}.{key}")
    elif isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        assert len(a) == len(b), f"{what}: {len(a)} and {len(b)} items"
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{what}[{index}]")
    else:
        assert same(a, b), f"{what} differs: {brief(a)} and {brief(b)}"


def brief(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.flatten()[:4].tolist()}"
    return repr(value)[:200]


def values(params: Params) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in params.items()}


def state_of(optimizer: torch.optim.Optimizer, params: Params) -> dict[str, dict[str, Any]]:
    """A copy of the live state under the parameters' names."""
    names = {id(p): name for name, p in params.items()}
    return {
        names[id(p)]: {k: v.clone() if type(v) is Tensor else copy.deepcopy(v) for k, v in state.items()}
        for p, state in optimizer.state.items()
    }


def snapshot(optimizer: torch.optim.Optimizer, params: Params) -> dict[str, Any]:
    """Everything a step or a load may change, copied."""
    groups = [
        {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
        | {"params": [id(p) for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    return {"values": values(params), "state": state_of(optimizer, params), "groups": groups}


def through_file(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Saved and read back the way torch does by default: nothing but tensors and plain values gets through."""
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    loaded: dict[str, Any] = torch.load(buffer, weights_only=True)
    return loaded


def tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


def held_by(optimizer: torch.optim.Optimizer, p: Tensor) -> int:
    """Bytes of one parameter's state tensors."""
    return sum(t.numel() * t.element_size() for t in optimizer.state[p].values() if isinstance(t, Tensor))


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all state tensors, counter and codebooks included."""
    return sum(t.numel() * t.element_size() for t in tensors(optimizer))


def quietly(optimizer: torch.optim.Optimizer) -> list[str]:
    """One step; the warnings it gave."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    return [str(w.message) for w in caught]
