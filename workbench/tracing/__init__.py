"""Watching a model compute, and changing what it computes: every tap point of every forward pass is a row of a table.

>>> with workbench.trace(model, keep=["*.gdn.log_decay"]) as trace:
...     model(input_ids)
>>> trace.table[["tap", "absmax", "frac_nan", "first_bad"]]
>>> trace.tensors["layers.00.gdn.log_decay"]
"""

from workbench.tracing.flags import Flags
from workbench.tracing.intervention import FIELD_INTERVENTIONS, Intervention, intervene
from workbench.tracing.observer import COLUMNS, Trace, trace
from workbench.tracing.selection import Selection
from workbench.tracing.statistics import NEAR_LIMIT_SHARE, Statistics, describe, exponent_histogram

__all__ = [
    "COLUMNS", "FIELD_INTERVENTIONS", "NEAR_LIMIT_SHARE", "Flags", "Intervention", "Selection", "Statistics", "Trace",
    "describe", "exponent_histogram", "intervene", "trace",
]  # fmt: skip
