"""A counting sort over a table [E, tokens] of hits: the place of a token is how many came before it. No host sync."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.kernels.alignment.spec import Alignment, most_rows
from workbench.kernels.registry import Call


def supports(call: Call) -> str | None:
    return None


def run(experts: Tensor, *, num_experts: int, block: int) -> Alignment:
    tokens, top_k = experts.shape
    pairs = tokens * top_k
    hits = torch.zeros(num_experts, tokens, dtype=torch.int32, device=experts.device).scatter_(0, experts.T, 1)
    places = hits.cumsum(1, dtype=torch.int32)  # counted from 1
    padded = (hits.sum(1) + (block - 1)) // block * block
    offsets = F.pad(padded.cumsum(0), (1, 0))
    position = places.gather(0, experts.T).T + (offsets[:-1] - 1)[experts]
    rows = torch.full((most_rows(pairs, num_experts, block),), pairs, dtype=torch.int64, device=experts.device)
    rows.scatter_(0, position.flatten(), torch.arange(pairs, device=experts.device))
    return Alignment(rows, position.contiguous(), offsets, block)
