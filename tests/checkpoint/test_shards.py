"""Shards: written by ranks or by `split`, put together by `consolidate`, read on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import daypack
from daypack.checkpoint import consolidate, header, load_file, save_file, split

from ..conformance.scene import assert_same, clone, parameters, state_of, train, values
from ..conformance.specs import CASES, Case
from ..distributed.ranks import run
from ..distributed.scene import content, like
from ..distributed.test_checkpoint import Net, compare, steps

every = pytest.mark.parametrize("case", [case for case in CASES if case.label != "plain"], ids=str)
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "gefen": {"name": "gefen"},
    "blocks": {"name": "gefen", "second_moment": "blocks"},
    "adamw": {"name": "adamw"},
    "sgd": {"name": "sgd", "momentum": 0.9},
}


@every
def test_split_and_consolidate_are_inverse(case: Case, tmp_path: Path) -> None:
    params = parameters()
    optimizer = case.create(params.items())
    train(optimizer, params, range(3))
    path = tmp_path / "state.safetensors"
    save_file(optimizer, path, {"step": "3"})
    for count in (1, 2, 3, 40, 300):
        if count == 300 and case.label != "factored":
            continue
        parts = split(path, count, tmp_path / str(count))
        assert len(parts) == count
        consolidate(list(reversed(parts)), tmp_path / "whole.safetensors")
        assert (tmp_path / "whole.safetensors").read_bytes() == path.read_bytes()
        index = tmp_path / str(count) / "state.safetensors"
        assert sorted(index.parent.iterdir()) == sorted([index, *parts])
        consolidate([index, parts[0]], tmp_path / "whole.safetensors")
        assert (tmp_path / "whole.safetensors").read_bytes() == path.read_bytes()
        mine = clone(params)
        other = case.create(mine.items())
        load_file(other, tmp_path / str(count) / "state.safetensors")
        assert_same(state_of(other, mine), state_of(optimizer, params))


def test_incomplete_and_mixed_shards_are_refused(tmp_path: Path) -> None:
    params = parameters()
    optimizer = daypack.Gefen(params.items())
    paths = {}
    for step in (1, 2):
        train(optimizer, params, [step])
        save_file(optimizer, tmp_path / f"{step}.safetensors")
        paths[step] = split(tmp_path / f"{step}.safetensors", 3, tmp_path / f"parts{step}")
    out = tmp_path / "out.safetensors"
    with pytest.raises(ValueError, match="give all shards"):
        consolidate(paths[1][:2], out)
    with pytest.raises(ValueError, match="give all shards"):
        consolidate([*paths[1][:2], paths[1][0]], out)
    with pytest.raises(ValueError, match="different checkpoints"):
        consolidate([*paths[1][:2], paths[2][2]], out)
    for count, word in ((0, "at least 1"), (301, "at most 300"), (10**9, "at most 300")):
        with pytest.raises(ValueError, match=word):
            split(tmp_path / "1.safetensors", count, tmp_path / "none")
    assert not (tmp_path / "none").exists()
    with pytest.raises(ValueError, match="give another"):
        split(tmp_path / "1.safetensors", 2, tmp_path)
    with pytest.raises(ValueError, match="no checkpoint at"):
        consolidate([tmp_path / "missing.safetensors"], out)
    assert not out.exists()
    paths[1][1].unlink()
    with pytest.raises(ValueError, match="give all shards"):
        load_file(daypack.Gefen(clone(params).items()), tmp_path / "parts1" / "1.safetensors")
    with pytest.raises(ValueError, match="no checkpoint at"):
        consolidate([tmp_path / "parts1" / "1.safetensors"], out)


def test_saving_again_leaves_one_form(tmp_path: Path) -> None:
    """Whole, two shards and three, each over each other: what is there is what its name says, and nothing else."""
    states, files = [], []
    params = parameters()
    optimizer = daypack.Gefen(params.items())
    for step in (0, 1):
        train(optimizer, params, [step])
        states.append({key: value.clone() for key, value in content(params, optimizer).items()})
        files.append(tmp_path / str(step) / "state.safetensors")
        files[-1].parent.mkdir()
        save_file(optimizer, files[-1])
    folder = tmp_path / "one"
    folder.mkdir()
    for turn, count in enumerate((2, 2, 2, 1, 3, 2, 1, 1)):
        if count > 1:
            shards = split(files[turn % 2], count, folder)
            expected = [folder / "state.safetensors", *shards]
        else:
            consolidate([files[turn % 2]], folder / "state.safetensors")
            load_file(optimizer, folder / "state.safetensors")
            save_file(optimizer, folder / "state.safetensors")
            expected = [folder / "state.safetensors"]
        assert sorted(folder.iterdir()) == sorted(expected), (turn, count)
        mine = clone(params)
        other = daypack.Gefen(mine.items())
        load_file(other, folder / "state.safetensors")
        found = content(mine, other)
        assert_same(
            {k: v for k, v in found.items() if k not in params},
            {k: states[turn % 2][k] for k in found if k not in params},
        )


def test_shards_without_their_index_are_read_and_an_index_without_them_is_refused(tmp_path: Path) -> None:
    params = parameters()
    optimizer = daypack.Gefen(params.items())
    train(optimizer, params, [0])
    save_file(optimizer, tmp_path / "state.safetensors")
    parts = split(tmp_path / "state.safetensors", 3, tmp_path / "parts")
    index = tmp_path / "parts" / "state.safetensors"
    kept = index.read_bytes()
    index.unlink()
    mine = clone(params)
    other = daypack.Gefen(mine.items())
    load_file(other, index)
    assert_same(state_of(other, mine), state_of(optimizer, params))
    index.write_bytes(kept)
    parts[2].rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"lists state-00003-of-00003.safetensors, which is not beside it"):
        load_file(other, index)
    for names in (["../state.safetensors"], [], [3]):
        from safetensors.torch import save_file as write

        write({}, str(index), header.index(names))
        with pytest.raises(ValueError, match="damaged or foreign"):
            load_file(other, index)


# --------------------------------------------------------------- over ranks


def _make(options: dict[str, Any], shard: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    net = Net()
    if shard:
        fully_shard(net)
    return net, daypack.create(params=net.named_parameters(), **{"lr": 1e-2, **options})


def _save_all(folder: str, shard: bool) -> dict[str, Any]:
    found = {}
    for label, options in OPTIMIZERS.items():
        net, optimizer = _make(options, shard)
        steps(net, optimizer, 0, 3)
        save_file(optimizer, f"{folder}/{label}.safetensors")
        found[label] = content(dict(net.named_parameters()), optimizer)
    return found


def _load_all(folder: str, shard: bool, saved: dict[str, Any]) -> dict[str, Any]:
    after = {}
    for label, options in OPTIMIZERS.items():
        net, optimizer = _make(options, shard)
        with torch.no_grad():
            for name, p in net.named_parameters():
                p.copy_(like(p, saved[label][name]))
        load_file(optimizer, f"{folder}/{label}.safetensors")
        compare(net, optimizer, saved[label])
        for p, state in optimizer.state.items():
            for key, value in state.items():
                if value.dim() and value.shape == p.shape:
                    assert type(value) is type(p.data), key
        steps(net, optimizer, 3, 4)
        after[label] = content(dict(net.named_parameters()), optimizer)
    return after


def _refuse(folder: str) -> list[str]:
    """One rank's shard is damaged: all ranks refuse, none waits, and all still work."""
    net, optimizer = _make(OPTIMIZERS["gefen"], True)
    steps(net, optimizer, 0, 1)
    before = content(dict(net.named_parameters()), optimizer)
    messages = []
    for name in ("gefen", "missing"):
        with pytest.raises(ValueError) as error:
            load_file(optimizer, f"{folder}/{name}.safetensors")
        messages.append(str(error.value))
    compare(net, optimizer, before)
    steps(net, optimizer, 1, 2)
    return messages


