"""What vLLM's moe_align_block_size gives, as the layout of the contract."""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.kernels.alignment.spec import Alignment, most_rows


def buffers(pairs: int, num_experts: int, block: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """(sorted_token_ids, experts_ids, num_tokens_post_pad) as the kernels want them, int32, filled with no pair."""
    rows = pairs + num_experts * (block - 1)
    blocks = -(-rows // block)
    ids = torch.full((rows,), pairs, dtype=torch.int32, device=device)
    return ids, torch.zeros(blocks, dtype=torch.int32, device=device), torch.zeros(1, dtype=torch.int32, device=device)


def alignment_of(
    ids: Tensor, block_experts: Tensor, rows_used: Tensor, *, experts: Tensor, num_experts: int, block: int
) -> Alignment:
    """The contract's layout from the kernel's: `ids` the pair of each row, `block_experts` the expert of each block,
    `rows_used` [1] the rows up to which both hold.

    The kernels rank the pairs of an expert as their threads come, in another order each time, where the contract has
    the order of the tokens: one sort over the rows makes it so. No host sync.
    """
    pairs = experts.numel()
    rows = most_rows(pairs, num_experts, block)
    place = torch.arange(rows, device=experts.device)
    is_used = place < rows_used.to(torch.int64)
    owner = block_experts.to(torch.int64)[: -(-rows // block)].repeat_interleave(block, output_size=rows)
    owner = torch.where(is_used, owner, num_experts)
    pair = torch.where(is_used, ids[:rows].to(torch.int64), pairs).clamp(max=pairs)
    pair = (owner * (pairs + 1) + pair).sort().values % (pairs + 1)  # by expert, then by pair, filling rows last
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=experts.device)
    counts.scatter_add_(0, owner, torch.ones_like(owner))
    offsets = torch.cat([counts.new_zeros(1), counts[:num_experts].cumsum(0)])
    position = torch.empty(pairs + 1, dtype=torch.int64, device=experts.device)
    position.scatter_(0, pair, place)  # all filling rows write to the last place, which is cut off
    return Alignment(pair, position[:pairs].view(experts.shape), offsets, block)
