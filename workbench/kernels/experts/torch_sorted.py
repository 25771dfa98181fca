"""Pairs sorted by expert, one matrix product per expert that is hit, activation once over all pairs.

One host synchronisation: the segment lengths. The sum over the experts of a token is a gather and a sum in rank
order, so it has no atomics and the same result every time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.kernels.experts.spec import swiglu
from workbench.kernels.registry import Call


def supports(call: Call) -> str | None:
    return None


def run(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    tokens, top_k = experts.shape
    flat = experts.flatten()
    order = torch.argsort(flat, stable=True)  # [pairs], pair p = token * A + rank
    segments = torch.bincount(flat, minlength=gate_up.shape[0]).tolist()
    hit = [expert for expert, length in enumerate(segments) if length]
    lengths = [segments[expert] for expert in hit]
    rows = x[order // top_k].split(lengths)
    hidden = swiglu(torch.cat([row @ gate_up[expert].T for expert, row in zip(hit, rows, strict=True)]))
    out = torch.cat([row @ down[expert].T for expert, row in zip(hit, hidden.split(lengths), strict=True)])
    position = torch.empty_like(order)
    position[order] = torch.arange(tokens * top_k, device=x.device)  # pair -> its row in `out`
    return (out[position].view(tokens, top_k, -1) * weights[..., None]).sum(1).to(x.dtype)
