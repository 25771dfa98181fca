"""The router of `spec` with a stable sort, which is what fixes the order of ties (torch.topk promises none)."""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.kernels.registry import Call
from workbench.kernels.routing.spec import ranked_by, softmax


def supports(call: Call) -> str | None:
    return None


def run(
    logits: Tensor, *, top_k: int, normalise: bool, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    probabilities = softmax(logits, dtype, torch.float32)
    order = torch.sort(ranked_by(logits, probabilities, dtype), dim=-1, descending=True, stable=True).indices
    experts = order[:, :top_k]
    weights = probabilities.gather(-1, experts)
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(logits.dtype), experts
