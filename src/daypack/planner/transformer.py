"""Sizes of a decoder transformer: the formula of its activations, and a stand-in where only a count is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TransformerShape:
    """What the activations of a transformer depend on.

    Attributes:
        experts: experts that each token visits; 1 for a dense MLP.
        gated: whether the MLP has a gate (SwiGLU) beside its up projection.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocabulary: int
    experts: int = 1
    gated: bool = True

    def layer_bytes(self, batch: int, sequence: int, itemsize: int, *, flash: bool) -> int:
        """Return the bytes that one layer keeps for its backward pass.

        Per token: of two norms the input, the normalised values in fp32 and the output; queries, keys, values and their
        rotated copies, the attention's output and log-sum-exp; three or four MLP widths. Without a flash kernel also
        the attention matrix, in fp32.
        """
        tokens = batch * sequence
        width, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        norms = tokens * self.hidden * (4 * itemsize + (8 if itemsize < 4 else 4))
        attention = tokens * (3 * width + 3 * kv) * itemsize + tokens * self.heads * 4
        matrix = 0 if flash else 4 * batch * self.heads * sequence * sequence
        mlp = tokens * self.experts * self.mlp * (4 if self.gated else 3) * itemsize
        return norms + attention + matrix + mlp

    def saved_bytes(self, batch: int, sequence: int, itemsize: int, *, flash: bool, checkpointing: bool) -> int:
        """Return the bytes kept for the backward pass: every layer's, or with checkpointing only its input, and the
        log-probabilities in fp32.

        Error: within 20 % of the measurement for Llama-like models without dropout
        (`tests/planner/test_activations.py`); the planner measures wherever it has a module that runs.
        """
        tokens = batch * sequence
        layer = tokens * self.hidden * itemsize
        if not checkpointing:
            layer = self.layer_bytes(batch, sequence, itemsize, flash=flash)
        return self.layers * layer + tokens * self.vocabulary * 4

    def peak_bytes(self, batch: int, sequence: int, itemsize: int, *, flash: bool, checkpointing: bool) -> int:
        """Return the bytes at the worst moment of the backward pass: its beginning, with two gradients of the fp32
        logits, or with checkpointing a layer that was computed anew, if that is more. Error: 10 %, and 20 % with
        checkpointing.
        """
        saved = self.saved_bytes(batch, sequence, itemsize, flash=flash, checkpointing=checkpointing)
        logits = batch * sequence * self.vocabulary * 4
        again = 0
        if checkpointing:
            matrix = 0 if flash else 4 * batch * self.heads * sequence * sequence
            again = self.layer_bytes(batch, sequence, itemsize, flash=flash) + matrix - logits
        return saved + max(2 * logits, again)

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> TransformerShape | None:
        """Read the sizes from a Hugging Face ``config.json``; None where it does not describe a transformer."""

        def get(*names: str) -> Any:
            return next((config[name] for name in names if config.get(name) is not None), None)

        hidden, layers = get("hidden_size", "n_embd", "d_model"), get("num_hidden_layers", "n_layer", "num_layers")
        heads, vocabulary = get("num_attention_heads", "n_head", "num_heads"), get("vocab_size")
        if not all(type(value) is int and value > 0 for value in (hidden, layers, heads, vocabulary)):
            return None
        mlp = get("moe_intermediate_size", "intermediate_size", "n_inner", "d_ff") or 4 * hidden
        kv, width = get("num_key_value_heads") or heads, get("head_dim") or hidden // heads
        experts = get("num_experts_per_tok") or 1
        gated = str(get("hidden_act", "activation_function") or "silu") in ("silu", "swish")
        sizes = (layers, hidden, heads, kv, width, mlp, vocabulary, experts)
        if not all(type(value) is int and value > 0 for value in sizes):
            return None
        return cls(*sizes, gated=gated)


#: Width over depth of published decoders (Llama 7 B: 4096 / 32), and the size of their heads.
ASPECT, HEAD = 128, 128
LLAMA_VOCABULARY = 32000


def llama_like(parameters: int) -> tuple[list[tuple[str, tuple[int, ...]]], TransformerShape]:
    """Return shapes of exactly ``parameters`` elements (square matrices, one shorter matrix and one vector), and the
    sizes of a Llama-like decoder that has about as many. The published 7 B, 13 B and 70 B have this width within 15 %.
    """
    hidden = max(HEAD, round((parameters * ASPECT / 12) ** (1 / 3) / HEAD) * HEAD)
    layers = max(1, round(parameters / (12 * hidden * hidden)))
    whole, rest = divmod(parameters, hidden * hidden)
    rows, vector = divmod(rest, hidden)
    shapes: list[tuple[str, tuple[int, ...]]] = [
        (f"layers.{i * layers // whole}.{i}", (hidden, hidden)) for i in range(whole)
    ]
    shapes += [("rest", (rows, hidden))] if rows else []
    shapes += [("vector", (vector,))] if vector else []
    heads = hidden // HEAD
    mlp = round(8 * hidden / 3 / HEAD) * HEAD
    return shapes, TransformerShape(layers, hidden, heads, heads, HEAD, mlp, LLAMA_VOCABULARY)
