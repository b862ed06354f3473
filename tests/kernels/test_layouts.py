"""Every change of a tensor between two steps is noticed, whichever way torch is asked."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import daypack
from daypack.kernels import layouts
from daypack.kernels.native import library as native

from ..conformance.scene import Params, assert_same, gradient, state_of, values
from .pairs import needs_native, parameters

pytestmark = needs_native

SMALL = {"matrix": (24, 520), "short": (12, 40), "line": (1, 5000), "vector": (130,)}


@pytest.fixture(params=["fast", "plain"], autouse=True)
def interfaces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the interfaces of torch that are not public, and without them."""
    if request.param == "plain":
        monkeypatch.setattr(layouts, "_guards", lambda tensors: None)
        monkeypatch.setattr(layouts, "_data_ptr", lambda: None)
    return str(request.param)


def test_this_torch_has_the_fast_interfaces(interfaces: str) -> None:
    """They are optional. This test says so if a new version of torch lacks them, because steps get slower then."""
    tensors = [torch.zeros(3, 4), torch.zeros(())]
    assert (layouts._guards(tensors) is not None) == (interfaces == "fast")
    assert (layouts._handles(tensors) is not None) == (interfaces == "fast")


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "another tensor": lambda x: x.clone(),
    "another shape": lambda x: x.view(-1, 2),
    "another dtype": lambda x: x.view(torch.int32),
    "other strides": lambda x: x.t(),
    "a part": lambda x: x[:2],
    "a later part": lambda x: x[1:],
    "an alias": lambda x: x.detach(),
    "a number": lambda x: 3,  # type: ignore[arg-type, return-value]
    "nothing": lambda x: None,  # type: ignore[arg-type, return-value]
}


@pytest.mark.parametrize("change", CHANGES)
def test_places_notice(change: str) -> None:
    tensors: list[object] = [torch.zeros(4, 4) for _ in range(5)]
    places = layouts.Places(tensors, native.loaded())
    assert places.hold(list(tensors))
    assert not places.hold(tensors[:-1])
    other = list(tensors)
    other[3] = CHANGES[change](tensors[3])  # type: ignore[arg-type]
    assert not places.hold(other)
    assert places.hold(tensors)


@pytest.mark.parametrize("change", ["another tensor", "a later part"])
def test_places_notice_what_happens_to_a_tensor_itself(change: str) -> None:
    tensors = [torch.zeros(4, 4) for _ in range(5)]
    places = layouts.Places(tensors, native.loaded())
    tensors[2].data = CHANGES[change](tensors[2].data)
    assert not places.hold(tensors)


def test_places_notice_storage_that_moves() -> None:
    tensors = [torch.zeros(4, 4) for _ in range(5)]
    places = layouts.Places(tensors, native.loaded())
    tensors[4].share_memory_()
    assert not places.hold(tensors)
    places = layouts.Places(tensors, native.loaded())
    tensors[1].untyped_storage().resize_(1 << 22)
    assert not places.hold(tensors)


def test_layouts_notice() -> None:
    tensors = [torch.zeros(4, 4) for _ in range(3)]
    kept = layouts.Layouts(tensors)
    assert kept.hold([torch.ones(4, 4) for _ in range(3)])
    assert not kept.hold(tensors[:2])
    for other in (
        torch.zeros(4, 5),
        torch.zeros(4, 4, dtype=torch.int32),
        torch.zeros(4, 4).t(),
        torch.zeros(4, 8)[:, ::2],
        torch.zeros(4, 4).to_sparse(),
        torch._neg_view(torch.zeros(4, 4)),
        Parameter(torch.zeros(4, 4)),
        None,
        1.0,
    ):
        assert not kept.hold([tensors[0], other, tensors[2]])


def test_references_are_given_back() -> None:
    x = torch.zeros(4, 4)
    before = x._use_count()
    places = layouts.Places([x], native.loaded())
    del places
    assert x._use_count() == before


def train(optimizer: daypack.Gefen, params: Params, steps: range) -> None:
    for step in steps:
        for name, p in params.items():
            p.grad = gradient(name, tuple(p.shape), step).to(p.dtype)
        optimizer.step()


KEYS = ["step", "exp_avg", "exp_avg_codes", "exp_avg_scale", "exp_avg_codebook"]
KEYS += ["exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq_block", "exp_avg_sq_block_size"]


@pytest.mark.parametrize("how", ["storage", "tensor", "state"])
@pytest.mark.parametrize("key", KEYS)
def test_one_state_tensor_may_move(key: str, how: str) -> None:
    """One tensor of one parameter gets other memory, or is replaced; the old memory is overwritten with rubbish."""
    runs = []
    second_moment = "blocks" if "block" in key else "factored"
    for changed in (True, False):
        params = parameters(torch.float32, SMALL)
        optimizer = daypack.Gefen(params.values(), lr=1e-2, second_moment=second_moment)
        train(optimizer, params, range(2))
        owner = next(p for p in params.values() if key in optimizer.state[p])
        if changed:
            old = optimizer.state[owner][key]
            kept = old.data
            if how == "storage":
                old.data = old.data.clone()
            else:
                optimizer.state[owner][key] = old.clone()
            if how == "state":
                optimizer.state[owner] = dict(optimizer.state[owner])
            kept.fill_(101)
        train(optimizer, params, range(2, 4))
        assert set(optimizer.kernels().values()) == {"native"}
        runs.append((values(params), state_of(optimizer, params)))
    assert_same(runs[0], runs[1])


def test_a_new_block_size_is_noticed() -> None:
    params = parameters(torch.float32, {"matrix": (24, 512)})
    optimizer = daypack.Gefen(params.values(), lr=1e-2, second_moment="blocks")
    train(optimizer, params, range(2))
    work = optimizer._work
    assert work is not None
    assert work.refresh()
    optimizer.state[params["matrix"]]["exp_avg_sq_block_size"] += 1
    assert not work.refresh()


def test_other_options_are_used() -> None:
    """Numbers of a group are read at every step, structure is laid out anew."""
    runs = []
    for fresh in (True, False):
        params = parameters(torch.float32, SMALL)
        optimizer = daypack.Gefen(params.values(), lr=1e-2)
        for step in range(4):
            optimizer.param_groups[0].update(lr=0.01 * (step + 1), betas=(0.5 + 0.1 * step, 0.9), maximize=step == 2)
            if fresh:
                optimizer._work = None
            train(optimizer, params, range(step, step + 1))
        runs.append(values(params))
    assert_same(runs[0], runs[1])
    train(optimizer, params, range(1))
    optimizer.param_groups[0]["fused"] = False
    train(optimizer, params, range(1, 2))
    assert set(optimizer.kernels().values()) == {"reference"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_parameters_may_change_their_dtype(dtype: torch.dtype) -> None:
    params = parameters(torch.float32, SMALL)
    optimizer = daypack.Gefen(params.values(), lr=1e-2)
    train(optimizer, params, range(2))
    params["matrix"].data = params["matrix"].data.to(dtype)
    params["matrix"].grad = None
    train(optimizer, params, range(2, 3))
    assert params["matrix"].dtype == dtype
    assert params["matrix"].isfinite().all()
