"""The vendor's gated delta rule of CoreX images: the class `CoreXGDN`, built once for each set of head sizes.

Its constructor has come in two forms, ``CoreXGDN(num_v_heads=, num_k_heads=, head_k_dim=, head_v_dim=)`` and
``CoreXGDN(num_heads, head_dim)``; which one there is, its signature says. The second knows one number of heads and one
head size: key heads are repeated for it, and K must equal W. ``forward`` takes q, k, v in float16, the log decay and
beta per value head and the state, and gives output and state. Names are those of the field notes; that the module
normalises nothing, scales nothing and holds its state as [B, V, K, W] is what the op's contract needs and was not seen
on a card: hold it to the contract with `workbench conformance gated_delta_rule --backend corex_gdn` before it is
trusted.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from workbench.errors import BackendError
from workbench.kernels.gated_delta_rule import library_form
from workbench.kernels.layout import row_major
from workbench.kernels.registry import Call
from workbench.kernels.requirements import Requires, load_symbol
from workbench.kernels.signatures import Given, Ordered, bind
from workbench.kernels.vendor_errors import native_stderr
from workbench.numerics import NumericsPolicy
from workbench.taps import Tap

POLICY = "fp32_cumsum"
CLASS = "corex_gdn:CoreXGDN"
REQUIRES = Requires(devices=("cuda",), dtypes=(torch.float16,), symbols=(CLASS,))

_SEPARATE = (
    Given("num_v_heads"), Given("num_k_heads"), Given("head_k_dim"), Given("head_v_dim"),
    Given("conv_kernel_size", is_needed=False), Given("layer_idx", is_needed=False),
)  # fmt: skip
_COMMON = (Given("num_heads"), Given("head_dim"), Given("layer_idx", is_needed=False))
FORMS = {CLASS: (Ordered(_SEPARATE), Ordered(_COMMON))}
_FORWARD = (
    Given("q", ("query",)), Given("k", ("key",)), Given("v", ("value",)), Given("gate", ("log_decay", "g")),
    Given("beta"), Given("conv_state", is_needed=False),
    Given("temporal_state", ("initial_state", "ssm_state", "state")), Given("attn_metadata", is_needed=False),
)  # fmt: skip


def supports(call: Call) -> str | None:
    if call.packed:
        return "takes sequences of one length, no packed row"
    return library_form.common_refusal(call, POLICY)


@functools.lru_cache(maxsize=8)
def _built(constructor: type, key_heads: int, value_heads: int, key_dim: int, value_dim: int) -> tuple[Any, bool]:
    """(the vendor's object, whether it wants key heads repeated)."""
    forms = FORMS[CLASS] if key_dim == value_dim else FORMS[CLASS][:1]
    binding = bind(CLASS, constructor, *forms)
    with native_stderr(CLASS):
        made = binding(
            num_v_heads=value_heads, num_k_heads=key_heads, head_k_dim=key_dim, head_v_dim=value_dim,
            num_heads=value_heads, head_dim=key_dim, conv_kernel_size=4, layer_idx=0,
        )  # fmt: skip
    return made, not binding.places("num_v_heads")


def run(
    q: Tensor, k: Tensor, v: Tensor, *, log_decay: Tensor, beta: Tensor, initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None, policy: NumericsPolicy, tap: Tap | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `spec`; no packed rows."""
    batch, tokens, key_heads, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    module, is_repeated = _built(load_symbol(CLASS), key_heads, value_heads, key_dim, value_dim)
    if is_repeated:
        q, k = (x.repeat_interleave(value_heads // key_heads, dim=2) for x in (q, k))
    if initial_state is None:
        initial_state = torch.zeros(batch, value_heads, key_dim, value_dim, dtype=torch.float32, device=q.device)
    metadata = SimpleNamespace(
        num_prefill_tokens=batch * tokens if tokens > 1 else 0, num_decode_tokens=batch if tokens == 1 else 0
    )
    forward = bind(f"{CLASS}.forward", module.forward, _FORWARD)
    with native_stderr(f"{CLASS}.forward"):
        found = forward(
            q=row_major(q), k=row_major(k), v=row_major(v), gate=library_form.gates(log_decay, policy, tokens),
            beta=row_major(beta), conv_state=None, attn_metadata=metadata,
            temporal_state=row_major(initial_state.to(torch.float32, copy=True)),
        )  # fmt: skip
    if not isinstance(found, tuple) or len(found) != 2 or found[1] is None:
        raise BackendError(f"{CLASS}.forward: expected (output, state), found {type(found).__name__}")
    return library_form.finished(found[0], found[1], policy, tap, like=v)
