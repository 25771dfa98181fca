"""FlashAttention 2: `flash_attn_varlen_func` over packed rows, for every kind of call.

    out = flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, ..., softmax_scale,
                                 causal)

q [queries, heads, head_dim], k, v [keys, kv heads, head_dim] in bfloat16 or float16, head_dim up to 256; boundaries
int32 on the device. With `causal` the mask is aligned to the last query and key, as the contract has it (from version
2.1 on). Read from the main branch of version 2.8, flash_attn/flash_attn_interface.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from workbench.kernels.attention import library_form
from workbench.kernels.registry import Call
from workbench.kernels.requirements import Requires
from workbench.kernels.signatures import Given, foreign
from workbench.taps import Tap

VARLEN = "flash_attn:flash_attn_varlen_func"
REQUIRES = Requires(devices=("cuda",), capability=(8, 0), dtypes=(torch.bfloat16, torch.float16), symbols=(VARLEN,))
MOST_HEAD_DIM = 256

_GIVEN = (
    Given("q"), Given("k"), Given("v"), Given("cu_seqlens_q"), Given("cu_seqlens_k"), Given("max_seqlen_q"),
    Given("max_seqlen_k"), Given("softmax_scale"), Given("causal"),
)  # fmt: skip
FORMS = {VARLEN: (_GIVEN,)}


def supports(call: Call) -> str | None:
    return library_form.common_refusal(call, MOST_HEAD_DIM)


def run(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, key_lengths: Sequence[int] | None = None,
    cu_seqlens: Tensor | None = None, tap: Tap | None = None,
) -> Tensor:  # fmt: skip
    """See `spec`."""

    def flash(rows: library_form.Rows, bounds: tuple[Tensor, Tensor], longest: tuple[int, int]) -> Tensor:
        return foreign(VARLEN, FORMS[VARLEN])(
            q=rows.q, k=rows.k, v=rows.v, cu_seqlens_q=bounds[0], cu_seqlens_k=bounds[1], max_seqlen_q=longest[0],
            max_seqlen_k=longest[1], softmax_scale=scale, causal=True,
        )  # fmt: skip

    return library_form.packed(
        flash, q, k, v, scale=scale, key_lengths=key_lengths, cu_seqlens=cu_seqlens, tap=tap
    )
