"""The functions of the libraries that backends call: signatures as read, limits as documented, results of our arbiter.

`READ_FROM` says for each where its signature was read. The bodies are ours: they compute in float64 what the function
is for, refuse what the library refuses, and spoil what it promises nothing about (memory past what it fills, the order
in which threads come), so that an adapter that relies on it is found out. Every tensor must lie in memory as its shape
says, also along axes of one element, which `Tensor.contiguous` leaves as they are and vLLM's assertions do not.
"""

import functools
import inspect
from itertools import pairwise

import torch
import torch.nn.functional as F

from workbench.kernels.gated_delta_rule.reference import oracle

FLA, QLA, INFER, VLLM = "fla-core 0.6.0", "flash-qla 0.1.3", "flashinfer-python 0.7.4", "vllm 0.26.0"

#: Parameters whose layout is another one, checked in the function: channels next to each other in memory.
CHANNELS_LAST = {"x", "conv_state", "conv_states", "initial_states"}


def row_major_only(function, other_layout=frozenset()):
    """The function, which takes no tensor with other strides than those of its shape, but for `other_layout`."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def asserting(*arguments, **named):
        for name, x in signature.bind(*arguments, **named).arguments.items():
            if isinstance(x, torch.Tensor) and name not in other_layout:
                found, needed = x.stride(), torch.empty(x.shape, device="meta").stride()
                assert found == needed, f"{function.__name__}: {name} {tuple(x.shape)}: strides {found}, needs {needed}"
        return function(*arguments, **named)

    return asserting


def _rule(q, k, v, g, beta, scale, state, cu_seqlens):
    """(out, state) in float64; state [S, V, K, W]."""
    bounds = None if cu_seqlens is None else cu_seqlens.cpu()
    return oracle(q.double() * scale, k, v, log_decay=g, beta=beta, initial_state=state, cu_seqlens=bounds)


# ---- flash-linear-attention


def fla_chunk_gated_delta_rule(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None,
    chunk_indices=None, cp_context=None, **kwargs,
):  # fmt: skip
    assert not kwargs, f"swallowed {sorted(kwargs)}"
    if cu_seqlens is not None and initial_state is not None and initial_state.shape[0] != len(cu_seqlens) - 1:
        raise ValueError("The number of initial states is expected to be equal to the number of input sequences")
    out, state = _rule(q, k, v, g, beta, k.shape[-1] ** -0.5 if scale is None else scale, initial_state, cu_seqlens)
    return out.to(q.dtype), state.float() if output_final_state else None


def fla_fused_recurrent_gated_delta_rule(
    q, k, v, g=None, gk=None, gv=None, beta=None, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, A_log=None, dt_bias=None, use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False, state_v_first=False, cu_seqlens=None, **kwargs,
):  # fmt: skip
    assert not kwargs and gk is None and gv is None
    out, state = _rule(q, k, v, g, beta, k.shape[-1] ** -0.5 if scale is None else scale, initial_state, cu_seqlens)
    return out.to(v.dtype), state.float() if output_final_state else None


def fla_rms_norm_gated(
    x, g, weight, bias, activation="swish", residual=None, prenorm=False, residual_in_fp32=False, eps=1e-6
):
    assert activation in ("swish", "silu") and bias is None and residual is None
    wide, gate = x.double(), g.double()
    return (wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + eps) * weight * gate * gate.sigmoid()).to(x.dtype)


# ---- FlashQLA


def qla_chunk_gated_delta_rule(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    cu_seqlens=None, head_first=False, state_v_first=False, auto_cp=True, enable_fwd_cp_cache=True, cp_context=None,
    force_intra_cp=False,
):  # fmt: skip
    assert q.dtype in (torch.bfloat16, torch.float16), "FlashQLA only supports bfloat16 and float16."
    assert q.dtype == k.dtype == v.dtype and not head_first
    assert q.shape[-1] == v.shape[-1] == 128
    out, state = _rule(q, k, v, g, beta, k.shape[-1] ** -0.5 if scale is None else scale, initial_state, cu_seqlens)
    return out.to(q.dtype), state.float() if output_final_state else None


# ---- FlashInfer


def infer_chunk_gated_delta_rule(
    q, k, v, g=None, beta=None, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None,
    use_qk_l2norm_in_kernel=False, output=None, output_state=None, state_checkpoints=None, checkpoint_cu_starts=None,
    checkpoint_every_n_tokens=0, use_cp="auto", state_indices=None, _cp_chunk_len=None, backend="auto", max_seqlen=None,
    *, gate_domain="linear", use_gate_in_kernel=False, A_log=None, dt_bias=None, beta_is_logit=False,
    cu_seqlens_cpu=None, output_state_indices=None, checkpoint_state_indices=None, prefix_lens=None,
):  # fmt: skip
    assert all(x.is_contiguous() and x.dim() == 3 for x in (q, k, v)) and gate_domain == "linear"
    assert g.dtype == beta.dtype == torch.float32 and q.shape[-1] == v.shape[-1] == 128
    assert bool(((g >= 0) & (g <= 1)).all()), "alpha = exp(g)"
    assert cu_seqlens is not None and output_state is not None
    state = None if initial_state is None else initial_state.transpose(2, 3)
    scale = k.shape[-1] ** -0.5 if scale is None or scale == 0.0 else scale
    gates = g.double().log().clamp(min=-1e4)
    out, last = _rule(q[None], k[None], v[None], gates[None], beta[None], scale, state, cu_seqlens)
    output_state.copy_(last.transpose(2, 3))
    return (out[0].to(q.dtype), output_state) if output_final_state else out[0].to(q.dtype)


def infer_gemma_rmsnorm(input, weight, eps=1e-6, out=None, enable_pdl=None):
    assert input.dim() == 2 and weight.dtype == input.dtype
    wide = input.double()
    return (wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + eps) * (1.0 + weight.double())).to(input.dtype)


def infer_single_prefill_with_kv_cache(
    q, k, v, scale_q=None, scale_k=None, scale_v=None, o_dtype=None, custom_mask=None, packed_custom_mask=None,
    causal=False, kv_layout="NHD", pos_encoding_mode="NONE", use_fp16_qk_reduction=False, sm_scale=None, window_left=-1,
    logits_soft_cap=None, rope_scale=None, rope_theta=None, backend="auto", return_lse=False, kv_cache_sf=None,
    k_scale=None, v_scale=None,
):  # fmt: skip
    assert causal and kv_layout == "NHD" and q.dim() == 3 and q.is_contiguous()
    return _attend(q, k, v, q.shape[-1] ** -0.5 if sm_scale is None else sm_scale)


def _attend(q, k, v, scale):
    """Causal, aligned to the last query and key: q [T, heads, D], k, v [L, kv heads, D]."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1).double() for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q.double(), k) * scale
    rows, columns = scores.shape[-2:]
    future = torch.ones(rows, columns, dtype=torch.bool).triu(columns - rows + 1)
    weights = scores.masked_fill(future, -torch.inf).softmax(-1)
    return torch.einsum("hts,shd->thd", weights, v).to(q.dtype)


