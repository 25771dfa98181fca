"""Every op of a pass judged by itself: each tap point recomputed in float64 from the tensors that its op was given.

    with stage_watch(model) as watch:
        model.generate(input_ids, max_new_tokens=8)
    watch.table[watch.table["is_fault"]]

An op is at fault where its inputs are finite and its output is not, or is further from the float64 result of those
inputs than the roundings of its dtype explain. What a fault spoils further on is computed right from spoiled inputs,
and is not blamed: the ops that are named are those that did it. So it finds what stays finite, too: heads that are
swapped, a state that is transposed, a norm without its offset.

The memory of a pass is judged before it: what a cache holds against what the passes before it must have left there.

A tap point reads others of the same layer, in the order of `taps.LAYER_TAPS`; the equations are those of the ops'
contracts (`kernels/*/spec.py`) and of `kernels.gated_delta_rule.torch_chunk`. Without the stages of a chunk (the
recurrence has none) its output and state are judged as a whole.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

from workbench import taps
from workbench.analysis.nans import OP_OF_TAP
from workbench.analysis.parity import ARGUMENT_TAPS
from workbench.analysis.patterns import Reading, read_pattern
from workbench.analysis.routing.recorder import seen_routing
from workbench.cache import Cache, KeyValueCache
from workbench.errors import InputError
from workbench.kernels import Kernels
from workbench.kernels.gated_delta_rule.reference import oracle
from workbench.kernels.registry import OPERATIONS
from workbench.model import CausalLM, DecoderLayer, DenseBlock, l2_norm, rotary_tables, rotate
from workbench.taps import Tap

#: Unit roundoffs of its dtype that an op may be off by: sums of many terms, and a handful of roundings on the way.
#: Sound ops of the miniature reach a sixth of it.
ROUNDINGS = 64.0
#: ... in half precision, whose products are summed in float32: the roundings that the model itself makes, alone.
NARROW_ROUNDINGS = 6.0
#: Times the limit that the worst row may be off, relative to the root mean square of all rows.
ROW_FACTOR = 16.0
#: Tap points of memory: what a pass found in its cache.
CACHE_TAPS = {
    "cache.window": "conv window", "cache.state": "recurrent state", "cache.keys": "key store",
    "cache.values": "value store",
}  # fmt: skip

#: Where a NaN that is gone was replaced: an output whose rows all read its inputs. Elsewhere an op may pass it by, as
#: attention does a later token's.
HIDES_NAN = {taps.GDN_OUT}

#: Columns of `StageWatch.table`.
STAGE_COLUMNS = (
    "step", "layer", "tap", "op", "dtype", "reads", "error", "row_error", "limit", "inputs_finite", "output_finite",
    "is_fault", "index", "found", "expected",
)  # fmt: skip


def unit(dtype: torch.dtype) -> float:
    """Unit roundoff: half the distance from 1 to the next number of the format."""
    return torch.finfo(dtype).eps / 2


def stage_limit(dtype: torch.dtype) -> float:
    """Largest relative error that the roundings of `dtype` explain."""
    return (ROUNDINGS if dtype.itemsize >= 4 else NARROW_ROUNDINGS) * unit(dtype)


def errors_of(found: Tensor, expected: Tensor) -> tuple[float, float]:
    """(Frobenius error over the norm of `expected`, largest row error over the root mean square row).

    Rows are those of the last axis. 0 / 0 is 0; where nothing is expected but zeros, any other value is infinitely off.
    """
    difference = (found.double() - expected).reshape(-1, expected.shape[-1] if expected.dim() else 1)
    size = torch.linalg.vector_norm(expected).item()
    off = torch.linalg.vector_norm(difference).item()
    if off == 0.0:
        return 0.0, 0.0
    if size == 0.0:
        return math.inf, math.inf
    worst = torch.linalg.vector_norm(difference, dim=-1).max().item()
    return off / size, worst * difference.shape[0] ** 0.5 / size


def place_of(found: Tensor, expected: Tensor) -> tuple[tuple[int, ...], float, float]:
    """(index, found, expected) of the first number in the place of a NaN, else of the first value that is not finite,
    else of the one that is furthest off."""
    bad = ~torch.isfinite(found)
    hidden = torch.isfinite(found) & expected.isnan()
    if bool(hidden.any()):
        off = hidden.double()
    else:
        off = bad.double() if bool(bad.any()) else (found.double() - expected).abs()
    flat = int(off.flatten().argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), found.shape))
    return index, found[index].item(), expected[index].item()


@dataclass(slots=True)
class Memory:
    """What a layer remembers between two passes: (keys, values) each [S, L, kv heads, head_dim], or (window, state)."""

    first: Tensor
    second: Tensor

    def clone(self) -> Memory:
        return Memory(self.first.clone(), self.second.clone())


def memory_of(cache: Cache) -> list[Memory]:
    """The valid rows of every layer, copied. All sequences must be of one length."""
    length = cache.lengths[0]
    return [
        Memory(layer.keys[:, :length].clone(), layer.values[:, :length].clone())
        if isinstance(layer, KeyValueCache)
        else Memory(layer.window.clone(), layer.state.clone())
        for layer in cache.layers
    ]


@dataclass(slots=True)
class Seen:
    """One pass: its tensors by full name, its experts by layer, its memory when it began (None where unknown)."""

    input_ids: Tensor
    past: int
    memory: list[Memory | None]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    experts: dict[int, Tensor] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)


class _Collector:
    """The tap of a watch: keeps every tensor of the main model's current pass, as the outer tap left it."""

    def __init__(self, watch: StageWatch, outer: Tap | None, prefix: str = ""):
        self.watch, self.outer, self.prefix = watch, outer, prefix

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        if self.outer is not None:
            tensor = self.outer(name, tensor)
        self.watch.see(self.prefix + name, tensor)
        return tensor

    def scope(self, prefix: str) -> _Collector:
        return _Collector(self.watch, None if self.outer is None else self.outer.scope(prefix), self.prefix + prefix)


