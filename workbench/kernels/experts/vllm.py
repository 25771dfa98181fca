"""vLLM's fused experts: its Triton grouped product, with the tile sizes that it was tuned with.

    out = fused_experts(hidden_states, w1, w2, topk_weights, topk_ids, ...)

hidden_states [tokens, D], w1 [E, 2 I, D] gate rows first, w2 [E, D, I], topk_weights [tokens, A] fp32,
topk_ids [tokens, A] int32, in bfloat16 or float16 (float32 would run in TF32). It sorts its pairs itself and asks no
`alignment`. Read from version 0.26.0, vllm/model_executor/layers/fused_moe/fused_moe.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.kernels.experts.spec import Chain
from workbench.kernels.layout import row_major
from workbench.kernels.registry import Call
from workbench.kernels.requirements import Requires
from workbench.kernels.signatures import Given, foreign

EXPERTS = "vllm.model_executor.layers.fused_moe.fused_moe:fused_experts"
REQUIRES = Requires(devices=("cuda",), capability=(8, 0), dtypes=(torch.bfloat16, torch.float16), symbols=(EXPERTS,))

_GIVEN = (Given("hidden_states"), Given("w1"), Given("w2"), Given("topk_weights"), Given("topk_ids"))
FORMS = {EXPERTS: (_GIVEN,)}


def supports(call: Call) -> str | None:
    return "has no backward pass" if call.needs_grad else None


def run(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, *, chain: Chain) -> Tensor:
    """See `spec`."""
    if not x.shape[0]:
        return torch.zeros_like(x)
    return foreign(EXPERTS, FORMS[EXPERTS])(
        hidden_states=row_major(x), w1=row_major(gate_up), w2=row_major(down),
        topk_weights=row_major(weights.to(torch.float32)), topk_ids=row_major(experts.to(torch.int32)),
    )  # fmt: skip
