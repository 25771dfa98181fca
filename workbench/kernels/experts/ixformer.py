"""The vendor's grouped expert product of ixformer, `vllm_invoke_fused_moe_kernel`: float16 alone.

    vllm_invoke_fused_moe_kernel(A, B, C, topk_weights, topk_ids, sorted_token_ids, expert_ids, num_tokens_post_padded,
                                 mul_routed_weight, top_k, block_size_m)

C[p] = A[p // top_k] B[expert of p]^T for the pairs p of each block, times their weights where mul_routed_weight is set;
A [rows, D], B [E, N, D], C [pairs / A, A, N]. Called twice: for gate and up, and for down with the weights. The pairs
are sorted by the op `alignment`, whichever backend that has: one link of the chain that is missing takes none of the
others with it. Names and order as the vendor's own vLLM 0.6.3 calls it, which gives the rows of a block and no other
tile size; not seen on a card.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.kernels.experts.spec import Chain, swiglu
from workbench.kernels.layout import row_major
from workbench.kernels.registry import Call
from workbench.kernels.requirements import Requires
from workbench.kernels.signatures import Given, Ordered, foreign
from workbench.kernels.vendor_errors import native_stderr

PRODUCT = "ixformer.functions:vllm_invoke_fused_moe_kernel"
REQUIRES = Requires(devices=("cuda",), dtypes=(torch.float16,), symbols=(PRODUCT,))
#: Rows of a block: what vLLM 0.6.3 takes where it was not tuned, for up to as many tokens as experts and for more.
FEW_ROWS, ROWS = 16, 64

_GIVEN = (
    Given("A", ("a", "input")), Given("B", ("b", "weight")), Given("C", ("c", "output")), Given("topk_weights"),
    Given("topk_ids"), Given("sorted_token_ids"), Given("expert_ids", ("experts_ids",)),
    Given("num_tokens_post_padded", ("num_tokens_post_pad",)), Given("mul_routed_weight"), Given("top_k", ("topk",)),
    Given("block_size_m", ("BLOCK_SIZE_M", "block_size")),
)  # fmt: skip
FORMS = {PRODUCT: (Ordered(_GIVEN),)}


def supports(call: Call) -> str | None:
    return "has no backward pass" if call.needs_grad else None


def run(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, *, chain: Chain) -> Tensor:
    """See `spec`."""
    if not x.shape[0]:
        return torch.zeros_like(x)
    tokens, top_k = experts.shape
    block = FEW_ROWS if tokens <= gate_up.shape[0] else ROWS
    plan = chain.align(experts, gate_up.shape[0], block)
    where = {
        "topk_weights": row_major(weights.to(torch.float32)), "topk_ids": row_major(experts.to(torch.int32)),
        "sorted_token_ids": plan.rows.to(torch.int32), "expert_ids": plan.experts_of_blocks().to(torch.int32),
        "num_tokens_post_padded": plan.offsets[-1:].to(torch.int32), "block_size_m": block,
    }  # fmt: skip
    product = foreign(PRODUCT, FORMS[PRODUCT])

    def multiplied(a: Tensor, b: Tensor, shared_by: int, is_weighted: bool) -> Tensor:
        """[tokens, A, N]: the rows of `a` times their experts' matrices; a row of `a` belongs to `shared_by` pairs."""
        c = a.new_zeros(tokens, top_k, b.shape[1])
        with native_stderr(PRODUCT):
            product(A=a, B=row_major(b), C=c, mul_routed_weight=is_weighted, top_k=shared_by, **where)
        return c

    hidden = swiglu(multiplied(row_major(x), gate_up, top_k, False)).view(tokens * top_k, -1)
    return multiplied(hidden, down, 1, True).sum(1, dtype=torch.float32).to(x.dtype)
