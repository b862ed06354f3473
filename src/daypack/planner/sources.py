"""Where a model to plan for comes from: a count, a config, a checkpoint's header, or a function that builds it."""

from __future__ import annotations

import importlib
import json
import re
import struct
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from daypack.planner.model import Inputs, ModelSpec, from_module, from_shapes
from daypack.planner.pretrained import from_config, known_types, transformers
from daypack.planner.transformer import TransformerShape, llama_like
from daypack.planner.units import parse_count

#: Names of dtypes in the header of a safetensors file.
SAFETENSORS = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_LONGEST_HEADER = 100_000_000


def load_model(text: str, *, sample: str | None = None) -> ModelSpec:
    """Describe the model that ``text`` names. Nothing is downloaded, and no weight is read or allocated.

    Args:
        text: a Hugging Face ``config.json`` or the folder of one, a ``.safetensors`` file or a folder of them, a
            function as ``package.module:function`` that returns a module, or a model type known to transformers.
        sample: how one sample of a function's module looks: ``3x224x224`` or ``ids`` (token ids).

    Raises:
        ValueError: there is no such model, or it cannot be described.
    """
    path = Path(text)
    if path.is_dir():
        return _folder(path)
    if path.suffix == ".safetensors":
        return from_safetensors([_existing(path)])
    if path.suffix == ".json":
        return from_config(_config(_existing(path)), name=text)
    if re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", text):
        return from_function(text, sample)
    if re.fullmatch(r"[\w.-]+", text) and not path.exists():
        if text not in known_types():
            raise ValueError(
                f"{text!r} is neither a file nor a model type known to transformers; "
                "give a config.json, a .safetensors file, module:function, or --params 7B"
            )
        return from_config({"model_type": text}, name=text)
    _existing(path)
    raise ValueError(f"cannot tell what {text!r} is; give a config.json, a .safetensors file or module:function")


def from_count(text: str) -> ModelSpec:
    """Describe a stand-in with exactly ``text`` (``7B``) parameters: matrices as wide as in a Llama-like model of that
    size.
    """
    shapes, shape = llama_like(parse_count(text))
    note = (
        "a stand-in for a model of which only the size is known: square matrices, with the activations of a Llama-like "
        f"decoder of {shape.layers} layers and hidden size {shape.hidden}"
    )
    return from_shapes(shapes, name=text, transformer=shape, notes=(note,))


def from_safetensors(paths: list[Path], config: dict[str, Any] | None = None) -> ModelSpec:
    """Read shapes and dtypes from the headers of a checkpoint's files. Integers and types below 16 bits count as
    frozen.
    """
    params: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for path in paths:
        params |= _header(path)
    tensors = [(name, torch.empty(shape, dtype=dtype, device="meta")) for name, (shape, dtype) in params.items()]
    spec = from_shapes(tensors, name=str(paths[0] if len(paths) == 1 else paths[0].parent))
    if not spec.params:
        raise ValueError(f"{paths[0]} holds no tensors")
    trained = tuple(replace(p, trainable=p.dtype.is_floating_point and p.dtype.itemsize > 1) for p in spec.params)
    return replace(spec, params=trained, transformer=TransformerShape.of_config(config) if config else None)


def from_function(text: str, sample: str | None = None) -> ModelSpec:
    """Call ``module:function`` on the meta device.

    It returns a module, or a pair of a module and a function of batch and sequence that returns the arguments of the
    module's forward.
    """
    module_name, _, name = text.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        function = getattr(importlib.import_module(module_name), name)
        with torch.device("meta"):
            result = function()
    except (Exception, SystemExit) as error:  # whatever the user's code does
        raise ValueError(f"{text} failed: {type(error).__name__}: {error}") from None
    module, inputs = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(module, nn.Module):
        raise ValueError(f"{text} must return a torch.nn.Module, got {type(module).__name__}")
    if sample and inputs:
        raise ValueError(f"{text} returns the arguments of its module itself; leave --sample out")
    called = f"the sample {sample}" if sample else f"the arguments that {text} returns" if inputs else ""
    spec = from_module(module, name=text, inputs=inputs or (sample_inputs(sample) if sample else None))
    return replace(spec, called=called)


def sample_inputs(sample: str) -> Inputs:
    """Return inputs of one tensor per sample: ``3x224x224`` numbers, or ``ids``, a sequence of token ids.

    Raises:
        ValueError: neither of the two.
    """
    if sample == "ids":
        return lambda batch, sequence: (torch.zeros(batch, sequence, dtype=torch.long, device="meta"),)
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", sample):
        raise ValueError(f"cannot read the sample {sample!r}; write its shape as in 3x224x224, or ids for token ids")
    shape = tuple(map(int, sample.split("x")))
    return lambda batch, sequence: (torch.zeros(batch, *shape, device="meta"),)


def _existing(path: Path) -> Path:
    if not path.exists():
        raise ValueError(f"there is no file {path}")
    return path


def _folder(path: Path) -> ModelSpec:
    config = path / "config.json"
    files = sorted(path.glob("*.safetensors"))
    described = _config(config) if config.exists() else None
    if described and "model_type" in described and (not files or transformers(required=False) is not None):
        return from_config(described, name=str(path))
    if files:
        return from_safetensors(files, described)
    raise ValueError(f"{path} holds neither a config.json nor .safetensors files")


def _config(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a model's configuration, which is a JSON object")
    return content


def _header(path: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Read name, shape and dtype of each tensor from the header of a safetensors file, and nothing else of it."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _LONGEST_HEADER:
                raise ValueError(f"its header would have {length} bytes")
            header = json.loads(file.read(length))
        if "daypack" in header.get("__metadata__", {}):
            raise ValueError("it holds optimizer state; give the weights of the model, or its config.json")
        return {
            name: (tuple(map(int, entry["shape"])), SAFETENSORS[entry["dtype"]])
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ValueError(f"{path} is not a safetensors file of a model's weights: {error}") from None
