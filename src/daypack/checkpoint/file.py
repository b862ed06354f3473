"""Files of optimizer state: written in one pass, one tensor at a time; read lazily, each byte against its checksum."""

from __future__ import annotations

import contextlib
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from daypack.checkpoint import header, json_values
from daypack.checkpoint.atomic import write_whole
from daypack.checkpoint.header import CHECKSUM_SPAN, Header, Part
from daypack.checkpoint.snapshot import Snapshot, Stored

#: Names of dtypes in safetensors.
_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_REMEDY = "use another checkpoint"


#: Names of shards have five digits.
MOST_SHARDS = 99_999


def shard_path(path: Path, index: int, count: int, slot: str = "") -> Path:
    """Return the path of one shard: ``state.safetensors`` becomes ``state-00001-of-00004.safetensors``."""
    return path.with_name(f"{path.stem}-{index + 1:05}-of-{count:05}{slot}{path.suffix}")


_SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}b?")


def whole_of(path: Path) -> Path:
    """Invert `shard_path`, with or without the ``b`` of a second set. Other paths are returned unchanged."""
    found = _SHARD.fullmatch(path.stem) if path.suffix == ".safetensors" else None
    return path.with_name(found[1] + path.suffix) if found else path


def shards_of(path: Path) -> list[Path]:
    """Return the shards beside the path of a whole file, in order, whether its index lists them or not."""
    return _beside(path, "", "")


def _beside(path: Path, before: str, after: str) -> list[Path]:
    pattern = re.compile(re.escape(before + path.stem) + r"-\d{5}-of-\d{5}b?" + re.escape(path.suffix + after))
    folder = path.parent
    return sorted(each for each in folder.iterdir() if pattern.fullmatch(each.name)) if folder.is_dir() else []


def free_slot(path: Path, count: int) -> str:
    """Choose the ending of the names of a new set of shards, so that no file of the set at ``path`` is overwritten.

    A set is replaced in one operation, the renaming of its index. Until then the old set must stay complete.

    Raises:
        ValueError: a name is taken by a file that is not of optimizer state, such as a shard of a model's weights.
    """
    try:
        live = members(path) if path.is_file() else _own_shards(path)
    except (ValueError, OSError):
        live = _own_shards(path)  # damaged: keep all shards, so that what is intact can be recovered by hand
    slot = "b" if shard_path(path, 0, count) in live else ""
    for shard in (shard_path(path, index, count, slot) for index in range(count)):
        if shard.exists() and not _is_own(shard):
            raise ValueError(
                f"{shard} holds no optimizer state that can be read, and would be replaced; give another name than "
                f"{path.name}, or move it away"
            )
    return slot


def _own_shards(path: Path) -> list[Path]:
    return [shard for shard in shards_of(path) if _is_own(shard)]


def _is_own(path: Path) -> bool:
    """Return whether daypack wrote a file, as the weights of a sharded model have names of the same form."""
    from safetensors import SafetensorError

    try:
        return header.HEADER in (_open(path).metadata() or {})
    except (SafetensorError, OSError):
        return False


def _open(path: Path) -> Any:
    from safetensors import safe_open

    path.open("rb").close()  # raises the real error: safetensors reports any file that it cannot open as missing
    return safe_open(str(path), framework="pt")


def members(path: Path) -> list[Path]:
    """Return the files that hold a checkpoint's tensors: those that the index at ``path`` lists, or ``path`` itself.

    Raises:
        ValueError: damaged, or not such a file.
        OSError: it cannot be read.
    """
    from safetensors import SafetensorError

    try:
        names = header.listed(_open(path).metadata())
    except (SafetensorError, ValueError, *header.Malformed) as error:
        raise _damaged(path, error) from None
    return [path] if names is None else [path.with_name(name) for name in names]


def commit(path: Path, shards: Sequence[Path]) -> None:
    """Make ``path`` the index of ``shards``, which are on the disk already, and remove what it stood for before."""
    content = _encoded({"__metadata__": header.index([shard.name for shard in shards])})
    write_whole(path, lambda temporary: _write_bytes(temporary, content))
    sweep(path, shards)


