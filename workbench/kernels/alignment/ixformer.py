"""The vendor's `vllm_moe_align_block_size` of ixformer, missing in some of its builds.

    vllm_moe_align_block_size(topk_ids, num_experts, block_size, sorted_token_ids, experts_ids, num_tokens_post_pad)

topk_ids [tokens, A] int32; the last three are written by the kernel, see `library_form`. Names and order as the
vendor's own vLLM 0.6.3 calls it; not seen on a card.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.kernels.alignment.library_form import alignment_of, buffers
from workbench.kernels.alignment.spec import Alignment
from workbench.kernels.layout import row_major
from workbench.kernels.registry import Call
from workbench.kernels.requirements import Requires
from workbench.kernels.signatures import Given, Ordered, foreign
from workbench.kernels.vendor_errors import native_stderr

ALIGN = "ixformer.functions:vllm_moe_align_block_size"
REQUIRES = Requires(devices=("cuda",), symbols=(ALIGN,))

_GIVEN = (
    Given("topk_ids"), Given("num_experts"), Given("block_size"), Given("sorted_token_ids", ("sorted_ids",)),
    Given("experts_ids", ("expert_ids",)), Given("num_tokens_post_pad", ("num_tokens_post_padded",)),
)  # fmt: skip
FORMS = {ALIGN: (Ordered(_GIVEN),)}


def supports(call: Call) -> str | None:
    return None


def run(experts: Tensor, *, num_experts: int, block: int) -> Alignment:
    """See `spec`."""
    ids, owners, used = buffers(experts.numel(), num_experts, block, experts.device)
    align = foreign(ALIGN, FORMS[ALIGN])
    with native_stderr(ALIGN):
        align(
            topk_ids=row_major(experts.to(torch.int32)), num_experts=num_experts, block_size=block,
            sorted_token_ids=ids, experts_ids=owners, num_tokens_post_pad=used,
        )  # fmt: skip
    return alignment_of(ids, owners, used, experts=experts, num_experts=num_experts, block=block)