# ---- FlashAttention


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    block_table=None,
):  # fmt: skip
    assert q.dtype in (torch.bfloat16, torch.float16) and cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    queries, keys = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    assert max_seqlen_q == max(b - a for a, b in pairwise(queries)) and causal
    assert max_seqlen_k == max(b - a for a, b in pairwise(keys))
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return torch.cat([
        _attend(q[queries[s] : queries[s + 1]], k[keys[s] : keys[s + 1]], v[keys[s] : keys[s + 1]], scale)
        for s in range(len(queries) - 1)
    ])  # fmt: skip


# ---- causal_conv1d


def _convolve(x, weight, state):
    """x [..., channels, T] after state [..., channels, width - 1]: (silu of the sums, the inputs that it saw)."""
    seen = torch.cat([state, x], dim=-1)
    y = torch.einsum("...tj,...j->...t", seen.double().unfold(-1, weight.shape[1], 1), weight.double())
    return F.silu(y).to(x.dtype), seen


def conv1d_fn(
    x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False, final_states_out=None,
    activation=None,
):  # fmt: skip
    assert activation in ("silu", "swish") and bias is None and x.stride(1) == 1 and x.shape[1] % 8 == 0
    assert 2 <= weight.shape[1] <= 4 and (seq_idx is None or initial_states is None)
    return _convolve(x, weight, initial_states)[0]


