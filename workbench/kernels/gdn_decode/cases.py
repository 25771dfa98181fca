"""What every backend of the decode step is held to: see `spec` for the contract.

In place, and with slots, a call changes what it is given: that is tested beside the backends, not here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch

from workbench import taps
from workbench.kernels.contract import Arguments, Contract, NanProbe, rounding_limit
from workbench.kernels.gdn_decode import spec

SHAPES: dict[str, dict[str, int]] = {
    "two value heads for a key head": {},
    "one value head for a key head": {"key_heads": 3, "value_heads": 3},
    "three value heads for a key head": {"value_heads": 6, "batch": 3},
    "one sequence": {"batch": 1},
    "no sequence": {"batch": 0},
    "keys wider than values": {"key_dim": 24, "value_dim": 8},
    "values wider than keys": {"key_dim": 5, "value_dim": 33},
    "single channels": {"key_dim": 1, "value_dim": 1},
    "width 1": {"width": 1},
    "width 2": {"width": 2, "batch": 1},
    "width 5": {"width": 5, "batch": 1},
    "heads of 128": {"key_heads": 1, "value_heads": 2, "key_dim": 128, "value_dim": 128},
}
#: Values of the narrow dtypes are rounded so often on the way to the output, and to the state, at most.
ROUNDINGS, STATE_ROUNDINGS = 5, 3
LIMIT_FP64, LIMIT_FP32 = 1e-12, 3e-6


@functools.cache
def cases() -> Mapping[str, Arguments]:
    found: dict[str, Arguments] = {
        name: spec.example(seed=seed, **sizes) for seed, (name, sizes) in enumerate(SHAPES.items())
    }
    base = spec.example(seed=20)
    found["from zero"] = {**base, "window": torch.zeros_like(base["window"]), "state": torch.zeros_like(base["state"])}
    found["gates that forget"] = {**base, "raw_gate": base["raw_gate"] + 30.0}
    found["gates that keep"] = {**base, "raw_gate": base["raw_gate"] - 40.0}
    found["channels of zeros"] = {**found["from zero"], "qkv": torch.zeros_like(base["qkv"]), "state": base["state"]}
    return found


@functools.cache
def probes() -> Mapping[str, NanProbe]:
    """A NaN shows in the heads that read it, and nowhere else."""
    base = spec.example(batch=2, seed=30)
    places = {
        "a query channel": ("qkv", (0, 3)), "a key channel of the window": ("window", (1, 0, 40)),
        "a value channel": ("qkv", (1, 64 + 30)), "a gate": ("raw_gate", (0, 2)),
        "a write strength": ("raw_beta", (1, 3)), "a state": ("state", (0, 1, 4, 7)),
        "an output gate": ("z", (1, 2, 5)),
    }  # fmt: skip
    found = {}
    for label, (name, index) in places.items():
        changed: dict[str, Any] = {**base, name: base[name].clone()}
        changed[name][index] = math.nan
        found[label] = NanProbe(arguments=changed, clean=base)
    return found


def limit(dtype: torch.dtype, output: str) -> float:
    """The window is inputs as they were."""
    if output == "window":
        return 0.0
    if dtype in (torch.float64, torch.float32):
        return LIMIT_FP64 if dtype == torch.float64 else LIMIT_FP32
    return rounding_limit(ROUNDINGS if output == "out" else STATE_ROUNDINGS)(dtype, output)


def output_dtype(dtype: torch.dtype, output: str) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32) if output == "state" else dtype


CONTRACTS = (
    Contract(
        op=spec.OP, spec=spec, outputs=("out", "window", "state"), cases=cases, limit=limit, output_dtype=output_dtype,
        tolerance=f"{LIMIT_FP64:g} in float64, {LIMIT_FP32:g} in float32; in bfloat16 and float16 {ROUNDINGS} eps / 2 "
        f"of the output and {STATE_ROUNDINGS} eps / 2 of the state, of values that are rounded to them; the window "
        "exactly",
        wide=("A_log", "dt_bias", "state"), probes=probes,
        flagged={taps.GDN_STATE: "state", taps.GDN_NORM: "out"},
    ),
)  # fmt: skip
