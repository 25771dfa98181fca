"""The region of `spec` from the single ops in PyTorch, as the model calls them one after another."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.kernels.causal_conv import torch_shift
from workbench.kernels.gated_delta_rule import torch_recurrent
from workbench.kernels.gated_delta_rule.spec import limited
from workbench.kernels.gated_delta_rule.torch_recurrent import supports as supports
from workbench.kernels.gdn_decode import spec
from workbench.kernels.norms import torch_rms
from workbench.numerics import NumericsPolicy
from workbench.taps import Tap


def run(
    qkv: Tensor, z: Tensor, raw_beta: Tensor, raw_gate: Tensor, *, conv_weight: Tensor, A_log: Tensor, dt_bias: Tensor,
    norm_weight: Tensor, window: Tensor, state: Tensor, eps: float, slots: Tensor | None = None,
    in_place: bool = False, policy: NumericsPolicy, tap: Tap | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """See `spec`; every clamp of the policy that one token has."""
    keys, (heads, key_dim, value_dim) = spec.key_heads(qkv, state), state.shape[1:]
    wide = torch.promote_types(qkv.dtype, torch.float32)
    rate = limited(A_log, policy.clamp("A_log", "decode")).exp()

    def step(taken: tuple[Tensor, ...], window: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        qkv, z, raw_beta, raw_gate = taken
        if not len(qkv):
            return z.clone(), window.clone(), state.clone()
        y, new_window = torch_shift.run(qkv[:, None], conv_weight, window=window)
        qk, v = y.split_with_sizes([2 * keys * key_dim, heads * value_dim], -1)
        qk = spec.l2_norm(qk.to(wide).reshape(-1, 1, 2 * keys, key_dim))
        q, k = qk.split(keys, dim=2)
        out, new_state = torch_recurrent.run(
            q * key_dim**-0.5, k, v.reshape(-1, 1, heads, value_dim),
            log_decay=-rate * F.softplus(raw_gate.to(wide) + dt_bias)[:, None], beta=torch.sigmoid(raw_beta)[:, None],
            initial_state=state, policy=policy, tap=tap,
        )  # fmt: skip
        return torch_rms.run_gated_rms_norm(out[:, 0], z, norm_weight, eps=eps), new_window.clone(), new_state

    return spec.placed(step, (qkv, z, raw_beta, raw_gate), window, state, slots, in_place)
