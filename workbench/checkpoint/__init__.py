"""Checkpoints: safetensors in and out, every tensor and every byte accounted for.

>>> checkpoint = read_checkpoint("data/miniature")
>>> print(checkpoint.accounting.summary())
>>> write_checkpoint("copy", checkpoint.config, checkpoint.tensors)
"""

from workbench.checkpoint.accounting import Accounting, AccountingRow, FileBytes, NarrowedTensor
from workbench.checkpoint.layout import SKIP_REASONS, canonical_name, expected_tensors
from workbench.checkpoint.read import Checkpoint, read_checkpoint
from workbench.checkpoint.write import write_checkpoint

__all__ = [
    "SKIP_REASONS",
    "Accounting",
    "AccountingRow",
    "Checkpoint",
    "FileBytes",
    "NarrowedTensor",
    "canonical_name",
    "expected_tensors",
    "read_checkpoint",
    "write_checkpoint",
]
