"""A pause and a rise of the learning rate, whatever scheduler sets it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import daypack
from daypack.checkpoint import Rewarm

from ..conformance.scene import assert_same, clone, parameters, train, values
from ..conformance.specs import CASES, Case


@pytest.mark.parametrize("case", CASES, ids=str)
def test_observes_rises_and_goes_away(case: Case) -> None:
    params = parameters()
    optimizer = case.create(params.items(), weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    plain = torch.optim.lr_scheduler.CosineAnnealingLR(case.create(clone(params).items()), 20)
    rewarm, before, factors = Rewarm(optimizer, observe=2, rise=3), values(params), []
    for step in range(8):
        factors.append(rewarm.factor)
        train(optimizer, params, [step])
        if step < 2:
            assert_same(values(params), before)
        scheduler.step()
        plain.optimizer.step()
        plain.step()
        assert optimizer.param_groups[0]["lr"] == plain.optimizer.param_groups[0]["lr"]
    assert factors[:6] == [0, 0, 0.25, 0.5, 0.75, 1]
    assert not optimizer._optimizer_step_pre_hooks
    if case.spec.ours:
        assert all(state["step"] == 8 for p, state in optimizer.state.items() if p.numel())


def test_numbers_of_steps_are_checked_and_a_tensor_rate_is_restored() -> None:
    params = parameters()
    rate = torch.tensor(0.1)
    optimizer = daypack.AdamW(params.values(), lr=rate, foreach=False)
    with pytest.raises(ValueError, match="numbers of steps"):
        Rewarm(optimizer, observe=-1)
    Rewarm(optimizer, 1, 1)
    train(optimizer, params, range(2))
    assert optimizer.param_groups[0]["lr"] is rate


def test_importing_daypack_does_not_import_checkpoints() -> None:
    code = "import sys, daypack; assert not [m for m in sys.modules if 'checkpoint.' in m and 'daypack' in m]; "
    code += (
        "assert daypack.convert and daypack.transplant and daypack.checkpoint.save_file; from daypack import *; convert"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
