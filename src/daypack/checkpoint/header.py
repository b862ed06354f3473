"""The schema of a file: what `docs/checkpoint-format.md` describes, as JSON text and back."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from daypack.checkpoint import json_values
from daypack.checkpoint.snapshot import ParamState, Snapshot, Stored, Value

FORMAT = "daypack optimizer state"
VERSION = 1
#: Keys of the safetensors metadata: the header, and the CRC-32 of its text.
HEADER, CHECKSUM = "daypack", "crc32"
#: Bytes of a stored tensor under one checksum: some rows can be read and checked without the rest.
CHECKSUM_SPAN = 1 << 22
#: Tensors of at most this many bytes that are equal (codebooks) are stored once, where they are whole on every rank.
SHARED_BYTES = 4096


#: What reading a header of another structure than ours may raise, beside ValueError.
Malformed = (KeyError, TypeError, AttributeError, IndexError, RecursionError, RuntimeError, OverflowError)


@dataclass(frozen=True)
class Part:
    """A tensor, or the rows of one, as it stands in a file: ``start`` is the place of its first row in the whole."""

    name: str
    value: Stored
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.stop - self.start, *self.value.shape[1:])

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.value.dtype.itemsize

    def read(self) -> Tensor:
        return self.value.read(self.start, self.stop)


@dataclass(frozen=True)
class Header:
    """What a file says of itself.

    Attributes:
        common: what all shards of one checkpoint say alike: optimizer, groups, parameters, split tensors.
        index: number of this shard, from 0.
        count: number of shards; 1 is a whole file.
        rows: the rows of each split tensor that stand here, ``name: (start, stop)``.
        crc: checksums of the runs of each tensor here, 8 hexadecimal digits each.
    """

    common: Mapping[str, Any]
    index: int
    count: int
    rows: Mapping[str, tuple[int, int]]
    crc: Mapping[str, str]

    def text(self) -> str:
        content = {
            "format": FORMAT,
            "version": VERSION,
            **self.common,
            "shard": [self.index, self.count],
            "rows": {name: list(span) for name, span in self.rows.items()},
            "crc32": dict(self.crc),
        }
        return json.dumps(content, separators=(",", ":"), allow_nan=False)


def runs(nbytes: int) -> int:
    """Return the number of checksums of a tensor of ``nbytes`` bytes."""
    return ceil(nbytes / CHECKSUM_SPAN)


def seed(name: str, dtype: torch.dtype, shape: tuple[int, ...], run: int) -> int:
    """Return the start value of a run's checksum, so that a tensor of another name, dtype or shape does not match."""
    return zlib.crc32(f"{name} {json_values.name_of(dtype)} {list(shape)} {run}".encode())


def describe(snapshot: Snapshot, count: int) -> tuple[dict[str, Any], list[Part]]:
    """Return what all shards state alike, and the tensors of one of ``count`` in order (whole ones go to the first)."""
    known: dict[tuple[torch.dtype, tuple[int, ...], bytes], str] = {}
    params: dict[str, Any] = {}
    parts: list[Part] = []
    split: dict[str, Any] = {}
    for name, param in snapshot.params.items():
        state: dict[str, Any] = {}
        for key, value in param.state.items():
            tensor = f"{name}.{key}"
            if not isinstance(value, Stored):
                state[key] = {"number": json_values.encode(value, f"{key} of parameter {name}")}
                continue
            start, stop = value.held or (0, value.shape[0])
            state[key] = _shared(known, tensor, value)
            if count > 1 and value.follows:
                split[tensor] = [json_values.name_of(value.dtype), list(value.shape)]
            if state[key] == tensor and not (count > 1 and value.follows and start == stop):
                parts.append(Part(tensor, value, start, stop))
        params[name] = {"shape": list(param.shape), "dtype": json_values.name_of(param.dtype), "state": state}
        whole = [key for key, value in param.state.items() if isinstance(value, Stored) and not value.follows]
        if whole:
            params[name]["whole"] = whole
    groups = [
        {
            "options": {key: json_values.encode(value, f"option {key}") for key, value in options.items()},
            "params": [*names],
        }
        for options, names in snapshot.groups
    ]
    common = {
        "optimizer": snapshot.optimizer,
        "named": snapshot.named,
        "groups": groups,
        "params": params,
        "split": split,
        "metadata": dict(snapshot.metadata),
    }
    # Wide numbers first, as safetensors wants it, so that each stands at a multiple of its size.
    return common, sorted(parts, key=lambda part: (-part.value.dtype.itemsize, part.name))


