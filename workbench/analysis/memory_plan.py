"""Whether a model fits a card: weights, recurrent state, convolution window, keys and values, and what a pass needs.

Weights, state, window, keys and values are exact for a configuration and a dtype. What a pass holds besides is an
estimate, checked against the tensors that passes really hold (`analysis.memory`); the share of the card that nobody may
use is an assumption, stated in the plan.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from workbench.analysis.costs import WIDTH
from workbench.analysis.wording import size_text
from workbench.cards import Card
from workbench.checkpoint import expected_tensors
from workbench.checkpoint.layout import ALWAYS_FLOAT32, OFFICIAL_FLOAT32
from workbench.checkpoint.read import FLOAT_DTYPES, plan_from_headers, target_dtype
from workbench.config import FULL, LINEAR, SPARSE, ModelConfig
from workbench.errors import InputError

#: Share of a card that a plan may use, as vLLM's default: the rest is the driver's, the allocator's and the libraries'.
UTILISATION = 0.9

#: Bytes of one matrix of the delta rule's state-free phase on a GPU, of which about six are held at a time.
_PHASE_BYTES, _PHASE_MATRICES = 1 << 29, 6


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """All in bytes.

    capacity     memory of the card, None: unknown;  usable: `utilisation` of it
    weights      in `dtype`;  sequence: state and window of one sequence;  token: keys and values of one token
    prompt       tokens that one pass takes at once;  working: what such a pass holds besides, an estimate
    asked, length, sequences
                 what was asked for: `sequences` of `length` tokens
    needed       all of it together for what was asked
    """

    card: str
    dtype: str
    capacity: int | None
    utilisation: float
    weights: int
    sequence: int
    token: int
    prompt: int
    working: int
    length: int
    sequences: int
    limit: int

    @property
    def usable(self) -> int | None:
        return None if self.capacity is None else int(self.capacity * self.utilisation)

    @property
    def needed(self) -> int:
        return self.weights + self.working + self.sequences * (self.sequence + self.length * self.token)

    @property
    def fits(self) -> bool | None:
        """Whether what was asked fits; None where the card's memory is unknown."""
        return None if self.usable is None else self.needed <= self.usable

    @property
    def free(self) -> int | None:
        """Left for sequences after weights and a pass; below 0: weights alone do not fit."""
        return None if self.usable is None else self.usable - self.weights - self.working

    @property
    def longest(self) -> int | None:
        """Longest context of one sequence, at most what the model was made for; 0: none; None: unknown."""
        if self.free is None:
            return None
        room = self.free - self.sequence
        if room < 0:
            return 0
        return min(self.limit, room // self.token) if self.token else self.limit

    @property
    def most_sequences(self) -> int | None:
        """Most sequences of `length` tokens at once."""
        if self.free is None:
            return None
        return max(0, self.free // (self.sequence + self.length * self.token))

    def in_words(self) -> str:
        """What takes how much, and what is left, in one sentence."""
        if self.usable is None:
            return f"memory: weights {size_text(self.weights)} in {self.dtype}; that of the card is unknown"
        rest = (
            f"{size_text(-self.free)} too much before the first token" if self.free < 0
            else f"room for {self.most_sequences:,} sequences of {self.length:,} tokens, or one of {self.longest:,}"
        )  # fmt: skip
        return (
            f"memory: weights {size_text(self.weights)} and a pass of {self.prompt:,} tokens {size_text(self.working)} "
            f"of {size_text(self.usable)} ({self.utilisation:.0%} of the card): {rest}"
        )

    def to_json(self) -> dict[str, object]:
        derived = ("usable", "needed", "fits", "free", "longest", "most_sequences")
        return asdict(self) | {name: getattr(self, name) for name in derived}


def weight_bytes(config: ModelConfig, dtype: str, *, with_mtp: bool = True) -> int:
    """Of a model in memory in `dtype`, its small float32 tensors as published files have them; a tied head once."""
    def width(name: str) -> int:
        return 4 if ALWAYS_FLOAT32.fullmatch(name) or OFFICIAL_FLOAT32.fullmatch(name) else WIDTH[dtype]

    return sum(
        math.prod(shape) * width(name)
        for name, shape in expected_tensors(config).items()
        if with_mtp or not name.startswith("mtp.")
    )


def weights_in_files(
    checkpoint: str | Path, dtype: str | None = None, *, with_mtp: bool = True, expert_layout: str | None = None
) -> tuple[ModelConfig, int]:
    """(configuration, bytes in memory in `dtype`, None: as stored) of a checkpoint, exact, from its headers alone.

    Raises as `read_checkpoint` for files that cannot be used.
    """
    plan = plan_from_headers(checkpoint, expert_layout=expert_layout)
    asked = None if dtype is None else getattr(torch, dtype)
    shapes = expected_tensors(plan.config)
    held = 0
    for name, sources in plan.sources.items():
        if with_mtp or not name.startswith("mtp."):
            held += math.prod(shapes[name]) * target_dtype(name, FLOAT_DTYPES[sources[0].dtype], asked).itemsize
    return plan.config, held


def sequence_bytes(config: ModelConfig, dtype: str) -> int:
    """Recurrent states (float32, or wider) and convolution windows of one sequence, whatever its length."""
    c = config
    state = c.linear_num_value_heads * c.linear_key_head_dim * c.linear_value_head_dim * max(WIDTH[dtype], 4)
    window = (c.linear_conv_kernel_dim - 1) * c.conv_dim * WIDTH[dtype]
    return c.layer_types.count(LINEAR) * (state + window)


def token_bytes(config: ModelConfig, dtype: str) -> int:
    """Keys and values of one token in all layers of full attention."""
    c = config
    return c.layer_types.count(FULL) * 2 * c.num_key_value_heads * c.head_dim * WIDTH[dtype]


def working_bytes(config: ModelConfig, dtype: str, tokens: int) -> int:
    """Estimate of what a pass of `tokens` tokens holds at once besides weights and caches: the widest block of a layer.

    Each block keeps the residual stream, its normed form and what it adds. A linear layer has its projections, the
    convolution's result, q and k in float32 three times (before and after the norm, cut into chunks), v and the output,
    the gates, and about six matrices of the delta rule's state-free phase, bounded by a budget. Attention has its
    projections, rotated q and k, the output and the gate. Experts have the token, both inner values and the result of
    each pair. The head has logits of the last token.
    """
    c, width = config, WIDTH[dtype]
    stream = 3 * tokens * c.hidden_size * width
    blocks = [stream]
    if LINEAR in c.layer_types:
        heads = c.linear_num_value_heads
        projected = c.conv_dim + c.value_dim + 2 * heads
        values = (projected + 2 * c.conv_dim + 2 * c.value_dim) * width + (3 * 2 * c.key_dim + c.value_dim + heads) * 4
        wide = max(64, c.linear_key_head_dim + c.linear_value_head_dim) * 4
        phase = min(_PHASE_BYTES, tokens * heads * wide)
        blocks.append(stream + tokens * values + _PHASE_MATRICES * phase)
    if FULL in c.layer_types:
        query, key = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        blocks.append(stream + tokens * (2 * query + 2 * key + 2 * (query + key) + 3 * query) * width)
    if SPARSE in c.mlp_types:
        chosen, inner, shared = c.num_experts_per_tok, c.moe_intermediate_size, c.shared_expert_intermediate_size
        pairs = chosen * (2 * c.hidden_size + 4 * inner)
        blocks.append(stream + tokens * (c.num_experts + 1 + 3 * shared + pairs + c.hidden_size) * width)
    if len(set(c.mlp_types)) > (SPARSE in c.mlp_types):
        blocks.append(stream + tokens * 3 * c.intermediate_size * width)
    return max(blocks) + c.vocab_size * width


def memory_plan(
    config: ModelConfig, card: Card, *, dtype: str | None = None, length: int | None = None, sequences: int = 1,
    prompt: int = 2048, utilisation: float = UTILISATION, weights: int | None = None, with_mtp: bool = True,
) -> MemoryPlan:  # fmt: skip
    """Plan for `sequences` sequences of `length` tokens (default: the model's longest) in `dtype` (the card's).

    `prompt` is the number of tokens that one pass takes at most; `weights` replaces the count from the configuration by
    that of a model in memory. Raises InputError for sizes that make no sense.
    """
    dtype = card.model_dtype if dtype is None else dtype
    length = config.max_position_embeddings if length is None else length
    for name, value in (("length", length), ("sequences", sequences), ("prompt", prompt)):
        if value < 1:
            raise InputError(f"memory plan: {name}: expected at least 1, found {value}")
    if not 0 < utilisation <= 1:
        raise InputError(f"memory plan: utilisation: expected above 0 and at most 1, found {utilisation:g}")
    if dtype not in WIDTH:
        raise InputError(f"memory plan: dtype: expected one of {', '.join(WIDTH)}, found {dtype!r}")
    return MemoryPlan(
        card=card.name, dtype=dtype, capacity=card.memory_bytes, utilisation=utilisation,
        weights=weight_bytes(config, dtype, with_mtp=with_mtp) if weights is None else weights,
        sequence=sequence_bytes(config, dtype), token=token_bytes(config, dtype), prompt=prompt,
        working=working_bytes(config, dtype, min(prompt, length)), length=length, sequences=sequences,
        limit=config.max_position_embeddings,
    )  # fmt: skip