def _convert_and_grow(folder: str) -> None:
    """Live sharded state is refused with the way that works, and that way works: file, new file, load."""
    net, optimizer = _make(OPTIMIZERS["adamw"], True)
    for p in net.parameters():
        assert p.requires_grad
    steps(net, optimizer, 0, 3)
    for act in (lambda: daypack.convert(optimizer, "gefen"), lambda: daypack.transplant(optimizer, optimizer)):
        with pytest.raises(ValueError, match=r"sharded; save .*save_file.*daypack convert.*load_file"):
            act()
    save_file(optimizer, f"{folder}/adamw.safetensors")
    if dist.get_rank() == 0:
        from daypack.checkpoint import conversion, foreign

        new, _ = conversion.convert_snapshot(foreign.read(Path(folder) / "adamw.safetensors"), "gefen")
        save_file(new, f"{folder}/gefen.safetensors")
    dist.barrier()
    other = daypack.Gefen(net.named_parameters())
    load_file(other, f"{folder}/gefen.safetensors")
    alone = Net()
    theirs = daypack.AdamW(alone.named_parameters(), lr=1e-2)
    load_file(theirs, f"{folder}/adamw.safetensors")
    expected = content(dict(alone.named_parameters()), daypack.convert(theirs, "gefen"))
    for key, value in content(dict(net.named_parameters()), other).items():
        if key not in dict(net.named_parameters()):
            assert_same(value, expected[key], key)
    steps(net, other, 3, 5)


