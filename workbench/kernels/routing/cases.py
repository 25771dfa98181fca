"""What every backend of the router is held to: see `spec` for the contract."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from workbench import taps
from workbench.kernels.contract import Arguments, Contract, NanProbe, rounding_limit, rounding_text, tokens_text
from workbench.kernels.routing import spec


def distinct_logits(tokens: int, experts: int, seed: int = 1) -> Tensor:
    """Logits that bf16 too keeps apart, in an order of its own for each token."""
    order = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(seed)).argsort(-1)
    return order.float() * (8.0 / experts) - 4.0


#: Rows of logits with ties, and the three experts that the lowest number among equals gives.
TIES = (
    ([0.0] * 8, [0, 1, 2]),  # all equal
    ([-5.0] * 8, [0, 1, 2]),
    ([1, 2, 2, 1, 2, 0, 2, 1], [1, 2, 4]),
    ([-9, -3, -8, -3, -7, -3, -6, -3], [1, 3, 5]),  # all negative
    ([3, 0, 0, 0, 0, 0, 0, 4], [7, 0, 1]),
    ([-0.0, 0.0, -0.0, 0.0, -1, -1, -1, 0.0], [0, 1, 2]),
    ([-math.inf] * 6 + [0.0, 0.0], [6, 7, 0]),  # shut out, but top 3 must be filled
)
SIZES = (
    (1, 8, 2, True), (1, 8, 8, True), (7, 16, 1, True), (255, 16, 4, True), (256, 16, 4, False), (300, 64, 8, True),
    (31, 128, 8, False), (3, 1, 1, True), (5, 3, 3, False), (300, 16, 16, False),
    (1, 256, 8, True), (40, 256, 8, True),
)  # fmt: skip


@functools.cache
def cases() -> Mapping[str, Arguments]:
    found = {
        f"{tokens_text(tokens)}, top {top_k} of {count}{'' if normalise else ', as they are'}": {
            "logits": distinct_logits(tokens, count), "top_k": top_k, "normalise": normalise,
        }
        for tokens, count, top_k, normalise in SIZES
    }  # fmt: skip
    ties = torch.tensor([row for row, _ in TIES], dtype=torch.float32)
    for repeat in (1, 60):
        found[f"ties, {7 * repeat} tokens"] = {"logits": ties.repeat(repeat, 1), "top_k": 3, "normalise": True}
    for count in (16, 64, 256):  # from some number of experts on a sort that is not stable does change the order
        logits = torch.randint(0, 3, (40, count), generator=torch.Generator().manual_seed(1)).float()
        found[f"ties among {count} experts"] = {"logits": logits, "top_k": 8, "normalise": True}
    for shift in (-1000.0, 96.0, 1000.0):  # softmax has no absolute scale
        found[f"far from zero, {shift:+g}"] = {
            "logits": distinct_logits(33, 16) + shift, "top_k": 4, "normalise": True,
        }  # fmt: skip
    return found


@functools.cache
def probes() -> Mapping[str, NanProbe]:
    """A row without a softmax has weights of NaN and some legal experts, so that nothing crashes far from the cause."""
    probes = {}
    for tokens, value in ((300, math.nan), (300, math.inf), (7, math.nan), (7, math.inf)):
        clean = {"logits": distinct_logits(tokens, 16), "top_k": 4, "normalise": True}
        logits = clean["logits"].clone()
        logits[[5, tokens - 1], [3, 0]] = value
        probes[f"{value} in 2 of {tokens} tokens"] = NanProbe(arguments={**clean, "logits": logits}, clean=clean)
    return probes


def legal(arguments: Arguments, _output: str, experts: Tensor) -> str | None:
    """What is wrong with the experts of rows that have no softmax, None where they are distinct and in range."""
    count = arguments["logits"].shape[-1]
    for row in experts.tolist():
        if len(set(row)) < len(row) or min(row) < 0 or max(row) >= count:
            return f"expected distinct experts from 0 to {count - 1}, found {row}"
    return None


def output_dtype(dtype: torch.dtype, output: str) -> torch.dtype:
    return torch.int64 if output == "experts" else dtype


CONTRACTS = (
    Contract(
        op=spec.OP, spec=spec, outputs=("weights", "experts"), cases=cases, limit=rounding_limit(1),
        tolerance=rounding_text(1) + "; experts exactly, ties too", output_dtype=output_dtype, probes=probes,
        legal=legal, flagged={taps.MOE_TOPK: "weights"},
    ),
)  # fmt: skip
