"""Planted faults are found, and named by parameter and kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import daypack
from daypack.calibration import maps
from daypack.inspection.result import Warn

from ..conformance.scene import gradient

SHAPES = {"good.weight": (32, 512), "bad.weight": (32, 512)}
NAMES = ("gefen", "adamw8bit", "adamw", "adam_mini", "lamb")


def trained(name: str, spoil: Any = None, **options: Any) -> tuple[Any, dict[str, Any]]:
    """An optimizer after three steps; ``spoil`` may change the gradient of the bad parameter in place."""
    params = {key: torch.nn.Parameter(torch.ones(shape)) for key, shape in SHAPES.items()}
    optimizer = daypack.create(name, params.items(), **options)
    for step in range(3):
        for key, p in params.items():
            p.grad = gradient(key, p.shape, step).float()
            if spoil is not None and key == "bad.weight":
                spoil(p.grad)
        optimizer.step()
    return optimizer, optimizer.state[params["bad.weight"]]


def warnings(optimizer: Any) -> tuple[Warn, ...]:
    found = daypack.inspect_state(optimizer).warnings
    assert {each.param for each in found} <= {"bad.weight"}, found
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_clean_state_has_no_warnings(name: str) -> None:
    assert warnings(trained(name)[0]) == ()


@pytest.mark.parametrize(
    ("name", "key", "decoded"),
    [
        ("gefen", "exp_avg_scale", 256),
        ("gefen", "exp_avg_sq_row", None),
        ("gefen", "exp_avg_sq_col", None),
        ("adamw8bit", "exp_avg_sq_scale", 256),
        ("adamw", "exp_avg", 1),
        ("adam_mini", "exp_avg_sq_row", 512),
    ],
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite(name: str, key: str, decoded: int | None, value: float) -> None:
    optimizer, state = trained(name)
    clean = {each.moment: each.norm for each in daypack.inspect_state(optimizer).params[1].moments}
    state[key].view(-1)[3] = value
    warning, *others = warnings(optimizer)
    assert {each.kind for each in others} <= {"large update"}  # a mean that is NaN makes v 0
    assert (warning.kind, warning.text) == ("not finite", f"{key} holds 1 value that is NaN or infinite")
    param = daypack.inspect_state(optimizer).params[1]
    assert param.nonfinite == {key: 1}
    hurt = param.moments["_sq" in key]
    assert hurt.nonfinite == decoded or decoded is None
    assert hurt.norm <= clean[hurt.moment]  # the norm of what is finite


@pytest.mark.parametrize("name", NAMES)
def test_a_dead_row(name: str) -> None:
    """No gradient has ever reached row 5 (of Adam-mini's blocks, one is a row here)."""
    optimizer, _ = trained(name, spoil=lambda grad: grad[5].zero_())
    (warning,) = warnings(optimizer)
    assert warning.kind == "dead"
    assert warning.text == "the second moment is 0 in 1 of 32 rows: no gradient reached them"
    assert [param.unused for param in daypack.inspect_state(optimizer).params] == [0, 1]


@pytest.mark.parametrize("name", ["gefen", "adamw8bit", "adamw"])
def test_a_stalled_row(name: str) -> None:
    """Row 5 had gradients, and its first moment is gone."""
    optimizer, state = trained(name)
    if name == "adamw":
        state["exp_avg"][5] = 0
    else:
        state["exp_avg_scale"][5] = 0
    (warning,) = warnings(optimizer)
    assert (warning.kind, warning.text) == (
        "stalled",
        "the first moment is 0 in 1 of 32 rows whose second moment is not",
    )


@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("name", ["gefen", "adamw8bit"])
def test_an_all_zero_block(name: str, scale: bool) -> None:
    """Block 1 of row 5: a scale of 0, or every code at the level 0."""
    optimizer, state = trained(name)
    if scale:
        state["exp_avg_scale"][5, 1] = 0
    else:
        levels = state.get("exp_avg_codebook")
        levels = maps.levels("signed dynamic") if levels is None else levels
        state["exp_avg_codes"][5, 256:] = int((levels == 0).nonzero()[0])
    (warning,) = warnings(optimizer)
    assert (warning.kind, warning.text) == ("stalled", "exp_avg is 0 in 1 of 64 blocks")


def test_a_block_mean_of_zero() -> None:
    optimizer, state = trained("gefen", second_moment="blocks")
    blocks = state["exp_avg_sq_block"].numel()
    state["exp_avg_sq_block"][5, 0] = 0
    dead, large = warnings(optimizer)
    assert (dead.kind, dead.text) == ("dead", f"exp_avg_sq is 0 in 1 of {blocks} blocks")
    assert large.kind == "large update"  # what is divided by 0


@pytest.mark.parametrize("name", ["gefen", "adamw8bit"])
def test_saturated_codes(name: str) -> None:
    """A tenth of the codes at the ends, as a scale leaves them that is too small. One per block is how it should be."""
    optimizer, state = trained(name)
    flat = state["exp_avg_codes"].view(-1)
    flat[::10] = 255
    flat[5::20] = 0
    (warning,) = warnings(optimizer)
    assert warning.kind == "saturated"
    assert warning.text == "15% of the codes of exp_avg are on an end level"


def test_damaged_values_and_shapes_are_told_and_do_not_stop_the_rest() -> None:
    optimizer, state = trained("gefen")
    state["exp_avg_sq_row"][0] = -1.0
    (warning,) = warnings(optimizer)
    assert (warning.kind, warning.text) == ("damaged", "exp_avg_sq_row holds a value that is negative or not finite")
    state["exp_avg_sq_row"][0] = 1.0
    state["exp_avg_codebook"].zero_()
    assert "cannot be read" in warnings(optimizer)[0].text
    state["exp_avg_scale"] = torch.zeros(3, 3)
    del state["exp_avg_sq_col"]
    found = daypack.inspect_state(optimizer)
    assert [each.moment for each in found.params[0].moments] == ["exp_avg", "exp_avg_sq"]
    assert found.params[1].moments == ()
    assert [each.text for each in warnings(optimizer)] == [
        "exp_avg_scale is float32 of shape (3, 3), not bfloat16 of shape (32, 2)",
        "exp_avg_sq_col is missing",
    ]


@pytest.mark.parametrize("value", [float("nan"), -1.0, 2.5])
def test_a_damaged_count_of_steps(value: float) -> None:
    optimizer, state = trained("gefen")
    state["step"].fill_(value)
    texts = [each.text for each in warnings(optimizer)]
    assert f"step is {value:g}, not a whole number from 0" in texts
    param = daypack.inspect_state(optimizer).params[1]
    assert (param.step, param.update) == (None, None)
    assert len(param.moments) == 2


def test_an_update_that_is_large_beside_the_weights() -> None:
    params = {"small.weight": torch.nn.Parameter(torch.full((16, 16), 1e-3))}
    optimizer = daypack.AdamW(params.items(), lr=1e-2, weight_decay=0)
    params["small.weight"].grad = torch.ones(16, 16)
    optimizer.step()
    (warning,) = daypack.inspect_state(optimizer).warnings
    assert warning.kind == "large update"