def test_sharded_state_is_converted_through_files(tmp_path: Path) -> None:
    run(2, _convert_and_grow, str(tmp_path))


def test_saved_on_some_ranks_loads_on_others(tmp_path: Path) -> None:
    """Seven rows, one row and three experts over 1, 2 and 4 ranks: uneven and empty parts."""
    saved: dict[int, Any] = {}
    for world in (4, 2):
        folder = tmp_path / str(world)
        folder.mkdir()
        saved[world] = run(world, _save_all, str(folder), True)[0]
        for label in OPTIMIZERS:
            shards = sorted(folder.glob(f"{label}-*"))
            assert len(shards) == world
            consolidate(shards, tmp_path / f"{label}.safetensors")
            parts = split(tmp_path / f"{label}.safetensors", world, tmp_path / "again")
            for mine, theirs in zip(parts, shards, strict=True):
                assert mine.read_bytes() == theirs.read_bytes()
        after = _load_all(str(folder), False, saved[world])
        if world == 4:
            run(2, _load_all, str(folder), True, saved[4])
        else:
            again = run(2, _load_all, str(folder), True, saved[2])[0]
            for label in ("adamw", "sgd"):
                assert_same(again[label], after[label])
    damaged = sorted((tmp_path / "2").glob("gefen-*"))[1]
    data = bytearray(damaged.read_bytes())
    data[-3] ^= 4
    damaged.write_bytes(data)
    for messages in run(2, _refuse, str(tmp_path / "2")):
        assert "checksum" in messages[0] or "another rank" in messages[0]
        assert "no checkpoint" in messages[1]


def test_values_are_not_shared_with_the_file(tmp_path: Path) -> None:
    """The file may be overwritten in place while training goes on."""
    for name in ("gefen", "adamw"):
        params = parameters()
        optimizer = daypack.create(name, params.items())
        train(optimizer, params, range(2))
        path = tmp_path / "state.safetensors"
        save_file(optimizer, path)
        mine = clone(params)
        other = daypack.create(name, mine.items())
        load_file(other, path)
        with path.open("rb+") as file:
            file.write(b"\xff" * path.stat().st_size)
        assert_same(state_of(other, mine), state_of(optimizer, params))
        assert_same(values(mine), values(params))