def conv1d_update(
    x, conv_state, weight, bias=None, activation=None, cache_seqlens=None, conv_state_indices=None
):
    assert activation in ("silu", "swish") and x.dim() == 2 and 2 <= weight.shape[1] <= 4
    y, seen = _convolve(x[..., None], weight, conv_state)
    conv_state.copy_(seen[..., 1:])
    return y[..., 0]


# ---- vLLM


def vllm_chunk_gated_delta_rule(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, chunk_indices=None,
    chunk_offsets=None, use_qk_l2norm_in_kernel=False, core_attn_out=None,
):  # fmt: skip
    assert q.dtype == k.dtype == v.dtype and q.dtype != torch.float32
    state = None if initial_state is None else initial_state.transpose(2, 3)
    out, last = _rule(q, k, v, g, beta, k.shape[-1] ** -0.5 if scale is None else scale, state, cu_seqlens)
    return out.to(q.dtype), last.transpose(2, 3).float() if output_final_state else None


def vllm_fused_recurrent_gated_delta_rule(
    q, k, v, g, beta=None, scale=None, initial_state=None, inplace_final_state=True, cu_seqlens=None,
    ssm_state_indices=None, num_accepted_tokens=None, use_qk_l2norm_in_kernel=False,
):  # fmt: skip
    assert not inplace_final_state and initial_state is not None
    # One state per token of the packed row, and states addressed by the first token of a sequence.
    assert q.shape[0] == 1 and cu_seqlens is not None and cu_seqlens.diff().eq(1).all()
    out, last = _rule(q, k, v, g, beta, scale, initial_state.transpose(2, 3), cu_seqlens)
    return out.to(q.dtype), last.transpose(2, 3).to(initial_state.dtype)


def vllm_causal_conv1d_fn(
    x, weight, bias, conv_states, query_start_loc, cache_indices=None, has_initial_state=None, activation="silu",
    pad_slot_id=-1, null_block_id=0, block_idx_first_scheduled_token=None, block_idx_last_scheduled_token=None,
    initial_state_idx=None, num_computed_tokens=None, block_size_to_align=0, metadata=None, validate_data=False,
):  # fmt: skip
    assert x.dim() == 2 and (x.stride(0) == 1 or x.shape[0] == 1) and query_start_loc.dtype == torch.int32
    out, bounds = torch.full_like(x, torch.nan), query_start_loc.tolist()
    for s, slot in enumerate(cache_indices.tolist()):
        start, stop = bounds[s], bounds[s + 1]
        if slot == null_block_id or start == stop:
            continue
        state = conv_states[slot] if has_initial_state[s] else torch.zeros_like(conv_states[slot])
        out[:, start:stop], seen = _convolve(x[:, start:stop], weight, state)
        conv_states[slot] = seen[:, seen.shape[1] - conv_states.shape[2] :].clone()
    return out


def vllm_causal_conv1d_update(
    x, conv_state, weight, bias=None, activation=None, conv_state_indices=None, num_accepted_tokens=None,
    query_start_loc=None, max_query_len=-1, null_block_id=0, block_idx_last_scheduled_token=None,
    initial_state_idx=None, validate_data=False,
):  # fmt: skip
    slots = conv_state_indices.long()
    assert activation in ("silu", "swish") and x.dim() == 2 and not (slots == null_block_id).any()
    y, seen = _convolve(x[..., None], weight, conv_state[slots])
    conv_state[slots] = seen[..., 1:]
    x.copy_(y[..., 0])  # the output takes the place of the input
    return x