def _shared(known: dict[tuple[torch.dtype, tuple[int, ...], bytes], str], tensor: str, value: Stored) -> str:
    """Return the name that a tensor is stored under: its own, or that of an equal tensor before it."""
    if value.follows or value.nbytes > SHARED_BYTES:
        return tensor
    content = value.whole().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return known.setdefault((value.dtype, value.shape, content), tensor)


def parse(metadata: Mapping[str, str] | None) -> Header:
    """Return the header of a file with tensors, after checking its structure.

    Raises:
        ValueError: not one of these files, of another version, or damaged.
        Malformed: what comes of reading a text with another structure.
    """
    content = _content(metadata)
    if "shards" in content:
        raise ValueError("it is the index of a set of shards, not one of them")
    common = {key: content[key] for key in ("optimizer", "named", "groups", "params", "split", "metadata")}
    index, count = content["shard"]
    if not 0 <= index < count:
        raise ValueError(f"it says that it is shard {index + 1} of {count}")
    rows = {name: (int(start), int(stop)) for name, (start, stop) in content["rows"].items()}
    return Header(common, index, count, rows, {str(name): str(crc) for name, crc in content["crc32"].items()})


def listed(metadata: Mapping[str, str] | None) -> list[str] | None:
    """Return the names of the shards that an index lists; None for a file with tensors of its own.

    Raises:
        ValueError, Malformed: as `parse`.
    """
    names = _content(metadata).get("shards")
    if names is not None and not (isinstance(names, list) and names and all(Path(n).name == n for n in names)):
        raise ValueError("it does not list its shards by their names")
    return names


def index(names: Sequence[str]) -> dict[str, str]:
    """Return the metadata of an index of shards."""
    text = json.dumps({"format": FORMAT, "version": VERSION, "shards": list(names)}, separators=(",", ":"))
    return {HEADER: text, CHECKSUM: checksum(text)}


def _content(metadata: Mapping[str, str] | None) -> Mapping[str, Any]:
    if not metadata or HEADER not in metadata:
        raise ValueError("it is a safetensors file, but not of optimizer state that daypack saved")
    text = metadata[HEADER]
    if metadata.get(CHECKSUM) != checksum(text):
        raise ValueError("the checksum of its header is wrong")
    content: Mapping[str, Any] = json.loads(text)
    if content["format"] != FORMAT:
        raise ValueError(f"its format is {content['format']!r:.60}, not {FORMAT!r}")
    if content["version"] != VERSION:
        raise ValueError(f"it has version {content['version']!r:.20}, this daypack reads {VERSION}; use a newer one")
    return content


def checksum(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


def snapshot_of(common: Mapping[str, Any], find: Mapping[str, Stored]) -> Snapshot:
    """Return the state that a header describes; ``find`` has its tensors by name.

    Raises:
        ValueError: the header contradicts itself, or lacks a tensor.
        Malformed: what comes of reading a text with another structure.
    """
    params = {str(name): _param(name, entry, find) for name, entry in common["params"].items()}
    groups = tuple(
        ({key: json_values.decode(value) for key, value in group["options"].items()}, tuple(map(str, group["params"])))
        for group in common["groups"]
    )
    listed = [name for _, names in groups for name in names]
    if sorted(listed) != sorted(params):
        raise ValueError("its groups do not list each of its parameters once")
    metadata = {str(key): str(value) for key, value in common["metadata"].items()}
    return Snapshot(str(common["optimizer"]), groups, params, bool(common["named"]), metadata)


def _param(name: str, entry: Mapping[str, Any], find: Mapping[str, Stored]) -> ParamState:
    whole = {*entry.get("whole", ())}
    state: dict[str, Value] = {}
    for key, value in entry["state"].items():
        if isinstance(value, str):
            if value not in find:
                raise ValueError(f"tensor {value} is missing ({key} of parameter {name})")
            found = find[value]
            state[str(key)] = Stored(found.shape, found.dtype, found.read, key not in whole, found.held)
        else:
            state[str(key)] = json_values.decode(value["number"])
    shape = tuple(int(size) for size in entry["shape"])
    if any(size < 0 for size in shape):
        raise ValueError(f"parameter {name} has shape {shape}")
    return ParamState(shape, json_values.dtype_of(entry["dtype"]), state)
