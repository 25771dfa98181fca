"""The vendor's modules of CoreX images: documented names, float16 alone, faults seen in the field, right results else.

No such card is at hand. Names are those of the field notes; bodies are ours and compute in float64.
"""

import inspect
import os

import torch
import torch.nn.functional as F

from stand_ins.libraries import _aligned, _attend, _rule, row_major_only


def complain(text: str) -> None:
    """Print as C code does: to the file descriptor, past Python's sys.stderr."""
    os.write(2, (text + "\n").encode())


MATMUL_DTYPE = "/opt/apps/ixformer/functions/matmul.cu:149 'Expected input.dtype() == kHalf'"


class Builtin:
    """A function of an extension module: no signature for Python, by position alone, its text as pybind11 writes it."""

    __signature__ = "none that inspect can read"

    def __init__(self, function, text: str | None):
        self.function, self.__doc__, self.__name__ = function, text, function.__name__

    def __call__(self, *arguments):
        return self.function(*arguments)


# ---- ixformer


@row_major_only
def matmul(input, other, out=None, transa=False, transb=False, alpha=1.0, beta=0.0):
    if input.dtype != torch.float16 or other.dtype != torch.float16:
        complain(MATMUL_DTYPE)
        return torch.zeros(input.shape[0], other.shape[0 if transb else 1], dtype=input.dtype)
    return (input.double() @ (other.double().T if transb else other.double())).half()


@row_major_only
def vllm_moe_topk_softmax(topk_weights, topk_ids, token_expert_indices, gating_output):
    if gating_output.dtype != torch.float16:
        raise TypeError("topk_softmax: expected gating_output of half")
    probabilities = gating_output.float().softmax(-1).nan_to_num(0.0)  # as vLLM's: a NaN is swallowed
    weights, experts = probabilities.sort(dim=-1, descending=True, stable=True)
    topk_weights.copy_(weights[:, : topk_weights.shape[1]])
    topk_ids.copy_(experts[:, : topk_ids.shape[1]])


@row_major_only
def vllm_moe_align_block_size(topk_ids, num_experts, block_size, sorted_token_ids, experts_ids, num_tokens_post_pad):
    assert topk_ids.dtype == sorted_token_ids.dtype == experts_ids.dtype == torch.int32
    _aligned(topk_ids, block_size, num_experts, sorted_token_ids, experts_ids, num_tokens_post_pad)


