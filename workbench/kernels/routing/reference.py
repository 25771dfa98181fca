"""The arbiter: the router of `spec`, token by token in float64 with Python's stable sort."""

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
    probabilities = softmax(logits, dtype, torch.float64)
    rows = ranked_by(logits, probabilities, dtype).tolist()
    ranked = [sorted(range(len(row)), key=lambda expert, row=row: -row[expert])[:top_k] for row in rows]
    experts = torch.tensor(ranked, dtype=torch.int64, device=logits.device).reshape(len(rows), top_k)
    weights = probabilities.gather(-1, experts)
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(logits.dtype), experts
