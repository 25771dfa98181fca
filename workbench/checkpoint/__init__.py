"""Checkpoints: safetensors in and out, every tensor and every byte accounted for.

>>> checkpoint = read_checkpoint("data/miniature")
>>> print(checkpoint.accounting.summary())
>>> write_checkpoint("copy", checkpoint.config, checkpoint.tensors)
"""

from workbench.checkpoint.accounting import Accounting, AccountingRow, FileBytes, NarrowedTensor
from workbench.checkpoint.expert_layouts import (
    LAYOUTS,
    ExpertSizes,
    Layout,
    convert,
    detect_layout,
    from_canonical,
    layout_named,
    to_canonical,
)
from workbench.checkpoint.layout import SKIP_REASONS, canonical_name, expected_tensors
from workbench.checkpoint.read import Checkpoint, expert_assumptions, read_checkpoint
from workbench.checkpoint.rewrite import Conversion, convert_experts
from workbench.checkpoint.write import write_checkpoint

__all__ = [
    "LAYOUTS",
    "SKIP_REASONS",
    "Accounting",
    "AccountingRow",
    "Checkpoint",
    "Conversion",
    "ExpertSizes",
    "FileBytes",
    "Layout",
    "NarrowedTensor",
    "canonical_name",
    "convert",
    "convert_experts",
    "detect_layout",
    "expected_tensors",
    "expert_assumptions",
    "from_canonical",
    "layout_named",
    "read_checkpoint",
    "to_canonical",
    "write_checkpoint",
]
