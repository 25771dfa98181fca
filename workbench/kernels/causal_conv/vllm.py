"""vLLM's Triton convolution: `causal_conv1d_fn` for prefill, `causal_conv1d_update` for one token.

    y = causal_conv1d_fn(x, weight, bias, conv_states, query_start_loc, cache_indices, has_initial_state, activation)
    y = causal_conv1d_update(x, conv_state, weight, bias, activation, conv_state_indices, ...)

Rows of all sequences one after another: x [channels, total] with the channels next to each other in memory,
query_start_loc [S + 1] int32. conv_states [slots, channels, width - 1] is a cache that both update in place, slot 0
its null block, which is neither read nor written: the windows are copied to slots 1 ... S. The update writes its output
over x, of which it is given a copy. Read from version 0.26.0, vllm/model_executor/layers/mamba/ops/causal_conv1d.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.kernels.layout import row_major
from workbench.kernels.registry import Call
from workbench.kernels.requirements import Requires
from workbench.kernels.signatures import Given, foreign

PREFILL = "vllm.model_executor.layers.mamba.ops.causal_conv1d:causal_conv1d_fn"
UPDATE = "vllm.model_executor.layers.mamba.ops.causal_conv1d:causal_conv1d_update"
REQUIRES = Requires(
    devices=("cuda",), capability=(8, 0), dtypes=(torch.bfloat16, torch.float16, torch.float32),
    symbols=(PREFILL, UPDATE),
)  # fmt: skip
#: It compiles for a width of 5 too, and leaves out taps: its result there is wrong.
WIDTHS = range(2, 5)

_PREFILL_GIVEN = (
    Given("x"), Given("weight"), Given("bias"), Given("conv_states"), Given("query_start_loc"), Given("cache_indices"),
    Given("has_initial_state"), Given("activation"),
)  # fmt: skip
_UPDATE_GIVEN = (
    Given("x"), Given("conv_state"), Given("weight"), Given("bias"), Given("activation"), Given("conv_state_indices"),
)  # fmt: skip
FORMS = {PREFILL: (_PREFILL_GIVEN,), UPDATE: (_UPDATE_GIVEN,)}


def supports(call: Call) -> str | None:
    if call.needs_grad:
        return "has no backward pass"
    if call.weight_shape and call.weight_shape[1] not in WIDTHS:
        return f"has kernels for a width of 2 to 4, found {call.weight_shape[1]}"
    return None


def run(
    x: Tensor, weight: Tensor, *, window: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `spec`."""
    batch, tokens, channels = x.shape
    bounds = [row * tokens for row in range(batch + 1)] if cu_seqlens is None else cu_seqlens.tolist()
    sequences = len(bounds) - 1
    cache = x.new_zeros(sequences + 1, weight.shape[1] - 1, channels)
    if window is not None:
        cache[1:] = window
    slots = torch.arange(1, sequences + 1, dtype=torch.int32, device=x.device)
    weight = row_major(weight)
    if tokens == 1 and cu_seqlens is None:
        y = foreign(UPDATE, FORMS[UPDATE])(
            x=x[:, 0].clone(memory_format=torch.contiguous_format), conv_state=cache.transpose(1, 2), weight=weight,
            bias=None, activation="silu", conv_state_indices=slots,
        )  # fmt: skip
    else:
        y = foreign(PREFILL, FORMS[PREFILL])(
            x=row_major(x.reshape(-1, channels)).transpose(0, 1), weight=weight, bias=None,
            conv_states=cache.transpose(1, 2), query_start_loc=torch.tensor(bounds, dtype=torch.int32, device=x.device),
            cache_indices=slots, has_initial_state=torch.ones(sequences, dtype=torch.bool, device=x.device),
            activation="silu",
        ).transpose(0, 1)  # fmt: skip
    return y.reshape(x.shape), cache[1:].clone()
