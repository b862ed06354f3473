"""Text as bytes: where it comes from, which part is held out, and which windows of it a step sees."""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

SIZE_LIMIT = 64 * 2**20  # bytes read at most; a longer source is cut there, and `Corpus.source` says so
_HELD_OUT = 16  # one block of this many is validation
_SKIPPED_FOLDERS = frozenset({"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"})


@dataclass(frozen=True)
class Corpus:
    """A text split into bytes to train on and bytes held out.

    Attributes:
        train: uint8 `[bytes]`.
        validation: uint8 `[bytes]`; no byte of it is in `train`.
        source: what the text is, for people.
        fingerprint: 16 hexadecimal digits that identify the bytes of both parts.
    """

    train: Tensor
    validation: Tensor
    source: str
    fingerprint: str

    def batch(self, seed: int, step: int, size: int, context: int) -> Tensor:
        """Draw the windows of one training step: int64 `[size, context + 1]`.

        They are a function of the arguments alone. A run is therefore resumed by its step number, and two optimizers
        with the same seed see the same bytes.
        """
        start = torch.randint(len(self.train) - context, (size, 1), generator=step_generator(seed, step))
        return self.train[start + torch.arange(context + 1)].long()

    def validation_batches(self, tokens: int, size: int, context: int) -> Iterator[Tensor]:
        """Yield the same windows at every call, spread over the held-out part, in batches `[<= size, context + 1]`.

        Windows predict disjoint bytes.

        Args:
            tokens: predicted bytes wanted; fewer if the held-out part is shorter, at least one window's.
            size: windows per batch.
            context: predicted bytes per window.
        """
        available = (len(self.validation) - 1) // context
        wanted = max(1, min(available, tokens // context))
        start = (torch.arange(wanted) * available // wanted * context)[:, None]
        for rows in torch.split(start, size):
            yield self.validation[rows + torch.arange(context + 1)].long()

    def require(self, context: int) -> None:
        """Check that both parts hold a window of `context + 1` bytes.

        Raises:
            ValueError: one is shorter.
        """
        shortest = min(len(self.train), len(self.validation))
        if shortest < context + 1:
            raise ValueError(
                f"corpus too small: {self.source} leaves {len(self.train):,} bytes to train on and "
                f"{len(self.validation):,} held out, a context of {context} needs {context + 1:,} of each; "
                "give more text or a shorter context"
            )


def load_corpus(data: str | os.PathLike[str] | None = None) -> Corpus:
    """Read a corpus.

    Args:
        data: a file (read as bytes, whatever it holds) or a folder (its text files in sorted order, hidden ones aside);
            None for the Python standard library's own sources.

    Raises:
        ValueError: nothing there, unreadable, or no text in it.
    """
    if data is None:
        folder = Path(sysconfig.get_path("stdlib"))
        source = f"the standard library of Python {sysconfig.get_python_version()}"
        files = [path for path in _walk(folder) if path.suffix == ".py" and not path.name.startswith("_sysconfigdata")]
        remedy = "this Python ships without sources; name a text file or folder instead"
    else:
        folder, source = Path(data), str(data)
        if not folder.exists():
            raise ValueError(f"no such file or folder: {source}; check the path")
        files = list(_walk(folder)) if folder.is_dir() else [folder]
        remedy = "name a file or folder that holds text"
    content, cut = _read(files, keep_binary=folder.is_file())
    if not content:
        raise ValueError(f"empty corpus: no text in {source}; {remedy}")
    return split_corpus(content, f"the first {SIZE_LIMIT >> 20} MiB of {source}" if cut else source)


def step_generator(seed: int, step: int) -> torch.Generator:
    """Build a generator that depends on the seed of a run and the number of a step alone."""
    digest = hashlib.blake2b(f"{seed}:{step}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)


def split_corpus(content: bytes, source: str) -> Corpus:
    """Hold out every 16th block of `content`, so that validation is spread over the whole text.

    Blocks are 8 KiB, smaller if the text is too short for 16 of them.
    """
    every = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    block = min(8192, max(1, len(content) // _HELD_OUT))
    held_out = (torch.arange(len(every)) // block) % _HELD_OUT == _HELD_OUT // 2
    fingerprint = hashlib.sha256(content).hexdigest()[:16]
    return Corpus(every[~held_out], every[held_out], source, fingerprint)


def _walk(folder: Path) -> Iterator[Path]:
    """Yield list the files below `folder` in an order that depends on names only."""
    for directory, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED_FOLDERS and not name.startswith("."))
        paths = (Path(directory, name) for name in sorted(files) if not name.startswith("."))
        yield from (path for path in paths if path.is_file())  # no pipes, no dangling links


def _read(files: list[Path], *, keep_binary: bool) -> tuple[bytes, bool]:
    """Join the files' bytes, and say whether `SIZE_LIMIT` cut them.

    A file that repeats another one's content is left out: it would put held-out bytes into the training part.
    """
    seen: set[bytes] = set()
    parts: list[bytes] = []
    room = SIZE_LIMIT
    for path in files:
        try:
            with path.open("rb") as file:
                content = file.read(room + 1)
        except OSError as error:
            raise ValueError(f"cannot read {path}: {error.strerror}; check its permissions") from None
        digest = hashlib.sha256(content).digest()
        if not content or digest in seen or (b"\0" in content and not keep_binary):
            continue
        seen.add(digest)
        parts.append(content[:room])
        room -= len(content)
        if room < 0:
            return b"".join(parts), True
    return b"".join(parts), False
