"""What is kept between steps is dropped when it must be; threads and forks change nothing; kernels can be chosen."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import daypack
from daypack import kernels
from daypack.calibration import codebook, tools
from daypack.formats.block_quantized import BlockQuantized
from daypack.kernels.native import backend
from daypack.kernels.native import library as native
from daypack.param import ParamPlan

from ..conformance.scene import Params, assert_same, gradient, noise, state_of, values
from .pairs import CELLS, SHAPES, cpu, create, needs_native, parameters, set_gradient

__all__ = ["cpu"]
pytestmark = needs_native

numpy_levels = codebook.optimal_levels  # as it is before conftest.py puts the native one in its place
SMALL = {"matrix": (24, 520), "wide": (3, 9000), "line": (1, 5000), "vector": (130,)}


def train(optimizer: Any, params: Params, steps: range) -> None:
    for step in steps:
        for name, p in params.items():
            p.grad = gradient(name, tuple(p.shape), step).to(p.dtype)
        optimizer.step()


@pytest.mark.parametrize("second_moment", ["factored", "blocks"])
def test_any_number_of_threads_gives_the_same_bits(cpu: str, second_moment: str) -> None:
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        try:
            params = parameters(torch.float32)
            optimizer = daypack.Gefen(params.values(), lr=1e-2, second_moment=second_moment)
            train(optimizer, params, range(2))
        finally:
            torch.set_num_threads(1)
        results.append((values(params), state_of(optimizer, params)))
    for other in results[1:]:
        assert_same(other, results[0])


@pytest.mark.parametrize("cell", CELLS)
def test_threads_and_separate_passes_change_no_bit_of_a_cell(cell: str) -> None:
    """Statistics and norms are added up in an order that shapes alone decide."""
    results = []
    for threads, nonfinite in ((1, "skip"), (2, "skip"), (5, "skip"), (2, "raise")):
        torch.set_num_threads(threads)
        try:
            params = parameters(torch.float32)
            optimizer = create(params, {**CELLS[cell], "nonfinite": nonfinite})
            train(optimizer, params, range(2))
            assert set(optimizer.kernels().values()) == {"native"}
        finally:
            torch.set_num_threads(1)
        results.append((values(params), state_of(optimizer, params)))
    for other in results[1:]:
        assert_same(other, results[0])


def test_a_forked_child_starts_its_own_threads() -> None:
    torch.set_num_threads(3)
    try:
        params = parameters(torch.float32, SMALL)
        optimizer = daypack.Gefen(params.values())
        train(optimizer, params, range(1))
        for name, p in params.items():
            p.grad = gradient(name, tuple(p.shape), 1).float()
        read, write = os.pipe()
        child = os.fork()
        if child == 0:  # torch's own threads do not survive a fork: nothing here but the kernels may use any
            with torch.no_grad():
                work = optimizer._work
                assert work is not None
                assert work.refresh()
                finite = work.observe()
                work.apply(finite)
            os.write(write, params["matrix"].detach().numpy().tobytes()[:4000])
            os._exit(0)
        os.close(write)
        found = b""
        while part := os.read(read, 65536):
            found += part
        assert os.waitpid(child, 0)[1] == 0
        optimizer.step()
        assert found == params["matrix"].detach().numpy().tobytes()[:4000]
    finally:
        torch.set_num_threads(1)


Change = Callable[[Any, Params], None]


def replace_state(optimizer: Any, params: Params) -> None:
    for state in optimizer.state.values():
        for key, value in state.items():
            state[key] = value.clone()


def swap_state_storage(optimizer: Any, params: Params) -> None:
    for state in optimizer.state.values():
        for value in state.values():
            value.data = value.data.clone()


def reload(optimizer: Any, params: Params) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def swap_param_storage(optimizer: Any, params: Params) -> None:
    for p in params.values():
        p.data = p.data.clone()


def other_strides(optimizer: Any, params: Params) -> None:
    params["matrix"].data = params["matrix"].data.t().contiguous().t()


def new_groups(optimizer: Any, params: Params) -> None:
    optimizer.param_groups = [dict(group) for group in optimizer.param_groups]


@pytest.mark.parametrize(
    "change", [replace_state, swap_state_storage, reload, swap_param_storage, other_strides, new_groups]
)
def test_tensors_may_move_between_steps(change: Change) -> None:
    """The kept table of pointers never outlives what it points to."""
    runs = []
    for changed in (True, False):
        params = parameters(torch.float32, SMALL)
        optimizer = daypack.Gefen(params.values(), lr=1e-2)
        train(optimizer, params, range(2))
        if changed:
            change(optimizer, params)
        train(optimizer, params, range(2, 4))
        optimizer.param_groups[0]["lr"] = 3e-2
        train(optimizer, params, range(4, 5))
        runs.append(values(params))
    if change is other_strides:
        torch.testing.assert_close(runs[0].pop("matrix"), runs[1].pop("matrix"))  # stepped by the reference
    assert_same(runs[0], runs[1])


def test_gradients_come_and_go() -> None:
    """Which parameters have a gradient changes from step to step: the others stand still, nothing is mixed up."""
    together, apart = parameters(torch.float32, SMALL), parameters(torch.float32, SMALL)
    optimizer = daypack.Gefen(together.values(), lr=1e-2)
    for _ in range(2):  # learn one codebook from all
        train(optimizer, together, range(1))
        break
    train(single := daypack.Gefen(apart.values(), lr=1e-2), apart, range(1))
    for step in range(1, 6):
        for params, each in ((together, optimizer), (apart, single)):
            for i, (name, p) in enumerate(params.items()):
                p.grad = gradient(name, tuple(p.shape), step).float() if (step >> i % 2) & 1 else None
            if each is optimizer:
                each.step()
            else:  # the same with nothing kept
                each._work = None
                each.step()
    assert_same(values(together), values(apart))


def test_a_gradient_of_another_layout_goes_to_the_reference_and_comes_back() -> None:
    params = parameters(torch.float32, SMALL)
    optimizer = daypack.Gefen(params.values(), lr=1e-2)
    train(optimizer, params, range(1))
    assert set(optimizer.kernels().values()) == {"native"}
    params["matrix"].grad = gradient("matrix", (520, 24), 1).float().t()
    optimizer.step()
    assert optimizer.kernels()[params["matrix"]] == "reference"
    assert optimizer.kernels()[params["wide"]] == "native"
    train(optimizer, params, range(2, 3))
    assert set(optimizer.kernels().values()) == {"native"}


def test_unaligned_tensors(cpu: str) -> None:
    """A parameter that starts in the middle of a cache line is stepped natively, one between two floats is not."""
    plain = parameters(torch.float32, {"matrix": (24, 520)})
    storage = torch.zeros(24 * 520 + 64)
    odd = Parameter(storage[3 : 3 + 24 * 520].view(24, 520))
    odd.data.copy_(plain["matrix"].data)
    bytes_ = torch.zeros(4 * 24 * 520 + 64, dtype=torch.uint8)
    results = []
    for p in (plain["matrix"], odd):
        optimizer = daypack.Gefen([p], lr=1e-2)
        for step in range(3):
            p.grad = gradient("matrix", (24, 520), step).float()
            optimizer.step()
        assert optimizer.kernels()[p] == "native"
        results.append(p.detach().clone())
    assert torch.equal(results[0], results[1])
    assert not native.is_plain(torch.frombuffer(bytes_.numpy().data, dtype=torch.float32, offset=2, count=100))


def test_autograd_notices_the_write() -> None:
    p = Parameter(torch.randn(8, 300))
    loss = (p * p).sum()
    loss.backward(retain_graph=True)
    daypack.Gefen([p]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_kernels_can_be_forced() -> None:
    p = Parameter(torch.randn(8, 300))
    p.grad = torch.randn(8, 300)
    for options, force, expected in (
        ({}, None, "native"),
        ({"fused": True}, None, "native"),
        ({"fused": False}, None, "reference"),
        ({"fused": True}, "reference", "reference"),
        ({"fused": False}, "native", "native"),
    ):
        optimizer = daypack.Gefen([p], **options)
        if force is None:
            optimizer.step()
        else:
            with kernels.use(force):
                optimizer.step()
        assert optimizer.kernels() == {p: expected}
        assert f"{expected}" in str(daypack.state_report(optimizer))
    with pytest.raises(ValueError, match="must be one of 'native', 'reference'"), kernels.use("triton"):
        pass
    q = Parameter(torch.randn(8, 300, dtype=torch.float64))
    q.grad = torch.randn(8, 300, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"fused=True, but no native kernel for torch.float64"):
        daypack.Gefen([q], fused=True).step()


def test_a_format_derived_from_a_known_one_goes_to_the_reference() -> None:
    class Derived(BlockQuantized):
        """Might lay its tensors out in another way."""

    class Optimizer(daypack.Gefen):
        def plan(self, *args: Any) -> ParamPlan:
            usual = super().plan(*args)
            return replace(usual, formats=(Derived(), *usual.formats[1:]))

    p = Parameter(torch.randn(8, 300))
    p.grad = torch.randn(8, 300)
    optimizer = Optimizer([p])
    optimizer.step()
    assert optimizer.kernels() == {p: "reference"}


def test_a_damaged_codebook_stops_the_step_before_anything_changes() -> None:
    params = parameters(torch.float32, SMALL)
    optimizer = daypack.Gefen(params.values())
    train(optimizer, params, range(1))
    optimizer.state[params["wide"]]["exp_avg_codebook"][100] += 1e-5
    before = values(params), state_of(optimizer, params)
    with pytest.raises(ValueError, match="codebook of parameter 1"):
        train(optimizer, params, range(1, 2))
    assert_same((values(params), state_of(optimizer, params)), before)


def test_unknown_instruction_sets_are_refused() -> None:
    now = native.cpu()
    with pytest.raises(ValueError, match="no mmx kernels"):
        native.use_cpu("mmx")
    assert native.cpu() == now


def test_without_the_library_the_reference_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "library", lambda: None)
    monkeypatch.setattr(tools, "REFERENCE", replace(tools.REFERENCE, optimal_levels=numpy_levels))
    params = parameters(torch.float32, SMALL)
    optimizer = daypack.Gefen(params.values())
    train(optimizer, params, range(2))
    assert set(optimizer.kernels().values()) == {"reference"}
    p = Parameter(noise((4, 300), "p").float())
    set_gradient(p, noise((4, 300), "g").float())
    with pytest.raises(ValueError, match="not built"):
        daypack.Gefen([p], fused=True).step()


def test_shapes_cover_the_cells() -> None:
    """The list of shapes holds every pair of formats that Gefen plans."""
    found = set()
    for second_moment in ("factored", "blocks"):
        params = parameters(torch.float32)
        optimizer = daypack.Gefen(params.values(), second_moment=second_moment)
        optimizer.materialize_state()
        found |= {tuple(sorted(state)) for state in optimizer.state.values()}
    assert len(found) == 4  # codes beside factors, blocks and a dense moment; both dense
    assert len(SHAPES) == len(params)
