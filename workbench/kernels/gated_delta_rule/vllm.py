"""vLLM's copy of flash-linear-attention's kernels, as its own models call them.

    o, state = chunk_gated_delta_rule(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens, ...)
    o, states = fused_recurrent_gated_delta_rule(q, k, v, g, beta, scale, initial_state, inplace_final_state, ...)

q, k [B, T, H, K], v [B, T, V, W], g [B, T, V] log decays; state [S, V, W, K], values before keys, unlike that of
flash-linear-attention itself. The recurrence gives one state per token where it does not write in place, and addresses
them by the first token of a sequence: a batch of single tokens is one packed row there. Read from version 0.26.0,
vllm/third_party/flash_linear_attention/ops/{chunk,fused_recurrent}.py.
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

POLICY = "vllm"
#: Tensor cores take U, W and the decayed keys in the dtype of the inputs.
ROUNDS_INSIDE = True
CHUNK = "vllm.third_party.flash_linear_attention.ops:chunk_gated_delta_rule"
RECURRENT = "vllm.third_party.flash_linear_attention.ops:fused_recurrent_gated_delta_rule"
REQUIRES = Requires(
    devices=("cuda",), capability=(8, 0), dtypes=(torch.bfloat16, torch.float16),
    symbols=(CHUNK, RECURRENT),
)  # fmt: skip
MOST_HEAD_SIZE = 256

_COMMON = (Given("q"), Given("k"), Given("v"), Given("g"), Given("beta"), Given("scale"), Given("initial_state"))
FORMS = {
    CHUNK: ((*_COMMON, Given("output_final_state"), Given("cu_seqlens")),),
    RECURRENT: ((*_COMMON, Given("inplace_final_state"), Given("cu_seqlens")),),
}


def supports(call: Call) -> str | None:
    return library_form.size_refusal(call, most=MOST_HEAD_SIZE) or library_form.common_refusal(call, POLICY)


def run(
    q: Tensor, k: Tensor, v: Tensor, *, log_decay: Tensor, beta: Tensor, initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None, policy: NumericsPolicy, tap: Tap | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `spec`: chunks for two tokens and more, the recurrence for one."""
    tokens = q.shape[1]
    g = library_form.gates(log_decay, policy, tokens)
    if tokens == 1 and cu_seqlens is None:
        return _one_token(q, k, v, g, beta, initial_state, policy, tap)
    packed = None if cu_seqlens is None else library_form.sequences_of(q.shape[0], tokens, cu_seqlens)
    if packed is None:
        first, bounds = None if initial_state is None else initial_state.to(torch.float32), None
    else:
        first, bounds = packed.initial(initial_state), packed.cu_seqlens(q.device, torch.int32)
    out, state = foreign(CHUNK, FORMS[CHUNK])(
        q=row_major(q), k=row_major(k), v=row_major(v), g=g, beta=row_major(beta), scale=1.0,
        initial_state=None if first is None else row_major(first.transpose(2, 3)), output_final_state=True,
        cu_seqlens=bounds,
    )  # fmt: skip
    state = state.transpose(2, 3).contiguous()
    state = state if packed is None else packed.final(state, initial_state)
    return library_form.finished(out, state, policy, tap, like=v)


def _one_token(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None, policy: NumericsPolicy,
    tap: Tap | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """[B, 1, ...] as one packed row of B sequences of one token each; the state of each is that after its token."""
    batch = q.shape[0]
    if initial_state is None:  # the kernel asks for its strides
        first = torch.zeros(batch, *v.shape[2:], q.shape[3], dtype=torch.float32, device=q.device)
    else:
        first = row_major(initial_state.to(torch.float32).transpose(2, 3))
    bounds = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
    row = {name: library_form.flat(x)[None] for name, x in {"q": q, "k": k, "v": v, "g": g, "beta": beta}.items()}
    out, states = foreign(RECURRENT, FORMS[RECURRENT])(
        **row, scale=1.0, initial_state=first, inplace_final_state=False, cu_seqlens=bounds
    )
    return library_form.finished(out, states.transpose(2, 3).contiguous(), policy, tap, like=v)