def _write_bytes(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def sweep(path: Path, shards: Sequence[Path] = ()) -> None:
    """Remove all shards of optimizer state beside ``path`` except ``shards``, and the temporary files of killed
    processes.
    """
    with contextlib.suppress(OSError):  # the new state is complete; files that stay beside it are not read
        # A file that a killed write left may have no header yet; it is recognised by the name that `write_whole` gives.
        for old in {*_own_shards(path), *_beside(path, ".", ".tmp")} - {*shards}:
            old.unlink(missing_ok=True)


# ------------------------------------------------------------------- writing


def write(path: Path, snapshot: Snapshot, index: int = 0, count: int = 1) -> None:
    """Write one shard of ``snapshot`` to ``path``: its rows of split tensors and, in the first shard, all other
    tensors.

    The checksums come before the data, so their space is reserved first and filled in at the end.
    """
    common, parts = header.describe(snapshot, count)
    if index:
        parts = [part for part in parts if part.value.follows]
    rows = {part.name: (part.start, part.stop) for part in parts if part.value.follows and count > 1}
    blank = {part.name: "0" * 8 * header.runs(part.nbytes) for part in parts}
    with path.open("wb") as file:
        front = _front(Header(common, index, count, rows, blank), parts)
        file.write(front)
        crc = {part.name: _write_tensor(file, part) for part in parts}
        whole = _front(Header(common, index, count, rows, crc), parts)
        if len(whole) != len(front):
            raise ValueError(f"a tensor changed its size while {path} was written")
        file.seek(0)
        file.write(whole)


def _front(head: Header, parts: list[Part]) -> bytes:
    """Return everything that comes before the data in a safetensors file."""
    text = head.text()
    entries: dict[str, Any] = {"__metadata__": {header.HEADER: text, header.CHECKSUM: header.checksum(text)}}
    offset = 0
    for part in parts:
        entries[part.name] = {
            "dtype": _CODES[part.value.dtype],
            "shape": list(part.shape),
            "data_offsets": [offset, offset + part.nbytes],
        }
        offset += part.nbytes
    return _encoded(entries)


def _encoded(entries: Mapping[str, Any]) -> bytes:
    """Return the header of a safetensors file, its text padded so that the data begin at a multiple of 8."""
    encoded = json.dumps(entries, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded


def _write_tensor(file: BinaryIO, part: Part) -> str:
    """Append the bytes of a tensor, and return its checksums."""
    data, crc = _bytes(part.read().cpu()), []
    for run, start in enumerate(range(0, len(data), CHECKSUM_SPAN)):
        piece = data[start : start + CHECKSUM_SPAN]
        file.write(piece)
        crc.append(f"{zlib.crc32(piece, header.seed(part.name, part.value.dtype, part.shape, run)):08x}")
    return "".join(crc)


def _bytes(tensor: Tensor) -> memoryview:
    numbers: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(numbers)


# ------------------------------------------------------------------- reading


def read(path: Path) -> Snapshot:
    """Return the state in a file, or in the shards that it lists. Tensors are read when they are used.

    Shards without their index are read by their names.

    Raises:
        ValueError: missing, truncated, damaged, not such a file, or not all of its shards.
        OSError: a file cannot be read.
    """
    shards = members(path) if path.is_file() else shards_of(path)
    if not shards:
        raise ValueError(f"no checkpoint at {path}; check the path")
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing:
        raise ValueError(f"{path} lists {missing[0]}, which is not beside it; give all shards of one checkpoint")
    return read_shards(shards)


def read_shards(paths: list[Path]) -> Snapshot:
    """Return the state in these files, which must be all shards of one checkpoint, in any order."""
    files = [_File(path) for path in paths]
    first, count = files[0], files[0].head.count
    if sorted(file.head.index for file in files) != list(range(count)) or any(f.head.count != count for f in files):
        raise ValueError(
            f"{first.path} is one of {count} shards, given are {', '.join(file.path.name for file in files)}; "
            "give all shards of one checkpoint"
        )
    for file in files[1:]:
        if file.head.common != first.head.common:
            raise ValueError(f"{file.path} and {first.path} are shards of different checkpoints; {_REMEDY}")
    files.sort(key=lambda file: file.head.index)
    try:
        return header.snapshot_of(files[0].head.common, dict(_tensors(files)))
    except (ValueError, *header.Malformed) as error:
        raise _damaged(first.path, error) from None


def _tensors(files: list[_File]) -> Iterator[tuple[str, Stored]]:
    """Yield all tensors by name: whole ones from the first file, split ones put together from the rows in all files."""
    split: Mapping[str, Any] = files[0].head.common["split"]
    for file in files:
        extra = file.names - split.keys()
        if extra and file.head.index:
            raise ValueError(f"{file.path.name} holds {min(extra)}, which belongs to the first shard")
    for name in files[0].names - split.keys():
        yield name, files[0].stored(name)
    for name, (dtype, shape) in split.items():
        pieces = [(*file.head.rows[name], file.stored(name)) for file in files if name in file.head.rows]
        yield name, _joined(name, json_values.dtype_of(dtype), tuple(map(int, shape)), sorted(pieces, key=_span))


def _span(piece: tuple[int, int, Stored]) -> tuple[int, int]:
    return piece[0], piece[1]


def _joined(name: str, dtype: torch.dtype, shape: tuple[int, ...], pieces: list[tuple[int, int, Stored]]) -> Stored:
    end = 0
    for start, stop, piece in pieces:
        if start != end or piece.shape != (stop - start, *shape[1:]) or piece.dtype != dtype:
            raise ValueError(f"the shards do not hold each row of {name} {shape} once (rows {start} to {stop})")
        end = stop
    if end != shape[0]:
        raise ValueError(f"rows {end} to {shape[0]} of {name} are in none of the shards")

    def read(begin: int, finish: int) -> Tensor:
        found = [
            piece.read(max(begin, start) - start, min(finish, stop) - start)
            for start, stop, piece in pieces
            if start < finish and begin < stop
        ]
        if len(found) == 1:
            return found[0]
        return torch.cat(found) if found else torch.empty((0, *shape[1:]), dtype=dtype)

    return Stored(shape, dtype, read)


class _File:
    """An open file: its header, and its tensors as views of mapped memory, checked when they are read."""

    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError

        self.path = path
        try:
            reader = _open(path)
            self._file = reader
            self.head = header.parse(reader.metadata())
            self.names: set[str] = set(reader.keys())
            if self.names != self.head.crc.keys():
                raise ValueError("its tensors are not those that its header lists")
        except (SafetensorError, ValueError, *header.Malformed) as error:
            raise _damaged(path, error) from None
        self._checked: set[tuple[str, int]] = set()

    def stored(self, name: str) -> Stored:
        tensor: Tensor = self._file.get_tensor(name)
        data, width = _bytes(tensor), tensor[:1].nbytes if tensor.dim() else 0
        crc, shape = self.head.crc[name], tuple(tensor.shape)
        if tensor.dim() == 0 or len(crc) != 8 * header.runs(len(data)):
            raise ValueError(f"tensor {name} is not the one that was saved")

        def read(start: int, stop: int) -> Tensor:
            for run in range(start * width // CHECKSUM_SPAN, header.runs(stop * width) if stop > start else 0):
                self._check(name, tensor, data, run)
            return tensor.narrow(0, start, stop - start)

        return Stored(shape, tensor.dtype, read)

    def _check(self, name: str, tensor: Tensor, data: memoryview, run: int) -> None:
        if (name, run) in self._checked:
            return
        first = header.seed(name, tensor.dtype, tuple(tensor.shape), run)
        found = f"{zlib.crc32(data[run * CHECKSUM_SPAN : (run + 1) * CHECKSUM_SPAN], first):08x}"
        if found != self.head.crc[name][8 * run : 8 * run + 8]:
            raise _damaged(self.path, ValueError(f"the checksum of tensor {name} is wrong"))
        self._checked.add((name, run))


def _damaged(path: Path, error: BaseException) -> ValueError:
    if isinstance(error, header.Malformed):
        error = ValueError(f"its header is not as it should be ({type(error).__name__}: {error})")
    message = " ".join(str(error).split()).rstrip(".")
    if message.startswith("damaged or foreign"):
        return ValueError(message)
    return ValueError(f"damaged or foreign checkpoint {path}: {message:.300}; {_REMEDY}")
