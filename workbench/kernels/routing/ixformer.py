"""The vendor's fused router of ixformer, `vllm_moe_topk_softmax`: float16 alone, and missing in some of its builds.

    vllm_moe_topk_softmax(topk_weights, topk_ids, token_expert_indices, gating_output)

topk_weights [tokens, A] fp32, topk_ids and token_expert_indices [tokens, A] int32, written by the kernel;
gating_output [tokens, E]. The weights are probabilities: they are divided by their sum here. Names and order as the
vendor's own vLLM 0.6.3 calls it; not seen on a card.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.kernels.registry import Call
from workbench.kernels.requirements import Requires
from workbench.kernels.routing.library_form import filled, with_faults
from workbench.kernels.signatures import Given, Ordered, foreign
from workbench.kernels.vendor_errors import native_stderr

ROUTER = "ixformer.functions:vllm_moe_topk_softmax"
REQUIRES = Requires(devices=("cuda",), dtypes=(torch.float16,), symbols=(ROUTER,))

_GIVEN = (
    Given("topk_weights"), Given("topk_ids", ("topk_indices",)),
    Given("token_expert_indices", ("token_expert_indicies",)), Given("gating_output"),
)  # fmt: skip
FORMS = {ROUTER: (Ordered(_GIVEN),)}


def supports(call: Call) -> str | None:
    return "has no backward pass" if call.needs_grad else None


def run(
    logits: Tensor, *, top_k: int, normalise: bool, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """See `spec`. Raises BackendError for a softmax in another dtype than fp32."""
    with native_stderr(ROUTER):
        weights, experts = filled(foreign(ROUTER, FORMS[ROUTER]), ROUTER, logits, top_k, dtype)
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return with_faults(weights, logits).to(logits.dtype), experts.to(torch.int64)
