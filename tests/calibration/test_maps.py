"""Fixed maps: pinned by their construction, by golden values, and by what quantisation needs of every map."""

import hashlib

import numpy as np
import pytest
import torch
from tests.reference.eight_bit import levels_of

from daypack.calibration import maps

NAMES = sorted(maps.MAPS)

#: First bytes of the SHA-256 of the 256 fp32 levels. State is saved as codes: other levels would misread every file.
GOLDEN = {
    "signed companded": "137e690b7d5e76d6",
    "signed dynamic": "e732639a65f497b4",
    "signed linear": "8d205cd0c00579e6",
    "unsigned companded": "103f14edb58193b3",
    "unsigned dynamic": "305f002cc11278fb",
    "unsigned linear": "3b790a8c777d638b",
}


@pytest.mark.parametrize("name", NAMES)
def test_levels_are_what_every_code_needs(name):
    levels = maps.levels(name)
    assert (levels.dtype, levels.shape) == (torch.float32, (256,))
    assert (levels.diff() > 0).all()
    assert (levels == 0).sum() == 1
    assert levels[-1] == 1
    assert levels[0] == 0 if maps.is_unsigned(name) else -1 <= levels[0] < -0.99
    assert levels.diff().max() < 0.016


@pytest.mark.parametrize("name", NAMES)
def test_levels_are_their_published_construction(name):
    sign, kind = name.split()
    np.testing.assert_allclose(maps.levels(name).double().numpy(), levels_of(kind, sign == "signed"), rtol=3e-7)


@pytest.mark.parametrize("name", NAMES)
def test_levels_never_change(name):
    assert hashlib.sha256(maps.levels(name).numpy().tobytes()).hexdigest()[:16] == GOLDEN[name]


@pytest.mark.parametrize("signed", [True, False])
def test_the_dynamic_map_is_bitsandbytes_own(signed):
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
    assert torch.equal(maps.dynamic(signed), functional.create_dynamic_map(signed))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nearest_is_the_nearest_level(name, dtype):
    levels = maps.levels(name, dtype=dtype)
    small = torch.logspace(-42, 0, 4000, dtype=torch.float64)
    edges = maps.thresholds(name).double()
    x = torch.cat([small, torch.linspace(0, 1, 4001).double(), edges, edges.nextafter(torch.tensor(2.0).double())])
    x = torch.cat([x, edges.float().nextafter(torch.tensor(-2.0)).double()])
    x = (x.abs() if maps.is_unsigned(name) else torch.cat([x, -x])).clamp(-1, 1).to(dtype)
    codes = maps.nearest(x, name)
    assert (codes.dtype, codes.min() >= 0, codes.max() <= 255) == (torch.int32, True, True)
    error = (levels[codes.long()].double() - x.double()).abs()
    best = (levels.double()[None] - x.double()[:, None]).abs().amin(1)
    assert (error <= best * (1 + 1e-4) + 1e-15).all()  # thresholds are rounded to fp32
    assert (levels[codes.long()] * x >= 0).all(), "rounding turned a sign"
    assert torch.equal(maps.nearest(levels, name), torch.arange(256, dtype=torch.int32))
    assert levels[maps.nearest(torch.zeros(1, dtype=dtype), name).long()].item() == 0


def test_a_map_whose_thresholds_cannot_be_told_apart_is_refused(monkeypatch):
    monkeypatch.setitem(maps.MAPS, "signed dense", lambda: torch.linspace(0.5, 0.6, 256))
    with pytest.raises(ValueError, match="signed dense"):
        maps.nearest(torch.zeros(3), "signed dense")
