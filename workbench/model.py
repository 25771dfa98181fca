"""The complete model, top to bottom: Qwen3.5/3.6 (MoE and dense) and Qwen3-Next.

Letters in names and comments: B batch, T time, S sequences, H key heads, V value heads, K key dim, W value dim,
D hidden, E experts, A experts per token, I expert width. Parameter names are the canonical names of `checkpoint`.
Layers compute only through `Kernels` (which backend runs) and show what they compute to a tap (see `taps`).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench import generation, taps
from workbench.cache import Cache, DeltaCache, KeyValueCache
from workbench.config import ModelConfig
from workbench.errors import InputError
from workbench.kernels import Kernels
from workbench.kernels.gated_delta_rule.spec import limited, phase_of, sequence_bounds
from workbench.kernels.gdn_decode.spec import l2_norm
from workbench.taps import Tap, observe


@dataclass(slots=True)
class ModelOutput:
    """`logits` [B, T, vocabulary], `hidden` [B, T, D] after the final norm, `cache` (None with use_cache=False).

    With last_only=True `logits` is [S, 1, vocabulary], one row for each of the S sequences (S = B unless packed).
    """

    logits: Tensor
    hidden: Tensor
    cache: Cache | None


@dataclass(frozen=True, slots=True)
class Pass:
    """What all layers of one forward pass share.

    `lengths` is the number of tokens each of the S sequences had before; `bounds` (host) and `cu_seqlens` (CPU
    tensor) are the boundaries of packed sequences or None; `cos`, `sin` [B or 1, T, 1, rotary_dim / 2].
    """

    kernels: Kernels
    lengths: list[int]
    bounds: list[int] | None
    cu_seqlens: Tensor | None
    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True)
class Padding:
    """Where the tokens of a padded batch stand: `where` in the flattened [B, T] `mask`, packed as `cu_seqlens`."""

    mask: Tensor
    where: Tensor
    cu_seqlens: Tensor

    @classmethod
    def of(cls, attention_mask: Tensor | None, ids: Tensor, cu_seqlens: Tensor | None) -> Padding | None:
        """The padding of a batch of `ids` [B, T]; None where there is none. Raises InputError for a mask with holes."""
        if attention_mask is None:
            return None
        if cu_seqlens is not None:
            raise InputError("attention_mask: expected none together with cu_seqlens, which marks the sequences")
        if attention_mask.shape != ids.shape:
            raise InputError(
                f"attention_mask: expected the shape of the new tokens {tuple(ids.shape)}, "
                f"found {tuple(attention_mask.shape)}"
            )
        if not bool(((attention_mask == 0) | (attention_mask == 1)).all()):
            raise InputError("attention_mask: expected 0 for padding and 1 for tokens, found other values")
        mask = attention_mask.bool()
        if bool(mask.all()):
            return None
        runs = F.pad(mask.to(torch.int8), (1, 1)).diff(dim=1).eq(1).sum(1)
        if not bool((runs == 1).all()):
            row = int((runs != 1).nonzero()[0])
            raise InputError(
                f"attention_mask row {row}: expected one run of ones, padded on the left or right, "
                f"found {int(runs[row])}"
            )
        return cls(mask, mask.flatten().nonzero().squeeze(1), F.pad(mask.sum(1).cumsum(0), (1, 0)).cpu())

    def pack(self, rows: Tensor) -> Tensor:
        """[B, T, ...] -> [1, tokens, ...] without the padding."""
        return rows.flatten(0, 1)[self.where][None]

    def spread(self, rows: Tensor) -> Tensor:
        """[1, tokens, D] -> [B, T, D] with zeros where the padding was."""
        full = rows.new_zeros(self.mask.numel(), rows.shape[-1]).index_copy(0, self.where, rows[0])
        return full.view(*self.mask.shape, -1)


@functools.lru_cache(maxsize=8)
def inverse_frequencies(rotary_dim: int, theta: float, device: torch.device) -> Tensor:
    """theta^(-2j / rotary_dim) in fp32, [rotary_dim / 2]."""
    exponents = torch.arange(0, rotary_dim, 2, device=device, dtype=torch.float32) / rotary_dim
    return 1.0 / theta**exponents


def rotary_tables(positions: Tensor, config: ModelConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of position * theta^(-2j / rotary_dim), [..., T] -> [..., T, 1, rotary_dim / 2] in `dtype`.

    Angles are taken in fp32. Text positions are equal in all three sections of M-RoPE, which makes it ordinary RoPE.
    """
    frequencies = inverse_frequencies(config.rotary_dim, config.rope_theta, positions.device)
    angles = positions[..., None, None].float() * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (j, j + rotary_dim / 2) of the first rotary_dim channels of x [B, T, heads, head_dim]."""
    half = cos.shape[-1]
    first, second, rest = x.split_with_sizes([half, half, x.shape[-1] - 2 * half], -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


class RMSNorm(nn.Module):
    """x rsqrt(mean(x^2) + eps) (1 + weight); the weight is centred on zero."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor, kernels: Kernels) -> Tensor:
        return kernels.rms_norm(x, self.weight, eps=self.eps)


