"""Blocks of rows of one expert each, multiplied in batches with copies of their experts' weights: no host sync.

For devices that have a batched product and nothing else. The copies make it slow: each block reads, writes and reads
again the weights of its expert; few blocks at a time, so that they stay within a byte budget.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.kernels.experts.spec import Chain, swiglu
from workbench.kernels.experts.torch_sorted import weighted_sum
from workbench.kernels.registry import Call

#: Rows per block: of 256 experts and 8 per token, 512 tokens put 16 on each.
BLOCK_ROWS = 16
#: Bytes of copied weights at a time.
BYTES_AT_ONCE = 1 << 26


def supports(call: Call) -> str | None:
    return None


def run(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, *, chain: Chain) -> Tensor:
    if not x.shape[0]:
        return torch.zeros_like(x)
    plan = chain.align(experts, gate_up.shape[0], BLOCK_ROWS)
    expert = plan.experts_of_blocks()
    token = plan.tokens_of_rows().view(-1, BLOCK_ROWS)
    at_once = max(1, BYTES_AT_ONCE // (gate_up[0].numel() * gate_up.element_size()))
    outs = []
    for chosen, tokens in zip(expert.split(at_once), token.split(at_once), strict=True):
        hidden = swiglu(torch.bmm(x[tokens], gate_up[chosen].transpose(1, 2)))  # [blocks, BLOCK_ROWS, I]
        outs.append(torch.bmm(hidden, down[chosen].transpose(1, 2)))
    return weighted_sum(torch.cat(outs).flatten(0, 1), plan.position, weights).to(x.dtype)
