"""Damaged and hostile files: one clear ValueError or a correct load, and never a changed optimizer."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import daypack
from daypack.checkpoint import file as files
from daypack.checkpoint import load_file, save_file
from daypack.checkpoint.snapshot import Snapshot, Stored, of_tensor, take

from ..conformance.scene import assert_same, parameters, snapshot, state_of, train

SHAPES = {"first.weight": (16, 320), "bias": (24,), "last.weight": (24, 320), "one": ()}
NAMES = ("gefen", "adamw")
RARE = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])


class Bench:
    """A good file for each optimizer, its state, and a live optimizer that damaged files are loaded into."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.good, self.state = folder, {}, {}
        self.live: dict[str, Any] = {}
        for name in NAMES:
            params = parameters(shapes=SHAPES)
            optimizer = daypack.create(name, params.items())
            train(optimizer, params, range(2))
            save_file(optimizer, folder / f"{name}.safetensors")
            self.good[name] = (folder / f"{name}.safetensors").read_bytes()
            self.state[name] = state_of(optimizer, params)
            mine = parameters(shapes=SHAPES, seed=1)
            other = daypack.create(name, mine.items(), lr=0.5)
            train(other, mine, range(1), seed=1)
            self.live[name] = (other, mine)
            self.source = take(optimizer)

    def load(self, name: str, data: bytes) -> str:
        """The error that loading ``data`` gives, empty if it loads; the optimizer is as it was before."""
        path = self.folder / "damaged.safetensors"
        path.write_bytes(data)
        optimizer, params = self.live[name]
        before = snapshot(optimizer, params)
        message = ""
        try:
            load_file(optimizer, path)
        except ValueError as error:
            message = str(error)
        if message:
            assert_same(snapshot(optimizer, params), before)
            assert "\n" not in message
        return message

    def assert_correct(self, name: str) -> None:
        optimizer, params = self.live[name]
        assert_same(state_of(optimizer, params), self.state[name])


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("corruption"))


@RARE
@given(st.sampled_from(NAMES), st.floats(0, 1, exclude_max=True))
def test_truncated(bench: Bench, name: str, where: float) -> None:
    data = bench.good[name]
    assert bench.load(name, data[: int(where * len(data))])


@RARE
@given(st.sampled_from(NAMES), st.floats(0, 1, exclude_max=True), st.integers(1, 255), st.booleans())
def test_flipped_byte(bench: Bench, name: str, where: float, change: int, front: bool) -> None:
    """Anywhere in the data, or in what stands before it: never a load of anything else."""
    data = bytearray(bench.good[name])
    start = 8 + int.from_bytes(data[:8], "little")
    data[int(where * start) if front else start + int(where * (len(data) - start))] ^= change
    if not bench.load(name, bytes(data)):
        bench.assert_correct(name)
        assert front


@RARE
@given(st.sampled_from(NAMES), st.binary(min_size=1, max_size=40), st.booleans())
def test_added_or_foreign_bytes(bench: Bench, name: str, junk: bytes, alone: bool) -> None:
    assert bench.load(name, junk if alone else bench.good[name] + junk)