class Linear(nn.Linear):
    """x weight^T."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor, kernels: Kernels) -> Tensor:
        return kernels.linear(x, self.weight)


class Joint:
    """Projections of one input, computed as one product where their weights lie one after another in memory.

    `lay_out` puts them there: the weights stay parameters of their own and become views of one matrix. Whatever
    replaces one of them (a cast, a move, an assignment) leaves separate products until the next `lay_out`. A hook on
    one of the layers has separate products too, or it would never be called.
    """

    def __init__(self, *layers: Linear):
        self.layers = layers
        self.sizes = [layer.out_features for layer in layers]
        self.matrix: Tensor | None = None
        self.pointers: list[int] = []

    def lay_out(self) -> None:
        weights = [layer.weight for layer in self.layers]
        if len({(weight.dtype, weight.device) for weight in weights}) > 1 or weights[0].is_meta:
            self.matrix = None
            return
        self.matrix = torch.cat([weight.detach() for weight in weights])
        for weight, rows in zip(weights, self.matrix.split(self.sizes), strict=True):
            weight.data = rows
        self.pointers = [weight.data_ptr() for weight in weights]

    def __call__(self, x: Tensor, kernels: Kernels) -> Sequence[Tensor]:
        """x [..., D] -> one [..., rows] per layer."""
        if self.matrix is None or self._must_be_separate():
            return [layer(x, kernels) for layer in self.layers]
        return kernels.linear(x, self.matrix).split_with_sizes(self.sizes, -1)

    def _must_be_separate(self) -> bool:
        """Whether a weight was replaced, is to be trained, or a hook waits for its layer; asked for every token."""
        trains = torch.is_grad_enabled()
        for layer, pointer in zip(self.layers, self.pointers, strict=True):
            weight = layer._parameters["weight"]  # `layer.weight` would search for it in three places
            if weight.data_ptr() != pointer or (trains and weight.requires_grad):
                return True
            if layer._forward_hooks or layer._forward_pre_hooks:
                return True
        return False


class Weight(nn.Module):
    """A module that is one weight: its place in the parameter names is all that matters."""

    def __init__(self, *shape: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(*shape))


class GatedDeltaNet(nn.Module):
    """Linear attention with the gated delta rule.

    q|k|v = silu(conv(in_proj_qkv x)); beta = sigmoid(in_proj_b x);
    log_decay = -exp(A_log) softplus(in_proj_a x + dt_bias); out_proj(norm(delta_rule(...)) * silu(in_proj_z x))
    """

    #: Rounding these is raised to a power by exp and then by the length: they never leave fp32.
    KEPT_WIDE = ("A_log", "dt_bias")

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.key_heads, self.value_heads = config.linear_num_key_heads, config.linear_num_value_heads
        self.key_head_dim, self.value_head_dim = config.linear_key_head_dim, config.linear_value_head_dim
        self.key_dim, self.value_dim = config.key_dim, config.value_dim
        self.eps = config.rms_norm_eps
        self.in_proj_qkv = Linear(config.hidden_size, config.conv_dim)
        self.in_proj_z = Linear(config.hidden_size, self.value_dim)
        self.in_proj_b = Linear(config.hidden_size, self.value_heads)
        self.in_proj_a = Linear(config.hidden_size, self.value_heads)
        self.conv1d = Weight(config.conv_dim, 1, config.linear_conv_kernel_dim)
        self.A_log = nn.Parameter(torch.zeros(self.value_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.ones(self.value_heads, dtype=torch.float32))
        self.norm = Weight(self.value_head_dim)
        self.out_proj = Linear(self.value_dim, config.hidden_size)
        self.joint = Joint(self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GatedDeltaNet:
        """`model.half()` and `model.to(dtype)` end here: move the wide parameters, but do not narrow them."""
        wide = {name: getattr(self, name).detach() for name in self.KEPT_WIDE}
        super()._apply(fn, recurse)
        for name, before in wide.items():
            after = getattr(self, name)
            if after.dtype.itemsize < 4:
                after.data = before.to(after.device)
        return self

    def forward(self, x: Tensor, shared: Pass, cache: DeltaCache | None, tap: Tap | None) -> Tensor:
        """x [B, T, D] -> [B, T, D]; `cache` is updated."""
        batch, tokens, _ = x.shape
        kernels = shared.kernels
        qkv, z, raw_beta, raw_gate = self.joint(x, kernels)
        is_decode = tokens == 1 and cache is not None and shared.bounds is None
        if is_decode and kernels.fuses_decode(qkv, cache.state, tap):
            out, window, state = kernels.gdn_decode(
                qkv[:, 0], z.view(batch, self.value_heads, self.value_head_dim), raw_beta[:, 0], raw_gate[:, 0],
                conv_weight=self.conv1d.weight.squeeze(1), A_log=self.A_log, dt_bias=self.dt_bias,
                norm_weight=self.norm.weight, window=cache.window, state=cache.state, eps=self.eps,
                watch=tap,
            )  # fmt: skip
            if tap is not None:  # it keeps flags, and these have been raised; the recurrence's output had this shape
                tap(taps.GDN_STATE, state)
                tap(taps.GDN_OUT, out)
                tap(taps.GDN_NORM, out)
            cache.window, cache.state = window.detach(), state.detach()
            return self.out_proj(out.view(batch, 1, self.value_dim), kernels)
        qkv = observe(tap, taps.GDN_QKV, qkv)
        z = observe(tap, taps.GDN_GATE, z.view(batch, tokens, self.value_heads, self.value_head_dim))
        beta = observe(tap, taps.GDN_BETA, torch.sigmoid(raw_beta))
        wide = torch.promote_types(x.dtype, torch.float32)
        of_rate = kernels.policy.clamp("A_log", phase_of(tokens))
        rate = limited(self.A_log, of_rate).exp()
        log_decay = -rate * F.softplus(raw_gate.to(wide) + self.dt_bias)
        log_decay = observe(tap, taps.GDN_LOG_DECAY, log_decay)

        mixed, window = kernels.causal_conv(
            qkv, self.conv1d.weight.squeeze(1), window=None if cache is None else cache.window,
            cu_seqlens=shared.cu_seqlens, watch=tap,
        )  # fmt: skip
        mixed = observe(tap, taps.GDN_CONV, mixed)
        qk, v = mixed.split_with_sizes([2 * self.key_dim, self.value_dim], -1)
        qk = l2_norm(qk.to(wide).view(batch, tokens, 2 * self.key_heads, self.key_head_dim))
        q, k = qk.split(self.key_heads, dim=2)
        q = observe(tap, taps.GDN_Q, q * self.key_head_dim**-0.5)
        k = observe(tap, taps.GDN_K, k)
        v = observe(tap, taps.GDN_V, v.reshape(batch, tokens, self.value_heads, self.value_head_dim))

        inside = taps.inside(tap)
        out, state = kernels.gated_delta_rule(
            q, k, v, log_decay=log_decay, beta=beta, initial_state=None if cache is None else cache.state,
            cu_seqlens=shared.cu_seqlens, tap=inside, watch=tap,
        )  # fmt: skip
        if inside is not tap:
            state = observe(tap, taps.GDN_STATE, state)  # what is handed on; inside, the state after each chunk
        if cache is not None:
            cache.window, cache.state = window.detach(), state.detach()
        out = observe(tap, taps.GDN_OUT, out)
        out = kernels.gated_rms_norm(out, z, self.norm.weight, eps=self.eps, watch=tap)
        out = observe(tap, taps.GDN_NORM, out.reshape(batch, tokens, self.value_dim))
        return self.out_proj(out, kernels)


class GatedAttention(nn.Module):
    """Grouped-query attention with RMS norm on queries and keys, partial rotation and a sigmoid output gate."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads, config.num_key_value_heads, config.head_dim
        )  # fmt: skip
        self.q_proj = Linear(config.hidden_size, 2 * self.heads * self.head_dim)
        self.k_proj = Linear(config.hidden_size, self.kv_heads * self.head_dim)
        self.v_proj = Linear(config.hidden_size, self.kv_heads * self.head_dim)
        self.o_proj = Linear(self.heads * self.head_dim, config.hidden_size)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.joint = Joint(self.q_proj, self.k_proj, self.v_proj)

    def forward(self, x: Tensor, shared: Pass, cache: KeyValueCache | None, tap: Tap | None) -> Tensor:
        """x [B, T, D] -> [B, T, D]; `cache` is updated."""
        batch, tokens, _ = x.shape
        kernels = shared.kernels
        q, k, v = self.joint(x, kernels)
        # Each head's rows of q_proj are its query, then its gate.
        q, gate = q.view(batch, tokens, self.heads, 2 * self.head_dim).chunk(2, dim=-1)
        gate = observe(tap, taps.ATTN_GATE, gate.reshape(batch, tokens, -1))
        k = k.view(batch, tokens, self.kv_heads, self.head_dim)
        v = v.view(batch, tokens, self.kv_heads, self.head_dim)
        q = observe(tap, taps.ATTN_Q, rotate(self.q_norm(q, kernels), shared.cos, shared.sin))
        k = observe(tap, taps.ATTN_K, rotate(self.k_norm(k, kernels), shared.cos, shared.sin))
        v = observe(tap, taps.ATTN_V, v)

        keys, values, key_lengths = self._visible(k, v, shared, cache)
        out = kernels.attention(
            q, keys, values, scale=self.head_dim**-0.5, key_lengths=key_lengths, cu_seqlens=shared.cu_seqlens,
            tap=taps.inside(tap),
        )  # fmt: skip
        out = observe(tap, taps.ATTN_OUT, out)
        return self.o_proj(out.reshape(batch, tokens, -1) * torch.sigmoid(gate), kernels)

    def _visible(
        self, k: Tensor, v: Tensor, shared: Pass, cache: KeyValueCache | None
    ) -> tuple[Tensor, Tensor, list[int] | None]:
        """Keys and values of each sequence, old and new, [S, L, kv heads, head_dim], and how many rows are valid."""
        bounds, lengths = shared.bounds, shared.lengths
        if bounds is None:
            key_lengths = [n + k.shape[1] for n in lengths]
            parts = [(s, 0, k.shape[1]) for s in range(len(lengths))]
        else:
            key_lengths = [n + b - a for n, a, b in zip(lengths, bounds, bounds[1:], strict=False)]
            parts = [(0, a, b) for a, b in itertools.pairwise(bounds)]
        past = None if cache is None or not any(lengths) else (cache.keys, cache.values)
        if bounds is None and past is None:
            visible = k, v
        elif k.requires_grad or cache is None:
            # The store is written in place, so a graph must hold copies of what it reads from it.
            visible = tuple(
                nn.utils.rnn.pad_sequence(
                    [
                        new[row, a:b] if past is None else torch.cat([past[which][s, : lengths[s]], new[row, a:b]])
                        for s, (row, a, b) in enumerate(parts)
                    ],
                    batch_first=True,
                )
                for which, new in enumerate((k, v))
            )
        else:
            visible = cache.append(k, v, lengths, bounds)
            return *visible, key_lengths
        if cache is not None:
            cache.append(k, v, lengths, bounds)
        return *visible, key_lengths


