"""The vendor's fused experts of CoreX images, `moe_forward`: float16 alone, in several forms.

    moe_forward(hidden_states, w13, w2, topk_weights, topk_ids)
    moe_forward(hidden_states, w1, w2, w3, topk_weights, topk_ids)              gate, down, up
    moe_forward(hidden_states, gate_output, w13, w2, topk, renormalize)         routes by itself
    moe_forward(hidden_states, gate_output, w1, w2, w3, topk, renormalize)

Which of them there is, its signature says; values go by name, so that no number lands in the place of a matrix. The
forms that route are given the logarithms of the weights as logits: the softmax over them, renormalised over the experts
chosen, is the weights over their sum, and the result is multiplied by that sum. Separate matrices are copies of
gate_up, made at each call. Names are those of the field notes; not seen on a card.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.kernels.experts.spec import Chain
from workbench.kernels.layout import row_major
from workbench.kernels.registry import Call
from workbench.kernels.requirements import Requires
from workbench.kernels.signatures import Given, foreign
from workbench.kernels.vendor_errors import native_stderr

FORWARD = "corex_moe:moe_forward"
REQUIRES = Requires(devices=("cuda",), dtypes=(torch.float16,), symbols=(FORWARD,))

_X = Given("hidden_states", ("x",))
_CHOSEN = (Given("topk_weights"), Given("topk_ids"))
_MERGED = (Given("w13"), Given("w2"))
_SEPARATE = (Given("w1"), Given("w2"), Given("w3"))
_ROUTING = (Given("topk", ("top_k",)), Given("renormalize", is_needed=False))
_LOGITS = Given("gate_output", ("router_logits", "gating_output"))
FORMS = {
    FORWARD: (
        (_X, *_MERGED, *_CHOSEN), (_X, *_SEPARATE, *_CHOSEN), (_X, _LOGITS, *_MERGED, *_ROUTING),
        (_X, _LOGITS, *_SEPARATE, *_ROUTING),
    ),
}  # fmt: skip


def supports(call: Call) -> str | None:
    return "has no backward pass" if call.needs_grad else None


def run(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, *, chain: Chain) -> Tensor:
    """See `spec`."""
    if not x.shape[0]:
        return torch.zeros_like(x)
    forward = foreign(FORWARD, FORMS[FORWARD])
    values = {"hidden_states": row_major(x), "w2": row_major(down)}
    if forward.places("w13"):
        values["w13"] = row_major(gate_up)
    else:
        gate, up = gate_up.chunk(2, dim=1)
        values |= {"w1": row_major(gate), "w3": row_major(up)}
    total = None
    if forward.places("topk_ids"):
        values |= {"topk_weights": row_major(weights.to(torch.float32)), "topk_ids": row_major(experts.to(torch.int32))}
    else:
        wide = weights.to(torch.float32)
        logits = torch.full((x.shape[0], gate_up.shape[0]), -torch.inf, device=x.device)
        total = wide.sum(-1, keepdim=True)
        values |= {
            "gate_output": logits.scatter_(1, experts, wide.log()), "topk": experts.shape[1], "renormalize": True
        }  # fmt: skip
    with native_stderr(FORWARD):
        out = forward(**values)
    return (out if total is None else out * total).to(x.dtype)
