"""A few tokens in Triton: only the experts hit are read, each once, without sorting pairs; bound by their memory.

Up to PAIR_TOKENS tokens hardly two share an expert: each pair is a product of its own in float32. Beyond, each expert
hit multiplies the tokens that chose it on tensor cores (float32 inputs are not rounded). Sums over the experts of a
token have a fixed order. On a GPU of compute capability 9.0 and newer each kernel starts while the one before it ends.

Tiles are those that were fastest on an H200 for 256 experts, top 8, D 2048, I 512 in bfloat16, of some 15 for each
number of tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench import taps
from workbench.kernels.experts.spec import Chain
from workbench.kernels.layout import row_major
from workbench.kernels.registry import Call
from workbench.kernels.triton_runs import REQUIRES as REQUIRES
from workbench.kernels.triton_runs import is_chained, refusal

FLAGS = (taps.MOE_EXPERTS,)
#: Up to this many tokens pair by pair.
PAIR_TOKENS = 4
#: All tokens are columns of each product: beyond this many most of them would be computed for nothing.
MOST_TOKENS = 64


def supports(call: Call) -> str | None:
    if call.tokens > MOST_TOKENS:
        return f"multiplies each expert by all tokens, up to {MOST_TOKENS}, found {call.tokens}"
    return refusal(call)


def run(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, *, chain: Chain,
    flags: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See `spec`."""
    if not x.shape[0]:
        return torch.zeros_like(x)
    product = by_pair if x.shape[0] <= PAIR_TOKENS else by_expert
    return product(*map(row_major, (x, weights, experts, gate_up, down)), flags)


def by_pair(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, flags: Tensor | None) -> Tensor:
    """Each pair by itself: a program reads a block of the two matrices of its pair, or of `down` of all of a token.

    For one token all programs are under way at once, of one warp each, and read their block of `down` while the first
    product still runs. For more that holds back other programs.
    """
    from triton import cdiv, next_power_of_2

    from workbench.kernels.experts.triton_few_kernels import down_of_token_kernel, gate_up_of_pair_kernel

    (tokens, hidden_size), top_k, width = x.shape, experts.shape[1], down.shape[2]
    hidden = x.new_empty(tokens * top_k, width)
    out = torch.empty_like(x)
    chained = is_chained(x.device)
    sizes = {"A": top_k, "D": hidden_size, "I": width, "CHAINED": chained}
    warps, values = (1, 4096) if tokens == 1 else (4, 8192)
    depth = min(2048, next_power_of_2(hidden_size))
    rows = max(1, 4096 // depth)
    gate_up_of_pair_kernel[(cdiv(width, rows), tokens * top_k)](
        x, weights, experts, gate_up, hidden, **sizes, ROWS=rows, DEPTH=depth, num_warps=warps, launch_pdl=chained
    )
    ranks = next_power_of_2(top_k)
    depth = min(512, next_power_of_2(width), max(1, values // ranks))
    columns = max(1, values // (ranks * depth))
    down_of_token_kernel[(cdiv(hidden_size, columns), tokens)](
        hidden, experts, down, out, flags, **sizes, RANKS=ranks, COLUMNS=columns, DEPTH=depth, EARLY=tokens == 1,
        RAISES_FLAGS=flags is not None, num_warps=warps, launch_pdl=chained,
    )  # fmt: skip
    return out


def by_expert(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, flags: Tensor | None
) -> Tensor:
    """Each expert hit by all tokens that chose it; the products of the pairs are held in float32 and then summed."""
    from triton import cdiv, next_power_of_2

    from workbench.kernels.experts import triton_few_kernels as kernels

    (tokens, hidden_size), top_k, width = x.shape, experts.shape[1], down.shape[2]
    pairs, block = tokens * top_k, max(16, next_power_of_2(tokens))
    hidden = x.new_empty(pairs, width)
    products = torch.empty(pairs, hidden_size, dtype=torch.float32, device=x.device)
    out = torch.empty_like(x)
    chained = is_chained(x.device)
    sizes = {"A": top_k, "D": hidden_size, "RANKS": next_power_of_2(top_k), "CHAINED": chained}
    slots = min(pairs, gate_up.shape[0])
    tile = {**sizes, "I": width, "TOKENS": block, "BY_EXPERT": slots < pairs, "num_warps": 4, "launch_pdl": chained}
    line, rows, columns = (256, 64, 64) if block == 16 else (128, 64, 128)  # bytes of a row read at a time, rows
    depth = line // x.element_size()
    stages = stages_that_fit(3 if block == 16 else 5 if block == 32 else 4, (2 * rows + block) * line, x.device)
    kernels.gate_up_of_expert_kernel[(cdiv(width, rows), slots)](
        x, weights, experts, gate_up, hidden, tokens, **tile, ROWS=rows, DEPTH=depth, STAGES=stages
    )
    stages = stages_that_fit(3 if block == 16 else 4, (columns + block) * line, x.device)
    kernels.down_of_expert_kernel[(cdiv(hidden_size, columns), slots)](
        hidden, experts, down, products, tokens, **tile, COLUMNS=columns, DEPTH=depth, STAGES=stages
    )
    kernels.sum_of_pairs_kernel[(cdiv(hidden_size, 256), tokens)](
        products, out, flags, **sizes, COLUMNS=256, RAISES_FLAGS=flags is not None, num_warps=4, launch_pdl=chained
    )
    return out


def stages_that_fit(most: int, size: int, device: torch.device) -> int:
    """Up to `most` stages of a pipeline, of `size` bytes each, in what a block may have of shared memory."""
    if device.type != "cuda":
        return most
    room = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    return max(1, min(most, room // (size + 1024)))
