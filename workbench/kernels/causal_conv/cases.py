"""What every backend of the causal convolution is held to: see `spec` for the contract."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from workbench import taps
from workbench.kernels.causal_conv import spec
from workbench.kernels.contract import (
    Arguments,
    Contract,
    NanProbe,
    bounds_of,
    normal,
    rounding_limit,
    rounding_text,
    same_dtype,
)


def example(
    lengths: Sequence[int], width: int, channels: int = 20, window: bool = False, rows: int = 1, packed: bool = False
) -> dict[str, Any]:
    """A call on `rows` sequences of one length, or on packed ones of several; drawn, with a window where asked for."""
    sequences = len(lengths) if packed else rows
    return {
        "x": normal(1, rows, sum(lengths), channels),
        "weight": normal(2, channels, width),
        "window": normal(3, sequences, width - 1, channels) if window else None,
        "cu_seqlens": bounds_of(*lengths) if packed else None,
    }


@functools.cache
def cases() -> Mapping[str, Arguments]:
    return {
        "one token": example([1], 4),
        "one token of three sequences, with a window": example([1], 4, window=True, rows=3),
        "shorter than the window": example([2], 4, window=True),
        "31": example([31], 4, rows=2, window=True),
        "33": example([33], 4, channels=7, rows=2),
        "130, with a window": example([130], 4, rows=2, window=True),
        "64 channels, with a window": example([31], 4, channels=64, rows=2, window=True),
        "64 channels, one token of three sequences": example([1], 4, channels=64, window=True, rows=3),
        "width 1": example([40], 1, channels=3, window=True),
        "width 2": example([40], 2, channels=1),
        "width 5": example([40], 5, channels=33, window=True),
        "64 channels": example([37], 4, channels=64, rows=2, window=True),
        "64 channels, packed": example([5, 30, 1], 4, channels=64, window=True, packed=True),
        "packed": example([5, 60, 1, 2, 40], 4, packed=True),
        "packed, with windows": example([5, 60, 1, 2, 40], 4, window=True, packed=True),
        "packed with empty ones": example([0, 1, 0, 36, 0], 4, window=True, packed=True),
        "packed of one": example([64], 3, packed=True),
        "packed single tokens": example([1, 1, 1], 4, window=True, packed=True),
    }


@functools.cache
def probes() -> Mapping[str, NanProbe]:
    """A NaN reaches the width - 1 tokens after it, the window, and neither another channel nor another sequence."""
    packed = example([5, 60, 1, 40], 4, window=True, packed=True)
    packed["x"][0, 5:65] = math.nan
    packed["window"][1] = math.nan
    one = example([40], 4, rows=2, window=True)
    one["x"][1, 17, 3] = math.nan
    last = example([40], 4, rows=2, window=True)
    last["x"][0, 39, 19] = math.nan
    token = example([1], 4, rows=3, window=True)
    token["window"][1, 0, 7] = math.nan
    return {
        "a packed sequence and its window": NanProbe(arguments=packed),
        "one channel of one token": NanProbe(arguments=one),
        "the last token": NanProbe(arguments=last),
        "the window of one token": NanProbe(arguments=token),
    }


def limit(dtype: torch.dtype, output: str) -> float:
    """The window is inputs as they were."""
    return 0.0 if output == "window" else rounding_limit(1)(dtype, output)


CONTRACTS = (
    Contract(
        op=spec.OP, spec=spec, outputs=("y", "window"), cases=cases, limit=limit,
        tolerance=f"y {rounding_text(1)}; the window exactly", output_dtype=same_dtype, may_update=("window",),
        probes=probes, flagged={taps.GDN_CONV: "y"},
    ),
)  # fmt: skip