class DenseMLP(nn.Module):
    """down(silu(gate x) * up x)."""

    def __init__(self, hidden_size: int, width: int):
        super().__init__()
        self.gate_proj = Linear(hidden_size, width)
        self.up_proj = Linear(hidden_size, width)
        self.down_proj = Linear(width, hidden_size)


class DenseBlock(DenseMLP):
    """The MLP of a dense layer."""

    def __init__(self, config: ModelConfig):
        super().__init__(config.hidden_size, config.intermediate_size)
        self.joint = Joint(self.gate_proj, self.up_proj)

    def forward(self, x: Tensor, kernels: Kernels, tap: Tap | None) -> Tensor:
        """x [B, T, D] -> [B, T, D]."""
        gate, up = self.joint(x, kernels)
        return observe(tap, taps.MOE_OUT, self.down_proj(F.silu(gate).mul_(up), kernels))


class Experts(nn.Module):
    """Stacked weights of the routed experts: gate_up_proj [E, 2I, D] (gate rows first), down_proj [E, D, I]."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        count, width = config.num_experts, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.zeros(count, 2 * width, config.hidden_size))
        self.down_proj = nn.Parameter(torch.zeros(count, config.hidden_size, width))


class SparseBlock(nn.Module):
    """Mixture of experts: the best A of E by softmax, plus a shared expert behind a sigmoid gate."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.top_k, self.normalise = config.num_experts_per_tok, config.norm_topk_prob
        self.gate = Linear(config.hidden_size, config.num_experts)
        self.experts = Experts(config)
        self.shared_expert = DenseMLP(config.hidden_size, config.shared_expert_intermediate_size)
        self.shared_expert_gate = Linear(config.hidden_size, 1)
        self.joint = Joint(
            self.gate, self.shared_expert_gate, self.shared_expert.gate_proj, self.shared_expert.up_proj
        )

    def forward(self, x: Tensor, kernels: Kernels, tap: Tap | None) -> Tensor:
        """x [B, T, D] -> [B, T, D]."""
        rows = x.reshape(-1, x.shape[-1])
        logits, share, gate, up = self.joint(rows, kernels)
        if kernels.router_dtype is not None:
            logits = kernels.linear(rows.to(kernels.router_dtype), self.gate.weight.to(kernels.router_dtype))
        logits = observe(tap, taps.MOE_LOGITS, logits)
        weights, experts = kernels.routing(logits, top_k=self.top_k, normalise=self.normalise, watch=tap)
        weights = observe(tap, taps.MOE_TOPK, weights.to(rows.dtype))  # no cast unless the router has its own dtype
        gate_up, down = self.experts.gate_up_proj, self.experts.down_proj
        routed = kernels.experts(rows, weights, experts, gate_up, down, watch=tap)
        routed = observe(tap, taps.MOE_EXPERTS, routed)
        shared = torch.sigmoid(share) * self.shared_expert.down_proj(F.silu(gate).mul_(up), kernels)
        shared = observe(tap, taps.MOE_SHARED, shared)
        return observe(tap, taps.MOE_OUT, (routed + shared).view_as(x))


