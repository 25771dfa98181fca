"""Tap points: the one table of names at which the model can be observed, and the protocol of an observer.

A tap is called as ``tensor = tap(name, tensor)`` and returns the tensor to go on with, so that an observer
(which returns its argument) and an intervention (which returns something else) have one interface. Without an
observer the model holds ``None`` and every tap point costs one comparison.

Names inside a layer are written relative to it (``gdn.cumsum``); ``Tap.layer`` adds the prefix, so that model and
kernels build no strings. This module is a leaf: everything may import it and it imports nothing of the package.

Shapes named below: B batch, T time, N chunks, C chunk rows, H key heads, V value heads, K key dim, W value dim,
D hidden, E experts, A experts per token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch import Tensor

EMBED = "embed"
FINAL_NORM = "final_norm"
LOGITS = "logits"

INPUT_NORM = "input_norm"
MIXER_OUT = "mixer_out"
RESIDUAL_MID = "residual_mid"
POST_NORM = "post_norm"
RESIDUAL = "residual"

GDN_QKV = "gdn.qkv"
GDN_CONV = "gdn.conv"
GDN_Q = "gdn.q"
GDN_K = "gdn.k"
GDN_V = "gdn.v"
GDN_GATE = "gdn.gate"
GDN_BETA = "gdn.beta"
GDN_LOG_DECAY = "gdn.log_decay"
GDN_CUMSUM = "gdn.cumsum"
GDN_DECAY = "gdn.decay"
GDN_KKT = "gdn.kkt"
GDN_INVERSE = "gdn.inverse"
GDN_U = "gdn.u"
GDN_W = "gdn.w"
GDN_INTRA = "gdn.intra"
GDN_INTER = "gdn.inter"
GDN_STATE = "gdn.state"
GDN_OUT = "gdn.out"
GDN_NORM = "gdn.norm"

ATTN_Q = "attn.q"
ATTN_K = "attn.k"
ATTN_V = "attn.v"
ATTN_GATE = "attn.gate"
ATTN_SCORES = "attn.scores"
ATTN_OUT = "attn.out"

MOE_LOGITS = "moe.logits"
MOE_TOPK = "moe.topk"
MOE_EXPERTS = "moe.experts"
MOE_SHARED = "moe.shared"
MOE_OUT = "moe.out"

#: Tap points inside an op: reached only with an observer that wants them (see `inside`).
STAGES = frozenset({
    GDN_CUMSUM, GDN_DECAY, GDN_KKT, GDN_INVERSE, GDN_U, GDN_W, GDN_INTRA, GDN_INTER, ATTN_SCORES,
})  # fmt: skip

#: What each tap point inside a layer holds, in the order in which a layer computes them. The last brackets are axes.
LAYER_TAPS: dict[str, str] = {
    INPUT_NORM: "residual stream after the norm before the mixer, [B, T, D]",
    GDN_QKV: "projected q|k|v channels before the convolution, [B, T, 2HK+VW]",
    GDN_GATE: "output gate before SiLU, [B, T, V, W]",
    GDN_BETA: "write strength in (0, 1), [B, T, V]",
    GDN_LOG_DECAY: "log of the per-token decay, <= 0, fp32, [B, T, V]",
    GDN_CONV: "the same channels after causal convolution and SiLU, [B, T, 2HK+VW]",
    GDN_Q: "queries after l2 norm and K**-0.5, [B, T, H, K]",
    GDN_K: "keys after l2 norm, [B, T, H, K]",
    GDN_V: "values, [B, T, V, W]",
    GDN_CUMSUM: "cumulative log decay inside each chunk, [N, V, C]",
    GDN_DECAY: "pairwise decay exp(G_i - G_j), zero above the diagonal, [N, V, C, C]",
    GDN_KKT: "strictly lower beta_i (k_i . k_j) decay_ij, [N, V, C, C]",
    GDN_INVERSE: "(I + kkt)^-1, [N, V, C, C]",
    GDN_U: "inverse @ (beta v), [N, V, C, W]",
    GDN_W: "inverse @ (beta exp(G) k), [N, V, C, K]",
    GDN_INTRA: "(q . k) decay inside the chunk, [N, V, C, C]",
    GDN_INTER: "readout of the state that entered the chunk, [N, V, C, W]",
    # What a tap returns for the state is handed on to the next pass; no chunk of this one reads it.
    GDN_STATE: "recurrent state after each chunk, fp32, [N, V, K, W]; of a recurrence the last one, [B, V, K, W]",
    GDN_OUT: "output of the gated delta rule, [B, T, V, W]",
    GDN_NORM: "output after gated RMS norm, [B, T, VW]",
    ATTN_Q: "queries after norm and rotation, [B, T, heads, head_dim]",
    ATTN_K: "keys after norm and rotation, [B, T, kv heads, head_dim]",
    ATTN_V: "values, [B, T, kv heads, head_dim]",
    ATTN_GATE: "output gate before the sigmoid, [B, T, heads * head_dim]",
    ATTN_SCORES: "scaled scores before mask and softmax, [B, heads, T, keys]",
    ATTN_OUT: "attention output before the gate, [B, T, heads, head_dim]",
    MIXER_OUT: "output of the mixer after its last projection, [B, T, D]",
    RESIDUAL_MID: "residual stream between the mixer and the MLP, [B, T, D]",
    POST_NORM: "residual stream after the norm before the MLP, [B, T, D]",
    MOE_LOGITS: "router logits, [tokens, E]",
    MOE_TOPK: "renormalised weights of the chosen experts, [tokens, A]",
    MOE_EXPERTS: "weighted sum of the chosen experts, [tokens, D]",
    MOE_SHARED: "shared expert times its gate, [tokens, D]",
    MOE_OUT: "output of the MLP block, [B, T, D]",
    RESIDUAL: "residual stream that leaves the layer, [B, T, D]",
}

#: Tap points outside the layers.
MODEL_TAPS: dict[str, str] = {
    EMBED: "token embeddings, [B, T, D]",
    FINAL_NORM: "residual stream after the last norm, [B, T, D]",
    LOGITS: "next-token logits, of last tokens alone [S, 1, vocabulary], else [B, T, vocabulary]",
}


def full_name(layer: int, name: str) -> str:
    """``full_name(3, "gdn.cumsum") == "layers.03.gdn.cumsum"``."""
    return f"layers.{layer:02d}.{name}"


def split_name(name: str) -> tuple[int | None, str]:
    """Inverse of `full_name`; the layer is None for a tap point outside the layers (also inside ``mtp.``)."""
    if name.startswith("layers."):
        _, index, relative = name.split(".", 2)
        return int(index), relative
    return None, name


@runtime_checkable
class Tap(Protocol):
    """An observer of tap points."""

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        """See `tensor` at the point `name`; return what the computation shall continue with."""
        ...

    # One that keeps flags may have ``flag_rows(names)`` too: see `kernels.dispatch.Site.flags`.

    def scope(self, prefix: str) -> Tap | None:
        """The same observer for names relative to `prefix` (``scope("layers.03.")``); None if it wants none there."""
        ...


def observe(tap: Tap | None, name: str, tensor: Tensor) -> Tensor:
    """``tap(name, tensor)``, or `tensor` itself where nobody observes."""
    return tensor if tap is None else tap(name, tensor)


def inside(tap: Tap | None) -> Tap | None:
    """The observer of the stages inside an op; None for one whose `sees_inside` is False.

    Some stages (the inverse of a chunk, attention's scores) are computed for an observer alone, and the others are
    evaluated for all chunks at once where somebody observes. An observer that wants only what ops take and give says
    so, and pays for none of this. Whoever calls an op with taps inside passes ``inside(tap)`` on.
    """
    return tap if getattr(tap, "sees_inside", True) else None


def takes_parts(tap: Tap | None) -> bool:
    """Whether a stage inside an op may reach the observer in several tensors, blocks of chunks in their order.

    Most observers want each stage of a pass as one tensor, for which all chunks have to be held at once. One whose
    `takes_parts` is True bounds that memory: its tap points are called once for each block.
    """
    return getattr(tap, "takes_parts", False)


class Ranges(NamedTuple):
    """What a kernel says of a stage that it does not write to memory, chunk by chunk and head by head.

    values  fp32 [N, V, 5]: smallest and largest finite value (+inf and -inf where there is none), and how many values
            are NaN, +inf, -inf
    shape, dtype  of the stage, as the kernel has it
    """

    values: Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype


def takes_ranges(tap: Tap | None) -> bool:
    """Whether ranges of the stages inside an op are enough: ``tap.see_ranges(name, ranges)`` in place of the tensor.

    A backend whose kernels hold the stages in registers then writes nothing else of them; the others show tensors.
    """
    return getattr(tap, "takes_ranges", False)