def vllm_rms_norm(out, input, weight, epsilon):
    assert out.dtype == input.dtype == weight.dtype and input.is_contiguous()
    wide = input.double()
    out.copy_(wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + epsilon) * weight.double())


def vllm_rmsnorm_fn(x, weight, bias, z=None, eps=1e-6, group_size=None, norm_before_gate=True, activation="swish"):
    assert norm_before_gate and bias is None and activation in ("swish", "silu")
    assert weight.stride(-1) == 1  # layernorm_guard.py:200, also of one channel
    return fla_rms_norm_gated(x, z, weight, bias, eps=eps)


def vllm_topk_softmax(
    topk_weights, topk_ids, token_expert_indices, gating_output, renormalize=False, e_score_correction_bias=None
):
    assert topk_weights.dtype == torch.float32 and topk_ids.dtype == token_expert_indices.dtype == torch.int32
    probabilities = gating_output.float().softmax(-1).nan_to_num(0.0)  # as its CUDA kernel: a NaN is swallowed
    weights, experts = probabilities.sort(dim=-1, descending=True, stable=True)
    top = topk_weights.shape[1]
    chosen = weights[:, :top]
    total = chosen.sum(-1, keepdim=True)
    topk_weights.copy_(chosen / total.where(total > 0.0, 1.0) if renormalize else chosen)
    topk_ids.copy_(experts[:, :top])