class DecoderLayer(nn.Module):
    """x += mixer(norm(x)); x += mlp(norm(x)). The mixer is `linear_attn` or `self_attn`."""

    def __init__(self, config: ModelConfig, mixer: str, mlp: str):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.is_linear = mixer == "linear_attention"
        if self.is_linear:
            self.linear_attn = GatedDeltaNet(config)
        else:
            self.self_attn = GatedAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SparseBlock(config) if mlp == "sparse" else DenseBlock(config)

    @property
    def mixer(self) -> GatedDeltaNet | GatedAttention:
        return self.linear_attn if self.is_linear else self.self_attn

    def forward(self, x: Tensor, shared: Pass, cache: KeyValueCache | DeltaCache | None, tap: Tap | None) -> Tensor:
        normed = observe(tap, taps.INPUT_NORM, self.input_layernorm(x, shared.kernels))
        mixed = observe(tap, taps.MIXER_OUT, self.mixer(normed, shared, cache, tap))
        x = observe(tap, taps.RESIDUAL_MID, x + mixed)  # not in place: a hook may hold what a module returned
        normed = observe(tap, taps.POST_NORM, self.post_attention_layernorm(x, shared.kernels))
        return observe(tap, taps.RESIDUAL, x + self.mlp(normed, shared.kernels, tap))


