"""The vendor's FlashAttention of CoreX images: packed prefill, which serves a query of one token as well.

    out = fa2_packed_prefill(query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale,
                             causal)

Rows as FlashAttention has them, float16 alone. The module's paged entries read a block cache, which this op does not
have. Names are those of the field notes and logs; not seen on a card.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from workbench.kernels.attention import library_form
from workbench.kernels.registry import Call
from workbench.kernels.requirements import Requires
from workbench.kernels.signatures import Given, foreign
from workbench.kernels.vendor_errors import native_stderr
from workbench.taps import Tap

PREFILL = "corex_fa2:fa2_packed_prefill"
REQUIRES = Requires(devices=("cuda",), dtypes=(torch.float16,), symbols=(PREFILL,))
MOST_HEAD_DIM = 256

_GIVEN = (
    Given("query", ("q",)), Given("key", ("k",)), Given("value", ("v",)), Given("cu_seqlens_q"), Given("cu_seqlens_k"),
    Given("max_seqlen_q", ("max_q",)), Given("max_seqlen_k", ("max_k",)), Given("softmax_scale", ("scale", "sm_scale")),
    Given("causal", ("is_causal",)),
)  # fmt: skip
FORMS = {PREFILL: (_GIVEN,)}


def supports(call: Call) -> str | None:
    return library_form.common_refusal(call, MOST_HEAD_DIM)


def run(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, key_lengths: Sequence[int] | None = None,
    cu_seqlens: Tensor | None = None, tap: Tap | None = None,
) -> Tensor:  # fmt: skip
    """See `spec`."""

    def flash(rows: library_form.Rows, bounds: tuple[Tensor, Tensor], longest: tuple[int, int]) -> Tensor:
        prefill = foreign(PREFILL, FORMS[PREFILL])
        with native_stderr(PREFILL):
            out = prefill(
                query=rows.q, key=rows.k, value=rows.v, cu_seqlens_q=bounds[0], cu_seqlens_k=bounds[1],
                max_seqlen_q=longest[0], max_seqlen_k=longest[1], softmax_scale=scale, causal=True,
            )  # fmt: skip
        return out.to(q.dtype)

    return library_form.packed(
        flash, q, k, v, scale=scale, key_lengths=key_lengths, cu_seqlens=cu_seqlens, tap=tap
    )
