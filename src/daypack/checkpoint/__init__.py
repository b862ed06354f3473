"""Optimizer state as files, and as the state of another optimizer or another architecture."""

from daypack.checkpoint.live import load_file, save_file
from daypack.checkpoint.shards import consolidate, split

__all__ = ["consolidate", "load_file", "save_file", "split"]
