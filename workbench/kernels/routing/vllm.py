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

from workbench.kernels.registry import Call
from workbench.kernels.requirements import Requires
from workbench.kernels.routing.library_form import filled, with_faults
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
    weights, experts = filled(foreign(ROUTER, FORMS[ROUTER]), ROUTER, logits, top_k, dtype, renormalize=normalise)
    return with_faults(weights, logits).to(logits.dtype), experts.to(torch.int64)
