"""Weights in float16: what a cast does to them, and the powers of two by which they can be moved without a change.

Two exact scalings of this architecture, both by powers of two, so that no bit changes unless a number leaves float16's
range of normal numbers:

units    A channel that a linear map makes and a linear map reads, with nothing but factors of other tensors between
         them: rows of up_proj and columns of down_proj (the hidden unit is silu(gate) up), rows of v_proj and columns
         of o_proj (attention is linear in v), the gated norm's weight and columns of out_proj. Rows times 2^-k, columns
         times 2^k, each channel with a k of its own.
stream   Every write into the residual stream (embedding, o_proj, out_proj, down_proj) times 2^-k. Whatever reads it is
         an RMS norm, x / sqrt(mean(x^2) + eps), which is the same for x 2^-k and eps 4^-k.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import pandas as pd
import torch
from torch import Tensor

from workbench import taps
from workbench.analysis.half_precision.watch import FLUSHES_TO, OVERFLOWS_FROM
from workbench.checkpoint.accounting import cast
from workbench.checkpoint.layout import ALWAYS_FLOAT32
from workbench.config import LINEAR, SPARSE, ModelConfig
from workbench.numerics import LARGEST, SMALLEST_NORMAL

#: What was too large is brought below 65504 / 4: another prompt may reach further than the one that was measured.
HEADROOM_BITS = 2
#: Where everything is tiny it is brought up to this power of two.
RAISED_TO_BITS = -4

#: Columns of `weight_table`.
WEIGHT_COLUMNS = ("tensor", "dtype", "values", "absmax", "overflows", "flushes", "subnormals")


def half(name: str, tensor: Tensor) -> Tensor:
    """A weight as a float16 model holds it: float16 but for what the loader keeps in float32."""
    if ALWAYS_FLOAT32.fullmatch(name):
        return tensor.float()
    if name.endswith(".linear_attn.norm.weight") and tensor.dtype == torch.float32:
        return tensor
    return tensor.half()


def weight_table(tensors: Mapping[str, Tensor]) -> pd.DataFrame:
    """What float16 makes of each weight that it would hold: finite values that overflow, flush, end up subnormal.

    `tensors` by canonical name, in any float dtype. One row each, columns as in WEIGHT_COLUMNS.
    """
    rows = []
    for name, tensor in tensors.items():
        target = half(name, tensor[:0]).dtype
        if target != torch.float16:
            continue
        _, record = cast(name, tensor, torch.float16)
        magnitude = tensor.float().abs()
        subnormal = int(((magnitude > FLUSHES_TO) & (magnitude < SMALLEST_NORMAL["float16"])).sum())
        absmax = float(magnitude.max()) if record is None else record.absmax
        overflows, flushes = (0, 0) if record is None else (record.n_overflow, record.n_flushed)
        rows.append((name, str(tensor.dtype).removeprefix("torch."), tensor.numel(), absmax, overflows, flushes,
                     subnormal))  # fmt: skip
    return pd.DataFrame(rows, columns=list(WEIGHT_COLUMNS))


def by_powers(x: Tensor, bits: Tensor) -> Tensor:
    """x 2^bits in x's own dtype, rounded once where the result is subnormal there."""
    return (x.to(torch.promote_types(x.dtype, torch.float32)) * torch.exp2(bits.double()).float()).to(x.dtype)


# ---- channels between two linear maps