@row_major_only
def vllm_invoke_fused_moe_kernel(
    A, B, C, topk_weights, topk_ids, sorted_token_ids, expert_ids, num_tokens_post_padded, mul_routed_weight, top_k,
    block_size_m,
):  # fmt: skip
    if A.dtype != torch.float16 or B.dtype != torch.float16:
        raise TypeError("invoke_fused_moe_kernel: expected half")
    out, pairs = C.view(-1, C.shape[-1]), C.shape[0] * C.shape[1]
    rows = sorted_token_ids.long()[: int(num_tokens_post_padded)]
    owners = expert_ids.long().repeat_interleave(block_size_m)[: len(rows)]
    is_pair = rows < pairs
    rows, owners = rows[is_pair], owners[is_pair]
    found = torch.einsum("rd,rnd->rn", A[rows // top_k].double(), B[owners].double())
    out[rows] = (found * topk_weights.view(-1, 1)[rows].double() if mul_routed_weight else found).half()


def _named(function) -> str:
    names = inspect.signature(function).parameters
    return f"{function.__name__}({', '.join(f'{name}: at::Tensor' for name in names)}) -> None\n\nOf libixformer.so"


def _nameless(function) -> str:
    count = len(inspect.signature(function).parameters)
    return f"{function.__name__}({', '.join(f'arg{i}: at::Tensor' for i in range(count))}) -> None"


#: Three ways in which an extension tells its signature: names, places, nothing.
IXFORMER = {
    "ixformer:matmul": matmul,
    "ixformer.functions:vllm_moe_topk_softmax": Builtin(vllm_moe_topk_softmax, None),
    "ixformer.functions:vllm_moe_align_block_size": Builtin(
        vllm_moe_align_block_size, _nameless(vllm_moe_align_block_size)),
    "ixformer.functions:vllm_invoke_fused_moe_kernel": Builtin(
        vllm_invoke_fused_moe_kernel, _named(vllm_invoke_fused_moe_kernel)),
}  # fmt: skip


# ---- corex_gdn


@row_major_only
def _forward(module, q, k, v, gate, beta, state):
    if q.dtype != torch.float16:
        raise TypeError("gdn: expected half")
    assert q.shape[2] == module.key_heads and v.shape[2] == module.value_heads and q.shape[3] == module.key_dim
    out, last = _rule(q, k, v, gate, beta, 1.0, state, None)
    state.fill_(torch.nan)  # what came in is its own to spoil
    return out.half(), last.float()


class SeparateHeads:
    """CoreXGDN with a number of heads and a size for keys and for values."""

    def __init__(self, num_v_heads, num_k_heads, head_k_dim, head_v_dim, conv_kernel_size=4, layer_idx=0):
        self.value_heads, self.key_heads, self.key_dim = num_v_heads, num_k_heads, head_k_dim

    def forward(self, q, k, v, gate, beta, conv_state, temporal_state, attn_metadata):
        assert (attn_metadata.num_prefill_tokens > 0) == (q.shape[1] > 1)
        return _forward(self, q, k, v, gate, beta, temporal_state)


class CommonHeads:
    """CoreXGDN as it came with another image: one number of heads, one size, and no keyword of the other form."""

    def __init__(self, num_heads, head_dim, layer_idx=0, chunk_size=16, eps=1e-6):
        self.value_heads = self.key_heads = num_heads
        self.key_dim = head_dim

    def forward(self, query, key, value, g, beta, initial_state):
        return _forward(self, query, key, value, g, beta, initial_state)


class SwallowingHeads:
    """CoreXGDN that takes any keyword and uses none but its own: a wrong one would be lost without a word."""

    def __init__(self, heads=1, **kwargs):
        raise AssertionError("called though it cannot be known what it takes")


class WholeLayer:
    """CoreXGDN whose forward is that of a layer: projections, convolution and norm included."""

    def __init__(self, num_v_heads, num_k_heads, head_k_dim, head_v_dim, conv_kernel_size=4, layer_idx=0):
        pass

    def forward(self, hidden_states, attn_metadata, conv_state, temporal_state, in_proj_qkv, A_log, dt_bias):
        raise AssertionError("called with the arguments of an op")


# ---- corex_moe


def _experts(x, weights, experts, gate, up, down):
    if x.dtype != torch.float16:
        raise TypeError("moe: expected half")
    out = torch.zeros(x.shape, dtype=torch.float64)
    for rank in range(experts.shape[1]):
        chosen = experts[:, rank].long()
        a, b = (torch.einsum("td,tid->ti", x.double(), w[chosen].double()) for w in (gate, up))
        rows = torch.einsum("ti,tdi->td", F.silu(a) * b, down[chosen].double())
        out += weights[:, rank, None].double() * rows
    return out


def _routed(gate_output, topk, renormalize):
    weights, experts = gate_output.double().softmax(-1).sort(dim=-1, descending=True, stable=True)
    weights = weights[:, :topk]
    return weights / weights.sum(-1, keepdim=True) if renormalize else weights, experts[:, :topk]


@row_major_only
def moe_forward_merged(hidden_states, w13, w2, topk_weights, topk_ids):
    gate, up = w13.chunk(2, dim=1)
    return _experts(hidden_states, topk_weights, topk_ids, gate, up, w2).half()


@row_major_only
def moe_forward_separate(hidden_states, w1, w2, w3, topk_weights, topk_ids):
    return _experts(hidden_states, topk_weights, topk_ids, w1, w3, w2).half()


@row_major_only
def moe_forward_routing_merged(hidden_states, gate_output, w13, w2, topk=8, renormalize=True):
    gate, up = w13.chunk(2, dim=1)
    return _experts(hidden_states, *_routed(gate_output, topk, renormalize), gate, up, w2).float()


@row_major_only
def moe_forward_routing_separate(hidden_states, gate_output, w1, w2, w3, topk=8, renormalize=True):
    assert w3.dim() == 3, "a number in the place of a matrix"
    return _experts(hidden_states, *_routed(gate_output, topk, renormalize), w1, w3, w2).float()


# ---- corex_fa2


@row_major_only
def fa2_packed_prefill(
    query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, causal=True,
    window_size=(-1, -1),
):  # fmt: skip
    if query.dtype != torch.float16:
        raise TypeError("fa2: expected half")
    a, b = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    parts = zip(a, a[1:], b, b[1:], strict=False)
    return torch.cat([_attend(query[i:j], key[m:n], value[m:n], softmax_scale) for i, j, m, n in parts])


COREX = {
    "corex_gdn:CoreXGDN": SeparateHeads,
    "corex_moe:moe_forward": moe_forward_merged,
    "corex_fa2:fa2_packed_prefill": fa2_packed_prefill,
}
SYMBOLS = IXFORMER | COREX
