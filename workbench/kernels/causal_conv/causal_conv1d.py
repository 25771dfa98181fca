"""The `causal_conv1d` package's CUDA kernels: `causal_conv1d_fn` for prefill, `causal_conv1d_update` for one token.

    y = causal_conv1d_fn(x, weight, bias, seq_idx, initial_states, return_final_states, ..., activation)
    y = causal_conv1d_update(x, conv_state, weight, bias, activation, ...)

x [B, channels, T] with the channels next to each other in memory (a view of ours), weight [channels, width] of 2 to 4;
initial_states and conv_state [B, channels, width - 1], the latter updated in place: it is given a copy. The new window
is cut out of the raw inputs here, which no kernel is needed for. Packed rows (seq_idx) exclude initial states there.
Read from the main branch of version 1.6, causal_conv1d/causal_conv1d_interface.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.kernels.causal_conv.spec import with_window
from workbench.kernels.layout import row_major
from workbench.kernels.registry import Call
from workbench.kernels.requirements import Requires
from workbench.kernels.signatures import Given, foreign

PREFILL = "causal_conv1d:causal_conv1d_fn"
UPDATE = "causal_conv1d:causal_conv1d_update"
REQUIRES = Requires(
    devices=("cuda",), capability=(5, 3), dtypes=(torch.bfloat16, torch.float16, torch.float32),
    symbols=(PREFILL, UPDATE),
)  # fmt: skip
WIDTHS = range(2, 5)
#: Channels of a row that lies channels first in memory are read eight at a time.
CHANNEL_STEP = 8

_PREFILL_GIVEN = (Given("x"), Given("weight"), Given("bias"), Given("initial_states"), Given("activation"))
_UPDATE_GIVEN = (Given("x"), Given("conv_state"), Given("weight"), Given("bias"), Given("activation"))
FORMS = {PREFILL: (_PREFILL_GIVEN,), UPDATE: (_UPDATE_GIVEN,)}


def supports(call: Call) -> str | None:
    if call.packed:
        return "takes a packed row (seq_idx) without initial states alone"
    if call.needs_grad:
        return "its backward pass is not held to the contract; name a torch backend for training"
    if call.weight_shape and call.weight_shape[1] not in WIDTHS:
        return f"has kernels for a width of 2 to 4, found {call.weight_shape[1]}"
    if call.weight_shape and call.weight_shape[0] % CHANNEL_STEP:
        return f"reads {CHANNEL_STEP} channels at a time, found {call.weight_shape[0]}"
    return None


def run(
    x: Tensor, weight: Tensor, *, window: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `spec`; no packed rows."""
    batch, tokens, channels = x.shape
    past = weight.shape[1] - 1
    if window is None:
        window = x.new_zeros(batch, past, channels)
    x, weight = row_major(x), row_major(weight)
    if tokens == 1:
        state = row_major(window.transpose(1, 2))  # a copy: updated in place
        state = state.clone() if state.data_ptr() == window.data_ptr() else state
        update = foreign(UPDATE, FORMS[UPDATE])
        y = update(x=x[:, 0], conv_state=state, weight=weight, bias=None, activation="silu")
        return y[:, None], state.transpose(1, 2).contiguous()
    prefill = foreign(PREFILL, FORMS[PREFILL])
    y = prefill(
        x=x.transpose(1, 2), weight=weight, bias=None, initial_states=row_major(window).transpose(1, 2),
        activation="silu",
    )  # fmt: skip
    return y.transpose(1, 2), with_window(x[:, -past:], window, batch, past + 1)[:, -past:].clone()
