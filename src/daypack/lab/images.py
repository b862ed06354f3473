"""Handwritten digits that ship with scikit-learn, and a small convolutional network for them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from daypack.lab.classifier import Classifier, built
from daypack.lab.corpus import step_generator

if TYPE_CHECKING:
    from daypack.lab.config import TrainConfig

SIDE, CLASSES = 8, 10
WHITE = 16  # the largest value of a pixel
_HELD_OUT = 5  # the last one part of this many is validation


def presets() -> dict[str, int]:
    """Return the channels of the first convolution by size: about 15, 59 and 233 thousand parameters."""
    return {"tiny": 16, "small": 32, "medium": 64}


class ConvNet(Classifier):
    """Three 3 x 3 convolutions with group norm, two poolings, one linear layer."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, channels, 3, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(4, channels)
        self.conv2 = nn.Conv2d(channels, 2 * channels, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(4, 2 * channels)
        self.conv3 = nn.Conv2d(2 * channels, 2 * channels, 3, padding=1, bias=False)
        self.norm3 = nn.GroupNorm(4, 2 * channels)
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(2 * channels * (SIDE // 4) ** 2, CLASSES)

    def split(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Return the pixels `[n, 64]` and the digit of each row of `batch`, `[n, 65]`."""
        return batch[:, :-1], batch[:, -1]

    def forward(self, pixels: Tensor) -> Tensor:
        """Compute logits `[n, 10]` of images `[n, 64]` of integers from 0 to 16."""
        x = pixels.to(self.head.weight.dtype).div(WHITE).view(-1, 1, SIDE, SIDE)
        x = self.norm1(self.conv1(x)).relu()
        x = self.pool(self.norm2(self.conv2(x)).relu())
        x = self.pool(self.norm3(self.conv3(x)).relu())
        return self.head(x.flatten(1))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class ImageTask:
    """Ten classes of 8 x 8 images.

    Attributes:
        train: int64 `[images, 65]`: pixels, then the digit.
        validation: the last fifth, likewise.
        source: what the images are, for people.
        fingerprint: 16 hexadecimal digits that identify them.
    """

    train: Tensor
    validation: Tensor
    source: str
    fingerprint: str

    @classmethod
    def load(cls, config: TrainConfig) -> ImageTask:
        """Read the images.

        Raises:
            ValueError: scikit-learn is not installed.
        """
        try:
            from sklearn.datasets import load_digits
        except ModuleNotFoundError as error:
            raise ValueError(f"task 'images' needs {error.name}; pip install 'daypack[tasks]'") from None
        pixels, digits = load_digits(return_X_y=True)
        rows = torch.cat((torch.from_numpy(pixels), torch.from_numpy(digits)[:, None]), 1).to(torch.int64)
        fingerprint = hashlib.sha256(rows.numpy().tobytes()).hexdigest()[:16]
        held_out = len(rows) // _HELD_OUT
        return cls(rows[:-held_out], rows[-held_out:], "scikit-learn's handwritten digits", fingerprint)

    @property
    def about(self) -> str:
        return f"{self.source}: {len(self.train):,} images"

    def model(self, config: TrainConfig) -> ConvNet:
        """Build a network whose weights depend on `config.model` and `config.seed` alone."""
        return cast(ConvNet, built(lambda: ConvNet(presets()[config.model]), config.seed))

    def batch(self, config: TrainConfig, step: int) -> Tensor:
        """Draw the images of one step, a function of the seed and the step: `[config.batch, 65]`."""
        generator = step_generator(config.seed, step)
        return self.train[torch.randint(len(self.train), (config.batch,), generator=generator)]

    def held_out(self, config: TrainConfig) -> Iterator[Tensor]:
        """Yield all images of the held-out part, the same at every call."""
        yield self.validation
