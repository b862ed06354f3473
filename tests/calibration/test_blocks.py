"""Block sizes of a row: defaults, candidates, and finding structure that was planted."""

import pytest
import torch

from daypack.calibration import blocks
from daypack.geometry import geometry


@pytest.mark.parametrize(
    ("cols", "size"),
    [
        (1, 1),
        (4, 4),
        (256, 256),
        (257, 256),
        (300, 150),
        (768, 256),
        (10007, 256),
        (11008, 256),
        (4096, 256),
        (272, 256),
    ],
)
def test_default_block_size(cols, size):
    assert blocks.default_block_size(cols) == size


@pytest.mark.parametrize("cols", [*range(1, 700, 13), 1024, 2816, 4096, 10007, 11008, 50257, 2**20])
def test_block_sizes_stay_cheap_and_consistent(cols):
    size = blocks.default_block_size(cols)
    assert size == cols or size >= 64  # at most 1/16 of a byte per element
    for candidate in blocks.candidates(cols):
        assert cols % candidate == 0
        assert candidate % blocks.finest_block_size(cols) == 0
    if blocks.candidates(cols):
        assert size % blocks.FINEST == 0


@pytest.mark.parametrize("period", [32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_planted_blocks_are_found(period, dtype):
    torch.manual_seed(0)
    magnitude = torch.exp(3 * torch.randn(40, 1024 // period)).repeat_interleave(period, dim=1)
    grad = (torch.randn(40, 1024) * magnitude).to(dtype)
    assert blocks.find_block_size(grad, geometry((40, 1024))) == period


def test_rows_without_candidates_take_the_default():
    for cols in (10007, 30, 32, 300):
        grad = torch.randn(8, cols, generator=torch.Generator().manual_seed(0))
        assert blocks.find_block_size(grad, geometry((8, cols))) == blocks.default_block_size(cols)
