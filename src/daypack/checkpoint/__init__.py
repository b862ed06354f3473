"""Optimizer state as files, and as the state of another optimizer or another architecture."""

from daypack.checkpoint.changed_model import transplant
from daypack.checkpoint.conversion import convert
from daypack.checkpoint.report import Report
from daypack.checkpoint.rewarm import Rewarm
from daypack.checkpoint.save_load import load_file, save_file
from daypack.checkpoint.shards import consolidate, split

__all__ = ["Report", "Rewarm", "consolidate", "convert", "load_file", "save_file", "split", "transplant"]
