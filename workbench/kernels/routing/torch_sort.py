"""The router of `spec` with a stable sort, which is what fixes the order of ties (torch.topk promises none)."""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.kernels.registry import Call
from workbench.kernels.routing.spec import softmax


def supports(call: Call) -> str | None:
    return None


def run(
    logits: Tensor, *, top_k: int, normalise: bool, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    probabilities = softmax(logits, dtype, torch.float32)
    ranked, order = torch.sort(probabilities, dim=-1, descending=True, stable=True)
    weights, experts = ranked[:, :top_k], order[:, :top_k]
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(logits.dtype), experts
