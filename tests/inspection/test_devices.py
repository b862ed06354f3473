"""State on another device, without one: its tensors refuse to meet those of the CPU until they are brought there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import daypack

from ..checkpoint.test_convert import dynamic_map, quantize
from ..conformance.scene import gradient
from .test_foreign import OptimState

#: Called with tensors that an operation on the device of the others has made.
ALIKE = (Tensor.index_select,)


class Elsewhere(Tensor):
    """A tensor on another device, as far as mixing goes."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [x for x in tree_leaves((args, kwargs)) if type(x) is Tensor and x.dim()]
        if plain and func not in ALIKE:
            raise RuntimeError(f"{func.__name__}: expected all tensors to be on the same device")
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result.as_subclass(Tensor) if func is Tensor.cpu else result


def away(tree: Any) -> Any:
    """All tensors with dims on the other device."""
    return tree_map(lambda x: x.as_subclass(Elsewhere) if type(x) is Tensor and x.dim() else x, tree)


def saved(name: str) -> dict[str, Any]:
    params = {key: torch.nn.Parameter(torch.ones(shape)) for key, shape in (("a", (32, 512)), ("b", (8,)))}
    options = {"min_8bit_size": 1} if name.endswith("8bit") else {}
    optimizer = daypack.create(name, params.items(), **options)
    for step in range(2):
        for key, p in params.items():
            p.grad = gradient(key, p.shape, step).float()
        optimizer.step()
    packed: dict[str, Any] = optimizer.state_dict()
    return packed


@pytest.mark.parametrize("name", ["adamw", "gefen", "adamw8bit", "adam_mini", "lamb"])
def test_state_and_weights_elsewhere(name: str) -> None:
    packed, weights = saved(name), {"a": torch.full((32, 512), 2.0), "b": torch.ones(8)}
    wanted = daypack.inspect_state(packed, weights, optimizer=name, pictures=True)
    found = daypack.inspect_state(away(packed), away(weights), optimizer=name, pictures=True)
    assert found == wanted
    assert daypack.diff_states(away(packed), packed, optimizer=name).equal


def test_codes_of_another_library_elsewhere() -> None:
    def state(move: Any) -> dict[str, Any]:
        codes, scale, value = quantize(gradient("m", (32, 256), 0).float(), dynamic_map(), 256)
        tensor = torch.zeros(32, 256).as_subclass(OptimState)
        tensor.codes, tensor.scale, tensor.qmap, tensor.value = map(move, (codes, scale, dynamic_map(), value))
        group = {"params": [0], "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
        return {"state": {0: {"step": torch.tensor(5.0), "exp_avg": tensor}}, "param_groups": [group]}

    wanted = daypack.inspect_state(state(lambda x: x), optimizer="lion", pictures=True)
    found = daypack.inspect_state(state(away), optimizer="lion", pictures=True)
    assert found == wanted
    assert found.params[0].moments[0].blocks == 32


def test_the_stand_in_refuses_what_a_device_refuses() -> None:
    x, y = torch.zeros(3), away(torch.ones(3))
    with pytest.raises(RuntimeError, match="same device"):
        x += y
    x += y.cpu()
