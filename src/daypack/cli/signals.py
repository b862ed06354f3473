"""Ctrl-C and SIGTERM: as a request that is met between two steps, or as an exception."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


class StopRequest:
    """While entered, the first SIGINT or SIGTERM only sets `signal`; a second SIGINT interrupts at once.

    Attributes:
        signal: number of the signal that came, or None.
    """

    def __init__(self) -> None:
        self.signal: int | None = None

    def __enter__(self) -> "StopRequest":
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = number


class Terminated(KeyboardInterrupt):
    """SIGTERM, where it is to end a job as Ctrl-C does."""


@contextlib.contextmanager
def terminated() -> Iterator[None]:
    """Make SIGTERM raise `Terminated` inside the block, so that a job can clean up or say what it left."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
