"""State of torch, bitsandbytes and torchao, in the layouts that they save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import daypack

from ..checkpoint.test_convert import bitsandbytes_dict, dynamic_map, quantize
from ..conformance.scene import gradient


class OptimState(torch.Tensor):
    """A stand-in for torchao's tensor: codes, scales of blocks of the flattened tensor, levels."""

    codes: torch.Tensor
    scale: torch.Tensor
    qmap: torch.Tensor
    value: torch.Tensor

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self.value.to(dtype)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("block", [256, 2048])
def test_bitsandbytes(nested: bool, block: int, tmp_path: Path) -> None:
    saved, wanted = bitsandbytes_dict(nested, block)
    torch.save(saved, tmp_path / "bnb.pt")
    found = daypack.inspect_state(tmp_path / "bnb.pt", pictures=True)
    first, second = found.params
    blocks = -(-37 * 300 // block)
    assert first.format == f"8-bit/{block} + 8-bit/{block}"
    assert dict(first.components) == {
        "exp_avg_codes": 11_100,
        "exp_avg_scale": 4 * blocks,
        "exp_avg_levels": 1024,
        "exp_avg_sq_codes": 11_100,
        "exp_avg_sq_scale": 4 * blocks,
        "exp_avg_sq_levels": 1024,
        "step": 4,
    }
    assert (second.format, second.step, second.total_bytes) == ("fp32 + fp32", 7, 2404)
    m, v = first.moments
    assert m.norm == pytest.approx(float(wanted["m"].double().norm()), rel=1e-6)
    assert v.norm == pytest.approx(float(wanted["v"].double().sum().sqrt()), rel=1e-6)
    assert (m.blocks, m.zero_blocks, m.saturated) == (blocks, 0, pytest.approx(0, abs=0.01))
    exact = gradient("m", (37, 300), 0).float()
    real = float((wanted["m"] - exact).norm() / exact.norm())
    assert m.error == pytest.approx(real, rel=0.15)
    assert found.warnings == ()
    assert m.picture is not None
    assert m.picture.levels is not None
    assert int(m.picture.codes.sum()) == 11_100  # type: ignore[union-attr]


def test_a_map_that_parameters_share_is_counted_once() -> None:
    saved, _ = bitsandbytes_dict(False, 256)
    saved["state"][1] = dict(saved["state"][0])
    one, other = daypack.inspect_state(saved).params
    assert one.total_bytes - other.total_bytes == 2 * 1024


def test_bitsandbytes_faults() -> None:
    saved, _ = bitsandbytes_dict(False, 256)
    saved["state"][0]["absmax1"][2] = float("nan")
    saved["state"][0]["absmax2"][0] = 0
    kinds = {each.kind: each for each in daypack.inspect_state(saved).warnings}
    assert kinds["not finite"].text == "exp_avg_scale holds 1 value that is NaN or infinite"
    assert "the second moment is 0 in 1 of 37 rows" in kinds["dead"].text  # what its other block holds is below 1/510
    saved["state"][0]["absmax2"][1] = 0
    assert any("exp_avg_sq is 0 in 2 of 44 blocks" in each.text for each in daypack.inspect_state(saved).warnings)


@pytest.mark.parametrize(("form", "size"), [("8-bit", 8192), ("4-bit", 4096), ("fp8", 8192)])
def test_torchao(form: str, size: int) -> None:
    m, v = gradient("m", (32, 256), 0).float(), gradient("v", (32, 256), 1).float().square()
    state: dict[str, Any] = {"step": torch.tensor(5.0)}
    for key, x in (("exp_avg", m), ("exp_avg_sq", v)):
        codes, absmax, value = quantize(x, dynamic_map(), 256)
        tensor = torch.zeros(32, 256).as_subclass(OptimState)
        tensor.value, tensor.scale = value, absmax
        if form == "fp8":
            tensor.codes = value.to(torch.float8_e4m3fn)
        else:
            tensor.codes, tensor.qmap = codes.reshape(-1)[:size].reshape(-1), dynamic_map()
            tensor.codes = tensor.codes.view(32, 256) if form == "8-bit" else tensor.codes
        state[key] = tensor
    packed = {"state": {0: state}, "param_groups": [{"params": [0], "lr": torch.tensor(1e-3), "betas": (0.9, 0.999)}]}
    (param,) = daypack.inspect_state(packed, optimizer="adamw").params
    assert param.format == f"{form}/256 + {form}/256"
    assert param.components["exp_avg_codes"] == size
    assert param.components["exp_avg_scale"] == 4 * 32
    assert param.components.get("exp_avg_levels", 0) == (0 if form == "fp8" else 1024)
    assert param.moments[0].norm == pytest.approx(float(state["exp_avg"].value.double().norm()), rel=1e-6)
    assert (param.moments[0].error is not None) == (form == "8-bit")
    assert "no option 'weight_decay'" in param.note


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
def test_a_bare_state_dict_of_torch(name: str, tmp_path: Path) -> None:
    p = torch.nn.Parameter(torch.ones(8, 16))
    options = {"momentum": 0.9} if name == "sgd" else {"amsgrad": True}
    optimizer = daypack.create(name, [p], **options)
    for step in range(3):
        p.grad = gradient("p", (8, 16), step).float()
        optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "optim.pt")
    found = daypack.inspect_state(tmp_path / "optim.pt")
    assert found.optimizer == type(optimizer).__name__
    assert [param.name for param in found.params] == ["0.0"]
    assert found.total.bytes == daypack.state_report(optimizer).total_bytes
    assert found.params[0].update == daypack.inspect_state(optimizer).params[0].update


def test_amsgrad_divides_by_the_largest_second_moment() -> None:
    p = torch.nn.Parameter(torch.ones(8, 16, dtype=torch.float64))
    optimizer = daypack.AdamW([p], lr=1e-2, weight_decay=0, amsgrad=True)
    for size in (1.0, 1e-3, 1e-3):
        before, p.grad = p.detach().clone(), size * gradient("p", (8, 16), 0)
        optimizer.step()
    (param,) = daypack.inspect_state(optimizer).params
    moved = float((p.detach() - before).square().mean().sqrt())
    assert 1e-2 * (param.update or 0) == pytest.approx(moved, rel=1e-9)


def test_saved_names_that_are_equal_are_refused() -> None:
    """The second would take the place of the first."""
    p, q = torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.ones(4))
    optimizer = daypack.AdamW([("p", p), ("q", q)])
    packed = optimizer.state_dict()
    packed["param_groups"][0]["param_names"] = ["p", "p"]
    with pytest.raises(ValueError, match="two parameters of the saved state are called p; save it with"):
        daypack.inspect_state(packed)


def test_flattened_state_without_its_options_is_refused(tmp_path: Path) -> None:
    flat = {f"{place}.{name}" for place in ("state", "param_groups") for name in "ab"}
    saved = {f"{each}.{'exp_avg' if each[0] == 's' else 'lr'}": torch.ones(3) for each in flat}
    del saved["param_groups.b.lr"]
    torch.save(saved, tmp_path / "flat.pt")
    with pytest.raises(ValueError, match=r"param_groups\.b has no entries though state\.b has"):
        daypack.inspect_state(tmp_path / "flat.pt", optimizer="lion")
