"""What every backend of the routed experts is held to: see `spec` for the contract."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch

from workbench import taps
from workbench.kernels.contract import (
    Arguments,
    Contract,
    NanProbe,
    rounding_limit,
    rounding_text,
    same_dtype,
    tokens_text,
)
from workbench.kernels.experts import spec

#: Computes every expert for every token and weighs by zero, as `spec` says.
READS_EVERY_EXPERT = ("torch_dense",)
SIZES = (
    (1, 8, 2), (3, 8, 3), (4, 8, 2), (5, 8, 2), (31, 8, 8), (31, 5, 1), (512, 8, 2), (700, 16, 4), (513, 64, 1),
)  # fmt: skip


def with_experts(tokens: int, chosen: list[int], **sizes: int) -> dict[str, Any]:
    """Every token goes to the same experts."""
    case = spec.example(tokens=tokens, top_k=len(chosen), hidden=20, width=12, **sizes)
    return {**case, "experts": torch.tensor(chosen).expand(tokens, -1).clone()}


@functools.cache
def cases() -> Mapping[str, Arguments]:
    found: dict[str, Arguments] = {
        f"{tokens_text(tokens)}, top {top_k} of {count}": spec.example(
            tokens=tokens, experts=count, top_k=top_k, hidden=20, width=12
        )
        for tokens, count, top_k in SIZES
    }
    for tokens in (1, 4, 5, 600):
        found[f"{tokens_text(tokens)}, all on the last expert"] = with_experts(tokens, [7])
        found[f"{tokens_text(tokens)}, all on two, the higher first"] = with_experts(tokens, [6, 1])
    found["a weight of zero"] = {**with_experts(6, [6, 1]), "weights": torch.tensor([[1.0, 0.0]]).expand(6, 2)}
    for tokens in (1, 40):  # what torch's grouped product asks for in half precision
        found[f"{tokens_text(tokens)}, rows of whole 16 bytes"] = spec.example(tokens=tokens, width=16)
    for tokens in (1, 40):
        found[f"{tokens_text(tokens)}, experts of 128 x 64"] = spec.example(tokens=tokens, hidden=128, width=64)
    found["an empty tail"] = with_experts(33, [0, 2], experts=100)
    return found


@functools.cache
def probes() -> Mapping[str, NanProbe]:
    """A NaN in a token shows in that token, one in an expert in the tokens that chose it: none where nobody did."""
    probes = {}
    for tokens in (1, 4, 5, 40, 600):
        case = spec.example(tokens=tokens, experts=6, top_k=2, hidden=20, width=12)
        for token in sorted({0, tokens - 1}):  # token 0 also fills up segments
            x = case["x"].clone()
            x[token, 3] = math.nan
            probes[f"token {token} of {tokens}"] = NanProbe(arguments={**case, "x": x})
        chosen = case["experts"]
        chosen[chosen == 5] = 4  # nobody chooses 5
        chosen[:, 1] = torch.where(chosen[:, 0] == 4, 1, chosen[:, 1])
        chosen[0] = torch.tensor([3, 0])
        for tensor in ("gate_up", "down"):
            for expert in (3, 5):
                broken = case[tensor].clone()
                broken[expert] = math.nan
                probes[f"{tensor} of expert {expert}, {tokens_text(tokens)}"] = NanProbe(
                    arguments={**case, tensor: broken}, spares=READS_EVERY_EXPERT,
                    reason="a backend that computes every expert for every token weighs it by zero",
                )  # fmt: skip
    return probes


CONTRACTS = (
    Contract(
        op=spec.OP, spec=spec, outputs=("out",), cases=cases, limit=rounding_limit(8), tolerance=rounding_text(8),
        output_dtype=same_dtype, probes=probes, flagged={taps.MOE_EXPERTS: "out"},
    ),
)  # fmt: skip