class MultiTokenPrediction(nn.Module):
    """Predicts the token after next: norm(layer(fc([norm_e(embed(next token)) ; norm_h(hidden)]))), shared head.

    `hidden` is the main model's output after its final norm.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.fc = Linear(2 * config.hidden_size, config.hidden_size)
        self.pre_fc_norm_embedding = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.pre_fc_norm_hidden = RMSNorm(config.hidden_size, config.rms_norm_eps)
        mlp = "sparse" if config.is_moe else "dense"
        self.layers = nn.ModuleList([DecoderLayer(config, "full_attention", mlp)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, embedded: Tensor, hidden: Tensor, shared: Pass, tap: Tap | None) -> Tensor:
        """embedded, hidden [B, T, D] -> [B, T, D]."""
        kernels = shared.kernels
        x = torch.cat([self.pre_fc_norm_embedding(embedded, kernels), self.pre_fc_norm_hidden(hidden, kernels)], dim=-1)
        x = self.layers[0](self.fc(x, kernels), shared, None, tap)
        return self.norm(x, kernels)


class CausalLM(nn.Module):
    """The language model. `kernels` chooses backends and policy; `tap` (None or an observer) sees every tap point."""

    def __init__(self, config: ModelConfig, kernels: Kernels | None = None):
        super().__init__()
        self.config = config
        self.kernels = kernels if kernels is not None else Kernels()
        self.tap: Tap | None = None
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, mixer, mlp)
            for mixer, mlp in zip(config.layer_types, config.mlp_types, strict=True)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size)
        if config.mtp_num_hidden_layers:
            self.mtp = MultiTokenPrediction(config)
        self._prefixes = [taps.full_name(i, "") for i in range(config.num_hidden_layers)]
        self._lay_out()

    def _lay_out(self) -> None:
        for module in self.modules():
            joint = getattr(module, "joint", None)
            if joint is not None:
                joint.lay_out()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> CausalLM:
        """Every cast and move ends here and gives each weight memory of its own."""
        super()._apply(fn, recurse)
        self._lay_out()
        return self

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights other than those that always stay wide."""
        return self.embed_tokens.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    def forward(
        self,
        input_ids: Tensor,
        *,
        cache: Cache | None = None,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
        use_cache: bool = True,
        last_only: bool = False,
    ) -> ModelOutput:
        """Logits of every position, and the cache to go on with.

        input_ids      [B, T] of int64
        cache          what earlier calls returned; updated in place and returned
        cu_seqlens     [S + 1] boundaries of S sequences packed into one row (B = 1); the cache then has S sequences
        attention_mask [B, T], 1 for tokens and 0 for padding, on the left or on the right of each row; covers the
                       new tokens only. Padding is never computed: it leaves no trace in the cache, and its logits
                       and hidden rows are zero.
        use_cache      False computes without memory and returns cache None
        last_only      True computes logits for the last token of each sequence alone, [S, 1, vocabulary]: a long
                       prompt's are the largest tensor of the pass, and generation reads one row of them

        Raises InputError for ids outside the vocabulary, holes in the mask, a cache of another batch size, or an
        empty packed sequence whose last token is asked for.
        """
        with self.kernels.rehearsal():
            return self._forward(input_ids, cache, cu_seqlens, attention_mask, use_cache, last_only)

    def _forward(
        self, input_ids: Tensor, cache: Cache | None, cu_seqlens: Tensor | None, attention_mask: Tensor | None,
        use_cache: bool, last_only: bool,
    ) -> ModelOutput:  # fmt: skip
        self._check_ids(input_ids)
        padding = Padding.of(attention_mask, input_ids, cu_seqlens)
        if padding is not None:
            packed = self(
                padding.pack(input_ids), cache=cache, cu_seqlens=padding.cu_seqlens, use_cache=use_cache,
                last_only=last_only,
            )  # fmt: skip
            logits = packed.logits if last_only else padding.spread(packed.logits)
            return ModelOutput(logits, padding.spread(packed.hidden), packed.cache)
        batch, tokens = input_ids.shape
        shared = self._pass(batch, tokens, cache, cu_seqlens)
        if last_only and shared.bounds is not None:
            for s, (start, stop) in enumerate(itertools.pairwise(shared.bounds)):
                if start == stop:
                    raise InputError(
                        f"last_only: expected at least one token in every packed sequence, found none in sequence {s}; "
                        "leave it out of cu_seqlens"
                    )
        if cache is None and use_cache:
            cache = Cache.empty(self.config, len(shared.lengths), device=self.device, dtype=self.dtype)

        tap = self.kernels.watched_by(self.tap)
        x = observe(tap, taps.EMBED, self.embed_tokens(input_ids))
        for i, layer in enumerate(self.layers):
            scoped = None if tap is None else tap.scope(self._prefixes[i])
            x = layer(x, shared, cache.layers[i] if cache is not None else None, scoped)
        if cache is not None:
            bounds = shared.bounds
            added = [tokens] * batch if bounds is None else [b - a for a, b in itertools.pairwise(bounds)]
            cache.lengths = [n + t for n, t in zip(shared.lengths, added, strict=True)]
        hidden = observe(tap, taps.FINAL_NORM, self.norm(x, self.kernels))
        rows = hidden
        if last_only and shared.bounds is None:
            rows = hidden[:, -1:]
        elif last_only:
            rows = hidden[0, [stop - 1 for stop in shared.bounds[1:]]][:, None]
        return ModelOutput(observe(tap, taps.LOGITS, self.head(rows)), hidden, cache)

    def head(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., vocabulary]."""
        if self.config.tie_word_embeddings:
            return self.kernels.linear(hidden, self.embed_tokens.weight)
        return self.lm_head(hidden, self.kernels)

    def mtp_logits(
        self,
        hidden: Tensor,
        next_ids: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Logits of the token after next, [B, T, vocabulary].

        Row t reads hidden[:, t] (the main model's output after its final norm) and the token that follows it,
        next_ids[:, t]. Packed and padded batches are marked as in `forward`; logits of padding are zero. Raises
        InputError when the model has no such head.
        """
        with self.kernels.rehearsal():
            return self._mtp_logits(hidden, next_ids, cu_seqlens, attention_mask)

    def _mtp_logits(
        self, hidden: Tensor, next_ids: Tensor, cu_seqlens: Tensor | None, attention_mask: Tensor | None
    ) -> Tensor:
        if not self.config.mtp_num_hidden_layers:
            raise InputError("mtp_logits: expected a model with a multi-token-prediction head, found none in this one")
        self._check_ids(next_ids)
        expected = (*next_ids.shape, self.config.hidden_size)
        if tuple(hidden.shape) != expected:
            raise InputError(f"mtp_logits: expected hidden {expected}, found {tuple(hidden.shape)}")
        padding = Padding.of(attention_mask, next_ids, cu_seqlens)
        if padding is not None:
            packed = padding.pack(hidden), padding.pack(next_ids)
            return padding.spread(self.mtp_logits(*packed, cu_seqlens=padding.cu_seqlens))
        shared = self._pass(*next_ids.shape, None, cu_seqlens)
        tap = self.kernels.watched_by(self.tap)
        tap = None if tap is None else tap.scope("mtp.layers.00.")
        return self.head(self.mtp(self.embed_tokens(next_ids), hidden, shared, tap))

    def generate(
        self, input_ids: Tensor, *, max_new_tokens: int, temperature: float = 0.0, top_p: float = 1.0,
        stop_ids: Collection[int] = (), seed: int | None = None, attention_mask: Tensor | None = None,
        stream: Callable[[list[int | None]], None] | None = None,
    ) -> generation.GenerateOutput:  # fmt: skip
        """See `generation.generate`."""
        return generation.generate(
            self, input_ids, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, stop_ids=stop_ids,
            seed=seed, attention_mask=attention_mask, stream=stream,
        )  # fmt: skip

    def init_weights(self, seed: int, decay: str = "realistic") -> CausalLM:
        """Random weights from `seed`: normal(0, initializer_range), norms neutral, convolutions U(-1, 1) / sqrt(width).

        `decay` is `class_default` (A ~ U(0.01, 16), dt_bias = 1) or `realistic` (same A, softplus(dt_bias) log-uniform
        in [1e-3, 1e-1]): the first overflows factored exponents from the start, the second learns to.
        """
        if decay not in ("realistic", "class_default"):
            raise InputError(f"decay: expected realistic or class_default, found {decay!r}")
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(self._initial_value(name, parameter, decay, generator))
        return self

    def _initial_value(self, name: str, parameter: Tensor, decay: str, generator: torch.Generator) -> Tensor:
        shape, leaf = parameter.shape, name.rsplit(".", 1)[-1]
        if leaf == "A_log":
            return torch.empty(shape).uniform_(0.01, 16.0, generator=generator).log()
        if leaf == "dt_bias":
            if decay == "class_default":
                return torch.ones(shape)
            dt = torch.empty(shape).uniform_(math.log(1e-3), math.log(1e-1), generator=generator).exp()
            return dt + torch.log(-torch.expm1(-dt))  # inverse of softplus
        if name.endswith("linear_attn.norm.weight"):
            return torch.ones(shape)
        if "norm" in name:
            return torch.zeros(shape)
        if name.endswith("conv1d.weight"):
            bound = shape[-1] ** -0.5
            return torch.empty(shape).uniform_(-bound, bound, generator=generator)
        return torch.empty(shape).normal_(0.0, self.config.initializer_range, generator=generator)

    def _check_ids(self, ids: Tensor) -> None:
        if ids.dtype not in (torch.int64, torch.int32):
            raise InputError(f"input_ids: expected int64 or int32 token ids, found {ids.dtype}")
        if ids.dim() != 2 or ids.numel() == 0:
            raise InputError(
                f"input_ids: expected shape [batch, tokens] with at least one token, found {tuple(ids.shape)}"
            )
        if ids.device.type != "cpu":  # a host sync per call; there the embedding's own device assertion stands
            return
        low, high = (int(bound) for bound in torch.aminmax(ids))
        if low < 0 or high >= self.config.vocab_size:
            raise InputError(f"input_ids: expected ids from 0 to {self.config.vocab_size - 1}, found {low} to {high}")

    def _pass(self, batch: int, tokens: int, cache: Cache | None, cu_seqlens: Tensor | None) -> Pass:
        bounds = None
        if cu_seqlens is not None:
            cu_seqlens = torch.as_tensor(cu_seqlens).cpu()
            bounds = sequence_bounds(batch, tokens, cu_seqlens)
        sequences = batch if bounds is None else len(bounds) - 1
        if cache is not None:
            cache.check(sequences, self.dtype)
        lengths = [0] * sequences if cache is None else cache.lengths
        if bounds is not None:
            position_list = [
                torch.arange(n, n + b - a) for n, a, b in zip(lengths, bounds, bounds[1:], strict=False)
            ]
            positions = torch.cat(position_list)[None].to(self.device)
        elif len(set(lengths)) == 1:
            positions = torch.arange(lengths[0], lengths[0] + tokens, device=self.device)[None]
        else:
            positions = torch.tensor(lengths, device=self.device)[:, None] + torch.arange(tokens, device=self.device)
        cos, sin = rotary_tables(positions, self.config, self.dtype)
        return Pass(self.kernels, list(lengths), bounds, cu_seqlens, cos, sin)
