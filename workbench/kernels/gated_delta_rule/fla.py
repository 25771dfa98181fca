"""flash-linear-attention's Triton kernels: `chunk_gated_delta_rule` for prefill, the fused recurrence for one token.

    o, state = chunk_gated_delta_rule(q, k, v, g, beta, scale, initial_state, output_final_state, ..., cu_seqlens)

q, k [B, T, H, K], v [B, T, V, W], g [B, T, V] log decays (natural), summed in fp32 per chunk of 64; state [S, V, K, W],
taken in any float dtype, given in fp32. Read from version 0.6.0, fla/ops/gated_delta_rule/{chunk,fused_recurrent}.py.
Where `flash_qla` is installed too, the library's own dispatch hands prefill over to it: that is refused here, since
the attestation would name the wrong kernel.
"""

from __future__ import annotations

import importlib.util
import os

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
CHUNK = "fla.ops.gated_delta_rule:chunk_gated_delta_rule"
RECURRENT = "fla.ops.gated_delta_rule:fused_recurrent_gated_delta_rule"
REQUIRES = Requires(
    devices=("cuda",), capability=(8, 0), dtypes=(torch.bfloat16, torch.float16, torch.float32),
    symbols=(CHUNK, RECURRENT),
)  # fmt: skip
MOST_HEAD_SIZE = 256

_GIVEN = (
    Given("q"), Given("k"), Given("v"), Given("g"), Given("beta"), Given("scale"), Given("initial_state"),
    Given("output_final_state"), Given("cu_seqlens"),
)  # fmt: skip
FORMS = {CHUNK: (_GIVEN,), RECURRENT: (_GIVEN,)}


def supports(call: Call) -> str | None:
    if call.tokens > 1 and call.dtype == torch.float32:
        return "its chunk kernels multiply float32 inputs in TF32, ten bits of mantissa"
    if call.tokens > 1 and _hands_over_to_flash_qla():
        return "would hand this call to flash_qla, which is installed; set FLA_FLASH_QLA=0, or name flash_qla"
    return library_form.size_refusal(call, most=MOST_HEAD_SIZE) or library_form.common_refusal(call, POLICY)


def _hands_over_to_flash_qla() -> bool:
    """Whether fla's own dispatch takes FlashQLA: installed, and neither switched off."""
    if os.environ.get("FLA_FLASH_QLA", "1") == "0" or os.environ.get("FLA_DISABLE_BACKEND_DISPATCH") == "1":
        return False
    return importlib.util.find_spec("flash_qla") is not None


def run(
    q: Tensor, k: Tensor, v: Tensor, *, log_decay: Tensor, beta: Tensor, initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None, policy: NumericsPolicy, tap: Tap | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `spec`; of a policy the gates are clamped here, the rest is what `supports` let through."""
    tokens = q.shape[1]
    symbol = CHUNK if tokens > 1 else RECURRENT
    g = library_form.gates(log_decay, policy, tokens)
    packed = None if cu_seqlens is None else library_form.sequences_of(q.shape[0], tokens, cu_seqlens)
    if packed is None:
        first, bounds = None if initial_state is None else row_major(initial_state.to(torch.float32)), None
    else:
        first, bounds = packed.initial(initial_state), packed.cu_seqlens(q.device, torch.int64)
    out, state = foreign(symbol, FORMS[symbol])(
        q=row_major(q), k=row_major(k), v=row_major(v), g=g, beta=row_major(beta), scale=1.0, initial_state=first,
        output_final_state=True, cu_seqlens=bounds,
    )  # fmt: skip
    state = state if packed is None else packed.final(state, initial_state)
    return library_form.finished(out, state, policy, tap, like=v)
