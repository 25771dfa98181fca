"""The multi-token-prediction head against an independent forward in float64, written as plain equations.

transformers has no such head for these models, so the arbiter is here: loops over sequences, heads and
experts, rotation as a multiplication of complex numbers, none of the package's operations.
"""

import cmath
import dataclasses
import math
from pathlib import Path

import pytest
import torch
from models import mini, mini256, mini_dense, mini_next
from torch import Tensor

import workbench
from workbench.config import ModelConfig
from workbench.errors import InputError
from workbench.kernels.agreement import relative_error
from workbench.model import CausalLM
from workbench.tokenizer import Tokenizer
from workbench.training.corpus import read_documents

DATA = Path(__file__).parent.parent / "data"
LIMIT = 1e-5
TOKENS = 70

CASES = {
    "mini": mini(),
    "mini256": mini256(),
    "tied": mini(tie_word_embeddings=True),
    "dense": mini_dense(),
    "dense, other eps and rotation": mini_dense(
        rms_norm_eps=1e-2, rope_parameters={"rope_theta": 50.0, "partial_rotary_factor": 0.5}
    ),
    "next": mini_next(),
    "next, weights not renormalised": mini_next(norm_topk_prob=False),
}


# ---- the arbiter


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x**2).mean(-1, keepdim=True) + eps) * (1 + weight)


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def rotated(x: Tensor, position: int, config: ModelConfig) -> Tensor:
    """One head [head_dim] at a position: channels j and j + half are a complex number turned by an angle."""
    half, y = config.rotary_dim // 2, x.clone()
    for j in range(half):
        angle = position * config.rope_theta ** (-2 * j / config.rotary_dim)
        turned = complex(x[j], x[j + half]) * cmath.exp(1j * angle)
        y[j], y[j + half] = turned.real, turned.imag
    return y


