"""What every backend of the gated delta rule is held to: see `spec` for the contract, `extremes` for hard inputs."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from workbench import taps
from workbench.kernels.contract import Arguments, Contract, NanProbe, bounds_of, tokens_text
from workbench.kernels.gated_delta_rule import spec
from workbench.kernels.gated_delta_rule.extremes import LIMIT, VALID_EXTREMES
from workbench.numerics import PRESETS

#: Largest error in float64, and of a gradient in float64 and float32; a gate's gradient is a sum of terms of both signs
#: that nearly cancel, and keeps fewer digits.
LIMIT_FP64, GRADIENT_FP64, GRADIENT_FP32, GATE_GRADIENT_FP32 = 1e-12, 1e-11, 1e-5, 1e-3

#: Lengths around a chunk of 64 and around none.
LENGTHS = (1, 2, 7, 63, 64, 65, 127, 128, 130)
SHAPES = {
    "one value head for a key head": {"key_heads": 3, "value_heads": 3},
    "two value heads for a key head": {"key_heads": 2, "value_heads": 4},
    "three value heads for a key head": {"key_heads": 2, "value_heads": 6, "batch": 3},
    "one key head": {"key_heads": 1, "value_heads": 2, "batch": 2},
    "keys wider than values": {"key_dim": 24, "value_dim": 8},
    "values wider than keys": {"key_dim": 5, "value_dim": 33},
    "single channels": {"key_dim": 1, "value_dim": 1},
    "square heads": {"key_dim": 16, "value_dim": 16, "batch": 2, "log_decay": -0.05},  # no shape protects the state
    "heads of 128": {"key_heads": 1, "key_dim": 128, "value_heads": 2, "value_dim": 128},  # those of the libraries
}
SERVED = {"key_heads": 1, "value_heads": 2, "key_dim": 128, "value_dim": 128}
PACKED = {
    "unsorted": (37, 63, 1, 130, 64),
    "empty ones": (0, 5, 0, 0, 66, 0),
    "single tokens": (1, 1, 1, 1),
    "an empty one and a token": (0, 1),
    "one": (97,),
    "falling": (129, 65, 64, 2),
}


WITHIN_A_CHUNK = "in a chunk a factor of 0 above the diagonal times NaN is NaN, so earlier tokens may show it too"


def random_state(sequences: int, inputs: Mapping[str, Tensor], seed: int = 5) -> Tensor:
    """A drawn state for each sequence, in fp32, or fp64 where the inputs are."""
    generator = torch.Generator().manual_seed(seed)
    key_dim, (value_heads, value_dim) = inputs["k"].shape[-1], inputs["v"].shape[2:]
    state = torch.randn(sequences, value_heads, key_dim, value_dim, generator=generator)
    return state.to(torch.promote_types(inputs["q"].dtype, torch.float32))


def _from(inputs: dict[str, Any], sequences: int) -> dict[str, dict[str, Any]]:
    """The same call from zero and from a state."""
    return {"from zero": inputs, "from a state": {**inputs, "initial_state": random_state(sequences, inputs)}}


@functools.cache
def cases() -> Mapping[str, Arguments]:
    found: dict[str, Arguments] = {}
    for name in ("random_gates", "correlated_keys", "mixed_decay"):
        for tokens in LENGTHS:
            found[f"{name}, {tokens_text(tokens)}"] = VALID_EXTREMES[name].make(tokens, 0)
    for name, extreme in VALID_EXTREMES.items():
        found.setdefault(f"{name}, 130 tokens", extreme.make(130, 0))
    for name, sizes in SHAPES.items():
        inputs = spec.example(tokens=70, seed=3, **sizes)
        for start, arguments in _from(inputs, inputs["q"].shape[0]).items():
            found[f"{name}, {start}"] = arguments
    for name, lengths in PACKED.items():
        inputs = spec.example(tokens=sum(lengths), seed=11) | {"cu_seqlens": bounds_of(*lengths)}
        for start, arguments in _from(inputs, len(lengths)).items():
            found[f"packed, {name}, {start}"] = arguments
    wide = spec.example(tokens=71, key_heads=1, key_dim=128, value_heads=2, value_dim=128, seed=13)
    wide |= {"cu_seqlens": bounds_of(64, 0, 7)}
    found["packed, heads of 128, from a state"] = {**wide, "initial_state": random_state(3, wide)}
    one = spec.example(batch=3, tokens=1, seed=12)
    found["one token of three sequences, from a state"] = {**one, "initial_state": random_state(3, one)}
    # Heads as wide as those of models that are served: some kernels are written for them alone.
    for name, tokens, lengths in (("65 tokens", 65, None), ("one token", 1, None), ("packed", 70, (3, 66, 1))):
        inputs = spec.example(tokens=tokens, log_decay=None if tokens == 1 else -0.1, seed=13, **SERVED)
        inputs |= {} if lengths is None else {"cu_seqlens": bounds_of(*lengths)}
        state = random_state(1 if lengths is None else len(lengths), inputs)
        found[f"heads of 128, {name}, from a state"] = {**inputs, "initial_state": state}
    # 80 matrices over two sequences: what is done for all chunks at once must be done in groups.
    many = spec.example(tokens=10 * 64 - 3, batch=2, seed=7)
    found["637 tokens of two sequences, from a state"] = {**many, "initial_state": random_state(2, many)}
    return found


@functools.cache
def probes() -> Mapping[str, NanProbe]:
    """From its token on a NaN shows in its head; it reaches no other value head that does not read it, no other
    sequence, and whatever the chunk nothing further."""
    lengths = (37, 66, 1)
    bounds = bounds_of(*lengths).tolist()

    def may(output: str, must: Tensor) -> Tensor:
        if output == "state":  # [S, V, K, W]
            return must.flatten(2).any(-1)[..., None, None].expand(must.shape)
        found = torch.zeros_like(must)  # [1, T, V, W]
        for start, stop in itertools.pairwise(bounds):
            found[0, start:stop] = must[0, start:stop].transpose(0, 1).flatten(1).any(-1)[:, None]
        return found

    probes = {}
    for label, sizes, places in (
        ("", {}, (
            ("v", (0, 70, 2, 5)), ("k", (0, 70, 1, 3)), ("q", (0, 70, 0, 3)), ("log_decay", (0, 70, 1)),
            ("beta", (0, 70, 3)), ("initial_state", (1, 2, 3, 4)), ("v", (0, 103, 0, 0)),
        )),
        ("heads of 128, ", SERVED, (("v", (0, 70, 1, 5)), ("initial_state", (1, 0, 3, 4)))),
    ):  # fmt: skip
        base = spec.example(tokens=sum(lengths), log_decay=-0.1, seed=16, **sizes)
        base |= {"cu_seqlens": bounds_of(*lengths), "initial_state": random_state(3, base)}
        for name, index in places:
            changed = base[name].clone()
            changed[index] = math.nan
            probes[f"{label}{name} at {list(index)}"] = NanProbe(
                arguments={**base, name: changed}, may=may,
                reason=WITHIN_A_CHUNK,
            )  # fmt: skip
    return probes


def repeats(case: str) -> bool:
    """Other values in the shapes of `random_gates`, but for one length beyond a chunk, where gradients are compared."""
    name, _, tokens = case.partition(", ")
    return name in VALID_EXTREMES and name != "random_gates" and tokens != "65 tokens"


def unpromised(case: str, policy: str) -> str | None:
    """Why a form that computes by `policy` is not held to a case: such inputs are known to be too much for it."""
    name = case.partition(",")[0]
    extreme = VALID_EXTREMES.get(name)
    if extreme is None or policy not in PRESETS or policy in extreme.survivors:
        return None
    return f"it computes by the policy {policy}, which is not right on {name}: {extreme.provokes}"


def limit(dtype: torch.dtype, output: str) -> float:
    if dtype == torch.float64:
        return LIMIT_FP64
    if dtype == torch.float32 or output == "state":
        return LIMIT
    return torch.finfo(dtype).eps / 2


def output_dtype(dtype: torch.dtype, output: str) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32) if output == "state" else dtype


def gradient_limit(dtype: torch.dtype, name: str) -> float:
    if dtype == torch.float64:
        return GRADIENT_FP64
    return GATE_GRADIENT_FP32 if name == "log_decay" else GRADIENT_FP32


CONTRACTS = (
    Contract(
        op=spec.OP, spec=spec, outputs=("out", "state"), cases=cases, limit=limit, output_dtype=output_dtype,
        tolerance=f"{LIMIT_FP64:g} in float64; {LIMIT:g} in float32, and of the state always; the output of bfloat16 "
        "and float16 eps / 2, one rounding",
        wide=("log_decay", "initial_state"), may_update=("initial_state",), layout_limit=1e-7,
        gradient_limit=gradient_limit, probes=probes, unpromised=unpromised, repeats=repeats,
        flagged={taps.GDN_STATE: "state", taps.GDN_OUT: "out"},
    ),
)  # fmt: skip
