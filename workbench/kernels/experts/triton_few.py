"""A few tokens in Triton: only the experts hit are read, each once, without sorting pairs; bound by their memory.

Up to PAIR_TOKENS tokens hardly two share an expert: each pair is a product of its own in float32. Beyond, each expert
hit multiplies the tokens that chose it on tensor cores (float32 inputs are not rounded). Sums over the experts of a
token have a fixed order. On a GPU of compute capability 9.0 and newer the kernels start before their predecessor has
ended, so that the weights of `down` are on their way when what they multiply is done.
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
PAIR_TOKENS = 2
#: Weights of one matrix that a program of two warps reads: so many programs fit that all are under way at once.
PAIR_VALUES = 4096
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
    from triton import cdiv, next_power_of_2

    from workbench.kernels.experts.triton_few_kernels import down_of_token_kernel, gate_up_of_pair_kernel

    (tokens, hidden_size), top_k, width = x.shape, experts.shape[1], down.shape[2]
    hidden = x.new_empty(tokens * top_k, width)
    out = torch.empty_like(x)
    sizes = {"A": top_k, "D": hidden_size, "I": width}
    launch = {"CHAINED": is_chained(x.device), "launch_pdl": is_chained(x.device)}
    ranks = next_power_of_2(top_k)
    depth = min(2048, next_power_of_2(hidden_size))
    rows = max(1, PAIR_VALUES // depth)
    gate_up_of_pair_kernel[(cdiv(width, rows), tokens * top_k)](
        x, experts, gate_up, hidden, **sizes, ROWS=rows, DEPTH=depth, num_warps=2, **launch
    )
    depth = min(512, next_power_of_2(width))
    columns = max(1, PAIR_VALUES // (depth * ranks))
    down_of_token_kernel[(cdiv(hidden_size, columns), tokens)](
        hidden, experts, weights, down, out, flags, **sizes, RANKS=ranks, COLUMNS=columns, DEPTH=depth,
        EARLY=True, RAISES_FLAGS=flags is not None, num_warps=2, **launch,
    )  # fmt: skip
    return out


def by_expert(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, flags: Tensor | None
) -> Tensor:
    from triton import cdiv, next_power_of_2

    from workbench.kernels.experts.triton_few_kernels import (
        down_of_expert_kernel,
        gate_up_of_expert_kernel,
        sum_of_pairs_kernel,
    )

    (tokens, hidden_size), top_k, width = x.shape, experts.shape[1], down.shape[2]
    pairs = tokens * top_k
    hidden = x.new_empty(pairs, width)
    weighted = torch.empty(pairs, hidden_size, dtype=torch.float32, device=x.device)
    out = torch.empty_like(x)
    sizes = {"A": top_k, "D": hidden_size, "RANKS": next_power_of_2(top_k)}
    launch = {"CHAINED": is_chained(x.device), "launch_pdl": is_chained(x.device)}
    slots = min(pairs, gate_up.shape[0])
    products = {
        **sizes, "I": width, "TOKENS": max(16, next_power_of_2(tokens)), "BY_EXPERT": slots < pairs, "TRANSPOSED": True
    }  # fmt: skip
    size = x.dtype.itemsize
    gate_up_of_expert_kernel[(cdiv(width, 64), slots)](
        x, experts, gate_up, hidden, tokens, **products, ROWS=64, DEPTH=256 // size, STAGES=3, num_warps=4, **launch
    )
    down_of_expert_kernel[(cdiv(hidden_size, 64), slots)](
        hidden, experts, weights, down, weighted, tokens, **products, COLUMNS=64, DEPTH=256 // size, STAGES=3,
        PREFETCH=False, num_warps=4, **launch,
    )  # fmt: skip
    sum_of_pairs_kernel[(cdiv(hidden_size, 256), tokens)](
        weighted, out, flags, **sizes, COLUMNS=256, RAISES_FLAGS=flags is not None, num_warps=4, **launch
    )
    return out
