"""Kinds of parameters: every shape, stride, dtype and oddity that a module may hold."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import Parameter

from daypack import kernels

from .scene import (
    assert_same,
    clone,
    gradient,
    held_by,
    noise,
    parameters,
    set_gradients,
    snapshot,
    state_of,
    structured,
    through_file,
    train,
    values,
)
from .specs import CASES, Case, crossed

NUMELS = (1, 2, 3, 255, 256, 257, 4095, 4096, 4097, 10007, 65537)


def shapes_of(numel: int) -> dict[str, tuple[int, ...]]:
    """As a vector, one row, one column, and rows of every kind of length that divides it."""
    shapes: dict[str, tuple[int, ...]] = {"v": (numel,), "row": (1, numel), "column": (numel, 1), "tail": (1, numel, 1)}
    divisors = [d for d in range(2, numel) if numel % d == 0]
    for d in divisors[:: max(1, len(divisors) // 3)]:
        shapes[f"rows of {d}"] = (numel // d, d)
    return shapes


@pytest.mark.parametrize("numel", NUMELS)
@crossed
def test_every_number_of_elements(case: Case, numel: int) -> None:
    """Every element moves with its gradient and not without; a prime number of them is compressed like any other."""
    params = parameters(shapes={"anchor": (8, 512), **shapes_of(numel)})
    optimizer = case.create(params.values(), weight_decay=0.0)
    start = values(params)
    train(optimizer, params, range(3))
    for name, p in params.items():
        assert p.isfinite().all(), name
        assert (p != start[name]).float().mean() > 0.99, name
    if case.spec.ours:
        for name in ("row", "column"):
            held = sum(
                t.numel() * t.element_size() for t in optimizer.state[params[name]].values() if torch.is_tensor(t)
            )
            assert held <= case.dense_bytes * numel + 4, name  # never more than AdamW's, or the rule's own, in fp32
        if numel >= 4095 and case.spec.name in ("gefen", "galore") and "low" not in case.label:
            # One row: a byte of code, a scale per 256, a column mean per element; and the codebook.
            assert held_by(optimizer, params["row"]) < 5.1 * numel + 1100
            assert optimizer.state[params["row"]]["exp_avg_codes"].shape == (1, numel)


def strided(shape: tuple[int, ...], kind: str) -> Tensor:
    """Storage for ``shape`` that is not contiguous."""
    if kind == "transposed":
        return torch.empty(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)
    if kind == "chunk":
        return torch.empty(*shape[:-1], 2 * shape[-1]).chunk(2, -1)[0]
    if kind == "sliced rows":
        return torch.empty(2 * shape[0], *shape[1:])[::2]
    if kind == "channels last":
        return torch.empty(shape).to(memory_format=torch.channels_last)
    return torch.empty(shape)


def like(value: Tensor, kind: str) -> Tensor:
    return strided(tuple(value.shape), kind).copy_(value)


KINDS = ("transposed", "chunk", "sliced rows", "contiguous")


@pytest.mark.parametrize("grads", KINDS)
@pytest.mark.parametrize("kind", KINDS)
@crossed
def test_strides_do_not_matter(case: Case, kind: str, grads: str) -> None:
    """Parameter and gradient with strides of their own: the contiguous result, up to the order of sums; strides stay.

    The momentum has no sums in it: it is the same to the bit, on the reference, to which native kernels leave what is
    not contiguous.
    """
    shapes: dict[str, tuple[int, ...]] = {"m": (24, 300), "e": (4, 24, 64), "c": (16, 8, 3, 3), "tall": (520, 8)}
    plain = parameters(shapes=shapes)
    params = {name: Parameter(like(p.detach(), kind)) for name, p in plain.items()}
    strides = {name: p.stride() for name, p in params.items()}
    optimizer, reference = case.create(params.values()), case.create(plain.values())
    for step in range(3):
        set_gradients(plain, step)
        for name, p in params.items():
            p.grad = like(plain[name].grad, grads)
        with kernels.use("reference"):
            optimizer.step()
            reference.step()
    assert {name: p.stride() for name, p in params.items()} == strides
    for name, p in params.items():
        torch.testing.assert_close(p, plain[name], rtol=1e-5, atol=1e-6)
        for key, value in optimizer.state.get(p, {}).items():
            wanted = reference.state[plain[name]][key]
            if key.startswith("exp_avg_sq") and torch.is_tensor(value):
                torch.testing.assert_close(value, wanted, rtol=1e-5, atol=0)
            elif key in ("exp_avg", "basis"):  # The sums in a basis differ in the last place.
                torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))
            else:
                assert_same(value, wanted, f"{name} {key}")


@crossed
def test_channels_last_and_expanded_gradients(case: Case) -> None:
    """Either side of a convolution in another memory format, and a gradient that is one number in many places.

    On the reference, which takes every memory format; native kernels need contiguous tensors and equal it within ulps.
    """
    shapes: dict[str, tuple[int, ...]] = {"a": (16, 8, 3, 3), "b": (16, 8, 3, 3), "x": (24, 300)}
    plain = parameters(shapes=shapes)
    params = clone(plain)
    params["a"] = Parameter(like(plain["a"].detach(), "channels last"))
    optimizer, reference = case.create(params.values()), case.create(plain.values())
    for step in range(3):
        set_gradients(plain, step)
        set_gradients(params, step)
        params["b"].grad = like(plain["b"].grad, "channels last")
        params["x"].grad = torch.tensor(0.01 * (step + 1)).expand(24, 300)
        plain["x"].grad = params["x"].grad.contiguous()
        with kernels.use("reference"):
            optimizer.step()
            reference.step()
    assert_same(values(params), values(plain))
    assert params["a"].is_contiguous(memory_format=torch.channels_last)


@crossed
def test_parameters_that_are_views_of_one_storage(case: Case) -> None:
    """Fused projections: neighbours in one buffer step as if each had its own."""
    buffer = noise((48, 300), "buffer").float()
    apart = [Parameter(part.clone()) for part in buffer.chunk(3)]
    views = [Parameter(part) for part in buffer.chunk(3)]
    optimizer, reference = case.create(views), case.create(apart)
    for step in range(3):
        for index, (p, q) in enumerate(zip(views, apart, strict=True)):
            p.grad = q.grad = gradient(str(index), (16, 300), step).float()
        optimizer.step()
        reference.step()
    assert_same(buffer, torch.cat([p.detach() for p in apart]))


@crossed
def test_empty_parameters_are_no_obstacle(case: Case) -> None:
    """First, in the middle and last in their group: the others train, and all of it is saved and loaded."""
    shapes: dict[str, tuple[int, ...]] = {
        "e0": (0,),
        "m": (24, 300),
        "e1": (8, 0),
        "v": (9,),
        "e2": (0, 3, 3),
        "e3": (0, 8),
    }
    params, others = parameters(shapes=shapes), parameters(shapes={n: shapes[n] for n in ("m", "v")})
    optimizer, reference = case.create(params.values()), case.create(others.values())
    train(optimizer, params, range(2))
    train(reference, others, range(2))
    mine = clone(params)
    loaded = case.create(mine.values())
    loaded.load_state_dict(through_file(optimizer.state_dict()))
    train(loaded, mine, [2])
    train(reference, others, [2])
    assert_same({n: values(mine)[n] for n in others}, values(others))
    alone = {"e": Parameter(torch.empty(0, 4))}
    train(case.create(alone.values()), alone, range(2))


@pytest.mark.parametrize("case", [c for c in CASES if c.label == "factored"], ids=str)
def test_experts_step_like_separate_matrices(case: Case) -> None:
    """A stack of matrices is what the matrices are one by one: same codebook, scales, statistics, values."""
    stack = Parameter(noise((6, 24, 80), "stack").float())
    apart = [Parameter(part.detach().clone()) for part in stack]
    optimizer, reference = case.create([stack]), case.create(apart)
    for step in range(3):
        stack.grad = gradient("stack", stack.shape, step).float()
        for p, part in zip(apart, stack.grad, strict=True):
            p.grad = part.clone()
        optimizer.step()
        reference.step()
        state = optimizer.state[stack]
        assert state["exp_avg_sq_row"].shape == (6, 24)
        assert state["exp_avg_sq_col"].shape == (6, 80)
        for index, p in enumerate(apart):
            theirs = reference.state[p]
            for key in ("exp_avg_sq_row", "exp_avg_sq_col"):
                torch.testing.assert_close(state[key][index], theirs[key], msg=key)
            if step == 0:  # Rounding for storage may depend on the place within the parameter.
                torch.testing.assert_close(stack[index], p, rtol=1e-6, atol=1e-7)
                assert torch.equal(state["exp_avg_scale"][index], theirs["exp_avg_scale"])
                assert torch.equal(state["exp_avg_codebook"], theirs["exp_avg_codebook"])


@pytest.mark.parametrize("shape", [(8, 16, 32), (64, 1, 4), (8, 3, 7, 5), (2, 3, 4, 5, 6), (3000, 1)], ids=str)
@crossed
def test_rows_are_independent_of_order(case: Case, shape: tuple[int, ...]) -> None:
    """Shuffled rows (filters, experts, tokens) give the shuffled update, up to summation order: no hidden layout."""
    order = torch.randperm(shape[0], generator=torch.Generator().manual_seed(3))
    p, q = Parameter(noise(shape, "p").double()), Parameter(noise(shape, "p").double()[order])
    a, b = case.create([p]), case.create([q])
    g = gradient("g", shape, 0)
    p.grad, q.grad = g, g[order].contiguous()
    a.step()
    b.step()
    torch.testing.assert_close(p.detach()[order], q.detach(), rtol=1e-10, atol=1e-10)


@crossed
def test_embedding_rows_that_are_not_used(case: Case) -> None:
    """Tokens that never occur keep their rows but for decay; the same for those that stopped occurring long ago."""
    weight = Parameter(noise((500, 64), "embed").float())
    start = weight.detach().clone()
    optimizer = case.create([weight], weight_decay=0.0)
    for step in range(5):
        used = torch.arange(step, 250, 3)
        weight.grad = torch.zeros_like(weight)
        weight.grad[used] = noise((len(used), 64), step).float()
        optimizer.step()
    assert_same(weight.detach()[250:], start[250:])
    assert (weight.detach()[:250] != start[:250]).float().mean() > 0.95


@crossed
def test_unusable_gradient_changes_nothing(case: Case) -> None:
    """A sparse gradient, and one left over from before the parameter was resized, come after good ones: all stay."""
    embedding = nn.Embedding(40, 64, sparse=True)
    params = parameters() | {"tokens": embedding.weight}
    optimizer = case.create(params.items())
    for step in range(2):
        before = snapshot(optimizer, params)
        set_gradients(params, step, without=("tokens",))
        embedding(torch.tensor([1, 5])).sum().backward()
        with pytest.raises(ValueError, match=r"tokens.*|.*tokens") as error:
            optimizer.step()
        assert "sparse" in str(error.value)
        assert_same(snapshot(optimizer, params)["values"], before["values"])
        assert_same(steps(optimizer, params), steps_in(before))
        set_gradients(params, step)
        optimizer.step()
    params["tokens"].grad = torch.zeros(40, 64)
    params["tokens"].data = torch.zeros(20, 64)
    before = snapshot(optimizer, params)
    with pytest.raises(ValueError, match="tokens"):
        optimizer.step()
    assert_same(snapshot(optimizer, params)["values"], before["values"])


def steps(optimizer: torch.optim.Optimizer, params: Any) -> dict[str, Any]:
    return steps_in({"state": state_of(optimizer, params)})


def steps_in(taken: dict[str, Any]) -> dict[str, Any]:
    return {name: state["step"] for name, state in taken["state"].items() if state["step"] != 0}


@crossed
def test_complex_parameter_is_refused(case: Case) -> None:
    """At construction, in a late group, or at the step, before anything moves: they want another mathematics."""
    params = parameters(shapes={"m": (24, 300), "v": (9,)})
    params["phase"] = Parameter(torch.zeros(4, 300, dtype=torch.complex64))
    with pytest.raises(ValueError, match="phase"):
        train(case.create(params.items()), params, [0])
    assert_same(values(params)["m"], values(parameters(shapes={"m": (24, 300)}))["m"])


@crossed
def test_integer_parameter_never_moves(case: Case) -> None:
    """Buffers of packed weights appear among parameters; they have no gradient and must not disturb."""
    params = parameters(shapes={"m": (24, 300)})
    packed = Parameter(torch.arange(600).reshape(2, 300), requires_grad=False)
    optimizer = case.create([*params.values(), packed])
    train(optimizer, params, range(2))
    assert torch.equal(packed, torch.arange(600).reshape(2, 300))
    assert not optimizer.state.get(packed)
    optimizer.state_dict()


DIMS = st.lists(st.integers(1, 40), min_size=0, max_size=4).filter(lambda dims: math.prod(dims) <= 20_000)


@pytest.mark.parametrize("case", [c for c in CASES if c.spec.ours], ids=str)
@settings(max_examples=10)
@given(dims=DIMS, dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float64)), wide=st.integers(0, 3))
def test_any_shape_trains_saves_and_resumes(case: Case, dims: list[int], dtype: torch.dtype, wide: int) -> None:
    """Random shapes, ragged against every block size: finite, compact, and bit for bit the same after a resume."""
    if dims:
        dims[-1] = min(dims[-1] * (1, 7, 16, 100)[wide], 3000)
    params = parameters(dtype, {"p": tuple(dims), "anchor": (16, 256)})
    options = {"block_size": 64} if case.takes("block_size") else {}
    optimizer = case.create(params.values(), **options)
    train(optimizer, params, range(2))
    mine = clone(params)
    other = case.create(mine.values(), **options)
    other.load_state_dict(through_file(optimizer.state_dict()))
    train(optimizer, params, [2])
    train(other, mine, [2])
    assert_same(values(mine), values(params))
    assert_same(state_of(other, mine), state_of(optimizer, params))
    p = params["p"]
    assert p.isfinite().all()
    assert held_by(optimizer, p) <= case.dense_bytes * (2 if dtype == torch.float64 else 1) * p.numel() + 4


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, from its compiler
@crossed
def test_compiled_step_equals_the_plain_one(case: Case) -> None:
    """Under `torch.compile` a step runs as it is, outside the graph, or compiled; the numbers are the same."""
    params, others = parameters(shapes={"m": (24, 300)}), parameters(shapes={"m": (24, 300)})
    optimizer, reference = case.create(params.values()), case.create(others.values())
    step = torch.compile(optimizer.step, backend="eager")
    for index in range(3):
        set_gradients(params, index)
        step()
        train(reference, others, [index])
    torch.testing.assert_close(params["m"], others["m"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", [c for c in CASES if c.label == "blocks"], ids=str)
def test_structure_is_found_at_each_parameters_own_first_gradient(case: Case) -> None:
    """Block structure of one that was unfrozen late is its own, not that of the first gradient of the run."""
    params = {name: Parameter(torch.zeros(24, 768)) for name in ("early", "late")}
    optimizer = case.create(params.values())
    params["early"].grad = structured(24, 768, 96, "s").float()
    for _ in range(2):
        optimizer.step()
    params["late"].grad = structured(24, 768, 48, "t").float()
    optimizer.step()
    shapes = {name: tuple(optimizer.state[p]["exp_avg_sq_block"].shape) for name, p in params.items()}
    assert shapes == {"early": (24, 8), "late": (24, 16)}
