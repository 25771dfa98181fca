"""What every backend of the two norms is held to: see `spec` for the contracts."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import torch

from workbench import taps
from workbench.kernels.contract import (
    Arguments,
    Contract,
    NanProbe,
    normal,
    rounding_limit,
    rounding_text,
    same_dtype,
)
from workbench.kernels.norms import spec

EPS = 1e-6
SHAPES = {
    "2 x 5 x 33": (2, 5, 33),
    "one token": (1, 1, 64),
    "one channel": (3, 1, 1),
    "heads": (2, 3, 4, 24),
    "heads of 128": (1, 5, 4, 128),
    "2048": (1, 3, 2048),
    "130": (1, 130, 2),
}


@functools.cache
def rms_norm() -> Mapping[str, Arguments]:
    drawn = {
        name: {"x": normal(1, *shape), "weight": 0.3 * normal(2, shape[-1]), "eps": EPS}
        for name, shape in SHAPES.items()
    }
    return drawn | {
        # Below sqrt(eps) and far above it, and a row of zeros.
        "tiny": {"x": 1e-4 * normal(1, 2, 3, 16), "weight": normal(2, 16), "eps": EPS},
        "large": {"x": 100.0 * normal(1, 2, 3, 16), "weight": normal(2, 16), "eps": EPS},
        "a large eps": {"x": normal(1, 2, 3, 16), "weight": normal(2, 16), "eps": 0.5},
        "zeros": {"x": torch.zeros(1, 2, 16), "weight": normal(2, 16), "eps": EPS},
        "a weight of -1": {"x": normal(1, 1, 3, 16), "weight": normal(2, 16).clamp(max=-1.0), "eps": EPS},
    }


@functools.cache
def gated_rms_norm() -> Mapping[str, Arguments]:
    return {name: {**case, "gate": 3.0 * normal(4, *case["x"].shape)} for name, case in rms_norm().items()}


def _probe(case: Arguments, name: str, *index: int) -> NanProbe:
    changed = case[name].clone()
    changed[index] = math.nan
    return NanProbe(arguments={**case, name: changed}, clean=case)


@functools.cache
def rms_norm_probes() -> Mapping[str, NanProbe]:
    case = rms_norm()["2 x 5 x 33"]
    return {"one row": _probe(case, "x", 1, 2, 30), "a channel of the weight": _probe(case, "weight", 32)}


@functools.cache
def gated_rms_norm_probes() -> Mapping[str, NanProbe]:
    case = gated_rms_norm()["2 x 5 x 33"]
    return {
        "one row": _probe(case, "x", 1, 2, 30),
        "a gate": _probe(case, "gate", 0, 4, 7),
        "a channel of the weight": _probe(case, "weight", 32),
    }


CONTRACTS = (
    Contract(
        op=spec.RMS_NORM, spec=spec, outputs=("y",), cases=rms_norm, limit=rounding_limit(1),
        tolerance=rounding_text(1), output_dtype=same_dtype, probes=rms_norm_probes,
    ),
    Contract(
        op=spec.GATED_RMS_NORM, spec=spec, outputs=("y",), cases=gated_rms_norm, limit=rounding_limit(2),
        tolerance=rounding_text(2), output_dtype=same_dtype, probes=gated_rms_norm_probes,
        flagged={taps.GDN_NORM: "y"},
    ),
)  # fmt: skip