def attention(x: Tensor, w: dict[str, Tensor], config: ModelConfig) -> Tensor:
    """One sequence [T, D] -> [T, D]."""
    tokens, size, heads = len(x), config.head_dim, config.num_attention_heads
    group = heads // config.num_key_value_heads
    keys, values = [], []
    for h in range(config.num_key_value_heads):
        rows = slice(h * size, (h + 1) * size)
        k = norm(x @ w["self_attn.k_proj.weight"][rows].T, w["self_attn.k_norm.weight"], config.rms_norm_eps)
        keys.append(torch.stack([rotated(k[t], t, config) for t in range(tokens)]))
        values.append(x @ w["self_attn.v_proj.weight"][rows].T)
    outs = []
    for h in range(heads):
        q_rows = w["self_attn.q_proj.weight"][2 * h * size : (2 * h + 1) * size]
        gate_rows = w["self_attn.q_proj.weight"][(2 * h + 1) * size : (2 * h + 2) * size]
        q = norm(x @ q_rows.T, w["self_attn.q_norm.weight"], config.rms_norm_eps)
        seen = []
        for t in range(tokens):
            scores = keys[h // group][: t + 1] @ rotated(q[t], t, config) / math.sqrt(size)
            weights = torch.exp(scores - scores.max())
            seen.append(weights / weights.sum() @ values[h // group][: t + 1])
        outs.append(torch.stack(seen) / (1 + torch.exp(-(x @ gate_rows.T))))
    return torch.cat(outs, dim=-1) @ w["self_attn.o_proj.weight"].T


def mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (silu(x @ gate.T) * (x @ up.T)) @ down.T


def dense(x: Tensor, w: dict[str, Tensor], stem: str) -> Tensor:
    return mlp(x, *(w[f"{stem}.{part}_proj.weight"] for part in ("gate", "up", "down")))


def experts(x: Tensor, w: dict[str, Tensor], config: ModelConfig) -> Tensor:
    """One token [D] -> [D]."""
    logits = w["mlp.gate.weight"] @ x
    p = torch.exp(logits - logits.max())
    p = p / p.sum()
    best = sorted(range(config.num_experts), key=lambda e: (-p[e].item(), e))[: config.num_experts_per_tok]
    total = sum(p[e] for e in best) if config.norm_topk_prob else 1.0
    out = torch.zeros_like(x)
    for e in best:
        gate, up = w["mlp.experts.gate_up_proj"][e].split(config.moe_intermediate_size)
        out += p[e] / total * mlp(x, gate, up, w["mlp.experts.down_proj"][e])
    share = 1 / (1 + torch.exp(-(w["mlp.shared_expert_gate.weight"][0] @ x)))
    return out + share * dense(x, w, "mlp.shared_expert")


def arbiter(model: CausalLM, hidden: Tensor, next_ids: Tensor, *, hidden_first: bool = False) -> Tensor:
    """Logits [B, T, vocabulary] in float64. `hidden_first` is the wrong order of the two halves."""
    config, eps = model.config, model.config.rms_norm_eps
    every = {name: tensor.detach().double() for name, tensor in model.state_dict().items()}
    w = {name.removeprefix("mtp.layers.0."): tensor for name, tensor in every.items()}
    rows = []
    for h, ids in zip(hidden.double(), next_ids, strict=True):
        halves = [
            norm(every["embed_tokens.weight"][ids], every["mtp.pre_fc_norm_embedding.weight"], eps),
            norm(h, every["mtp.pre_fc_norm_hidden.weight"], eps),
        ]
        x = torch.cat(halves[::-1] if hidden_first else halves, dim=-1) @ every["mtp.fc.weight"].T
        x = x + attention(norm(x, w["input_layernorm.weight"], eps), w, config)
        y = norm(x, w["post_attention_layernorm.weight"], eps)
        x = x + (torch.stack([experts(t, w, config) for t in y]) if config.is_moe else dense(y, w, "mlp"))
        head = every["embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"]
        rows.append(norm(x, every["mtp.norm.weight"], eps) @ head.T)
    return torch.stack(rows)


# ---- random weights


def build(fields: dict) -> CausalLM:
    """Branches that count; norms drawn as well, or exchanging those of the two halves would not show."""
    config = dataclasses.replace(ModelConfig.from_hf(fields), initializer_range=0.1)
    model = CausalLM(config).init_weights(0).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def random_ids(rows: int, tokens: int = TOKENS) -> Tensor:
    return torch.randint(0, 97, (rows, tokens + 1), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_an_independent_forward(case):
    model, ids = build(CASES[case]), random_ids(2)
    hidden = model(ids[:, :-1]).hidden
    found = model.mtp_logits(hidden, ids[:, 1:])
    expected = arbiter(model, hidden, ids[:, 1:])
    error = relative_error(found, expected)
    print(f"{case}: {error:.1e} in fp32")
    assert found.shape == (2, TOKENS, 97) and error <= LIMIT
    # Rotation angles are fp32 in every dtype, all else is float64.
    wide = model.double()
    assert relative_error(wide.mtp_logits(hidden.double(), ids[:, 1:]), expected) <= 1e-6


def test_trained_head_equals_an_independent_forward_and_predicts_the_token_after_next():
    model = workbench.load(DATA / "miniature", dtype="float32")
    document = next(d for d in read_documents(DATA / "heldout.jsonl") if d.source == "bible")
    ids = torch.tensor([Tokenizer.from_directory(DATA / "miniature").encode(document.text)[: 2 * TOKENS]])
    with torch.inference_mode():
        hidden = model(ids[:, :-1]).hidden
        found = model.mtp_logits(hidden, ids[:, 1:])
        error = relative_error(found, arbiter(model, hidden, ids[:, 1:]))
    print(f"trained: {error:.1e} in fp32")
    assert error <= LIMIT
    losses = {  # by the distance of the token that row t is taken to predict
        distance: torch.nn.functional.cross_entropy(
            found[0, :TOKENS], ids[0, distance : distance + TOKENS]
        ).item()
        for distance in (0, 1, 2, 3)
    }
    print(f"cross-entropy by distance: {losses}")
    assert min(losses, key=losses.get) == 2 and losses[2] < losses[3] - 1.0


def test_the_embedding_comes_first():
    """The other order of the halves is far off, and so are exchanged columns of `fc`."""
    model, ids = build(mini()), random_ids(1, 20)
    hidden = model(ids[:, :-1]).hidden
    found = model.mtp_logits(hidden, ids[:, 1:])
    assert relative_error(found, arbiter(model, hidden, ids[:, 1:])) <= LIMIT
    assert relative_error(found, arbiter(model, hidden, ids[:, 1:], hidden_first=True)) > 0.5
    model.mtp.fc.weight.copy_(model.mtp.fc.weight.roll(64, dims=1))
    exchanged = model.mtp_logits(hidden, ids[:, 1:])
    assert relative_error(exchanged, found) > 0.5
    assert relative_error(exchanged, arbiter(model, hidden, ids[:, 1:], hidden_first=False)) <= LIMIT
    model.mtp.fc.weight[:, 64:] = 0  # nothing but the embedding
    alone = model.mtp_logits(hidden, ids[:, 1:])
    assert torch.equal(model.mtp_logits(torch.randn_like(hidden), ids[:, 1:]), alone)


@pytest.mark.parametrize("case", ["mini", "dense"])
def test_a_row_depends_on_what_came_before_and_on_nothing_after(case):
    model, ids = build(CASES[case]), random_ids(1)
    hidden = model(ids[:, :-1]).hidden
    before = model.mtp_logits(hidden, ids[:, 1:])
    for position in (0, 30, TOKENS - 1):
        other_ids, other_hidden = ids[:, 1:].clone(), hidden.clone()
        other_ids[0, position] = (other_ids[0, position] + 1) % 97
        other_hidden[0, position] *= -1
        for after in (model.mtp_logits(hidden, other_ids), model.mtp_logits(other_hidden, ids[:, 1:])):
            if position:
                assert relative_error(after[:, :position], before[:, :position]) <= LIMIT
            for later in {position, TOKENS - 1}:  # the last row still sees the change, through attention
                assert relative_error(after[:, later], before[:, later]) > 1e-4


def test_rows_of_a_batch_and_shorter_sequences_are_the_same():
    model, ids = build(mini()), random_ids(3)
    hidden = model(ids[:, :-1]).hidden
    whole = model.mtp_logits(hidden, ids[:, 1:])
    for row in range(3):
        alone = model.mtp_logits(hidden[row : row + 1, :33], ids[row : row + 1, 1:34])
        assert relative_error(alone, whole[row : row + 1, :33]) <= LIMIT


def test_the_head_is_observed_under_its_own_name():
    model, ids = build(mini()), random_ids(1, 9)
    with workbench.trace(model) as trace:
        model.mtp_logits(model(ids[:, :-1]).hidden, ids[:, 1:])
    names = set(trace.table["tap"])
    assert {"mtp.layers.00.attn.q", "mtp.layers.00.moe.logits", "layers.03.attn.q"} <= names


@torch.inference_mode()
@pytest.mark.parametrize("builder", [mini, mini_dense])
def test_packed_and_padded_batches_equal_single_runs(builder):
    model = build(builder())
    lengths = (7, 1, 66, 30)
    texts = [(random_ids(1, n) + 11 * n) % 97 for n in lengths]  # n tokens and the one after each
    single = [model.mtp_logits(model(ids[:, :-1]).hidden, ids[:, 1:]) for ids in texts]

    bounds = torch.tensor([0, *lengths]).cumsum(0)
    inputs, following = (torch.cat([ids[:, part] for ids in texts], dim=1) for part in (slice(-1), slice(1, None)))
    found = model.mtp_logits(model(inputs, cu_seqlens=bounds).hidden, following, cu_seqlens=bounds)
    for start, stop, expected in zip(bounds, bounds[1:], single, strict=False):
        assert relative_error(found[:, start:stop], expected) <= 1e-5

    for side in ("left", "right"):
        mask = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
        inputs, following = torch.zeros_like(mask), torch.zeros_like(mask)
        for row, (n, ids) in enumerate(zip(lengths, texts, strict=True)):
            here = slice(-n, None) if side == "left" else slice(n)
            mask[row, here], inputs[row, here], following[row, here] = 1, ids[0, :-1], ids[0, 1:]
        found = model.mtp_logits(model(inputs, attention_mask=mask).hidden, following, attention_mask=mask)
        assert not found[mask == 0].any()
        for row, expected in enumerate(single):
            assert relative_error(found[row][mask[row] == 1][None], expected) <= 1e-5, side


def test_bad_input_is_one_line():
    model, ids = build(mini()), random_ids(1, 9)
    hidden = model(ids[:, :-1]).hidden
    without = CausalLM(ModelConfig.from_hf(mini(mtp_num_hidden_layers=0))).init_weights(0)
    for head, next_ids, words in (
        (without, ids[:, 1:], "mtp_logits: expected a model with a multi-token-prediction head"),
        (model, ids, r"mtp_logits: expected hidden \(1, 10, 64\), found \(1, 9, 64\)"),
        (model, ids[:, 1:] + 97, "expected ids from 0 to 96, found"),
        (model, ids[0, 1:], r"expected shape \[batch, tokens\]"),
    ):
        with pytest.raises(InputError, match=words) as caught:
            head.mtp_logits(hidden, next_ids)
        assert "\n" not in caught.value.args[0]
