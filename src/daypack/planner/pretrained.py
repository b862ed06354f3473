"""Models of Hugging Face transformers, built on the meta device from a configuration. Nothing is downloaded."""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from daypack.planner.model import Inputs, ModelSpec, from_module
from daypack.planner.transformer import TransformerShape
from daypack.planner.units import parse_dtype

_LANGUAGE = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration", "ForSeq2SeqLM")


def transformers(*, required: bool = True) -> Any:
    """Return the library; if it is missing, None, or with ``required`` raise ValueError."""
    try:
        with quiet():
            return importlib.import_module("transformers")
    except ImportError:
        if required:
            raise ValueError(
                "a model by its config or type needs transformers; pip install 'daypack[models]'"
            ) from None
        return None


def known_types() -> frozenset[str]:
    """Return the model types, such as ``llama``."""
    library = transformers()
    return frozenset(library.CONFIG_MAPPING.keys())


def from_config(config: Mapping[str, Any], name: str) -> ModelSpec:
    """Describe the model of a ``config.json``, given its content; weights in the dtype that it names, else fp32.

    Raises:
        ValueError: transformers is missing, or cannot build it.
    """
    library = transformers()
    described = dict(config)
    kind = described.pop("model_type", None)
    if not isinstance(kind, str):
        raise ValueError(f"{name} names no model_type; it must be a Hugging Face model configuration")
    dtype = parse_dtype(str(config.get("dtype") or config.get("torch_dtype") or "fp32"))
    try:
        with quiet():
            settings = library.AutoConfig.for_model(kind, **described)
            settings.use_cache = False  # a cache is for generation
            if (
                getattr(settings, "is_encoder_decoder", False)
                and getattr(settings, "decoder_start_token_id", None) is None
            ):
                settings.decoder_start_token_id = 0
            with torch.device("meta"):
                module = class_for(library, settings)(settings)
    except Exception as error:  # the library's own errors are of every type
        text = " ".join(str(error).split())[:300]
        raise ValueError(f"transformers cannot build {name}: {type(error).__name__}: {text}") from None
    return describe(module, name, dtype, TransformerShape.of_config({**settings.to_dict()}))


def describe(
    module: nn.Module, name: str | None = None, dtype: torch.dtype | None = None, shape: TransformerShape | None = None
) -> ModelSpec:
    """Describe a model of transformers, with the inputs that it is trained on."""
    if dtype is not None:
        for p in module.parameters():
            p.data = p.data.to(dtype)
    context = getattr(module.config, "max_position_embeddings", None)
    spec = from_module(module, name=name, inputs=_inputs(module), transformer=shape)
    return replace(spec, context=context if isinstance(context, int) and context > 0 else None)


def class_for(library: Any, settings: Any) -> Any:
    """Return the class that the configuration names, else the one for training a model of its type from scratch."""
    for name in getattr(settings, "architectures", None) or ():
        found = getattr(library, str(name), None)
        if found is not None:
            return found
    autos = ["AutoModelForMaskedLM", "AutoModelForCausalLM", "AutoModelForImageClassification", "AutoModel"]
    if getattr(settings, "is_encoder_decoder", False):
        autos.insert(0, "AutoModelForSeq2SeqLM")
    for auto in autos:
        mapping = getattr(library, auto)._model_mapping
        if type(settings) in mapping:
            found = mapping[type(settings)]
            return found[0] if isinstance(found, tuple) else found
    raise ValueError(f"no model is known for {type(settings).__name__}")


def _inputs(module: Any) -> Inputs | None:
    """Return token ids or pixels, with labels where the model computes a loss from them."""
    kind, settings = type(module).__name__, module.config
    main = getattr(module, "main_input_name", "")
    labels = "labels" in inspect.signature(module.forward).parameters
    channels: Any = getattr(settings, "num_channels", None)
    side: Any = getattr(settings, "image_size", None)
    if main != "input_ids" and not (main == "pixel_values" and isinstance(channels, int) and isinstance(side, int)):
        return None

    def inputs(batch: int, sequence: int) -> dict[str, Any]:
        ids = torch.zeros(batch, sequence, dtype=torch.long, device="meta")
        given: dict[str, Any] = {"input_ids": ids}
        if main == "pixel_values":
            given = {"pixel_values": torch.zeros(batch, channels, side, side, device="meta")}
        if labels and kind.endswith(_LANGUAGE):
            given["labels"] = ids
        elif labels and kind.endswith(("ForImageClassification", "ForSequenceClassification")):
            given["labels"] = ids[:, 0]
        elif getattr(settings, "is_encoder_decoder", False) and main == "input_ids":
            given["decoder_input_ids"] = ids
        return given

    return inputs


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the library's log lines about options that matter at run time only."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
