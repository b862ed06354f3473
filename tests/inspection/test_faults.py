"""Planted faults are found, and named by parameter and kind."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

import daypack
from daypack.calibration import maps
from daypack.checkpoint.snapshot import take
from daypack.inspection import StateInspection
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


def dense(options: dict[str, Any] | None = None, **changes: Any) -> StateInspection:
    """What is found in torch's state of two parameters, of which the first has ``changes``."""
    good = {"step": torch.tensor(3.0), "exp_avg": torch.ones(4, 6), "exp_avg_sq": torch.ones(4, 6)}
    group = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}
    groups = [{**group, **(options or {}), "params": [0]}, {**group, "params": [1]}]
    return daypack.inspect_state(
        {"state": {0: {**good, **changes}, 1: good}, "param_groups": groups}, optimizer="adamw"
    )


DAMAGED = [
    ({"step": None}, "step is None, not a whole number from 0"),
    ({"step": torch.ones(2)}, "step is float32 of shape (2,), not a whole number from 0"),
    ({"exp_avg": 3.5}, "exp_avg is 3.5, not float32 of shape (4, 6)"),
    ({"exp_avg_sq": torch.tensor(2.0)}, "exp_avg_sq is 2, not float32 of shape (4, 6)"),
    ({"exp_avg": torch.ones(4, 6).to_sparse()}, "exp_avg cannot be read: "),
    ({"exp_avg_sq": torch.ones(4, 6).to_sparse()}, "exp_avg_sq cannot be read: "),
    ({"exp_avg": torch.ones(4, 6, dtype=torch.complex64)}, "exp_avg is complex64 of shape (4, 6), not float32"),
    ({"exp_avg": torch.ones(4, 6).to(torch.float8_e4m3fn)}, "exp_avg is float8_e4m3fn of shape (4, 6), not "),
    ({"max_exp_avg_sq": torch.ones(3)}, "max_exp_avg_sq is float32 of shape (3,), not float32 of shape (4, 6)"),
    ({"max_exp_avg_sq": 2.0}, "max_exp_avg_sq is 2, not float32 of shape (4, 6)"),
]


@pytest.mark.parametrize(("changes", "text"), DAMAGED, ids=[text for _, text in DAMAGED])
def test_a_damaged_entry_is_warned_of_and_the_rest_is_measured(changes: dict[str, Any], text: str) -> None:
    found = dense(**changes)
    (warning,) = found.warnings
    assert (warning.param, warning.kind) == ("0.0", "damaged")
    assert warning.text.startswith(text)
    assert found.params[0].update is None
    assert found.params[1:] == dense().params[1:]
    assert found.params[1].update
    json.dumps(found.to_dict(), allow_nan=False)


@pytest.mark.parametrize("option", ["betas", "eps", "weight_decay", "lr"])
def test_an_option_that_is_none(option: str) -> None:
    found = dense({option: None})
    assert [(each.param, each.kind, each.text) for each in found.warnings] == [
        ("0.0", "damaged", f"the option {option} is None")
    ]
    assert found.params[0].moments == found.params[1].moments
    assert (found.params[0].update, found.params[0].ratio) == (None, None)


@pytest.mark.parametrize("options", [{"betas": (0.9,)}, {"eps": "small"}, {"lr": torch.ones(2)}])
def test_options_of_another_kind_leave_the_update_open(options: dict[str, Any]) -> None:
    found = dense(options)
    assert found.params[0].update is None
    assert "an option of its group is damaged" in found.params[0].note


def test_options_by_which_state_is_stored_cannot_be_guessed() -> None:
    optimizer, _ = trained("adamw8bit")
    found = take(optimizer)
    ((options, names),) = found.groups
    damaged = replace(found, groups=(({**options, "min_8bit_size": None}, names),))
    with pytest.raises(ValueError, match=r"an option of the group of parameter good\.weight is damaged"):
        daypack.inspect_state(damaged)
    packed = optimizer.state_dict()
    packed["param_groups"][0]["min_8bit_size"] = None
    with pytest.raises(ValueError, match="this mapping is not a state_dict as optimizers save it"):
        daypack.inspect_state(packed, optimizer="adamw8bit")


@pytest.mark.parametrize("count", [3, 24])
def test_weights_that_are_not_finite(count: int) -> None:
    """Nothing of weights that are all NaN is 0."""
    p = torch.nn.Parameter(torch.ones(4, 6))
    optimizer = daypack.AdamW([("p", p)])
    p.grad = torch.ones(4, 6)
    optimizer.step()
    p.detach().view(-1)[:count] = float("nan")
    found = daypack.inspect_state(optimizer)
    (warning,) = found.warnings
    assert (warning.kind, warning.text) == ("not finite", f"weight holds {count} values that are NaN or infinite")
    assert (found.params[0].weight is None) == (count == 24)
