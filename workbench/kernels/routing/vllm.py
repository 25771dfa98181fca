"""vLLM's fused router, `topk_softmax`.

    topk_softmax(topk_weights, topk_ids, token_expert_indices, gating_output, renormalize, ...)

topk_weights [tokens, A] fp32, topk_ids and token_expert_indices [tokens, A] int32, written by the kernel; gating_output
[tokens, E]. The softmax is in fp32 and ranks by probability, of equal ones the lowest number: experts whose
probabilities vanish in fp32 are ties there and not by logit. Read from version 0.26.0, vllm/_custom_ops.py and
vllm/model_executor/layers/fused_moe/router/fused_topk_router.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.errors import BackendError
from workbench.kernels.layout import row_major
from workbench.kernels.registry import Call
from workbench.kernels.requirements import Requires
from workbench.kernels.routing.library_form import with_faults
from workbench.kernels.signatures import Given, foreign

ROUTER = "vllm._custom_ops:topk_softmax"
REQUIRES = Requires(
    devices=("cuda",), capability=(7, 5), dtypes=(torch.bfloat16, torch.float16, torch.float32),
    symbols=(ROUTER,),
)  # fmt: skip

_GIVEN = (
    Given("topk_weights"), Given("topk_ids", ("topk_indices",)),
    Given("token_expert_indices", ("token_expert_indicies",)), Given("gating_output"), Given("renormalize"),
)  # fmt: skip
FORMS = {ROUTER: (_GIVEN,)}


def supports(call: Call) -> str | None:
    return "has no backward pass" if call.needs_grad else None


def run(
    logits: Tensor, *, top_k: int, normalise: bool, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """See `spec`. Raises BackendError for a softmax in another dtype than fp32."""
    if dtype not in (None, torch.float32):
        raise BackendError(f"{ROUTER} takes its softmax in float32, asked for {dtype}; leave the router dtype out")
    tokens = logits.shape[0]
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    experts = torch.empty(tokens, top_k, dtype=torch.int32, device=logits.device)
    foreign(ROUTER, FORMS[ROUTER])(
        topk_weights=weights, topk_ids=experts, token_expert_indices=torch.empty_like(experts),
        gating_output=row_major(logits), renormalize=normalise,
    )  # fmt: skip
    return with_faults(weights, logits).to(logits.dtype), experts.to(torch.int64)
