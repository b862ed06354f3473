"""The matrix view of a parameter, its chunks, and reading and writing them whatever the strides."""

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from daypack import geometry as views
from daypack.geometry import chunks, geometry, read, write_

SHAPES = st.lists(st.integers(1, 9), min_size=0, max_size=5).map(tuple)


@given(SHAPES)
@settings(deadline=None)
def test_view_keeps_every_element_and_leading_dims(shape):
    view = geometry(shape)
    assert prod(view.view3) == prod(shape)
    assert prod(view.row_shape) == view.matrices * view.rows
    assert prod(view.col_shape) == view.matrices * view.cols
    if len(shape) > 1:
        assert view.row_shape == shape[: len(view.row_shape)]  # so that a shard of dim 0 is a shard of it


@pytest.mark.parametrize(
    ("shape", "view3", "row_shape", "col_shape"),
    [
        ((), (1, 1, 1), (), (1,)),
        ((7,), (1, 1, 7), (), (7,)),
        ((5, 3), (1, 5, 3), (5,), (3,)),
        ((8, 3, 7, 5), (1, 8, 105), (8,), (105,)),  # a convolution is one matrix
        ((8, 2048, 1408), (8, 2048, 1408), (8, 2048), (8, 1408)),  # experts are eight
        ((64, 1, 4), (1, 64, 4), (64,), (4,)),  # depthwise convolution
        ((2, 3, 64, 32), (6, 64, 32), (2, 3, 64), (2, 3, 32)),
    ],
)
def test_view_stores_the_fewest_factors(shape, view3, row_shape, col_shape):
    view = geometry(shape)
    assert (view.view3, view.row_shape, view.col_shape) == (view3, row_shape, col_shape)


@given(SHAPES, st.integers(1, 40), st.sampled_from([1, 3, 4]))
@settings(deadline=None, max_examples=200)
def test_chunks_cover_every_element_once_in_contiguous_aligned_runs(shape, limit, align):
    view = geometry(shape)
    index = torch.arange(prod(shape)).view(view.view3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(views, "CHUNK_ELEMENTS", limit)
        parts = list(chunks(view, align))
    seen = []
    for part in parts:
        here = index[part].flatten()
        assert (here.diff() == 1).all()  # a run: the dither counts on it
        assert len(here) <= max(limit, align)
        assert part[2].start is None or part[2].start % align == 0
        seen.append(here)
    assert torch.equal(torch.cat(seen), torch.arange(prod(shape)))


LAYOUTS = {
    "contiguous": lambda t: t.contiguous(),
    "transposed": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
    "strided": lambda t: torch.empty(*t.shape[:-1], 2 * t.shape[-1])[..., ::2].copy_(t),
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last) if t.ndim == 4 else t,
    "expanded": lambda t: t[:1].expand(t.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(6, 10), (5, 3, 4, 2), (4, 16, 9), (2, 3, 8, 8), (3, 2, 4, 8, 6)])
@pytest.mark.parametrize("limit", [7, 50, 10_000])
def test_read_and_write_see_through_strides(layout, shape, limit, monkeypatch):
    monkeypatch.setattr(views, "CHUNK_ELEMENTS", limit)
    torch.manual_seed(0)
    source = LAYOUTS[layout](torch.randn(shape))
    view = geometry(shape)
    target = LAYOUTS["transposed" if layout == "expanded" else layout](torch.zeros(shape))
    strides = target.stride()
    for chunk in chunks(view):
        part = read(source, view, chunk)
        assert torch.equal(part, source.reshape(view.view3)[chunk])
        write_(target, view, chunk, part * 2)
    assert torch.equal(target, source * 2)
    assert target.stride() == strides
