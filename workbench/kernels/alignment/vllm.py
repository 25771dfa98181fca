"""vLLM's `moe_align_block_size`.

    sorted_ids, expert_ids, num_tokens_post_pad = moe_align_block_size(topk_ids, block_size, num_experts, ...)

topk_ids [tokens, A] int32; sorted_ids the pair of each row, filling rows the number of pairs; expert_ids the expert of
each block; both hold up to num_tokens_post_pad rows. Pairs of an expert come in no promised order: see `library_form`.
Read from version 0.26.0, vllm/model_executor/layers/fused_moe/moe_align_block_size.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.kernels.alignment.library_form import alignment_of
from workbench.kernels.alignment.spec import Alignment
from workbench.kernels.layout import row_major
from workbench.kernels.registry import Call
from workbench.kernels.requirements import Requires
from workbench.kernels.signatures import Given, foreign

ALIGN = "vllm.model_executor.layers.fused_moe.moe_align_block_size:moe_align_block_size"
REQUIRES = Requires(devices=("cuda",), capability=(7, 5), symbols=(ALIGN,))

_GIVEN = (Given("topk_ids"), Given("block_size"), Given("num_experts"))
FORMS = {ALIGN: (_GIVEN,)}


def supports(call: Call) -> str | None:
    return None


def run(experts: Tensor, *, num_experts: int, block: int) -> Alignment:
    """See `spec`."""
    ids, owners, used = foreign(ALIGN, FORMS[ALIGN])(
        topk_ids=row_major(experts.to(torch.int32)), block_size=block, num_experts=num_experts
    )
    return alignment_of(ids, owners, used, experts=experts, num_experts=num_experts, block=block)
