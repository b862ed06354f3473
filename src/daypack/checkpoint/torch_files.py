"""Files of unknown content, loaded without running anything in them; and the weights that such a file may hold."""

from __future__ import annotations

import pickle
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from daypack.optim.registry import REGISTRY

#: Where a training checkpoint, a dict with weights under ``model`` and a state_dict under ``optimizer``, has the name
#: of the optimizer's class, such as ``"AdamW8bit"``.
OPTIMIZER_CLASS = "optimizer_class"


def is_safetensors(path: Path) -> bool:
    """Return whether a file is safetensors: it begins with the length of its header, then the header in JSON."""
    with path.open("rb") as file:
        front = file.read(9)
    return len(front) < 9 or front[8:] == b"{"


#: What torch raises for files that are damaged or none of its own; in its old format a wrong byte may mean anything.
_BROKEN = (
    *(RuntimeError, ValueError, EOFError, LookupError, TypeError, AttributeError, AssertionError, OverflowError),
    *(pickle.UnpicklingError, struct.error),
)


def torch_load(path: Path) -> Any:
    try:
        # torch maps only its zip format; what it wrote before 1.6 is read whole.
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}; it may be cut short: check its size") from None
    except pickle.UnpicklingError as error:
        text = " ".join(str(error).split())
        if "torchao" not in text:
            raise ValueError(
                f"damaged or unknown checkpoint {path}: torch.save did not write it, or it holds more than tensors and "
                "numbers, which is not loaded because loading it would run code"
            ) from None
    except _BROKEN as error:
        text = " ".join(str(error).split())
    if "torchao" in text:
        try:
            import torchao.optim  # type: ignore[import-not-found]  # noqa: F401 - it registers its tensors as safe
        except ImportError:
            raise ValueError(
                f"{path} holds tensors of torchao, which is not installed; install it to read them"
            ) from None
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except _BROKEN as error:
            text = " ".join(str(error).split())
    raise ValueError(f"damaged or unknown checkpoint {path}: {text:.200}")


def weights_in(content: Any) -> Mapping[str, Tensor]:
    """Return the weights in a training checkpoint, from under one of their usual names; empty if there are none."""
    for key in ("model", "model_state_dict", "state_dict"):
        held = content.get(key) if isinstance(content, Mapping) else None
        if isinstance(held, Mapping) and held and all(isinstance(value, Tensor) for value in held.values()):
            return held
    return {}


def class_in(content: Any) -> str | None:
    """Return the name of the optimizer's class that a training checkpoint gives; None if it gives none."""
    if not isinstance(content, Mapping):
        return None
    name = content.get(OPTIMIZER_CLASS)
    config = content.get("config")
    if name is None and content.get("format") == "daypack training" and isinstance(config, Mapping):
        # Files from before the class was named have the optimizer's registered name among their options.
        cls = REGISTRY.get(str(config.get("optimizer")))
        name = cls and cls.__name__
    return name if isinstance(name, str) else None


def file_damage(path: Path) -> str | None:
    """Say what is wrong with a file of ``torch.save`` by its checksums, which ``torch.load`` ignores; None: nothing."""
    if not zipfile.is_zipfile(path):
        return None  # torch's old format has no checksums
    try:
        with zipfile.ZipFile(path) as archive:
            member = archive.testzip()
    except zipfile.BadZipFile as error:
        return str(error)
    return None if member is None else f"checksum of {member} is wrong"


def read_weights(path: Path) -> Mapping[str, Tensor]:
    """Return the weights of a model by name, from a safetensors file or from what ``torch.save`` made of a model's
    ``state_dict()``, by itself or within a training checkpoint. Tensors are read when they are used.

    Raises:
        ValueError: missing, damaged, or neither.
    """
    if not path.is_file():
        raise ValueError(f"no weights at {path}; check the path")
    if is_safetensors(path):
        from safetensors import SafetensorError, safe_open

        try:
            file: Any = safe_open(str(path), framework="pt")
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
        except SafetensorError as error:
            raise ValueError(f"damaged or unknown weights {path}: {error}") from None
    content = torch_load(path)
    if isinstance(content, Mapping) and content and all(isinstance(value, Tensor) for value in content.values()):
        return content
    if weights := weights_in(content):
        return weights
    raise ValueError(f"{path} holds no weights; pass a safetensors file, or what torch.save made of model.state_dict()")
