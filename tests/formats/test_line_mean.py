"""One second moment for each group of rows or columns."""

import numpy as np
import pytest
import torch

from daypack import geometry as views
from daypack.formats.line_mean import LineMean, group_count
from daypack.geometry import chunks, geometry


def allocate(form, view, dtype):
    return {"v" + spec.suffix: torch.zeros(spec.shape, dtype=spec.dtype) for spec in form.components(view, dtype)}


CASES = {
    "rows": ((6, 10), LineMean("row", ((6, 1),))),
    "heads": ((12, 10), LineMean("row", ((12, 4),))),
    "ragged": ((11, 10), LineMean("row", ((11, 4),))),
    "fused": ((14, 9), LineMean("row", ((6, 3), (4, 4), (4, 1)))),
    "whole": ((7, 5), LineMean("row", ((7, 7),))),
    "columns": ((5, 12), LineMean("col", ((6, 3), (6, 1)))),
    "one row": ((9,), LineMean("row", ((1, 1),))),
    "convolution": ((8, 3, 5, 5), LineMean("row", ((8, 2),))),
    "experts": ((3, 16, 20), LineMean("row", ((16, 3),))),
    "experts' columns": ((3, 16, 20), LineMean("col", ((20, 5),))),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("limit", [13, 64, 1 << 19])
@pytest.mark.parametrize("name", CASES)
def test_each_line_holds_the_mean_of_its_group(name, limit, dtype, monkeypatch):
    monkeypatch.setattr(views, "CHUNK_ELEMENTS", limit)
    shape, form = CASES[name]
    view = geometry(shape)
    state = allocate(form, view, dtype)
    (stored,) = state.values()
    assert stored.shape == (view.row_shape if form.axis == "row" else view.col_shape)
    generator = torch.Generator().manual_seed(0)
    exact = np.zeros(view.view3)
    for _ in range(3):
        grad = torch.randn(shape, generator=generator, dtype=dtype)
        sums = form.sums(state, "v", view, like=grad)
        for chunk in chunks(view):
            form.observe(sums, view, chunk, grad.view(view.view3)[chunk].square())
        form.combine(state, "v", view, sums, 0.9)
        square = grad.double().square().view(view.view3).numpy()
        lines = np.moveaxis(square, 1 if form.axis == "row" else 2, 1)  # [matrices, lines, elements]
        means, start = np.empty_like(lines), 0
        for count, size in form.segments:
            for first in range(start, start + count, size):
                group = slice(first, min(first + size, start + count))
                means[:, group] = lines[:, group].mean((1, 2), keepdims=True)
            start += count
        assert start == lines.shape[1]
        exact = 0.9 * exact + 0.1 * np.moveaxis(means, 1, 1 if form.axis == "row" else 2)
    for chunk in chunks(view):
        got = form.decode(state, "v", view, chunk).double().numpy()
        want = exact[chunk]
        np.testing.assert_allclose(
            np.broadcast_to(got, want.shape), want, rtol=1e-5 if dtype == torch.float32 else 1e-12
        )
    assert form.fault(state, "v", view, squares=True) is None


def test_lines_of_a_group_are_equal_to_the_bit():
    form, view = LineMean("row", ((64, 16),)), geometry((64, 33))
    state = allocate(form, view, torch.float32)
    for step in range(5):
        sums = form.sums(state, "v", view, like=torch.zeros(()))
        squared = torch.rand(1, 64, 33, generator=torch.Generator().manual_seed(step))
        form.observe(sums, view, (slice(None),) * 3, squared)
        form.combine(state, "v", view, sums, 0.99)
    assert (state["v_row"].view(4, 16) == state["v_row"].view(4, 16)[:, :1]).all()


def test_groups_are_counted():
    assert group_count(((768, 64), (768, 64), (768, 1))) == 12 + 12 + 768
    assert group_count(((11, 4),)) == 3


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_damage_is_found(value):
    form, view = LineMean("col", ((4, 2),)), geometry((3, 4))
    state = allocate(form, view, torch.float32)
    state["v_col"][2] = value
    assert "v_col holds" in form.fault(state, "v", view, squares=True)
