"""FlashQLA's fused TileLang prefill for Hopper and the first Blackwell cards.

    o, state = chunk_gated_delta_rule(q, k, v, g, beta, scale, initial_state, output_final_state, ..., cu_seqlens)

q, k [B, T, H, 128], v [B, T, V, 128] in bfloat16 or float16, g [B, T, V] log decays, state [S, V, K, W] fp32. Chunks of
64, fp32 sums, the difference masked before exp, an inverse by blocks of 16 with the decay taken out of it: in exact
arithmetic that of the preset `fla`. The kernels for compute capability 12 take chunks of 32, another policy, and are
left out. Read from version 0.1.3, flash_qla/ops/gated_delta_rule/chunk/{__init__,hopper/kkt_solve,hopper/fused_fwd}.py.
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

POLICY = "fla"
#: Tensor cores take U, W and the decayed keys in the dtype of the inputs.
ROUNDS_INSIDE = True
CHUNK = "flash_qla:chunk_gated_delta_rule"
REQUIRES = Requires(
    devices=("cuda",), capability=(9, 0), capability_below=(12, 0), dtypes=(torch.bfloat16, torch.float16),
    symbols=(CHUNK,),
)  # fmt: skip
HEAD_SIZE = 128

_GIVEN = (
    Given("q"), Given("k"), Given("v"), Given("g"), Given("beta"), Given("scale"), Given("initial_state"),
    Given("output_final_state"), Given("cu_seqlens"),
)  # fmt: skip
FORMS = {CHUNK: (_GIVEN,)}


def supports(call: Call) -> str | None:
    if call.tokens == 1:
        return "has no kernel for a decode step; name fla or a torch backend for it"
    return library_form.size_refusal(call, only=HEAD_SIZE) or library_form.common_refusal(call, POLICY)


def run(
    q: Tensor, k: Tensor, v: Tensor, *, log_decay: Tensor, beta: Tensor, initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None, policy: NumericsPolicy, tap: Tap | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `spec`."""
    g = library_form.gates(log_decay, policy, q.shape[1])
    packed = None if cu_seqlens is None else library_form.sequences_of(q.shape[0], q.shape[1], cu_seqlens)
    if packed is None:
        first, bounds = None if initial_state is None else row_major(initial_state.to(torch.float32)), None
    else:
        first, bounds = packed.initial(initial_state), packed.cu_seqlens(q.device, torch.int64)
    out, state = foreign(CHUNK, FORMS[CHUNK])(
        q=row_major(q), k=row_major(k), v=row_major(v), g=g, beta=row_major(beta), scale=1.0, initial_state=first,
        output_final_state=True, cu_seqlens=bounds,
    )  # fmt: skip
    state = state if packed is None else packed.final(state, initial_state)
    return library_form.finished(out, state, policy, tap, like=v)
