"""Files of earlier versions load and go on exactly, for ever. Never write them again; add those of new versions."""

from __future__ import annotations

import copy

import pytest
import torch

import daypack
from daypack.checkpoint import load_file

from ..conformance.scene import assert_same, state_of, train
from .golden.make import FOLDER, KINDS, LATER, SHAPES, STEPS, flat, make


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fused", [None, False], ids=["any-kernel", "reference"])
def test_golden_files_load_and_go_on_exactly(kind: str, fused: bool | None) -> None:
    saved = torch.load(FOLDER / f"{kind}.pt", weights_only=True)
    optimizer, params = make(kind)
    twin, others = make(kind)
    assert load_file(optimizer, FOLDER / f"{kind}.safetensors") == {"steps": str(STEPS)}
    twin.load_state_dict(copy.deepcopy(saved["optimizer"]))
    assert_same(state_of(optimizer, params), state_of(twin, others))
    assert optimizer.param_groups[0]["lr"] == 1e-2
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    sizes = [p.numel() for p in params.values()]
    with torch.no_grad():
        for p, value in zip(params.values(), saved["weights"].split(sizes), strict=True):
            p.copy_(value.view(p.shape))
    for group in optimizer.param_groups:
        group["fused"] = fused
    train(optimizer, params, range(STEPS, LATER), without=("unused",))
    # Kernels may differ by fp32 rounding; nothing else may.
    torch.testing.assert_close(flat(params), saved["later"], rtol=1e-6, atol=1e-8)


def test_golden_files_are_small_and_unconverted_state_is_found() -> None:
    sizes = [path.stat().st_size for path in FOLDER.iterdir() if path.suffix in (".pt", ".safetensors")]
    assert sum(sizes) < 100_000
    for kind in KINDS:
        found = daypack.checkpoint.foreign.read(FOLDER / f"{kind}.safetensors")
        assert list(found.params) == list(SHAPES)
