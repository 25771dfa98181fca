"""What every backend of the projection is held to: see `spec` for the contract."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

from workbench.kernels.contract import (
    Arguments,
    Contract,
    NanProbe,
    normal,
    rounding_limit,
    rounding_text,
    same_dtype,
)
from workbench.kernels.linear import spec


@functools.cache
def cases() -> Mapping[str, Arguments]:
    return {
        "one row": {"x": normal(1, 1, 1, 33), "weight": normal(2, 7, 33)},
        "a vector": {"x": normal(1, 9), "weight": normal(2, 5, 9)},
        "31 rows": {"x": normal(1, 31, 20), "weight": normal(2, 3, 20)},
        "33 rows": {"x": normal(1, 1, 33, 20), "weight": normal(2, 41, 20)},
        "two batches": {"x": normal(1, 2, 65, 64), "weight": normal(2, 96, 64)},
        "40 rows of 256": {"x": normal(1, 40, 256), "weight": normal(2, 64, 256)},
        "one output": {"x": normal(1, 2, 40, 17), "weight": normal(2, 1, 17)},
        "one input": {"x": normal(1, 40, 1), "weight": normal(2, 6, 1)},
        "strided": {"x": normal(1, 20, 3, 40).transpose(0, 2), "weight": normal(2, 20, 9).T},
    }


@functools.cache
def probes() -> Mapping[str, NanProbe]:
    """A NaN in a row of x shows in that row, one in a row of the weight in that channel of every row."""
    x, weight = normal(1, 2, 40, 20), normal(2, 41, 20)
    row, matrix = x.clone(), weight.clone()
    row[1, 37, 19] = math.nan
    matrix[40, 3] = math.nan
    return {
        "a row of x": NanProbe(arguments={"x": row, "weight": weight}),
        "a row of the weight": NanProbe(arguments={"x": x, "weight": matrix}),
        "the only row": NanProbe(arguments={"x": row[1:, 37:38], "weight": weight}),
    }


CONTRACTS = (
    Contract(
        op=spec.OP, spec=spec, outputs=("y",), cases=cases, limit=rounding_limit(1), tolerance=rounding_text(1),
        output_dtype=same_dtype, probes=probes,
    ),
)  # fmt: skip
