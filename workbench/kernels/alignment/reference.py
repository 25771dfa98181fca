"""The arbiter: the layout of `spec` with Python lists, one pair after another."""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.kernels.alignment.spec import Alignment, most_rows
from workbench.kernels.registry import Call


def supports(call: Call) -> str | None:
    return None


def run(experts: Tensor, *, num_experts: int, block: int) -> Alignment:
    tokens, top_k = experts.shape
    pairs = tokens * top_k
    of_expert: list[list[int]] = [[] for _ in range(num_experts)]
    for pair, expert in enumerate(experts.flatten().tolist()):
        of_expert[expert].append(pair)
    rows, offsets = [], [0]
    for found in of_expert:
        rows += found + [pairs] * (-len(found) % block)
        offsets.append(len(rows))
    rows += [pairs] * (most_rows(pairs, num_experts, block) - len(rows))
    place = {pair: row for row, pair in enumerate(rows) if pair < pairs}
    position = torch.tensor([place[pair] for pair in range(pairs)], dtype=torch.int64)
    return Alignment(
        torch.tensor(rows, dtype=torch.int64, device=experts.device),
        position.view(tokens, top_k).to(experts.device),
        torch.tensor(offsets, device=experts.device),
        block,
    )
