"""FlashInfer's `single_prefill_with_kv_cache`, sequence by sequence.

    out = single_prefill_with_kv_cache(q, k, v, ..., causal, kv_layout, ..., sm_scale)

q [queries, heads, head_dim], k, v [keys, kv heads, head_dim] (layout NHD) in bfloat16 or float16, head_dim 64, 128 or
256; with `causal` the mask is aligned to the last query and key. One launch per sequence and no plan to keep: its batch
wrappers want a workspace and a plan made on the host for each set of lengths. Read from versions 0.6.13 and 0.7.4,
flashinfer/prefill.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from workbench.kernels.attention import library_form, spec
from workbench.kernels.layout import row_major
from workbench.kernels.registry import Call
from workbench.kernels.requirements import Requires
from workbench.kernels.signatures import Given, foreign
from workbench.taps import Tap

PREFILL = "flashinfer.prefill:single_prefill_with_kv_cache"
REQUIRES = Requires(devices=("cuda",), capability=(8, 0), dtypes=(torch.bfloat16, torch.float16), symbols=(PREFILL,))
HEAD_DIMS = (64, 128, 256)

_GIVEN = (Given("q"), Given("k"), Given("v"), Given("causal"), Given("kv_layout"), Given("sm_scale"))
FORMS = {PREFILL: (_GIVEN,)}


def supports(call: Call) -> str | None:
    if call.weight_shape and call.weight_shape[-1] not in HEAD_DIMS:
        return f"has kernels for head_dim {', '.join(map(str, HEAD_DIMS))}, found {call.weight_shape[-1]}"
    return library_form.common_refusal(call, max(HEAD_DIMS))


def run(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, key_lengths: Sequence[int] | None = None,
    cu_seqlens: Tensor | None = None, tap: Tap | None = None,
) -> Tensor:  # fmt: skip
    """See `spec`."""

    def attend() -> Tensor:
        prefill = foreign(PREFILL, FORMS[PREFILL])
        outs = [
            prefill(
                q=row_major(query[0]), k=row_major(key[0]), v=row_major(value[0]), causal=True,
                kv_layout="NHD", sm_scale=scale,
            )
            for query, key, value in spec.sequences(q, k, v, key_lengths, cu_seqlens) if query.shape[1]
        ]  # fmt: skip
        return torch.cat(outs).reshape(q.shape)

    return library_form.observed(
        attend, q, k, v, scale=scale, key_lengths=key_lengths, cu_seqlens=cu_seqlens, tap=tap
    )
