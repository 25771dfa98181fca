"""The router in Triton, one launch: a maximum for each chosen expert, over logits held in registers.

Softmax in float32; a maximum of integers that order as the floats do, and of the equal ones the lowest expert.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench import taps
from workbench.errors import BackendError
from workbench.kernels.layout import row_major
from workbench.kernels.registry import Call
from workbench.kernels.triton_runs import REQUIRES as REQUIRES
from workbench.kernels.triton_runs import is_chained, refusal

FLAGS = (taps.MOE_TOPK,)
#: Up to so many experts their number fits beside a logit of 16 bits.
PACKED_EXPERTS = 1 << 13
#: Logits of a program: 8 to 32 in each of 32 threads.
MOST_LOGITS = 1024
#: Up to this many tokens a program has one of them, so that no token waits for another.
SINGLE_TOKENS = 512


def supports(call: Call) -> str | None:
    return refusal(call)


def run(
    logits: Tensor, *, top_k: int, normalise: bool, dtype: torch.dtype | None = None, flags: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `spec`. Raises BackendError for a softmax in another dtype than fp32, bf16 and fp16."""
    import triton.language as tl
    from triton import cdiv, next_power_of_2

    from workbench.kernels.routing.triton_topk_kernels import topk_kernel

    types = {None: None, torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    if dtype not in types:
        raise BackendError(f"triton_topk takes its softmax in 32 bits or fewer, asked for {dtype}; name torch_sort")
    tokens, count = logits.shape
    weights = torch.empty(tokens, top_k, dtype=logits.dtype, device=logits.device)
    experts = torch.empty(tokens, top_k, dtype=torch.int64, device=logits.device)
    if not tokens:
        return weights, experts
    columns = next_power_of_2(count)
    rows = 1 if tokens <= SINGLE_TOKENS else max(1, MOST_LOGITS // columns)
    is_chain = is_chained(logits.device)
    topk_kernel[(cdiv(tokens, rows),)](
        row_major(logits), weights, experts, flags, tokens, types[dtype],
        E=count, A=top_k, ROWS=rows, COLUMNS=columns, RANKS=next_power_of_2(top_k), NORMALISE=normalise,
        PACKED=dtype is None and logits.dtype.itemsize == 2 and count <= PACKED_EXPERTS,
        RAISES_FLAGS=flags is not None, CHAINED=is_chain,
        num_warps=max(1, min(8, rows * columns // 512)), launch_pdl=is_chain,
    )  # fmt: skip
    return weights, experts