@dataclass(frozen=True, slots=True)
class Pair:
    """Channels from `maker` to `reader`; `seen` are names of watched tensors that hold them, the reader's input first.

    `kind` is `mlp`, `experts`, `attention` or `delta`; of `delta` and `attention` several columns of the reader are one
    channel: `repeats` says how often each, heads of a group next to each other where `is_grouped`.
    """

    layer: int
    kind: str
    maker: str
    reader: str
    seen: tuple[str, ...]
    repeats: int = 1
    head_dim: int = 0  # of attention: channels are [kv heads, head_dim], columns [kv heads, repeats, head_dim]

    def per_channel(self, columns: Tensor) -> Tensor:
        """Largest of the columns of each channel: [columns] -> [channels]; experts pass unchanged."""
        if self.kind == "attention":
            return columns.unflatten(0, (-1, self.repeats, self.head_dim)).amax(1).flatten()
        return columns.unflatten(0, (self.repeats, -1)).amax(0) if self.kind == "delta" else columns

    def per_column(self, channels: Tensor) -> Tensor:
        """A value for each column from one for each channel: [channels] -> [columns]."""
        if self.kind == "attention":
            return channels.unflatten(0, (-1, 1, self.head_dim)).expand(-1, self.repeats, -1).flatten()
        return channels.repeat(self.repeats) if self.kind == "delta" else channels

    def maker_rows(self, weight: Tensor) -> Tensor:
        """The part of the maker's weight that makes the channels."""
        return weight[:, weight.shape[1] // 2 :] if self.kind == "experts" else weight

    def largest(self, tensors: Mapping[str, Tensor], channels: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Largest magnitude per channel of the maker's rows, of what was seen, and of the reader's columns, float32."""
        maker = self.maker_rows(tensors[self.maker]).float().abs()
        maker = maker if self.kind == "delta" else maker.amax(-1)
        columns = tensors[self.reader].float().abs().amax(-2)
        reader = self.per_channel(columns)
        seen = torch.zeros_like(reader)
        for name in self.seen:
            if name in channels:
                found = channels[name].to(reader)
                seen = torch.maximum(seen, self.per_channel(found) if found.shape == columns.shape else found)
        return maker, seen, reader

    def scaled(self, tensors: Mapping[str, Tensor], bits: Tensor) -> dict[str, Tensor]:
        """Maker and reader with channel j's rows times 2^-bits[j] and its columns times 2^bits[j]."""
        maker, reader = tensors[self.maker], tensors[self.reader]
        bits = bits.to(maker.device)
        changed = maker.clone()
        rows = self.maker_rows(changed)
        rows.copy_(by_powers(rows, -(bits if self.kind == "delta" else bits[..., None])))
        return {self.maker: changed, self.reader: by_powers(reader, self.per_column(bits)[..., None, :])}


def pairs_of(config: ModelConfig) -> Iterator[Pair]:
    """Every pair of the main model, layer by layer."""
    for layer, (mixer, mlp) in enumerate(zip(config.layer_types, config.mlp_types, strict=True)):
        at, seen = f"layers.{layer}.", taps.full_name(layer, "")
        if mixer == LINEAR:
            yield Pair(layer, "delta", f"{at}linear_attn.norm.weight", f"{at}linear_attn.out_proj.weight",
                       (f"{seen}linear_attn.out_proj.input",), config.linear_num_value_heads)  # fmt: skip
        else:
            yield Pair(
                layer, "attention", f"{at}self_attn.v_proj.weight", f"{at}self_attn.o_proj.weight",
                (f"{seen}self_attn.o_proj.input", f"{seen}{taps.ATTN_V}"),
                config.num_attention_heads // config.num_key_value_heads, config.head_dim,
            )  # fmt: skip
        if mlp == SPARSE:
            yield Pair(layer, "experts", f"{at}mlp.experts.gate_up_proj", f"{at}mlp.experts.down_proj",
                       (f"{seen}mlp.experts.down_proj.input", f"{seen}mlp.experts.up_proj.output"))  # fmt: skip
        block = "mlp.shared_expert." if mlp == SPARSE else "mlp."
        yield Pair(layer, "mlp", f"{at}{block}up_proj.weight", f"{at}{block}down_proj.weight",
                   (f"{seen}{block}down_proj.input", f"{seen}{block}up_proj.output"))  # fmt: skip


def _log2(x: Tensor) -> Tensor:
    return x.clamp(min=torch.finfo(torch.float32).tiny).log2()


def unit_bits(maker: Tensor, seen: Tensor, reader: Tensor) -> Tensor:
    """By how many binary places each channel has to be lowered (negative: raised), int32, 0 for most.

    All three hold the largest magnitude per channel: weights that make it, values seen, weights that read it. Lowered
    where weights or values overflow, raised where the reading weights do or all making weights are subnormal; always
    such that nothing else leaves the range, 0 where that cannot be.
    """
    limit, tiny = math.log2(LARGEST["float16"]), math.log2(SMALLEST_NORMAL["float16"])
    overflow = math.log2(OVERFLOWS_FROM)
    high, rows, columns = _log2(torch.maximum(maker, seen)), _log2(maker), _log2(reader)
    most, least = (limit - columns).floor(), (high - limit).ceil()  # between these nothing overflows
    lowered = (high - (limit - HEADROOM_BITS)).ceil()
    # Raised to a middling size, as far as values keep their room and the reading weights stay normal numbers.
    normal = (tiny + HEADROOM_BITS - columns).ceil()
    raised = torch.maximum(torch.maximum((rows - RAISED_TO_BITS).ceil(), lowered), normal)
    zero = torch.zeros_like(high)
    wanted = torch.where(high >= overflow, lowered, torch.where(rows < tiny, raised.clamp(max=0), zero))
    wanted = torch.where(columns >= overflow, torch.minimum(wanted, most), wanted)
    fits = (wanted <= most) & (wanted >= least) & (maker > 0) & (reader > 0)
    return torch.where(fits, wanted, zero).to(torch.int32)


@dataclass(frozen=True, slots=True)
class Scaled:
    """Weights that were moved: `tensors` that differ from the original, and the config that belongs to them.

    `eps` holds the eps of single norms, by module name, where they are not the config's. `moved` says in words what
    was done, `extra_bytes` what the result has more, in float16.
    """

    config: ModelConfig
    tensors: dict[str, Tensor]
    eps: dict[str, float] = field(default_factory=dict)
    moved: tuple[str, ...] = ()
    extra_bytes: int = 0


@dataclass(frozen=True, slots=True)
class UnitPlan:
    """The pairs with channels to be moved, and by how much."""

    bits: dict[Pair, Tensor]

    @classmethod
    def of(
        cls, config: ModelConfig, tensors: Mapping[str, Tensor], channels: Mapping[str, Tensor]
    ) -> UnitPlan:
        """From the weights and what a wide run showed (`Watch.channels`)."""
        found = {}
        for pair in pairs_of(config):
            bits = unit_bits(*pair.largest(tensors, channels))
            if bool(bits.any()):
                found[pair] = bits
        return cls(found)

    def __bool__(self) -> bool:
        return bool(self.bits)

    @property
    def cured(self) -> set[str]:
        """Names of the watched tensors and weights whose range this sets right."""
        return {name for pair in self.bits for name in (*pair.seen, pair.maker, pair.reader)}

    def apply(self, before: Scaled, tensors: Mapping[str, Tensor]) -> Scaled:
        """`before` with these channels moved; `tensors` are the original ones."""
        changed, words = dict(before.tensors), list(before.moved)
        for pair, bits in self.bits.items():
            changed |= pair.scaled({**tensors, **changed}, bits)
            some = bits[bits != 0]
            words.append(
                f"{pair.maker} rows times {powers(-some)} and {pair.reader} columns times {powers(some)}, "
                f"{some.numel()} of {bits.numel()} channels{_which(bits)}"
            )
        return replace(before, tensors=changed, moved=tuple(words))


def powers(bits: Tensor) -> str:
    """``2^-3``, or ``2^-3 to 2^-5`` for several."""
    low, high = int(bits.min()), int(bits.max())
    return f"2^{low}" if low == high else f"2^{low} to 2^{high}"


def _which(bits: Tensor) -> str:
    places = bits.nonzero().tolist()
    if len(places) > 4:
        return ""
    names = [f"expert {place[0]} unit {place[1]}" if len(place) == 2 else f"unit {place[0]}" for place in places]
    return f" ({', '.join(names)})"


# ---- the residual stream

#: Weights that write into a residual stream; the embedding and mtp.fc begin one.
STREAM_WRITERS = re.compile(
    r"(mtp\.)?layers\.\d+\.(self_attn\.o_proj\.weight|linear_attn\.out_proj\.weight|"
    r"mlp\.(shared_expert\.)?down_proj\.weight|mlp\.experts\.down_proj)|embed_tokens\.weight|mtp\.fc\.weight"
)
#: Weights whose output is normed and read by nothing else: k_proj, and of q_proj the query rows, not the gate rows.
NORMED_PROJECTIONS = re.compile(r"(mtp\.)?layers\.\d+\.self_attn\.(q|k)_proj\.weight")
#: Norms that read a residual stream, or the embedding.
STREAM_NORMS = re.compile(
    r"(mtp\.)?layers\.\d+\.(input_layernorm|post_attention_layernorm)|(mtp\.)?norm|mtp\.pre_fc_norm_embedding"
)


def times(tensor: Tensor, bits: int) -> Tensor:
    """tensor 2^bits in its own dtype."""
    return tensor * 2.0**bits


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """The whole residual stream times 2^-bits, and what becomes of the eps of the norms.

    own     only the norms that read the stream have eps 4^-bits: exact, and nothing that a config can say
    shared  all norms have it, as the config's one rms_norm_eps; query and key projections are scaled along, which makes
            theirs exact, and the gated norm of the linear layers is left with a smaller eps than it was trained with
    kept    all have what they had: the norms that read the stream act as if their eps were 4^bits as large
    """

    bits: int
    eps: str = "shared"

    def apply(self, before: Scaled, tensors: Mapping[str, Tensor]) -> Scaled:
        """`before` with the stream moved. A head that shares the embedding gets a matrix of its own, unscaled."""
        k, config = self.bits, before.config
        current = {**tensors, **before.tensors}
        changed, eps, words = dict(before.tensors), dict(before.eps), list(before.moved)
        extra = before.extra_bytes
        for name, tensor in current.items():
            if STREAM_WRITERS.fullmatch(name):
                changed[name] = times(tensor, -k)
            elif self.eps == "shared" and NORMED_PROJECTIONS.fullmatch(name):
                changed[name] = self._normed(name, tensor, config)
        words.append(f"embed_tokens and every o_proj, out_proj and down_proj times 2^{-k}")
        if config.tie_word_embeddings:
            changed["lm_head.weight"] = current["embed_tokens.weight"].clone()
            config, extra = replace(config, tie_word_embeddings=False), extra + 2 * changed["lm_head.weight"].numel()
            words.append("lm_head unscaled, no longer the embedding")
        small = config.rms_norm_eps * 4.0**-k
        if self.eps == "own":
            eps |= {
                name.removesuffix(".weight"): small for name in current
                if STREAM_NORMS.fullmatch(name.removesuffix(".weight"))
            }  # fmt: skip
            words.append(f"eps {small:.3g} in the norms that read the stream, {config.rms_norm_eps:.3g} in the others")
        elif self.eps == "shared":
            words.append(f"rms_norm_eps {small:.3g} for {config.rms_norm_eps:.3g}, query and key rows times 2^{-k}")
            config = replace(config, rms_norm_eps=small)
        return Scaled(config, changed, eps, tuple(words), extra)

    def _normed(self, name: str, tensor: Tensor, config: ModelConfig) -> Tensor:
        if name.endswith("k_proj.weight"):
            return times(tensor, -self.bits)
        changed = tensor.clone()
        heads = changed.view(-1, 2, config.head_dim, tensor.shape[1])  # each head's query rows, then its gate rows
        heads[:, 0] = times(heads[:, 0], -self.bits)
        return changed


def stream_bits(largest: float) -> int:
    """How many binary places bring the largest magnitude of the stream to 65504 / 4 or below; negative: it is tiny."""
    if largest <= 0.0:
        return 0
    needed = math.ceil(math.log2(largest) - (math.log2(LARGEST["float16"]) - HEADROOM_BITS))
    return needed if largest >= OVERFLOWS_FROM or needed < 0 else 0
