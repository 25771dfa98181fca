"""Watching a model compute: every tap point of every forward pass becomes one row of a table.

>>> with workbench.trace(model, keep=["*.gdn.log_decay"]) as trace:
...     model(input_ids)
>>> trace.table[["tap", "absmax", "frac_nan", "first_bad"]]
>>> trace.tensors["layers.00.gdn.log_decay"]
"""

from workbench.tracing.observer import COLUMNS, Trace, trace
from workbench.tracing.statistics import NEAR_LIMIT_SHARE, Statistics, describe

__all__ = ["COLUMNS", "NEAR_LIMIT_SHARE", "Statistics", "Trace", "describe", "trace"]
