"""Second moments kept as statistics of g^2: factored, and one mean per block."""

import pytest
import torch

from daypack import geometry as views
from daypack.calibration import blocks
from daypack.formats.block_mean import BlockMean
from daypack.formats.factored import Factored
from daypack.geometry import chunks, geometry

EVERYTHING = (slice(None),) * 3


def run(form, state, shape, grads, beta, limit=1 << 19):
    view = geometry(shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(views, "CHUNK_ELEMENTS", limit)
        for grad in grads:
            sums = form.sums(state, "v", view, like=grad)
            for chunk in chunks(view, form.align(view)):
                form.observe(sums, view, chunk, grad.view(view.view3)[chunk].square())
            form.combine(state, "v", view, sums, beta)
        return torch.cat([form.decode(state, "v", view, chunk).flatten() for chunk in chunks(view, form.align(view))])


def allocate(form, shape, dtype):
    view = geometry(shape)
    return {"v" + spec.suffix: torch.zeros(spec.shape, dtype=spec.dtype) for spec in form.components(view, dtype)}


@pytest.mark.parametrize("shape", [(6, 10), (1, 9), (9, 1), (8, 3, 5, 5), (3, 16, 20)])
@pytest.mark.parametrize("limit", [13, 64, 1 << 19])
def test_factored_is_exact_for_gradients_of_rank_one(shape, limit):
    torch.manual_seed(0)
    view = geometry(shape)
    r, c = torch.rand(view.matrices, view.rows, 1).double() + 0.1, torch.rand(view.matrices, 1, view.cols).double()
    grads = [(r * c * scale).reshape(shape) for scale in (1.0, 3.0, 0.5)]
    state = allocate(Factored(), shape, torch.float64)
    got = run(Factored(), state, shape, grads, 0.9, limit)
    exact = torch.zeros_like(grads[0])
    for grad in grads:
        exact = 0.9 * exact + 0.1 * grad.square()
    assert torch.allclose(got, exact.flatten(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("magnitude", [1e-12, 1e-6, 1.0, 1e10, 1e15])
def test_factored_neither_overflows_nor_vanishes(magnitude):
    grad = torch.ones(32, 48) * magnitude
    state = allocate(Factored(), (32, 48), torch.float32)
    got = run(Factored(), state, (32, 48), [grad], 0.999)
    assert torch.allclose(got.double(), torch.full((32 * 48,), 0.001 * magnitude**2).double(), rtol=1e-4)


def test_factored_rows_and_columns_without_gradient_are_zero():
    grad = torch.randn(8, 6)
    grad[2] = 0
    grad[:, 3] = 0
    got = run(Factored(), allocate(Factored(), (8, 6), torch.float32), (8, 6), [grad], 0.9).view(8, 6)
    assert torch.equal(got == 0, torch.eye(8)[2][:, None].bool() | torch.eye(6)[3][None].bool())
    assert (run(Factored(), allocate(Factored(), (8, 6), torch.float32), (8, 6), [grad * 0], 0.9) == 0).all()


@pytest.mark.parametrize("shape", [(5, 300), (4, 7), (3, 10007), (2, 3, 64, 96), (3, 1040)])
@pytest.mark.parametrize("limit", [900, 1 << 19])
def test_block_mean_is_the_mean_of_each_block_of_a_row(shape, limit):
    torch.manual_seed(0)
    form, view = BlockMean(), geometry(shape)
    state = allocate(form, shape, torch.float32)
    grads = [torch.randn(shape) for _ in range(3)]
    got = run(form, state, shape, grads, 0.9, limit).view(view.view3)
    size = blocks.default_block_size(view.cols)
    assert state["v_block"].numel() * 4 <= 4 * view.matrices * view.rows * -(-view.cols // size)
    exact = 0
    for grad in grads:
        rows = grad.view(view.view3).square()
        means = torch.cat([part.mean(-1, keepdim=True).expand_as(part) for part in rows.split(size, -1)], -1)
        exact = 0.9 * exact + 0.1 * means
    assert torch.allclose(got, exact, rtol=1e-5)


@pytest.mark.parametrize("cols", [48, 96, 1040, 2720, 4096])
def test_saved_block_means_have_a_shape_that_does_not_depend_on_what_was_found(cols):
    form, view = BlockMean(), geometry((3, cols))
    unit = blocks.finest_block_size(cols)
    assert unit == 16
    shapes = set()
    for size in {*blocks.candidates(cols), blocks.default_block_size(cols)}:
        state = allocate(form, (3, cols), torch.float32)
        assert form.calibrate_(state, "v", view, torch.tensor(size))
        state["v_block"] += torch.rand_like(state["v_block"])
        live = state["v_block"].clone()
        state.update(form.save(state, "v", view))
        shapes.add(tuple(state["v_block"].shape))
        assert form.fault(state, "v", view, squares=True) is None
        form.load_(state, "v", view)
        assert torch.equal(state["v_block"], live)
        form.load_(state, "v", view)  # state in its live shape already is left alone
        assert torch.equal(state["v_block"], live)
    assert shapes == {form.saved(view, torch.float32)[0].shape} == {(3, cols // 16)}


@pytest.mark.parametrize("size", [-16, 24, 10**6])
def test_block_sizes_that_a_row_cannot_have_are_found(size):
    form, view = BlockMean(), geometry((2, 64))
    state = allocate(form, (2, 64), torch.float32)
    state["v_block_size"].fill_(size)
    assert "v_block_size is" in form.fault(state, "v", view, squares=True)
