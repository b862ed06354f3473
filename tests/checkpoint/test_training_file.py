"""Training checkpoints: weights and optimizer state in one dict, read without knowing who trained."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import daypack
from daypack.checkpoint.foreign import read, read_with_weights

#: State of some of them is not told apart by its tensors.
CLASSES = ["adamw", "adam", "sgd", "adamw8bit", "adam8bit", "lion8bit", "gefen"]


def trained(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(64, 80), nn.Linear(80, 8))
    optimizer = daypack.create(name, model.named_parameters(), lr=1e-3)
    model(torch.randn(4, 64)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, **more: Any) -> None:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), **more}, path)


@pytest.mark.parametrize("name", CLASSES)
def test_a_file_names_the_class_of_its_optimizer(tmp_path: Path, name: str) -> None:
    model, optimizer = trained(name)
    save(tmp_path / "c.pt", model, optimizer, optimizer_class=type(optimizer).__name__)
    found, weights = read_with_weights(tmp_path / "c.pt")
    assert found.optimizer == type(optimizer).__name__
    assert {*found.params} == {*weights} == {*model.state_dict()}
    assert read(tmp_path / "c.pt", name).optimizer == found.optimizer
    other = "gefen" if name == "adamw" else "adamw"
    with pytest.raises(ValueError, match=f"says that {type(optimizer).__name__} saved it, not {other}"):
        read(tmp_path / "c.pt", other)


@pytest.mark.parametrize("name", ["adam8bit", "gefen"])
def test_files_from_before_the_class_was_named_are_read(tmp_path: Path, name: str) -> None:
    model, optimizer = trained(name)
    save(tmp_path / "c.pt", model, optimizer, format="daypack training", config={"optimizer": name})
    assert read(tmp_path / "c.pt").optimizer == type(optimizer).__name__


def test_a_config_of_others_says_nothing(tmp_path: Path) -> None:
    model, optimizer = trained("gefen")
    save(tmp_path / "c.pt", model, optimizer, config={"optimizer": "adamw"})
    assert read(tmp_path / "c.pt").optimizer == "Gefen"


def test_without_state_or_with_a_flipped_bit_it_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    torch.save({"model": {}, "optimizer": None, "optimizer_class": "AdamW"}, path)
    with pytest.raises(ValueError, match=r"c.pt holds no optimizer state"):
        read(path)
    save(path, *trained("adamw"), optimizer_class="AdamW")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"damaged .*checkpoint .*c.pt"):
        read(path)


def test_reading_does_not_import_the_lab(tmp_path: Path) -> None:
    save(tmp_path / "c.pt", *trained("gefen"), format="daypack training", config={"optimizer": "gefen"})
    code = f"""
import sys, daypack
daypack.inspect_state({str(tmp_path / "c.pt")!r})
assert not [name for name in sys.modules if name.startswith("daypack.lab")]
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