def reference(op: str) -> Callable:
    return OPERATIONS[op].backends["reference"].run


class LayerStages:
    """The expected value of each tap point of one layer in float64, from the tensors that were seen."""

    def __init__(self, model: CausalLM, index: int, seen: Seen):
        self.model, self.index, self.seen = model, index, seen
        self.layer: DecoderLayer = model.layers[index]
        self.mixer, self.mlp = self.layer.mixer, self.layer.mlp
        self.memory = seen.memory[index]
        self.tokens = seen.input_ids.shape[1]

    @property
    def is_dense(self) -> bool:
        return isinstance(self.mlp, DenseBlock)

    def has(self, name: str) -> bool:
        return taps.full_name(self.index, name) in self.seen.tensors

    def value(self, name: str) -> Tensor:
        """A tensor of this layer that was seen, in float64."""
        return self.seen.tensors[taps.full_name(self.index, name)].double()

    def entering(self) -> Tensor:
        """The residual stream that enters the layer."""
        before = taps.EMBED if self.index == 0 else taps.full_name(self.index - 1, taps.RESIDUAL)
        return self.seen.tensors[before].double()

    def norm(self, x: Tensor, module) -> Tensor:
        return reference("rms_norm")(x, module.weight.double(), eps=module.eps)

    def through(self, x: Tensor, *projections) -> Tensor:
        return torch.cat([x @ projection.weight.double().T for projection in projections], dim=-1)

    # ---- linear attention

    def qkv(self) -> Tensor:
        return self.through(self.value(taps.INPUT_NORM), self.mixer.in_proj_qkv)

    def gate(self) -> Tensor:
        z = self.through(self.value(taps.INPUT_NORM), self.mixer.in_proj_z)
        return z.unflatten(-1, (self.mixer.value_heads, -1))

    def beta(self) -> Tensor:
        return torch.sigmoid(self.through(self.value(taps.INPUT_NORM), self.mixer.in_proj_b))

    def log_decay(self) -> Tensor:
        raw = self.through(self.value(taps.INPUT_NORM), self.mixer.in_proj_a)
        # The rate is kept in fp32 whatever the model's dtype, and so is its exponential.
        return -self.mixer.A_log.exp().double() * F.softplus(raw + self.mixer.dt_bias.double())

    def conv(self) -> Tensor:
        return reference("causal_conv")(
            self.value(taps.GDN_QKV), self.mixer.conv1d.weight.squeeze(1).double(), window=self.memory.first.double()
        )[0]

    def channels(self) -> tuple[Tensor, Tensor, Tensor]:
        m = self.mixer
        q, k, v = self.value(taps.GDN_CONV).split([m.key_dim, m.key_dim, m.value_dim], dim=-1)
        q, k = (x.unflatten(-1, (m.key_heads, m.key_head_dim)) for x in (q, k))
        return q, k, v.unflatten(-1, (m.value_heads, m.value_head_dim))

    def q(self) -> Tensor:
        return l2_norm(self.channels()[0]) * self.mixer.key_head_dim**-0.5

    def k(self) -> Tensor:
        return l2_norm(self.channels()[1])

    def v(self) -> Tensor:
        return self.channels()[2]

    def chunked(self, name: str, *, rows: int) -> Tensor:
        """[B, T, heads, ...] -> [N B, V, C, ...]: chunk after chunk, the sequences of a chunk side by side."""
        x = self.value(name)
        heads = self.mixer.value_heads
        if x.shape[2] != heads:  # value head h reads key head h // (V / H)
            x = x.repeat_interleave(heads // x.shape[2], dim=2)
        padding = -self.tokens % rows
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, padding))
        x = x.unflatten(1, (-1, rows)).transpose(0, 1).flatten(0, 1)  # [N B, C, V, ...]
        return x.transpose(1, 2)

    @property
    def rows(self) -> int:
        return self.value(taps.GDN_CUMSUM).shape[-1]

    def cumsum(self) -> Tensor:
        return self.chunked(taps.GDN_LOG_DECAY, rows=self.rows).cumsum(-1)

    def decay(self) -> Tensor:
        g = self.value(taps.GDN_CUMSUM)
        return (g[..., :, None] - g[..., None, :]).tril().exp().tril()

    def kkt(self) -> Tensor:
        k, beta = (self.chunked(name, rows=self.rows) for name in (taps.GDN_K, taps.GDN_BETA))
        return (beta[..., None] * (k @ k.mT) * self.value(taps.GDN_DECAY)).tril(-1)

    def inverse(self) -> Tensor:
        kkt = self.value(taps.GDN_KKT)
        eye = torch.eye(kkt.shape[-1], dtype=kkt.dtype, device=kkt.device).expand_as(kkt)
        return torch.linalg.solve_triangular(kkt, eye, upper=False, unitriangular=True)

    def u(self) -> Tensor:
        v, beta = (self.chunked(name, rows=self.rows) for name in (taps.GDN_V, taps.GDN_BETA))
        return self.value(taps.GDN_INVERSE) @ (beta[..., None] * v)

    def w(self) -> Tensor:
        k, beta = (self.chunked(name, rows=self.rows) for name in (taps.GDN_K, taps.GDN_BETA))
        scale = beta * self.value(taps.GDN_CUMSUM).exp()
        return self.value(taps.GDN_INVERSE) @ (scale[..., None] * k)

    def intra(self) -> Tensor:
        q, k = (self.chunked(name, rows=self.rows) for name in (taps.GDN_Q, taps.GDN_K))
        return (q @ k.mT) * self.value(taps.GDN_DECAY)

    def entered(self) -> Tensor:
        """The state that entered each chunk: the cache's, then what the chunk before left, [N B, V, K, W]."""
        left = self.value(taps.GDN_STATE)
        return torch.cat([self.memory.second.double(), left])[: left.shape[0]]

    def corrections(self) -> Tensor:
        return self.value(taps.GDN_U) - self.value(taps.GDN_W) @ self.entered()

    def inter(self) -> Tensor:
        q = self.chunked(taps.GDN_Q, rows=self.rows)
        return (self.value(taps.GDN_CUMSUM).exp()[..., None] * q) @ self.entered()

    def state(self) -> Tensor:
        if not self.has(taps.GDN_CUMSUM):
            return self.recurrence()[1]
        g, k = self.value(taps.GDN_CUMSUM), self.chunked(taps.GDN_K, rows=self.rows)
        last = g[..., -1:]
        writers = ((last - g).exp()[..., None] * k).mT
        return last.exp()[..., None] * self.entered() + writers @ self.corrections()

    def recurrence(self) -> tuple[Tensor, Tensor]:
        inputs = {argument: self.value(tap) for argument, tap in ARGUMENT_TAPS.items()}
        return oracle(**inputs, initial_state=self.memory.second.double())

    def pattern(self) -> Reading:
        """Which rows of the op as a whole are wrong, beside the recurrence on its inputs; sequences in one."""
        found, exact = self.value(taps.GDN_OUT), self.recurrence()[0]
        off = torch.linalg.vector_norm(found - exact, dim=-1)
        size = torch.linalg.vector_norm(exact, dim=-1).square().mean().sqrt()
        bad = (~torch.isfinite(off) | (off > ROW_FACTOR * stage_limit(torch.float32) * size)).any(0)  # [T, V]
        chunk = self.rows if self.has(taps.GDN_CUMSUM) else self.model.kernels.policy.chunk
        gates = self.value(taps.GDN_LOG_DECAY).amin(0)
        return read_pattern(bad, chunk=chunk, key_heads=self.mixer.key_heads, log_decay=gates)

    def out(self) -> Tensor:
        if not self.has(taps.GDN_CUMSUM):
            return self.recurrence()[0]
        chunks = self.value(taps.GDN_INTER) + self.value(taps.GDN_INTRA) @ self.corrections()  # [N B, V, C, W]
        batch = self.seen.input_ids.shape[0]
        return chunks.unflatten(0, (-1, batch)).permute(1, 0, 3, 2, 4).flatten(1, 2)[:, : self.tokens]

    def gated_norm(self) -> Tensor:
        out, z = self.value(taps.GDN_OUT), self.value(taps.GDN_GATE)
        y = reference("gated_rms_norm")(out, z, self.mixer.norm.weight.double(), eps=self.mixer.eps)
        return y.flatten(2)

    # ---- full attention

    def heads(self, projection, name: str) -> Tensor:
        m = self.mixer
        x = self.through(self.value(taps.INPUT_NORM), projection)
        count = m.heads if name in ("q", "gate") else m.kv_heads
        x = x.unflatten(-1, (count, -1))
        if name in ("q", "gate"):
            q, gate = x.chunk(2, dim=-1)
            return q if name == "q" else gate.flatten(2)
        return x

    def rotated(self, x: Tensor, norm) -> Tensor:
        positions = torch.arange(self.seen.past, self.seen.past + self.tokens, device=x.device)[None]
        cos, sin = rotary_tables(positions, self.model.config, torch.float64)
        return rotate(self.norm(x, norm), cos, sin)

    def attn_q(self) -> Tensor:
        return self.rotated(self.heads(self.mixer.q_proj, "q"), self.mixer.q_norm)

    def attn_k(self) -> Tensor:
        return self.rotated(self.heads(self.mixer.k_proj, "k"), self.mixer.k_norm)

    def attn_v(self) -> Tensor:
        return self.heads(self.mixer.v_proj, "v")

    def attn_gate(self) -> Tensor:
        return self.heads(self.mixer.q_proj, "gate")

    def visible(self) -> tuple[Tensor, Tensor]:
        return (
            torch.cat([self.memory.first.double(), self.value(taps.ATTN_K)], dim=1),
            torch.cat([self.memory.second.double(), self.value(taps.ATTN_V)], dim=1),
        )

    def scores(self) -> Tensor:
        q, (keys, _) = self.value(taps.ATTN_Q), self.visible()
        keys = keys.repeat_interleave(self.mixer.heads // self.mixer.kv_heads, dim=2)
        return torch.einsum("bthd,blhd->bhtl", q, keys) * self.mixer.head_dim**-0.5

    def attn_out(self) -> Tensor:
        keys, values = self.visible()
        return reference("attention")(self.value(taps.ATTN_Q), keys, values, scale=self.mixer.head_dim**-0.5)

    # ---- what both have

    def input_norm(self) -> Tensor:
        return self.norm(self.entering(), self.layer.input_layernorm)

    def mixer_out(self) -> Tensor:
        if self.layer.is_linear:
            return self.through(self.value(taps.GDN_NORM), self.mixer.out_proj)
        gated = self.value(taps.ATTN_OUT).flatten(2) * torch.sigmoid(self.value(taps.ATTN_GATE))
        return self.through(gated, self.mixer.o_proj)

    def residual_mid(self) -> Tensor:
        return self.entering() + self.value(taps.MIXER_OUT)

    def post_norm(self) -> Tensor:
        return self.norm(self.value(taps.RESIDUAL_MID), self.layer.post_attention_layernorm)

    def flat(self) -> Tensor:
        return self.value(taps.POST_NORM).flatten(0, 1)

    def moe_logits(self) -> Tensor:
        return self.through(self.flat(), self.mlp.gate)

    def moe_topk(self) -> Tensor:
        """The weights of the experts that were chosen; whether they were the right ones is `choice_error`'s."""
        weights = torch.softmax(self.value(taps.MOE_LOGITS), dim=-1).gather(-1, self.seen.experts[self.index])
        return weights / weights.sum(-1, keepdim=True) if self.mlp.normalise else weights

    def choice_error(self) -> float:
        """By how much of the largest logit an expert that was left out exceeds one that was chosen."""
        logits, chosen = self.value(taps.MOE_LOGITS), self.seen.experts[self.index]
        if chosen.shape[-1] == logits.shape[-1]:
            return 0.0
        least = logits.gather(-1, chosen).amin(-1)
        others = logits.scatter(-1, chosen, -torch.inf).amax(-1)
        return ((others - least).clamp(min=0) / logits.abs().amax().clamp(min=1e-300)).max().item()

    def moe_experts(self) -> Tensor:
        experts = self.mlp.experts
        return Kernels("experts=torch_sorted").experts(
            self.flat(), self.value(taps.MOE_TOPK), self.seen.experts[self.index], experts.gate_up_proj.double(),
            experts.down_proj.double(),
        )  # fmt: skip

    def dense(self, mlp, x: Tensor) -> Tensor:
        hidden = F.silu(self.through(x, mlp.gate_proj)) * self.through(x, mlp.up_proj)
        return self.through(hidden, mlp.down_proj)

    def moe_shared(self) -> Tensor:
        x = self.flat()
        return torch.sigmoid(self.through(x, self.mlp.shared_expert_gate)) * self.dense(self.mlp.shared_expert, x)

    def moe_out(self) -> Tensor:
        if isinstance(self.mlp, DenseBlock):
            return self.dense(self.mlp, self.value(taps.POST_NORM))
        return (self.value(taps.MOE_EXPERTS) + self.value(taps.MOE_SHARED)).view_as(self.value(taps.POST_NORM))

    def residual(self) -> Tensor:
        return self.value(taps.RESIDUAL_MID) + self.value(taps.MOE_OUT)


@dataclass(frozen=True, slots=True)
class Stage:
    """How a tap point follows from others: `expect` gives it, `reads` names what it is made from.

    `^` stands for the stream that enters the layer, `*` for the layer's memory.
    """

    expect: Callable[[LayerStages], Tensor]
    reads: tuple[str, ...]


_CHUNK_STATE = (taps.GDN_CUMSUM, taps.GDN_K, taps.GDN_U, taps.GDN_W, "*")
_DELTA_INPUTS = tuple(ARGUMENT_TAPS.values())

STAGES: dict[str, Stage] = {
    taps.INPUT_NORM: Stage(LayerStages.input_norm, ("^",)),
    taps.GDN_QKV: Stage(LayerStages.qkv, (taps.INPUT_NORM,)),
    taps.GDN_GATE: Stage(LayerStages.gate, (taps.INPUT_NORM,)),
    taps.GDN_BETA: Stage(LayerStages.beta, (taps.INPUT_NORM,)),
    taps.GDN_LOG_DECAY: Stage(LayerStages.log_decay, (taps.INPUT_NORM,)),
    taps.GDN_CONV: Stage(LayerStages.conv, (taps.GDN_QKV, "*")),
    taps.GDN_Q: Stage(LayerStages.q, (taps.GDN_CONV,)),
    taps.GDN_K: Stage(LayerStages.k, (taps.GDN_CONV,)),
    taps.GDN_V: Stage(LayerStages.v, (taps.GDN_CONV,)),
    taps.GDN_CUMSUM: Stage(LayerStages.cumsum, (taps.GDN_LOG_DECAY,)),
    taps.GDN_DECAY: Stage(LayerStages.decay, (taps.GDN_CUMSUM,)),
    taps.GDN_KKT: Stage(LayerStages.kkt, (taps.GDN_K, taps.GDN_BETA, taps.GDN_DECAY)),
    taps.GDN_INVERSE: Stage(LayerStages.inverse, (taps.GDN_KKT,)),
    taps.GDN_U: Stage(LayerStages.u, (taps.GDN_INVERSE, taps.GDN_BETA, taps.GDN_V)),
    taps.GDN_W: Stage(LayerStages.w, (taps.GDN_INVERSE, taps.GDN_BETA, taps.GDN_K, taps.GDN_CUMSUM)),
    taps.GDN_INTRA: Stage(LayerStages.intra, (taps.GDN_Q, taps.GDN_K, taps.GDN_DECAY)),
    taps.GDN_STATE: Stage(LayerStages.state, _CHUNK_STATE),
    taps.GDN_INTER: Stage(LayerStages.inter, (taps.GDN_Q, taps.GDN_CUMSUM, taps.GDN_STATE, "*")),
    taps.GDN_OUT: Stage(
        LayerStages.out, (taps.GDN_INTER, taps.GDN_INTRA, taps.GDN_U, taps.GDN_W, taps.GDN_STATE, "*")
    ),
    taps.GDN_NORM: Stage(LayerStages.gated_norm, (taps.GDN_OUT, taps.GDN_GATE)),
    taps.ATTN_Q: Stage(LayerStages.attn_q, (taps.INPUT_NORM,)),
    taps.ATTN_K: Stage(LayerStages.attn_k, (taps.INPUT_NORM,)),
    taps.ATTN_V: Stage(LayerStages.attn_v, (taps.INPUT_NORM,)),
    taps.ATTN_GATE: Stage(LayerStages.attn_gate, (taps.INPUT_NORM,)),
    taps.ATTN_SCORES: Stage(LayerStages.scores, (taps.ATTN_Q, taps.ATTN_K, "*")),
    taps.ATTN_OUT: Stage(LayerStages.attn_out, (taps.ATTN_Q, taps.ATTN_K, taps.ATTN_V, "*")),
    taps.MIXER_OUT: Stage(LayerStages.mixer_out, (taps.GDN_NORM, taps.ATTN_OUT, taps.ATTN_GATE)),
    taps.RESIDUAL_MID: Stage(LayerStages.residual_mid, ("^", taps.MIXER_OUT)),
    taps.POST_NORM: Stage(LayerStages.post_norm, (taps.RESIDUAL_MID,)),
    taps.MOE_LOGITS: Stage(LayerStages.moe_logits, (taps.POST_NORM,)),
    taps.MOE_TOPK: Stage(LayerStages.moe_topk, (taps.MOE_LOGITS,)),
    taps.MOE_EXPERTS: Stage(LayerStages.moe_experts, (taps.POST_NORM, taps.MOE_TOPK)),
    taps.MOE_SHARED: Stage(LayerStages.moe_shared, (taps.POST_NORM,)),
    taps.MOE_OUT: Stage(LayerStages.moe_out, (taps.POST_NORM, taps.MOE_EXPERTS, taps.MOE_SHARED)),
    taps.RESIDUAL: Stage(LayerStages.residual, (taps.RESIDUAL_MID, taps.MOE_OUT)),
}

#: Without the stages of a chunk.
RECURRENT_STAGES = {
    taps.GDN_STATE: Stage(LayerStages.state, (*_DELTA_INPUTS, "*")),
    taps.GDN_OUT: Stage(LayerStages.out, (*_DELTA_INPUTS, "*")),
}
#: Tap points that an engine may compute inside an op without showing them: taken from what it shows, in float64.
INSIDE_OPS = (taps.GDN_Q, taps.GDN_K, taps.MOE_SHARED)
#: Tap points in fp32 whose op has a projection in the model's own dtype before it.
AFTER_A_PROJECTION = {taps.GDN_LOG_DECAY}


def stage_of(name: str, is_chunked: bool) -> Stage:
    """The stage of a tap point inside a layer; `is_chunked` says whether its stages of a chunk are seen."""
    return STAGES[name] if is_chunked or name not in RECURRENT_STAGES else RECURRENT_STAGES[name]


def reads_of(index: int, name: str, is_chunked: bool) -> list[str]:
    """Full names of the tap points that a tap point of layer `index` is made from, its memory left out."""
    stage = stage_of(name, is_chunked)
    reads = [taps.full_name(index, read) for read in stage.reads if read not in "^*"]
    if "^" in stage.reads:
        reads.append(taps.EMBED if index == 0 else taps.full_name(index - 1, taps.RESIDUAL))
    return reads


class StageWatch:
    """What `stage_watch` found: `table`, one row for each tap point of each pass, in the order of computation.

    step            number of the pass
    layer, tap, op  the place, see `nans.OP_OF_TAP`; tap points of `CACHE_TAPS` are what the pass found in its memory
    dtype, reads    of the tensor, and the tap points that it was made from
    error           relative to the float64 result of the same inputs, Frobenius; NaN where one of them is not finite
    row_error       of the worst row of the last axis, over the root mean square of the rows
    limit           what the roundings of the dtype explain: of `error`; of `row_error`, ROW_FACTOR times that
    is_fault        inputs finite, and the output not finite or beyond a limit; or, at HIDES_NAN, inputs that are not
                    finite and an output that is, where float64 gives NaN: a NaN was replaced
    index           of a fault: the first value that is not finite, else the one that is furthest off; None elsewhere
    found, expected the value there, and what float64 makes of the same inputs
    """

    def __init__(self, model: CausalLM, keep: bool = False):
        self.model = model
        #: With `keep` every pass with its tensors.
        self.passes: list[Seen] = []
        self._keep = keep
        self._rows: list[tuple] = []
        self._current: Seen | None = None
        self._step = -1
        self._expected: tuple[Cache, list[Memory]] | None = None
        #: (step, layer) -> which rows of the gated delta rule are wrong, where one of its stages is at fault.
        self.patterns: dict[tuple[int, int], Reading] = {}

    @property
    def table(self) -> pd.DataFrame:
        frame = pd.DataFrame(self._rows, columns=list(STAGE_COLUMNS))
        return frame.astype({"step": "int64", "layer": "Int64", "is_fault": "bool"})

    @property
    def first_fault(self) -> pd.Series | None:
        """The first row, in the order of computation, that is a fault."""
        faults = self.table[self.table["is_fault"]]
        return None if faults.empty else faults.iloc[0]

    def see(self, name: str, tensor: Tensor) -> None:
        if self._current is not None and not name.startswith("mtp."):
            self._current.tensors[name] = tensor.detach().clone()
            self._current.order.append(name)

    def see_experts(self, experts: Tensor) -> None:
        if self._current is not None:
            layer, _ = taps.split_name(self._current.order[-1])  # the router comes after its logits' tap point
            if layer is not None:
                self._current.experts[layer] = experts.detach().clone()

    def begin(self, input_ids: Tensor, cache: Cache | None) -> None:
        self._step += 1
        if cache is not None and len(set(cache.lengths)) > 1:
            raise InputError(
                f"stages: expected sequences of one length, found {cache.lengths}; watch them one by one"
            )
        start = cache
        if start is None:
            start = Cache.empty(
                self.model.config, input_ids.shape[0], device=self.model.device, dtype=self.model.dtype
            )
        memory = memory_of(start)
        if cache is not None and self._expected is not None and self._expected[0] is cache:
            self._judge_memory(memory, self._expected[1])
        self._current = Seen(input_ids, start.lengths[0], memory)

    def end(self, cache: Cache | None) -> None:
        seen, self._current = self._current, None
        left = self.judge(seen)
        self._expected = None if cache is None else (cache, left)
        if self._keep:
            self.passes.append(seen)

    def judge(self, seen: Seen) -> list[Memory | None]:
        """Judge the tap points of a pass of which all is known that they read; what its layers must leave behind."""
        if taps.EMBED in seen.tensors and bool((seen.input_ids >= 0).all()):  # else the tokens are unknown
            self._judge(taps.EMBED, None, lambda: self.model.embed_tokens.weight.double()[seen.input_ids], [], seen)
        left = []
        for index in range(len(self.model.layers)):
            stages = LayerStages(self.model, index, seen)
            self._judge_layer(stages)
            left.append(self._memory_after(stages))
        final = taps.full_name(len(self.model.layers) - 1, taps.RESIDUAL)
        norm = LayerStages(self.model, 0, seen).norm
        if {final, taps.FINAL_NORM} <= seen.tensors.keys():
            self._judge(
                taps.FINAL_NORM, None, lambda: norm(seen.tensors[final].double(), self.model.norm), [final], seen
            )
        if {taps.FINAL_NORM, taps.LOGITS} <= seen.tensors.keys():
            self._judge(taps.LOGITS, None, lambda: self._logits(seen), [taps.FINAL_NORM], seen)
        return left

    def _logits(self, seen: Seen) -> Tensor:
        config = self.model.config
        weight = self.model.embed_tokens.weight if config.tie_word_embeddings else self.model.lm_head.weight
        rows = seen.tensors[taps.FINAL_NORM].double()
        return rows[:, -seen.tensors[taps.LOGITS].shape[1] :] @ weight.double().T

    def _judge_layer(self, stages: LayerStages) -> None:
        seen, index = stages.seen, stages.index
        prefix = taps.full_name(index, "")
        here = [name.removeprefix(prefix) for name in seen.order if name.startswith(prefix)]
        is_chunked = stages.has(taps.GDN_CUMSUM)
        before = len(self._rows)
        for name in dict.fromkeys(here):
            stage, reads = stage_of(name, is_chunked), reads_of(index, name, is_chunked)
            if not self._is_known(stages, name, stage, reads):
                continue
            memory = [stages.memory.first, stages.memory.second] if "*" in stage.reads else []
            extra = stages.choice_error if name == taps.MOE_TOPK else None
            self._judge(name, index, lambda s=stage: s.expect(stages), reads, seen, memory, extra)
        faults = {row[3] for row in self._rows[before:] if row[STAGE_COLUMNS.index("is_fault")]}
        if "gated_delta_rule" in faults and all(map(is_finite, map(stages.value, ARGUMENT_TAPS.values()))):
            self.patterns[self._step, index] = stages.pattern()

    def _is_known(self, stages: LayerStages, name: str, stage: Stage, reads: list[str]) -> bool:
        """Whether everything was seen that a tap point is made from, as layers of this kind make it."""
        skipped = "attn." if stages.layer.is_linear else "gdn."
        ignored = (skipped, "moe.") if stages.is_dense else (skipped,)
        needed = [read for read in reads if not taps.split_name(read)[1].startswith(ignored)]
        has_memory = "*" not in stage.reads or stages.memory is not None
        has_experts = name not in (taps.MOE_TOPK, taps.MOE_EXPERTS) or stages.index in stages.seen.experts
        return has_memory and has_experts and all(read in stages.seen.tensors for read in needed)

    def _judge(
        self, name: str, layer: int | None, expect: Callable[[], Tensor], reads: list[str], seen: Seen,
        memory: list[Tensor] = (), choice: Callable[[], float] | None = None,
    ) -> None:  # fmt: skip
        full = name if layer is None else taps.full_name(layer, name)
        found = seen.tensors[full]
        inputs_finite = all(is_finite(seen.tensors[read]) for read in reads if read in seen.tensors)
        inputs_finite = inputs_finite and all(map(is_finite, memory))
        output_finite = is_finite(found)
        dtype = self.model.dtype if name in AFTER_A_PROJECTION else found.dtype
        limit = stage_limit(dtype if dtype.itemsize <= 4 or self.model.dtype == torch.float64 else torch.float32)
        error = row_error = math.nan
        is_fault, expected = inputs_finite and not output_finite, None
        if inputs_finite or (output_finite and name in HIDES_NAN):
            expected = expect()
        if not inputs_finite:
            is_fault = expected is not None and bool(expected.isnan().any())  # a NaN was replaced
        elif output_finite:
            if expected.shape != found.shape:
                raise InputError(
                    f"stages: {full}: expected shape {tuple(expected.shape)}, found {tuple(found.shape)}; packed and "
                    "padded batches are not judged, give their sequences one by one"
                )
            error, row_error = errors_of(found, expected)
            if choice is not None:
                error = max(error, choice())
            is_fault = not (error <= limit and row_error <= ROW_FACTOR * limit)
        place = place_of(found, expected) if is_fault else (None, math.nan, math.nan)
        self._rows.append(
            (self._step, layer, full, OP_OF_TAP[name], str(found.dtype).removeprefix("torch."), tuple(reads), error,
             row_error, limit, inputs_finite, output_finite, is_fault, *place)
        )  # fmt: skip

    def _memory_after(self, stages: LayerStages) -> Memory | None:
        """What the layer must leave behind after the pass, in the dtype of the cache; None where it was not seen."""
        before = stages.memory
        kept = (taps.GDN_QKV, taps.GDN_STATE) if stages.layer.is_linear else (taps.ATTN_K, taps.ATTN_V)
        if before is None or not all(map(stages.has, kept)):
            return None
        if stages.layer.is_linear:
            width = before.first.shape[1]
            qkv = stages.seen.tensors[taps.full_name(stages.index, taps.GDN_QKV)]
            window = torch.cat([before.first, qkv], dim=1)[:, -width:] if width else before.first
            batch = qkv.shape[0]
            return Memory(window, stages.seen.tensors[taps.full_name(stages.index, taps.GDN_STATE)][-batch:])
        new = (stages.seen.tensors[taps.full_name(stages.index, name)] for name in (taps.ATTN_K, taps.ATTN_V))
        return Memory(*(torch.cat([old, x], dim=1) for old, x in zip((before.first, before.second), new, strict=True)))

    def _judge_memory(self, found: list[Memory], expected: list[Memory]) -> None:
        for index, (here, there) in enumerate(zip(found, expected, strict=True)):
            is_linear = self.model.layers[index].is_linear
            names = ("cache.window", "cache.state") if is_linear else ("cache.keys", "cache.values")
            for name, a, b in zip(names, (here.first, here.second), (there.first, there.second), strict=True):
                was_finite, now_finite, same_shape = is_finite(b), is_finite(a), a.shape == b.shape
                error = row_error = math.nan
                if same_shape and was_finite and now_finite:
                    error, row_error = errors_of(a, b.double())
                limit = 0.0  # memory is kept, not computed
                is_fault = not same_shape or (was_finite and not now_finite) or error > limit
                place = place_of(a, b.double()) if is_fault and same_shape else (None, math.nan, math.nan)
                self._rows.append(
                    (self._step, index, taps.full_name(index, name), CACHE_TAPS[name],
                     str(a.dtype).removeprefix("torch."), (), error, row_error, limit, was_finite, now_finite, is_fault,
                     *place)
                )  # fmt: skip


def is_finite(x: Tensor) -> bool:
    return bool(torch.isfinite(x).all())


@torch.no_grad()
def judge_passes(model: CausalLM, passes: Iterable[Seen]) -> StageWatch:
    """Judge passes that were seen elsewhere (another engine, a file), with the weights of `model`.

    The first of them began without memory; each of the others with what the one before it left. Tap points that are
    made from ones that were not seen are left out; those of INSIDE_OPS are computed in float64 where they were not.
    `Seen.memory` is replaced.
    """
    watch = StageWatch(model)
    memory: list[Memory | None] | None = None
    for step, seen in enumerate(passes):
        if memory is None:
            batch = seen.input_ids.shape[0]
            memory = memory_of(Cache.empty(model.config, batch, device=model.device, dtype=model.dtype))
        whole = dataclasses.replace(
            seen, memory=memory, input_ids=seen.input_ids.to(model.device),
            tensors={name: tensor.to(model.device) for name, tensor in seen.tensors.items()},
            experts={layer: chosen.to(model.device) for layer, chosen in seen.experts.items()},
        )  # fmt: skip
        for index in range(len(model.layers)):
            stages = LayerStages(model, index, whole)
            for name in INSIDE_OPS:
                needed = reads_of(index, name, True)
                is_there = all(read in whole.tensors for read in needed)
                if is_there and not stages.has(name) and not (name == taps.MOE_SHARED and stages.is_dense):
                    whole.tensors[taps.full_name(index, name)] = STAGES[name].expect(stages)
        watch._step = step
        memory = watch.judge(whole)
    return watch


@contextmanager
def stage_watch(model: CausalLM, *, keep: bool = False) -> Iterator[StageWatch]:
    """Judge every op of every pass of `model` inside the context; see the module and `StageWatch`.

    `keep` leaves every pass with all its tensors in `StageWatch.passes`.

    Each pass is followed by its float64 recomputation, so that it takes several times as long, and all its tensors are
    kept until then. Raises InputError for packed and padded batches and for sequences of different lengths.
    """
    if "forward" in vars(model):
        raise InputError("stages: expected a model with its own forward, found it replaced; leave the other watch")
    watch = StageWatch(model, keep)
    outer = model.tap
    forward = model.forward

    def watched(input_ids: Tensor, **settings) -> object:
        if settings.get("cu_seqlens") is not None or settings.get("attention_mask") is not None:
            raise InputError(
                "stages: expected a batch without padding, found cu_seqlens or a mask; give its sequences one by one"
            )
        with torch.no_grad():
            watch.begin(input_ids, settings.get("cache"))
            output = forward(input_ids, **settings)
            watch.end(output.cache)
        return output

    model.tap = _Collector(watch, outer)
    model.forward = watched
    try:
        with seen_routing(model, lambda logits, weights, experts: watch.see_experts(experts)):
            yield watch
    finally:
        del model.forward
        model.tap = outer
