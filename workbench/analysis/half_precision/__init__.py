"""Float16 readiness of a checkpoint: weights, stream and activations against 65504, and a remedy proven by a rerun.

>>> report = fp16_readiness("data/miniature", input_ids)
>>> report.verdict.fix
"""

from workbench.analysis.half_precision.islands import Islands, Part, build
from workbench.analysis.half_precision.readiness import (
    REMEDY_COLUMNS,
    ROUNDING_FACTOR,
    Readiness,
    Remedy,
    fp16_readiness,
)
from workbench.analysis.half_precision.watch import COLUMNS, Watch, watched
from workbench.analysis.half_precision.weights import (
    WEIGHT_COLUMNS,
    Scaled,
    StreamPlan,
    UnitPlan,
    pairs_of,
    weight_table,
)
from workbench.analysis.half_precision.wording import NOT_FINITE_IN_FLOAT32, OVERFLOW, UNDERFLOW

__all__ = [
    "COLUMNS",
    "NOT_FINITE_IN_FLOAT32",
    "OVERFLOW",
    "REMEDY_COLUMNS",
    "ROUNDING_FACTOR",
    "UNDERFLOW",
    "WEIGHT_COLUMNS",
    "Islands",
    "Part",
    "Readiness",
    "Remedy",
    "Scaled",
    "StreamPlan",
    "UnitPlan",
    "Watch",
    "build",
    "fp16_readiness",
    "pairs_of",
    "watched",
    "weight_table",
]
