"""Every native cell computes what the torch reference computes.

How much may differ, and why: sums of g^2 are added in another order; a multiplication and an addition may be one
instruction; the learning rate may divide the denominator instead of multiplying the direction. So moments agree to
a few units in the last place, and a code differs only where its value lies within that of a decision threshold.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

import daypack
from daypack import kernels

from ..conformance.scene import noise
from .pairs import CELLS, SHAPES, TYPES, Pair, compare, cpu, needs_native, parameters, set_gradient

__all__ = ["cpu"]
pytestmark = needs_native

ULP = 2.0**-23
#: Codes that may differ, of a million, and scales (where the largest moment rounds to another bf16), of a thousand.
CODES_PER_MILLION, SCALES_PER_MILLE = 10, 1
#: Beside a fixed map the scale is the largest moment itself, whose last bits move every value that it divides.
NEAREST_PER_MILLION = 60

MOMENTS = ("exp_avg", "exp_avg_sq")

OPTIONS: list[dict[str, Any]] = [
    {"lr": 1e-2, "weight_decay": 0.1},
    {"lr": 3e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.3, "maximize": True, "block_size": 100},
    {"lr": 1e-2, "betas": (0.0, 0.99), "weight_decay": 0.0, "block_size": 64},
    {"lr": 0.0, "betas": (0.3, 0.0)},
]


def assert_equal(pairs: Iterable[Pair], codes_per_million: float = CODES_PER_MILLION) -> None:
    """Everything in every pair agrees within the stated bounds."""
    codes = elements = scales = blocks = rounded = values = 0
    for pair in pairs:
        name, state, reference = pair.name, pair.state, pair.reference
        assert state.keys() == reference.keys()
        for key in state.keys() - {f"{moment}_{part}" for moment in MOMENTS for part in ("codes", "scale")}:
            close(pair, key)
        for moment in MOMENTS if pair.ours.numel() else ():
            if moment + "_codes" not in state:
                continue
            scale, other = state[moment + "_scale"], reference[moment + "_scale"]
            apart = (places(scale) - places(other)).abs()
            if scale.dtype == torch.float32:  # the largest moment itself
                close(pair, moment + "_scale")
            else:
                assert apart.max() <= 1, name
                scales, blocks = scales + int((apart > 0).sum()), blocks + scale.numel()
            distance = (state[moment + "_codes"].int() - reference[moment + "_codes"].int()).abs()
            if scale.dtype == torch.float32 or not apart.any():
                assert distance.max() <= 1, name
                codes, elements = codes + int(distance.sum()), elements + distance.numel()
        off, count = parameter(pair)
        rounded, values = rounded + off, values + count
    assert codes <= 2 + codes_per_million * elements / 1e6, f"{codes} of {elements} codes differ"
    assert scales <= 2 + SCALES_PER_MILLE * blocks / 1e3, f"{scales} of {blocks} scales differ"
    assert rounded <= 2 + 2e-4 * values, f"{rounded} of {values} half-precision parameters round otherwise"


def close(pair: Pair, key: str) -> None:
    ours, theirs, what = pair.state[key], pair.reference[key], f"{pair.name} {key}"
    if key.startswith("exp_avg_sq") and ours.dtype == torch.float32:  # sums in another order
        largest = float(pair.grad.abs().nan_to_num().max()) if key == "exp_avg_sq" and pair.grad.numel() else 0.0
        atol = (8 * ULP * largest) ** 2 + 1e-44  # gradient and coupled decay may cancel
        torch.testing.assert_close(ours, theirs, rtol=64 * ULP, atol=atol, msg=lambda m: f"{what}: {m}")
    elif key in ("exp_avg", "exp_avg_scale"):  # the old and the new part may cancel
        assert ours.shape == theirs.shape, what
        if ours.numel():
            slack = 4 * ULP * max(float(theirs.abs().max()), float(pair.grad.abs().max())) + 4e-45
            assert (ours - theirs).abs().max() <= slack, what
    else:
        assert torch.equal(ours, theirs), what


def parameter(pair: Pair) -> tuple[int, int]:
    """How many half-precision values rounded to the neighbour, of how many. fp32: within 2 ulp, and 16 of the step."""
    finite = pair.ours.isfinite()
    assert torch.equal(finite, pair.theirs.isfinite()), pair.name
    ours, theirs, before = (x[finite] for x in (pair.ours, pair.theirs, pair.before))
    if not ours.numel():
        return 0, 0
    step = (theirs.float() - before.float()).nan_to_num().abs().max()
    if ours.dtype == torch.float32:
        slack = 2 * ULP * torch.maximum(theirs.abs(), before.abs()) + 16 * ULP * step + 4e-45
        worst = float(((ours - theirs).abs() / slack).max())
        assert worst <= 1, f"{pair.name}: {worst:.2f} times the slack"
        return 0, 0
    distance = (places(ours) - places(theirs)).abs()
    distance[(ours.float() - theirs.float()).abs() <= 16 * ULP * step] = 0  # near 0 a half-precision ulp is as small
    assert distance.max() <= 1, pair.name
    return int(distance.sum()), distance.numel()


def places(x: Tensor) -> Tensor:
    """Numbers by their rank among those of their type; both zeros are 0."""
    bits = x.view(torch.int32).long() if x.dtype == torch.float32 else x.view(torch.int16).long()
    largest = 0x7FFFFFFF if x.dtype == torch.float32 else 0x7FFF
    return torch.where(bits < 0, -(bits & largest), bits)


@pytest.mark.parametrize("second_moment", ["factored", "blocks"])
@pytest.mark.parametrize("options", OPTIONS, ids=["defaults", "all-changed", "no-beta1", "no-lr"])
def test_all_shapes(cpu: str, options: dict[str, Any], second_moment: str) -> None:
    options = {**options, "second_moment": second_moment}
    shapes = {name: shape for name, shape in SHAPES.items() if name != "both" or "block_size" not in options}
    assert_equal(compare(parameters(torch.float32, shapes), torch.float32, options, 3))


@pytest.mark.parametrize("second_moment", ["factored", "blocks"])
@pytest.mark.parametrize("grad_dtype", TYPES, ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_all_dtypes(cpu: str, dtype: torch.dtype, grad_dtype: torch.dtype, second_moment: str) -> None:
    shapes = {name: shape for name, shape in SHAPES.items() if name != "both"}
    options = {"lr": 1e-2, "weight_decay": 0.1, "second_moment": second_moment}
    assert_equal(compare(parameters(dtype, shapes), grad_dtype, options, 2))


@pytest.mark.parametrize("cols", [*range(1, 70), 127, 128, 129, 255, 256, 257, 300, 319, 320, 512, 513])
def test_every_length_of_row(cpu: str, cols: int) -> None:
    params = parameters(torch.float32, {str(rows): (rows, cols) for rows in (2, 7, 64)})
    for options in ({"lr": 1e-2}, {"lr": 1e-2, "block_size": 48}):
        assert_equal(compare(params, torch.float32, options, 2))


@pytest.mark.parametrize("magnitude", [1e-42, 1e-38, 1e-32, 1e-27, 1e-20, 1e-12, 1e5, 1e16])
def test_tiny_and_huge_gradients(cpu: str, magnitude: float) -> None:
    """From denormals, whose squares vanish, to the edge of the range."""
    shapes = {name: SHAPES[name] for name in ("matrix", "short", "line", "vector")}

    def make(name: str, shape: tuple[int, ...], step: int) -> Tensor:
        return magnitude * noise(shape, name, step)

    pairs = compare(parameters(torch.float32, shapes), torch.float32, {"lr": 1e-2, "eps": 1e-8}, 3, make)
    assert_equal(pairs, codes_per_million=10 if magnitude > 1e-37 else 1000)  # denormals: an ulp is a large part


def with_zeros(name: str, shape: tuple[int, ...], step: int) -> Tensor:
    """A gradient whose rows and columns are zeros in part; all of it is, but at steps 1 and 2."""
    g = 0.01 * noise(shape, name, step)
    if len(shape) == 2:
        g[:, : shape[1] // 3] = 0
        g[::5] = 0
    return g * (step in (1, 2))


@pytest.mark.parametrize("second_moment", ["factored", "blocks"])
def test_zeros(cpu: str, second_moment: str) -> None:
    """All-zero gradients, rows, columns and blocks, before and after others."""
    shapes = {name: shape for name, shape in SHAPES.items() if name != "both"}
    options = {"lr": 1e-2, "second_moment": second_moment}
    assert_equal(compare(parameters(torch.float32, shapes), torch.float32, options, 5, with_zeros))


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan"), 3e38])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nonfinite_gradients_are_found_wherever_they_are(cpu: str, bad: float, grad_dtype: torch.dtype) -> None:
    shapes = {name: shape for name, shape in SHAPES.items() if name not in ("empty", "both")}
    for place in (0, -1, 17):
        params = parameters(torch.float32, shapes)
        optimizer = daypack.Gefen(params.values())
        before = {name: p.detach().clone() for name, p in params.items()}
        broken = list(shapes)[::2]
        for name, p in params.items():
            g = noise(tuple(p.shape), name).to(grad_dtype)
            if name in broken:
                g.view(-1)[place % g.numel()] = bad
            set_gradient(p, g)
        with kernels.use("native"), pytest.warns(UserWarning, match="not finite"):
            optimizer.step()
        for name, p in params.items():
            assert torch.equal(p.detach(), before[name]) == (name in broken), (name, place)
            assert optimizer.state[p]["step"] == (name not in broken)


def test_denormal_parameters_and_infinities(cpu: str) -> None:
    for dtype in TYPES:
        params = parameters(dtype, {"matrix": (8, 600), "vector": (300,)})
        tiny = torch.finfo(dtype).smallest_normal
        for p in params.values():
            p.data.view(-1)[::3] = (noise((len(p.data.view(-1)[::3]),), "tiny") * tiny / 4).to(dtype)
            p.data.view(-1)[5] = float("inf")
        for lr in (0.0, 1e-30):
            assert_equal(compare(params, torch.float32, {"lr": lr, "weight_decay": 0.5}, 2))


@pytest.mark.parametrize("cell", CELLS)
def test_every_cell_on_all_shapes(cpu: str, cell: str) -> None:
    assert_equal(compare(parameters(torch.float32), torch.float32, CELLS[cell], 3), NEAREST_PER_MILLION)


@pytest.mark.parametrize("cell", CELLS)
def test_every_cell_in_all_dtypes(cpu: str, cell: str) -> None:
    names = ("matrix", "convolution", "experts", "prime", "short", "vector", "scalar", "thin")
    shapes = {name: SHAPES[name] for name in names}
    for dtype in TYPES:
        for grad_dtype in TYPES:
            assert_equal(compare(parameters(dtype, shapes), grad_dtype, CELLS[cell], 2), NEAREST_PER_MILLION)


@pytest.mark.parametrize("cell", CELLS)
def test_every_cell_with_zeros(cpu: str, cell: str) -> None:
    """A zero gradient at first, then rows and columns of zeros: no code of a second moment may become 0."""
    shapes = {name: SHAPES[name] for name in ("matrix", "prime", "short", "line", "vector")}
    assert_equal(compare(parameters(torch.float32, shapes), torch.float32, CELLS[cell], 4, with_zeros))


@pytest.mark.parametrize("magnitude", [1e-38, 1e-27, 1e-15, 1e-12, 1e5, 1e16])
@pytest.mark.parametrize("cell", ["adamw8bit", "adamw8bit-companded", "lion8bit", "adam-mini", "lamb", "adafactor"])
def test_cells_with_tiny_and_huge_gradients(cpu: str, cell: str, magnitude: float) -> None:
    def make(name: str, shape: tuple[int, ...], step: int) -> Tensor:
        return magnitude * noise(shape, name, step)

    shapes = {name: SHAPES[name] for name in ("matrix", "short", "vector")}
    params = parameters(torch.float32, shapes)
    assert_equal(compare(params, torch.float32, CELLS[cell], 3, make), codes_per_million=100)


@pytest.mark.parametrize("cols", [1, 15, 16, 17, 63, 64, 65, 127, 255, 256, 257, 319, 320, 321, 513])
def test_cells_with_every_length_of_row(cpu: str, cols: int) -> None:
    params = parameters(torch.float32, {str(rows): (rows, cols) for rows in (2, 7, 64)})
    for cell in ("adamw8bit", "sgd8bit", "adam-mini", "adafactor-8bit", "lamb-8bit"):
        options = {key: value for key, value in CELLS[cell].items() if key != "partition"}
        assert_equal(compare(params, torch.float32, options, 2))