def rewritten(data: bytes, change: Callable[[dict[str, Any]], Any]) -> bytes:
    """A file with another header, all checksums of the header right."""
    size = int.from_bytes(data[:8], "little")
    front = json.loads(data[8 : 8 + size])
    content = json.loads(front["__metadata__"]["daypack"])
    change(content)
    text = json.dumps(content)
    front["__metadata__"] = {"daypack": text, "crc32": f"{zlib.crc32(text.encode()):08x}"}
    encoded = json.dumps(front).encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded + data[8 + size :]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The ways to every value in a JSON text."""
    found = [path] if path else []
    if isinstance(value, dict):
        for key, each in value.items():
            found += places(each, (*path, key))
    elif isinstance(value, list):
        for key, each in enumerate(value):
            found += places(each, (*path, key))
    return found


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
    st.sampled_from(
        [
            [],
            {},
            [1],
            {"float32": 3.5},
            {"tuple": [1]},
            {"number": {"float32": -1.0}},
            {"float": "inf"},
            [[]],
            {"dict": {}},
        ]
    ),
)


@settings(RARE, max_examples=400)
@given(st.sampled_from(NAMES), st.integers(0, 2**30), JUNK, st.sampled_from(["replace", "remove", "add"]))
def test_hostile_header(bench: Bench, name: str, pick: int, junk: Any, act: str) -> None:
    """Any value of the header replaced, removed, or joined by another one, with checksums that fit."""

    def change(content: dict[str, Any]) -> None:
        ways = places(content)
        *path, last = ways[pick % len(ways)]
        holder: Any = content
        for key in path:
            holder = holder[key]
        if act == "replace":
            holder[last] = junk
        elif act == "remove":
            del holder[last]
        elif isinstance(holder, dict):
            holder["extra"] = junk
        else:
            holder.append(junk)

    optimizer, params = bench.live[name]
    if not bench.load(name, rewritten(bench.good[name], change)) and name == "gefen":
        train(optimizer, params, [3])  # What was loaded works. torch's own options may ask for a GPU.


def changed(source: Snapshot, name: str, key: str, value: Any) -> Snapshot:
    """``source`` with another value of one state key; None removes the key."""
    entry = source.params[name]
    state = {k: v for k, v in entry.state.items() if k != key} | ({} if value is None else {key: value})
    return replace(source, params={**source.params, name: replace(entry, state=state)})


def damages(value: Stored) -> dict[str, torch.Tensor]:
    whole = value.whole().clone()
    spoilt = {
        "one row more": torch.cat([whole, whole[:1]]),
        "flat": whole.reshape(1, -1),
        "of another dtype": whole.to(torch.float64 if whole.dtype != torch.float64 else torch.float32),
    }
    if whole.is_floating_point():
        spoilt["not a number"] = torch.full_like(whole, float("nan"))
        spoilt["negative"] = torch.full_like(whole, -1.0)
    return spoilt


def test_consistent_files_with_wrong_content(tmp_path: Path) -> None:
    """Written by our own writer, checksums and all: wrong shapes, dtypes and values, missing and extra keys."""
    params = parameters(shapes=SHAPES)
    optimizer = daypack.Gefen(params.items())
    train(optimizer, params, range(2))
    source, path, count = take(optimizer), tmp_path / "state.safetensors", 0
    mine = parameters(shapes=SHAPES, seed=1)
    other = daypack.Gefen(mine.items())
    train(other, mine, range(1))
    before = snapshot(other, mine)
    for name in ("last.weight", "bias"):
        for key, value in source.params[name].state.items():
            ways: dict[str, Any] = {"missing": None}
            if isinstance(value, Stored):
                ways |= {way: of_tensor(tensor, value.follows) for way, tensor in damages(value).items()}
            ways |= {"a number": 3, "extra": torch.tensor(1.0)}
            for way, spoilt in ways.items():
                if (key, way) in (("step", "a number"), ("step", "extra")):
                    continue  # a step may be a plain number
                if way == "negative" and key == "exp_avg":
                    continue  # a first moment has either sign
                place = key + "_extra" if way == "extra" else key
                files.write(path, changed(source, name, place, spoilt))
                with pytest.raises(ValueError, match=name.replace(".", r"\.")):
                    load_file(other, path)
                assert_same(snapshot(other, mine), before, f"{name} {key} {way}")
                count += 1
    assert count > 40


def test_other_versions_and_files_say_what_they_are(bench: Bench) -> None:
    for version in (0, 2, "1"):
        data = rewritten(bench.good["gefen"], lambda content, version=version: content.update(version=version))
        assert f"version {version!r}" in bench.load("gefen", data)
    data = rewritten(bench.good["gefen"], lambda content: content.update(format="other"))
    assert "'other'" in bench.load("gefen", data)
    from safetensors.torch import save

    assert "not of optimizer state" in bench.load("gefen", save({"a": torch.zeros(3)}))
    torch.save(bench.live["gefen"][0].state_dict(), bench.folder / "torch.pt")
    assert "damaged or foreign" in bench.load("gefen", (bench.folder / "torch.pt").read_bytes())
