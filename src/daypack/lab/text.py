"""Predicting the next byte of a text with a decoder-only transformer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from daypack.lab.corpus import Corpus, load_corpus
from daypack.lab.models import Transformer, build_model

if TYPE_CHECKING:
    from daypack.lab.config import TrainConfig


@dataclass(frozen=True)
class TextTask:
    """A corpus as a task."""

    corpus: Corpus

    @classmethod
    def load(cls, config: TrainConfig) -> TextTask:
        """Read the corpus that `config.data` names.

        Raises:
            ValueError: see `load_corpus`.
        """
        return cls(load_corpus(config.data))

    @property
    def source(self) -> str:
        return self.corpus.source

    @property
    def fingerprint(self) -> str:
        return self.corpus.fingerprint

    @property
    def about(self) -> str:
        return f"{self.source}: {len(self.corpus.train) / 1e6:.1f} MB of text"

    def model(self, config: TrainConfig) -> Transformer:
        """Build a transformer whose weights depend on `config.model` and `config.seed` alone.

        Raises:
            ValueError: the corpus is too small for `config.context`.
        """
        self.corpus.require(config.context)
        return build_model(config.model, config.seed)

    def batch(self, config: TrainConfig, step: int) -> Tensor:
        """Draw the windows of one step: `[config.batch, config.context + 1]`."""
        return self.corpus.batch(config.seed, step, config.batch, config.context)

    def held_out(self, config: TrainConfig) -> Iterator[Tensor]:
        """Yield the same windows at every call, `config.eval_tokens` predicted bytes of them."""
        return self.corpus.validation_batches(config.eval_tokens, 2 * config.batch, config.context)
