"""FlashInfer's GDN prefill.

    o, state = chunk_gated_delta_rule(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens, ...)

Rows packed: q, k [total, H, 128], v [total, V, 128] in bfloat16 or float16; g [total, V] is alpha = exp(log decay) in
fp32 and not its logarithm; beta [total, V] in fp32; state [S, V, W, K] in fp32, values before keys; cu_seqlens [S + 1]
on the device. Read from versions 0.6.13 and 0.7.4, flashinfer/gdn_prefill.py. Its decode step takes raw gates (A_log,
a, dt_bias) and no log decays, so that it is another op.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.kernels.gated_delta_rule import library_form
from workbench.kernels.layout import row_major
from workbench.kernels.registry import Call
from workbench.kernels.requirements import Requires
from workbench.kernels.signatures import Given, foreign
from workbench.numerics import NumericsPolicy
from workbench.taps import Tap

POLICY = "flashinfer"
#: Tensor cores take U, W and the decayed keys in the dtype of the inputs.
ROUNDS_INSIDE = True
CHUNK = "flashinfer.gdn_prefill:chunk_gated_delta_rule"
REQUIRES = Requires(devices=("cuda",), capability=(9, 0), dtypes=(torch.bfloat16, torch.float16), symbols=(CHUNK,))
HEAD_SIZE = 128

_GIVEN = (
    Given("q"), Given("k"), Given("v"), Given("g"), Given("beta"), Given("scale"), Given("initial_state"),
    Given("output_final_state"), Given("cu_seqlens"), Given("output_state"),
    Given("gate_domain", is_needed=False),  # from 0.7 on; linear is what older versions take
)  # fmt: skip
FORMS = {CHUNK: (_GIVEN,)}


def supports(call: Call) -> str | None:
    if call.tokens == 1:
        return "its decode step takes raw gates (A_log, a, dt_bias), no log decays; name fla or a torch backend for it"
    return library_form.size_refusal(call, only=HEAD_SIZE) or library_form.common_refusal(call, POLICY)


def run(
    q: Tensor, k: Tensor, v: Tensor, *, log_decay: Tensor, beta: Tensor, initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None, policy: NumericsPolicy, tap: Tap | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `spec`."""
    parts = library_form.sequences_of(q.shape[0], q.shape[1], cu_seqlens)
    first = parts.initial(initial_state)
    value_heads, value_dim = v.shape[2:]
    last = torch.empty(len(parts.kept), value_heads, value_dim, q.shape[3], dtype=torch.float32, device=q.device)
    out, state = foreign(CHUNK, FORMS[CHUNK])(
        q=library_form.flat(q), k=library_form.flat(k), v=library_form.flat(v),
        g=library_form.flat(library_form.gates(log_decay, policy, q.shape[1])).exp(),
        beta=library_form.flat(beta).to(torch.float32), scale=1.0,
        initial_state=None if first is None else row_major(first.transpose(2, 3)), output_final_state=True,
        cu_seqlens=parts.cu_seqlens(q.device, torch.int64), output_state=last, gate_domain="linear",
    )  # fmt: skip
    state = parts.final(state.transpose(2, 3).contiguous(), initial_state)
    return library_form.finished(out, state, policy, tap, like=v)