def _aligned(topk_ids, block_size, num_experts, ids, owners, used):
    """Pairs by expert in whole blocks, those of an expert in an order of their own, junk past the rows used."""
    flat, row = topk_ids.flatten().tolist(), 0
    ids.fill_(len(flat))
    owners.fill_(-7)
    for expert in range(num_experts):
        pairs = [pair for pair, owner in enumerate(flat) if owner == expert][::-1]
        rows = -(-len(pairs) // block_size) * block_size
        ids[row : row + len(pairs)] = torch.tensor(pairs, dtype=ids.dtype)
        owners[row // block_size : (row + rows) // block_size] = expert
        row += rows
    ids[row:] = -12345
    owners[row // block_size :] = num_experts - 1
    used.fill_(row)


def vllm_moe_align_block_size(
    topk_ids, block_size, num_experts, expert_map=None, pad_sorted_ids=False, ignore_invalid_experts=False
):
    rows = topk_ids.numel() + num_experts * (block_size - 1)
    if topk_ids.numel() < num_experts:
        rows = min(topk_ids.numel() * block_size, rows)
    ids, owners, used = (torch.empty(n, dtype=torch.int32) for n in (rows, -(-rows // block_size), 1))
    _aligned(topk_ids, block_size, num_experts, ids, owners, used)
    return ids, owners, used


def vllm_fused_experts(
    hidden_states, w1, w2, topk_weights, topk_ids, activation="silu", apply_router_weight_on_input=False,
    global_num_experts=-1, expert_map=None, quant_config=None,
):  # fmt: skip
    assert hidden_states.is_contiguous() and w1.stride(-1) == w2.stride(-1) == 1 and topk_ids.dtype == torch.int32
    assert topk_weights.stride(1) == 1  # fused_moe.py:877, also of one expert for each token
    out = torch.zeros(hidden_states.shape, dtype=torch.float64)
    for rank in range(topk_ids.shape[1]):
        chosen = topk_ids[:, rank].long()
        gate, up = torch.einsum("td,tnd->tn", hidden_states.double(), w1[chosen].double()).chunk(2, -1)
        hidden = F.silu(gate) * up
        rows = torch.einsum("ti,tdi->td", hidden, w2[chosen].double())
        out += topk_weights[:, rank, None].double() * rows
    return out.to(hidden_states.dtype)


#: symbol -> (function, where its signature was read)
READ_FROM = {
    "fla.ops.gated_delta_rule:chunk_gated_delta_rule": (
        fla_chunk_gated_delta_rule, FLA, "fla/ops/gated_delta_rule/chunk.py"),
    "fla.ops.gated_delta_rule:fused_recurrent_gated_delta_rule": (
        fla_fused_recurrent_gated_delta_rule, FLA, "fla/ops/gated_delta_rule/fused_recurrent.py"),
    "fla.modules.norm.fused_norm_gate:rms_norm_gated": (fla_rms_norm_gated, FLA, "fla/modules/norm/fused_norm_gate.py"),
    "flash_qla:chunk_gated_delta_rule": (
        qla_chunk_gated_delta_rule, QLA, "flash_qla/ops/gated_delta_rule/chunk/__init__.py"),
    "flashinfer.gdn_prefill:chunk_gated_delta_rule": (
        infer_chunk_gated_delta_rule, INFER, "flashinfer/gdn_prefill.py"),
    "flashinfer.norm:gemma_rmsnorm": (infer_gemma_rmsnorm, INFER, "flashinfer/norm/__init__.py"),
    "flashinfer.prefill:single_prefill_with_kv_cache": (
        infer_single_prefill_with_kv_cache, INFER, "flashinfer/prefill.py"),
    "flash_attn:flash_attn_varlen_func": (
        flash_attn_varlen_func, "flash-attention, main branch of 2.8", "flash_attn/flash_attn_interface.py"),
    "causal_conv1d:causal_conv1d_fn": (
        conv1d_fn, "causal-conv1d, main branch of 1.6", "causal_conv1d/causal_conv1d_interface.py"),
    "causal_conv1d:causal_conv1d_update": (
        conv1d_update, "causal-conv1d, main branch of 1.6", "causal_conv1d/causal_conv1d_interface.py"),
    "vllm.third_party.flash_linear_attention.ops:chunk_gated_delta_rule": (
        vllm_chunk_gated_delta_rule, VLLM, "vllm/third_party/flash_linear_attention/ops/chunk.py"),
    "vllm.third_party.flash_linear_attention.ops:fused_recurrent_gated_delta_rule": (
        vllm_fused_recurrent_gated_delta_rule, VLLM, "vllm/third_party/flash_linear_attention/ops/fused_recurrent.py"),
    "vllm.third_party.flash_linear_attention.ops.layernorm_guard:rmsnorm_fn": (
        vllm_rmsnorm_fn, VLLM, "vllm/third_party/flash_linear_attention/ops/layernorm_guard.py"),
    "vllm.model_executor.layers.mamba.ops.causal_conv1d:causal_conv1d_fn": (
        vllm_causal_conv1d_fn, VLLM, "vllm/model_executor/layers/mamba/ops/causal_conv1d.py"),
    "vllm.model_executor.layers.mamba.ops.causal_conv1d:causal_conv1d_update": (
        vllm_causal_conv1d_update, VLLM, "vllm/model_executor/layers/mamba/ops/causal_conv1d.py"),
    "vllm._custom_ops:rms_norm": (vllm_rms_norm, VLLM, "vllm/_custom_ops.py"),
    "vllm._custom_ops:topk_softmax": (vllm_topk_softmax, VLLM, "vllm/_custom_ops.py"),
    "vllm.model_executor.layers.fused_moe.moe_align_block_size:moe_align_block_size": (
        vllm_moe_align_block_size, VLLM, "vllm/model_executor/layers/fused_moe/moe_align_block_size.py"),
    "vllm.model_executor.layers.fused_moe.fused_moe:fused_experts": (
        vllm_fused_experts, VLLM, "vllm/model_executor/layers/fused_moe/fused_moe.py"),
}  # fmt: skip

SYMBOLS = {
    symbol: row_major_only(found, CHANNELS_LAST if "causal_conv1d" in symbol else frozenset())
    for symbol, (found, _, _) in READ_FROM.items()
}
