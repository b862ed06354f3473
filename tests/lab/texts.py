"""A small text that a model can learn from, and small runs on it."""

from __future__ import annotations

import random
from typing import Any

from daypack.lab import TextTask, TrainConfig
from daypack.lab.corpus import split_corpus


def text(size: int = 24_000) -> bytes:
    """Repeatable words, at least `size` bytes."""
    words = ["state", "of", "an optimizer", "takes", "one byte", "per parameter", "and trains", "like before\n"]
    source = random.Random(7)
    return " ".join(source.choice(words) for _ in range(size // 3)).encode()[:size]


def task() -> TextTask:
    return TextTask(split_corpus(text(), "a test"))


def config(**changes: Any) -> TrainConfig:
    """A run of 12 steps, a few milliseconds each."""
    small: dict[str, Any] = {
        "model": "tiny",
        "steps": 12,
        "batch": 4,
        "context": 16,
        "warmup": 3,
        "eval_every": 4,
        "eval_tokens": 256,
        "threads": 1,
    }
    return TrainConfig(**{**small, **changes})
