"""What a pass of a model computes and moves, op by op, and the least time that a card needs for it.

Flops are those of products (2 for each pair that is summed) and of the delta rule's updates. Bytes are what must cross
the memory bus where each op reads its operands and writes its result once: weights, activations, recurrent state, keys
and values. An op takes at least

    max(flops / rate of its dtype, bytes / bandwidth)

on a card (a roofline). Launches, conversions and what a kernel reads twice are not in it, so that a real run is slower.

Letters: B sequences, T new tokens of each, L tokens before them, D hidden, E experts, A experts per token, I expert
width, H key heads of width K, V value heads of width W, C rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import pandas as pd

from workbench.cards import Card, Rule
from workbench.config import LINEAR, SPARSE, ModelConfig
from workbench.errors import InputError

#: Bytes of a value.
WIDTH = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

#: Columns of `cost_table`.
COLUMNS = ("part", "op", "calls", "dtype", "flops", "weights", "activations", "state", "kv", "seconds", "bound")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCost:
    """One part of all layers together.

    part     ``gdn.in_proj``, ``moe.experts``, ...;  op: the op of the workbench that computes it
    calls    how often in one pass
    dtype    of its products
    flops    of the pass;  weights, activations, state, kv: bytes of the pass
    """

    part: str
    op: str
    calls: int
    dtype: str
    flops: float = 0.0
    weights: float = 0.0
    activations: float = 0.0
    state: float = 0.0
    kv: float = 0.0

    @property
    def bytes(self) -> float:
        return self.weights + self.activations + self.state + self.kv

    def seconds(self, card: Card) -> tuple[float | None, str]:
        """(least time on the card, what bounds it: ``compute`` or ``memory``); None with what is unknown."""
        rate, bandwidth = card.rates.get(self.dtype), card.bandwidth
        missing = [f"rates.{self.dtype}"] if rate is None and self.flops else []
        missing += [] if bandwidth is not None else ["bandwidth"]
        if missing:
            return None, "unknown: " + ", ".join(missing)
        compute = self.flops / rate if self.flops else 0.0
        memory = self.bytes / bandwidth
        return max(compute, memory), "compute" if compute > memory else "memory"


def distinct_experts(experts: int, chosen: int, tokens: int) -> float:
    """Experts that serve at least one of `tokens` tokens, expected where each takes `chosen` of `experts` at random:
    E (1 - (1 - A/E)^T)."""
    return experts * (1.0 - (1.0 - chosen / experts) ** tokens)


def delta_rule_flops(tokens: int, key_dim: int, value_dim: int, chunk: int) -> float:
    """Of one value head: chunks for more than one token, else the recurrence.

    A chunk of C rows: k k^T and q k^T (2 C K each a token), the triangular solve (C (K + W)), the state that is read
    twice and written once (3 x 2 K W), and the part inside the chunk (2 C W). A token alone: k S, the update and q S,
    2 K W each. Fused kernels give each value head its own k k^T, as here; `torch_chunk` shares it by key head.
    """
    if tokens == 1:
        return 6.0 * key_dim * value_dim
    rows = min(chunk, tokens)
    per_token = 4 * rows * key_dim + rows * (key_dim + value_dim) + 6 * key_dim * value_dim + 2 * rows * value_dim
    return float(tokens * per_token)


def op_costs(
    config: ModelConfig, *, tokens: int, context: int = 0, sequences: int = 1, dtype: str = "bfloat16",
    delta_dtype: str = "float32", chunk: int = 64, all_logits: bool = False,
) -> tuple[OpCost, ...]:  # fmt: skip
    """The parts of one pass of `sequences` sequences: `tokens` new ones each, after `context` earlier ones.

    A prompt is ``tokens=T``; a step of decoding at length L is ``tokens=1, context=L``. `dtype` is that of weights,
    activations, keys and values; `delta_dtype` that of the delta rule's products, whose operands are read in `dtype`;
    the recurrent state is float32. Logits of the last token alone unless `all_logits`. The prediction head is not in
    it. Raises InputError for sizes below 1 and unknown dtypes.
    """
    for name, value, least in (("tokens", tokens, 1), ("context", context, 0), ("sequences", sequences, 1)):
        if value < least:
            raise InputError(f"costs: {name}: expected at least {least}, found {value}")
    for name in (dtype, delta_dtype):
        if name not in WIDTH:
            raise InputError(f"costs: dtype: expected one of {', '.join(WIDTH)}, found {name!r}")
    c, width, rows = config, WIDTH[dtype], sequences * tokens
    linear, full = c.layer_types.count(LINEAR), len(c.layer_types) - c.layer_types.count(LINEAR)
    sparse = c.mlp_types.count(SPARSE)
    found: list[OpCost] = []

    def product(part: str, calls: int, inputs: int, outputs: int, at: int = rows) -> None:
        """`calls` products of [at, inputs] and a weight [outputs, inputs]."""
        if calls:
            found.append(OpCost(
                part=part, op="linear", calls=calls, dtype=dtype, flops=2.0 * calls * at * inputs * outputs,
                weights=float(calls * inputs * outputs * width),
                activations=float(calls * at * (inputs + outputs) * width),
            ))  # fmt: skip

    def elementwise(part: str, op: str, calls: int, values: float, weights: float = 0.0, flops: float = 0.0) -> None:
        """`values` read and written in each of `calls` calls."""
        if calls:
            found.append(OpCost(
                part=part, op=op, calls=calls, dtype=dtype, flops=calls * flops, weights=calls * weights * width,
                activations=calls * values * width,
            ))  # fmt: skip

    elementwise("embed", "embedding", 1, 2.0 * rows * c.hidden_size)
    elementwise("norms", "rms_norm", 2 * len(c.layer_types) + 1, 2.0 * rows * c.hidden_size, c.hidden_size)

    key_dim, value_dim, heads = c.linear_key_head_dim, c.linear_value_head_dim, c.linear_num_value_heads
    product("gdn.in_proj", linear, c.hidden_size, c.conv_dim + c.value_dim + 2 * heads)
    window = c.linear_conv_kernel_dim
    elementwise("gdn.conv", "causal_conv", linear, 2.0 * (rows + sequences * (window - 1)) * c.conv_dim,
                window * c.conv_dim, 2.0 * rows * window * c.conv_dim)  # fmt: skip
    if linear:
        state = 2.0 * sequences * heads * key_dim * value_dim * 4  # read once, written once, float32
        # q, k, v, out and beta; the gates in float32
        values = rows * (2 * c.key_dim + 2 * c.value_dim + heads) * width + rows * heads * 4
        found.append(OpCost(
            part="gdn.delta_rule", op="gated_delta_rule", calls=linear, dtype=delta_dtype,
            flops=linear * sequences * heads * delta_rule_flops(tokens, key_dim, value_dim, chunk),
            activations=float(linear * values), state=linear * state,
        ))  # fmt: skip
    elementwise("gdn.norm", "gated_rms_norm", linear, 3.0 * rows * c.value_dim, value_dim)
    product("gdn.out_proj", linear, c.value_dim, c.hidden_size)

    query, key = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    product("attn.in_proj", full, c.hidden_size, 2 * query + 2 * key)
    elementwise("attn.norm", "rms_norm", 2 * full, 1.0 * rows * (query + key), c.head_dim)
    if full:
        pairs = tokens * context + tokens * (tokens + 1) / 2  # each token sees itself and what was before it
        found.append(OpCost(
            part="attn.attention", op="attention", calls=full, dtype=dtype,
            flops=full * sequences * 4.0 * query * pairs, activations=2.0 * full * rows * query * width,
            kv=2.0 * full * sequences * key * (context + 2 * tokens) * width,  # the new ones are written and read
        ))  # fmt: skip
    product("attn.out_proj", full, query, c.hidden_size)

    if sparse:
        shared, inner = c.shared_expert_intermediate_size, c.moe_intermediate_size
        product("moe.in_proj", sparse, c.hidden_size, c.num_experts + 1 + 2 * shared)
        elementwise("moe.routing", "routing", sparse, 1.0 * rows * (c.num_experts + c.num_experts_per_tok))
        chosen = c.num_experts_per_tok
        touched = distinct_experts(c.num_experts, chosen, rows)
        found.append(OpCost(
            part="moe.experts", op="experts", calls=sparse, dtype=dtype,
            flops=sparse * 2.0 * rows * chosen * 3 * c.hidden_size * inner,
            weights=sparse * touched * 3 * c.hidden_size * inner * width,
            # Every pair reads its token, writes and reads its inner values, and adds to its token's sum.
            activations=float(sparse * rows * (chosen * (c.hidden_size + 2 * inner) + c.hidden_size) * width),
        ))  # fmt: skip
        product("moe.shared_down", sparse, shared, c.hidden_size)
    dense = len(c.mlp_types) - sparse
    if dense:
        product("mlp.in_proj", dense, c.hidden_size, 2 * c.intermediate_size)
        product("mlp.down_proj", dense, c.intermediate_size, c.hidden_size)
    elementwise("residual", "add", 2 * len(c.layer_types), 3.0 * rows * c.hidden_size)
    product("lm_head", 1, c.hidden_size, c.vocab_size, rows if all_logits else sequences)
    return tuple(found)


def cost_table(costs: Iterable[OpCost], card: Card) -> pd.DataFrame:
    """A row for each part: flops and bytes of the pass, least seconds on `card` (NaN: unknown), what bounds it."""
    rows = []
    for cost in costs:
        seconds, bound = cost.seconds(card)
        rows.append((cost.part, cost.op, cost.calls, cost.dtype, cost.flops, cost.weights, cost.activations, cost.state,
                     cost.kv, float("nan") if seconds is None else seconds, bound))  # fmt: skip
    return pd.DataFrame(rows, columns=list(COLUMNS))


def total_seconds(costs: Iterable[OpCost], card: Card) -> float | None:
    """Least time of all parts one after another; None where a figure of the card is unknown."""
    times = [cost.seconds(card)[0] for cost in costs]
    return None if None in times else sum(times)


@dataclass(frozen=True, slots=True)
class Price:
    """What it costs that an op computes in another dtype: `seconds` instead of `before`; None where it is unknown.

    `cost` is what it was, `moved` what it is in the other dtype.
    """

    cost: OpCost
    moved: OpCost
    seconds: float | None
    before: float | None
    how: str

    @property
    def factor(self) -> float | None:
        return None if self.seconds is None or not self.before else self.seconds / self.before


def price_of(cost: OpCost, card: Card, dtype: str, rule: Rule | None = None) -> Price:
    """The price of computing `cost` in `dtype` instead of the card's model dtype, by its rates and its bandwidth.

    `rule` may have a measured factor of its own. Weights and activations are as wide as the dtype they are computed in;
    state, keys and values stay as they are.
    """
    before, why = replace(cost, dtype=card.model_dtype).seconds(card)
    ratio = WIDTH[dtype] / WIDTH[card.model_dtype]
    moved = replace(
        cost, dtype=dtype, weights=cost.weights * ratio,
        activations=cost.activations * (1.0 if cost.op == "gated_delta_rule" else ratio),
    )  # fmt: skip
    if rule is not None and rule.price is not None:
        return Price(cost, moved, None if before is None else before * rule.price, before, rule.source)
    seconds, bound = moved.seconds(card)
    if seconds is None or before is None:
        return Price(cost, moved, None, before, bound if seconds is None else why)
    return Price(cost, moved, seconds, before, f"roofline, bound by {bound}")
