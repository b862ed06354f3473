"""What a save may replace and remove, and what becomes of it where the disk refuses."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file as write_weights

import daypack
from daypack.checkpoint import file as files
from daypack.checkpoint import load_file, save_file, split

from ..conformance.scene import parameters, train
from ..distributed.ranks import run
from ..distributed.scene import mesh, set_gradients, sharded

SHAPES = {"matrix": (24, 64), "vector": (130,)}


def stepped(shapes: dict[str, tuple[int, ...]] = SHAPES) -> Any:
    params = parameters(shapes=shapes)
    optimizer = daypack.AdamW(params.items())
    train(optimizer, params, [0])
    return optimizer


def refuse(*_: object, **__: object) -> Any:
    raise PermissionError(13, "Permission denied")


def test_the_index_is_readable_by_whom_its_shards_are(tmp_path: Path) -> None:
    save_file(stepped(), tmp_path / "state.safetensors")
    shards = split(tmp_path / "state.safetensors", 2, tmp_path / "parts")
    modes = {path.stat().st_mode for path in (*shards, tmp_path / "parts" / "state.safetensors")}
    assert modes == {(tmp_path / "state.safetensors").stat().st_mode}


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"])
def test_weights_in_shards_are_neither_removed_nor_replaced(tmp_path: Path, name: str) -> None:
    weights, path = tmp_path / name, tmp_path / "model.safetensors"
    write_weights({"w": torch.ones(3)}, str(weights), {"format": "pt"})
    before = weights.read_bytes()
    save_file(stepped(), path)
    assert weights.read_bytes() == before
    (tmp_path / "other").mkdir()
    save_file(stepped(), tmp_path / "other" / path.name)
    with pytest.raises(ValueError, match=rf"{name} holds no optimizer state that can be read, .*; give another name"):
        split(tmp_path / "other" / path.name, 2, tmp_path)
    split(tmp_path / "other" / path.name, 3, tmp_path)
    assert weights.read_bytes() == before
    save_file(stepped(), path)
    assert sorted(tmp_path.glob("*.safetensors")) == sorted([path, weights])


def test_shards_without_an_index_are_not_split_into_their_own_folder(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    save_file(stepped(), path)
    parts = split(path, 2, tmp_path / "parts")
    (tmp_path / "parts" / path.name).unlink()
    for count in (2, 3):
        with pytest.raises(ValueError, match=r"state-00001-of-00002.safetensors; give another folder, or delete them"):
            split(tmp_path / "parts" / path.name, count, tmp_path / "parts")
    assert sorted((tmp_path / "parts").iterdir()) == parts
    split(tmp_path / "parts" / path.name, 3, tmp_path / "others")
    assert sorted((tmp_path / "parts").iterdir()) == parts


def test_what_may_not_be_read_is_not_called_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state.safetensors"
    save_file(stepped(), path)
    split(path, 2, tmp_path / "parts")
    monkeypatch.setattr(Path, "open", refuse)
    for each in (path, tmp_path / "parts" / path.name):
        with pytest.raises(ValueError, match=r"cannot read .*: Permission denied; check its permissions"):
            load_file(stepped(), each)


def test_old_shards_that_cannot_be_removed_do_not_fail_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state.safetensors"
    save_file(stepped(), path, {"step": "1"})
    parts = split(path, 2, tmp_path / "parts")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        save_file(stepped(), tmp_path / "parts" / path.name, {"step": "2"})
        assert all(part.exists() for part in parts)
        split(path, 3, tmp_path / "parts")
    assert load_file(stepped(), tmp_path / "parts" / path.name) == {"step": "1"}


def test_a_folder_in_the_place_of_the_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "state.safetensors").mkdir()
    with pytest.raises(ValueError, match=r"cannot write .*state.safetensors: .*; check the folder and its space"):
        save_file(stepped(), tmp_path / "state.safetensors")


# --------------------------------------------------------------- over ranks


def _fail(folder: str) -> list[str]:
    """What each rank says when the disk refuses an act on one of them."""
    path, rank = Path(folder) / "state.safetensors", torch.distributed.get_rank()
    params = sharded(parameters(shapes=SHAPES), mesh())
    optimizer = daypack.AdamW(params.items())
    set_gradients(params, 0)
    optimizer.step()
    save_file(optimizer, path, {"step": "1"})
    messages = []
    for place, name, at in ((os, "replace", 1), (files, "free_slot", 0), (files, "_write_bytes", 0)):
        with pytest.MonkeyPatch.context() as patch:
            if rank == at:
                patch.setattr(place, name, refuse)
            with pytest.raises(ValueError) as error:
                save_file(optimizer, path, {"step": "2"})
        messages.append(str(error.value))
        assert load_file(optimizer, path) == {"step": "1"}
    save_file(optimizer, path, {"step": "3"})
    assert load_file(optimizer, path) == {"step": "3"}
    return messages


def test_a_write_that_fails_on_one_rank_raises_on_all(tmp_path: Path) -> None:
    first, second = run(2, _fail, str(tmp_path))
    for place, (failed, other) in enumerate(((second, first), (first, second), (first, second))):
        assert "Permission denied; check the folder" in failed[place]
        assert "another rank refused its part" in other[place]
