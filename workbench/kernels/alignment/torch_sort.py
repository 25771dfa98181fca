"""A stable sort of the pairs by expert. No host sync, no table of experts times tokens."""

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
    ranked, order = experts.flatten().sort(stable=True)
    numbers = torch.arange(pairs, device=experts.device)
    # Counting by scatter: torch.bincount would read its largest argument back to the host.
    counts = numbers.new_zeros(num_experts).scatter_add_(0, ranked, torch.ones_like(ranked))
    padded = (counts + (block - 1)) // block * block
    offsets = F.pad(padded.cumsum(0), (1, 0))
    row = numbers + (offsets[:-1] - (counts.cumsum(0) - counts))[ranked]  # filling before this expert moves it on
    rows = torch.full((most_rows(pairs, num_experts, block),), pairs, dtype=torch.int64, device=experts.device)
    rows.scatter_(0, row, order)
    position = torch.empty_like(order).scatter_(0, order, row)
    return Alignment(rows, position.view(tokens, top_k), offsets, block)
