"""The model against itself and against finite differences: batches, caches, dtypes, gradients, bad input.

What it computes is held to transformers in test_model_parity.py; here, each way of computing it is held to
the plainest one.
"""

import copy
import dataclasses
import functools
import json
import math

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from models import mini, mini256, mini_dense, mini_next
from safetensors.torch import load_file, save_file
from torch import Tensor

import workbench
from workbench.cache import Cache, KeyValueCache
from workbench.checkpoint import write_checkpoint
from workbench.config import ModelConfig
from workbench.errors import BackendError, CheckpointError, InputError, PolicyError, WorkbenchError
from workbench.kernels import Kernels
from workbench.kernels.agreement import logit_difference
from workbench.model import CausalLM, ModelOutput
from workbench.numerics import NumericsPolicy

BUILDERS = {"mini": mini, "mini256": mini256, "dense": mini_dense, "next": mini_next}
LIMIT = 1e-5
#: Below, at and above a chunk of 64, single tokens, and one that needs three chunks.
LENGTHS = (37, 1, 64, 28, 65, 130)


def build(name: str = "mini", decay: str = "realistic", **changes) -> CausalLM:
    """Random weights, norms included: neutral ones would hide a norm that is left out or applied twice."""
    model = CausalLM(ModelConfig.from_hf(BUILDERS[name](**changes))).init_weights(0, decay).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def random_ids(rows: int, tokens: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 97, (rows, tokens), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module", params=BUILDERS)
def model(request) -> CausalLM:
    return build(request.param).requires_grad_(False)


@pytest.fixture(scope="module")
def plain() -> CausalLM:
    return build().requires_grad_(False)


def assert_same(found: Tensor, expected: Tensor, limit: float = LIMIT) -> None:
    assert found.shape == expected.shape
    assert logit_difference(found, expected) <= limit


def assert_same_cache(found: Cache, sequence: int, expected: Cache) -> None:
    """What `found` remembers of one of its sequences is what `expected` remembers of its only one."""
    length = expected.lengths[0]
    assert found.lengths[sequence] == length
    for one, other in zip(found.layers, expected.layers, strict=True):
        if isinstance(one, KeyValueCache):
            assert_same(one.keys[sequence, :length], other.keys[0, :length])
            assert_same(one.values[sequence, :length], other.values[0, :length])
        else:
            assert_same(one.state[sequence], other.state[0])
            assert_same(one.window[sequence], other.window[0])


def texts(lengths: tuple[int, ...] = LENGTHS, more: int = 80) -> list[Tensor]:
    """A sequence for each length, `more` tokens longer, to go on with: [1, length + more]."""
    return [random_ids(1, n + more, seed=i) for i, n in enumerate(lengths)]


def boundaries(lengths) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def packed(
    model: CausalLM, sequences: list[Tensor], cache: Cache | None = None
) -> tuple[list[Tensor], ModelOutput]:
    """(logits of each sequence, the output) of all sequences in one row."""
    lengths = [x.shape[1] for x in sequences]
    out = model(torch.cat(sequences, dim=1), cu_seqlens=boundaries(lengths), cache=cache)
    return list(out.logits.split(lengths, dim=1)), out


def padded(sequences: list[Tensor], side: str) -> tuple[Tensor, Tensor]:
    """(ids [S, longest], mask), padded with any ids on the `left`, the `right`, or by turns (`mixed`)."""
    longest = max(x.shape[1] for x in sequences)
    ids = random_ids(len(sequences), longest, seed=99)
    mask = torch.zeros(ids.shape, dtype=torch.int64)
    for row, x in enumerate(sequences):
        on_left = side == "left" or (side == "mixed" and row % 2 == 0)
        start = longest - x.shape[1] if on_left else 0
        ids[row, start : start + x.shape[1]] = x[0]
        mask[row, start : start + x.shape[1]] = 1
    return ids, mask


# ---- packed and padded batches


@torch.inference_mode()
def test_packed_sequences_equal_single_runs(model):
    sequences = texts(more=0)
    logits, out = packed(model, sequences)
    assert out.cache.lengths == list(LENGTHS)
    hidden = out.hidden.split(LENGTHS, dim=1)
    for s, x in enumerate(sequences):
        single = model(x)
        assert_same(logits[s], single.logits)
        assert_same(hidden[s], single.hidden)
        assert_same_cache(out.cache, s, single.cache)


@torch.inference_mode()
def test_going_on_from_a_packed_cache_equals_single_runs(model):
    """Token by token, packed with other lengths, and as a batch: 6 sequences of 6 lengths in one cache."""
    sequences = texts()
    wholes = [model(x).logits for x in sequences]
    _, out = packed(model, [x[:, :n] for x, n in zip(sequences, LENGTHS, strict=True)])
    lengths = list(LENGTHS)

    def expect(logits: list[Tensor]) -> None:
        for s, part in enumerate(logits):
            assert_same(part, wholes[s][:, lengths[s] : lengths[s] + part.shape[1]])
            lengths[s] += part.shape[1]
        assert out.cache.lengths == lengths

    def coming(sizes) -> list[Tensor]:
        return [x[:, n : n + size] for x, n, size in zip(sequences, lengths, sizes, strict=True)]

    for _ in range(3):
        out = model(torch.cat(coming([1] * 6)), cache=out.cache)
        expect(list(out.logits.split(1)))
    logits, out = packed(model, coming([2, 66, 1, 5, 64, 3]), out.cache)
    expect(logits)
    out = model(torch.cat(coming([4] * 6)), cache=out.cache)
    expect(list(out.logits.split(1)))
    logits, out = packed(model, coming([1] * 6), out.cache)
    expect(logits)
    for s, x in enumerate(sequences):
        assert_same_cache(out.cache, s, model(x[:, : lengths[s]]).cache)


@pytest.mark.parametrize("side", ["left", "right", "mixed"])
@torch.inference_mode()
def test_padded_batches_equal_single_runs(model, side):
    sequences = texts()
    starts = [x[:, :n] for x, n in zip(sequences, LENGTHS, strict=True)]
    ids, mask = padded(starts, side)
    out = model(ids, attention_mask=mask)
    assert out.cache.lengths == list(LENGTHS)
    assert not out.logits[mask == 0].any() and not out.hidden[mask == 0].any()
    for s, x in enumerate(starts):
        single = model(x)
        assert_same(out.logits[s][mask[s] == 1], single.logits[0])
        assert_same(out.hidden[s][mask[s] == 1], single.hidden[0])
        assert_same_cache(out.cache, s, single.cache)

    # On with one token each, then with a padded batch of other lengths.
    sizes = (70, 1, 3, 2, 64, 5)
    step = model(
        torch.cat([x[:, n : n + 1] for x, n in zip(sequences, LENGTHS, strict=True)]), cache=out.cache
    )
    parts = [x[:, n + 1 : n + 1 + m] for x, n, m in zip(sequences, LENGTHS, sizes, strict=True)]
    ids, mask = padded(parts, side)
    more = model(ids, attention_mask=mask, cache=step.cache)
    for s, (n, m) in enumerate(zip(LENGTHS, sizes, strict=True)):
        single = model(sequences[s][:, : n + 1 + m])
        assert_same(step.logits[s], single.logits[0, n : n + 1])
        assert_same(more.logits[s][mask[s] == 1], single.logits[0, n + 1 :])
        assert_same_cache(more.cache, s, single.cache)


@torch.inference_mode()
def test_what_stands_in_the_padding_does_not_matter(plain):
    ids, mask = padded(texts((5, 9, 70), more=0), "left")
    first = plain(ids, attention_mask=mask.bool())
    second = plain(torch.where(mask == 1, ids, 3), attention_mask=mask.float())
    assert torch.equal(first.logits, second.logits)
    everything = plain(ids, attention_mask=torch.ones_like(ids))
    assert torch.equal(everything.logits, plain(ids).logits)


@torch.inference_mode()
def test_an_empty_packed_sequence_leaves_its_memory_alone(plain):
    x = random_ids(1, 20)
    out = plain(x, cu_seqlens=torch.tensor([0, 0, 5, 5, 20]))
    assert out.cache.lengths == [0, 5, 0, 15]
    assert_same(out.logits[:, :5], plain(x[:, :5]).logits)
    assert_same(out.logits[:, 5:], plain(x[:, 5:]).logits)
    after = plain(random_ids(4, 3, seed=8), cache=out.cache)
    assert_same(after.logits[2:3], plain(random_ids(4, 3, seed=8)[2:3]).logits)


@torch.inference_mode()
def test_rows_of_a_batch_do_not_see_each_other(model):
    ids = random_ids(3, 70)
    out = model(ids)
    for row in range(3):
        assert_same(out.logits[row : row + 1], model(ids[row : row + 1]).logits)
    changed = ids.clone()
    changed[1] = (changed[1] + 1) % 97
    found = model(changed).logits
    assert_same(found[0], out.logits[0])
    assert_same(found[2], out.logits[2])
    assert logit_difference(found[1], out.logits[1]) > 0.1


@torch.inference_mode()
def test_a_token_changes_nothing_before_it(model):
    ids = random_ids(1, 130)
    expected = model(ids).logits
    for position in (0, 63, 64, 100):
        changed = ids.clone()
        changed[0, position] = (changed[0, position] + 1) % 97
        found = model(changed).logits
        if position:
            assert_same(found[:, :position], expected[:, :position])
        # Into the last token as well: through attention or the state, not through the convolution alone.
        assert logit_difference(found[:, -1], expected[:, -1]) > 1e-4


# ---- logits of the last token alone


@pytest.fixture
def head_rows(monkeypatch) -> list[int]:
    """Rows of logits that each later call of the head computes."""
    rows: list[int] = []
    head = CausalLM.head

    def counted(self: CausalLM, hidden: Tensor) -> Tensor:
        rows.append(hidden[..., 0].numel())
        return head(self, hidden)

    monkeypatch.setattr(CausalLM, "head", counted)
    return rows


@pytest.mark.parametrize("layout", ["plain", "packed", "left", "right", "mixed"])
@torch.inference_mode()
def test_logits_of_the_last_token_are_those_of_the_full_run(model, layout, head_rows):
    sequences = [random_ids(1, 70, seed=i) for i in range(3)] if layout == "plain" else texts(more=0)
    if layout == "plain":
        ids, marks = torch.cat(sequences), {}
    elif layout == "packed":
        ids, marks = torch.cat(sequences, dim=1), {"cu_seqlens": boundaries([x.shape[1] for x in sequences])}
    else:
        ids, mask = padded(sequences, layout)
        marks = {"attention_mask": mask}
    full, out = model(ids, **marks), model(ids, **marks, last_only=True)
    assert head_rows == [sum(x.shape[1] for x in sequences), len(sequences)]
    assert out.logits.shape == (len(sequences), 1, model.config.vocab_size)
    for s, x in enumerate(sequences):
        assert_same(out.logits[s : s + 1], model(x).logits[:, -1:])
    assert torch.equal(out.hidden, full.hidden)
    # On from the cache: another batch size of the head must not have touched it.
    following = random_ids(len(sequences), 2, seed=5)
    on = model(following, cache=out.cache, last_only=True)
    assert_same(on.logits, model(following, cache=full.cache).logits[:, -1:])


@torch.inference_mode()
def test_an_empty_packed_sequence_has_no_last_token_and_leaves_the_cache_as_it_was(plain):
    cache = plain(random_ids(2, 4)).cache
    with pytest.raises(InputError, match=r"last_only: expected at least one token .* found none in sequence 1"):
        plain(random_ids(1, 5), cu_seqlens=torch.tensor([0, 5, 5]), cache=cache, last_only=True)
    assert cache.lengths == [4, 4]


# ---- the cache


@torch.inference_mode()
def test_prefill_in_two_parts_at_every_point(plain):
    ids = random_ids(1, 70)
    whole = plain(ids)
    for split in range(1, 70):
        first = plain(ids[:, :split])
        second = plain(ids[:, split:], cache=first.cache)
        assert_same(torch.cat([first.logits, second.logits], dim=1), whole.logits)
        assert_same_cache(second.cache, 0, whole.cache)


@hypothesis.settings(max_examples=15)
@hypothesis.given(sizes=st.lists(st.integers(1, 70), min_size=1, max_size=6), rows=st.integers(1, 3))
def test_prefill_in_any_parts(plain, sizes, rows):
    ids = random_ids(rows, sum(sizes))
    with torch.inference_mode():
        whole, cache, logits = plain(ids).logits, None, []
        for part in ids.split(sizes, dim=1):
            out = plain(part, cache=cache)
            cache = out.cache
            logits.append(out.logits)
    assert_same(torch.cat(logits, dim=1), whole)
    assert cache.lengths == [sum(sizes)] * rows


def tensors_of(cache: Cache) -> list[Tensor]:
    return [getattr(layer, field.name) for layer in cache.layers for field in dataclasses.fields(layer)]


@torch.inference_mode()
def test_a_clone_of_a_cache_goes_its_own_way(model):
    ids, one, other = random_ids(2, 40), random_ids(2, 90, seed=5), random_ids(2, 90, seed=6)
    cache = model(ids).cache
    copied = cache.clone()
    assert not {x.data_ptr() for x in tensors_of(cache)} & {x.data_ptr() for x in tensors_of(copied)}
    # By turns, and at first within the room that the store of keys has: a shared one would be overwritten.
    for start, stop in ((0, 5), (5, 6), (6, 20), (20, 90)):
        for mine, tail in ((cache, one), (copied, other)):
            out = model(tail[:, start:stop], cache=mine)
            assert out.cache is mine and mine.lengths == [40 + stop] * 2
            whole = model(torch.cat([ids, tail[:, :stop]], dim=1))
            assert_same(out.logits, whole.logits[:, 40 + start :])


@torch.inference_mode()
def test_without_a_cache_the_logits_are_the_same(model):
    ids = random_ids(2, 70)
    with_cache, without = model(ids), model(ids, use_cache=False)
    assert without.cache is None and with_cache.cache is not None
    assert torch.equal(with_cache.logits, without.logits)
    sequences = texts((5, 9, 70), more=0)
    without = model(torch.cat(sequences, dim=1), cu_seqlens=boundaries([5, 9, 70]), use_cache=False)
    assert without.cache is None
    assert_same(without.logits, torch.cat(packed(model, sequences)[0], dim=1))
    ids, mask = padded(sequences, "left")
    assert model(ids, attention_mask=mask, use_cache=False).cache is None


def test_the_size_of_a_cache_is_that_of_its_tensors(plain):
    config = plain.config
    cache = Cache.empty(config, 3, device=torch.device("cpu"), dtype=torch.bfloat16)
    state = 4 * 16 * 24 * 4  # value heads, key width, value width, bytes of fp32
    window = 3 * config.conv_dim * 2
    assert cache.nbytes == 3 * 3 * (state + window) and cache.sequences == 3
    with torch.inference_mode():
        cache = plain(random_ids(1, 10)).cache
    keys = sum(2 * layer.keys.nbytes for layer in cache.layers if isinstance(layer, KeyValueCache))
    assert keys >= 2 * 10 * 2 * 32 * 4
    assert cache.nbytes == keys + 3 * (state + 2 * window)


# ---- heads


@torch.inference_mode()
def test_value_head_reads_key_head_h_over_group_and_not_h_modulo(plain):
    """The second of 2 key heads serves value heads 2 and 3 of 4; with tiled heads it would be 1 and 3."""
    before, after = plain, build()
    rows = after.layers[0].linear_attn.in_proj_qkv.weight
    rows.data[16:32] = -rows.data[16:32].flip(0)  # queries of key head 1, before the convolution
    changed = heads_that_differ(before, after, "layers.00.gdn.out")
    assert changed == [2, 3]


@torch.inference_mode()
def test_query_head_reads_key_value_head_h_over_group(plain):
    before, after = plain, build()
    for projection in (after.layers[3].self_attn.k_proj, after.layers[3].self_attn.v_proj):
        projection.weight.data[32:64].neg_()
    assert heads_that_differ(before, after, "layers.03.attn.out") == [2, 3]


@torch.inference_mode()
def test_output_gate_follows_its_query_head_by_head(plain):
    """Of the 64 rows that each head has in q_proj, the second 32 are its gate."""
    before, after = plain, build()
    after.layers[3].self_attn.q_proj.weight.data[64 + 32 : 64 + 64].neg_()  # gate of head 1
    assert heads_that_differ(before, after, "layers.03.attn.q") == []
    gates = [traced(m, "layers.03.attn.gate").unflatten(-1, (4, 32)) for m in (before, after)]
    assert [h for h in range(4) if not torch.equal(*(g[..., h, :] for g in gates))] == [1]


def traced(model: CausalLM, name: str) -> Tensor:
    with workbench.trace(model, keep=[name]) as trace:
        model(random_ids(1, 70))
    return trace.tensors[name]


def heads_that_differ(before: CausalLM, after: CausalLM, name: str) -> list[int]:
    one, other = (traced(m, name) for m in (before, after))
    return [h for h in range(one.shape[2]) if logit_difference(one[:, :, h], other[:, :, h]) > 1e-4]


@torch.inference_mode()
def test_of_equal_experts_the_first_serve():
    model = build()
    for layer in model.layers:
        layer.mlp.gate.weight.zero_()
        layer.mlp.experts.down_proj[2:] = math.nan
    for tokens in (1, 2, 70):
        assert bool(torch.isfinite(model(random_ids(1, tokens)).logits).all())
    model.layers[2].mlp.experts.down_proj[1] = math.nan
    assert not bool(torch.isfinite(model(random_ids(1, 1)).logits).any())


@torch.inference_mode()
def test_tied_and_separate_heads():
    ids = random_ids(1, 9)
    tied = build(tie_word_embeddings=True)
    assert "lm_head.weight" not in dict(tied.named_parameters())
    out = tied(ids)
    assert_same(out.logits, out.hidden @ tied.embed_tokens.weight.T)
    separate = build()
    out = separate(ids)
    assert_same(out.logits, out.hidden @ separate.lm_head.weight.T)
    assert logit_difference(out.logits, out.hidden @ separate.embed_tokens.weight.T) > 0.1


@torch.inference_mode()
def test_a_dense_layer_among_sparse_ones():
    model = build("next")
    names = dict(model.named_parameters())
    assert names["layers.1.mlp.gate_proj.weight"].shape == (80, 64)
    assert not [name for name in names if name.startswith("layers.1.mlp.") and "expert" in name]
    assert names["layers.0.mlp.experts.gate_up_proj"].shape == (8, 64, 64)
    with workbench.trace(model, keep=["layers.01.*norm", "layers.01.moe.out"]) as trace:
        model(random_ids(1, 9))
    x, mlp = trace.tensors["layers.01.post_norm"], model.layers[1].mlp
    hidden = torch.nn.functional.silu(x @ mlp.gate_proj.weight.T) * (x @ mlp.up_proj.weight.T)
    assert_same(trace.tensors["layers.01.moe.out"], hidden @ mlp.down_proj.weight.T)


# ---- dtypes and loading

NARROWING = {
    "half": lambda m: m.half(),
    "to bfloat16": lambda m: m.to(torch.bfloat16),
    "to device and dtype": lambda m: m.to("cpu", torch.float16),
    "there and back": lambda m: m.half().float().bfloat16(),
}


@pytest.mark.parametrize("how", NARROWING)
def test_gates_and_state_stay_wide_in_a_narrow_model(how):
    model = build(decay="class_default")
    kept = {name: p.clone() for name, p in model.named_parameters() if name.endswith(("A_log", "dt_bias"))}
    assert len(kept) == 6
    model = NARROWING[how](model)
    for name, parameter in model.named_parameters():
        if name in kept:
            assert parameter.dtype == torch.float32 and torch.equal(parameter, kept[name])
            assert parameter.requires_grad
        else:
            assert parameter.dtype == model.dtype != torch.float32
    with torch.inference_mode(), workbench.trace(model, keep=["*.gdn.log_decay"]) as trace:
        out = model(random_ids(2, 70))
        out = model(random_ids(2, 1), cache=out.cache)
    assert all(x.dtype == torch.float32 for x in trace.tensors.values())
    assert out.logits.dtype == out.hidden.dtype == model.dtype and bool(torch.isfinite(out.logits).all())
    for layer in out.cache.layers:
        if isinstance(layer, KeyValueCache):
            assert layer.keys.dtype == layer.values.dtype == model.dtype
        else:
            assert layer.state.dtype == torch.float32 and layer.window.dtype == model.dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_gates_are_computed_wide_in_a_narrow_model(dtype):
    """Without the input's part, log_decay is -exp(A_log) softplus(dt_bias): to the digits of fp32."""
    model = build()
    for layer in model.layers[:3]:
        layer.linear_attn.in_proj_a.weight.zero_()
    with workbench.trace(model.to(dtype), keep=["*.gdn.log_decay"]) as trace:
        model(random_ids(1, 9))
    for layer, found in zip(model.layers[:3], trace.tensors.values(), strict=True):
        gate = layer.linear_attn
        expected = -gate.A_log.double().exp() * torch.nn.functional.softplus(gate.dt_bias.double())
        assert logit_difference(found, expected.expand_as(found)) <= 1e-6


@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
@torch.inference_mode()
def test_narrow_models_compute_the_same_up_to_rounding(model, dtype, limit):
    """Both sides have the rounded weights, so what differs is the arithmetic alone."""
    narrow = CausalLM(model.config)
    narrow.load_state_dict(model.state_dict())
    narrow = narrow.to(dtype).eval()
    wide = CausalLM(model.config)
    wide.load_state_dict({name: x.float() for name, x in narrow.state_dict().items()})
    ids = random_ids(1, 130)
    found, expected = narrow(ids).logits.float(), wide.eval()(ids).logits
    # The median token: where a router is close to a tie, rounding sends a token to other experts.
    error = (found - expected).abs().amax(-1).median() / expected.abs().max()
    assert error <= limit


@torch.inference_mode()
def test_a_float64_model_computes_in_float64(model):
    wide = CausalLM(model.config)
    wide.load_state_dict(model.state_dict())
    wide = wide.double().eval()
    for name, parameter in wide.named_parameters():
        assert parameter.dtype == torch.float64
        assert torch.equal(parameter, model.get_parameter(name).double())
    ids = random_ids(2, 130)
    out = wide(ids)
    assert out.logits.dtype == torch.float64
    states = [layer.state for layer in out.cache.layers if not isinstance(layer, KeyValueCache)]
    assert {state.dtype for state in states} == {torch.float64}
    assert_same(model(ids).logits, out.logits)
    # Two ways of computing agree to more digits than fp32 has.
    first = wide(ids[:, :65])
    assert_same(wide(ids[:, 65:], cache=first.cache).logits, out.logits[:, 65:], limit=1e-12)


def test_loading_in_fp16_reports_what_was_lost(tmp_path):
    model = build()
    with torch.no_grad():
        model.layers[0].mlp.experts.down_proj[2, 0, :3] = torch.tensor([1e5, -7e4, 65504.0])
        model.layers[3].self_attn.q_proj.weight[0, :4] = torch.tensor([1e-9, -2e-8, 0.0, 1e-3])
        model.layers[1].linear_attn.A_log[0] = 1e-9
    write_checkpoint(tmp_path / "c", model.config, model.state_dict(), dtype=torch.float32)
    narrow = workbench.load(tmp_path / "c", dtype="float16")
    assert narrow.dtype == torch.float16 and not narrow.training
    assert torch.equal(narrow.layers[1].linear_attn.A_log, model.layers[1].linear_attn.A_log)
    lost = {record.name: record for record in narrow.narrowing}
    assert not [name for name in lost if name.endswith(("A_log", "dt_bias"))]
    overflowed = lost["layers.0.mlp.experts.down_proj"]
    assert (overflowed.n_overflow, overflowed.numel) == (2, 8 * 64 * 32)
    # 2e-8 and 1e-9 are below half of fp16's smallest subnormal, 2.98e-8.
    planted = lost["layers.3.self_attn.q_proj.weight"]
    small = model.layers[3].self_attn.q_proj.weight.abs()
    assert planted.n_flushed == int(((small > 0) & (small < 2.0**-25)).sum()) >= 2
    assert torch.isinf(narrow.layers[0].mlp.experts.down_proj).sum() == 2
    assert workbench.load(tmp_path / "c").narrowing == ()


def test_loading_with_device_backend_and_policy(tmp_path):
    model = build()
    write_checkpoint(tmp_path / "c", model.config, model.state_dict(), dtype=torch.float32)
    ids = random_ids(1, 70)
    with torch.inference_mode():
        expected = model(ids).logits
        chosen = workbench.load(
            tmp_path / "c",
            dtype=torch.float32,
            device=torch.device("cpu"),
            backend="gated_delta_rule=torch_recurrent,attention=torch_sdpa",
        )
        assert_same(chosen(ids).logits, expected)
    rows = {row.op: row for row in chosen.kernels.attestation()}
    for op, name in (("gated_delta_rule", "torch_recurrent"), ("attention", "torch_sdpa")):
        assert (rows[op].backend, rows[op].reason) == (name, "named by the user")
    assert rows["experts"].reason != "named by the user"

    assert workbench.load(tmp_path / "c", policy="segsum").kernels.policy == NumericsPolicy(cumsum="segsum")
    by_backend = workbench.load(tmp_path / "c", backend="torch_chunk:fp32_cumsum").kernels
    assert by_backend.policy.cumsum == "float32" and by_backend.requested == {
        "gated_delta_rule": "torch_chunk"
    }
    (tmp_path / "policy.json").write_text(json.dumps({"chunk": 16}))
    assert workbench.load(tmp_path / "c", policy=str(tmp_path / "policy.json")).kernels.policy.chunk == 16
    mine = NumericsPolicy(solver="row_loop", chunk=32)
    solved = workbench.load(tmp_path / "c", policy=mine)
    with torch.inference_mode():
        assert_same(solved(ids).logits, expected)

    for error, words, options in (
        (InputError, "dtype: expected one of float64", {"dtype": "int8"}),
        (BackendError, "no op has a backend of that name", {"backend": "torch_magic"}),
        (BackendError, "unknown op 'attn'", {"backend": "attn=torch_sdpa"}),
        (PolicyError, "neither a preset", {"policy": "no_such_policy"}),
        (PolicyError, "expected a NumericsPolicy, a preset's name or a file, found dict", {"policy": {"chunk": 16}}),
        (BackendError, "or a mapping of op to name, found list", {"backend": ["torch_chunk"]}),
        (InputError, "dtype: expected one of float64", {"dtype": []}),
    ):
        with pytest.raises(error, match=words):
            workbench.load(tmp_path / "c", **options)
    with pytest.raises(InputError, match="checkpoint: expected a path, found NoneType"):
        workbench.load(None)


def test_loading_takes_one_glob_as_one_and_never_half_a_model(tmp_path):
    model = build()
    tensors = dict(model.state_dict())
    gone = "layers.1.mlp.gate.weight"
    write_checkpoint(tmp_path / "whole", model.config, tensors)
    rewrite(tmp_path / "whole", tmp_path / "more", add={"model.language_model.zzz.weight": torch.ones(3)})
    with pytest.raises(CheckpointError, match="zzz"):
        workbench.load(tmp_path / "more", allow_unexpected="abc*")
    allowed = workbench.load(tmp_path / "more", allow_unexpected="*zzz*")
    assert allowed.checkpoint_accounting.totals["unexpected"][0] == 1

    rewrite(tmp_path / "whole", tmp_path / "less", drop=f"model.language_model.{gone}")
    with pytest.raises(CheckpointError, match=f"found 1 missing, first {gone}"):
        workbench.load(tmp_path / "less", allow_missing=("*.mlp.gate.weight",))
    rewrite(tmp_path / "whole", tmp_path / "headless", drop="mtp.")
    assert workbench.load(tmp_path / "headless", allow_missing="mtp.*").config.mtp_num_hidden_layers == 0


def rewrite(source, target, add=None, drop: str | None = None) -> None:
    """A copy of a checkpoint with a tensor more, or without those whose stored name starts with `drop`."""
    target.mkdir()
    (target / "config.json").write_text((source / "config.json").read_text())
    stored = load_file(source / "model.safetensors") | (add or {})
    kept = {name: tensor for name, tensor in stored.items() if drop is None or not name.startswith(drop)}
    assert len(kept) != len(load_file(source / "model.safetensors"))
    save_file(kept, target / "model.safetensors")


# ---- backends


@torch.inference_mode()
def test_the_reference_backends_compute_the_same(model):
    reference = CausalLM(model.config, Kernels("reference"))
    reference.load_state_dict(model.state_dict())
    sequences = texts((5, 1, 66), more=4)
    found, expected = (packed(m, sequences) for m in (reference, model))
    for one, other in zip(found[0], expected[0], strict=True):
        assert_same(one, other)
    step = random_ids(3, 1, seed=6)
    found, expected = (m(step, cache=out.cache) for m, (_, out) in ((reference, found), (model, expected)))
    assert_same(found.logits, expected.logits)
    ids, mask = padded(sequences, "left")
    assert_same(reference(ids, attention_mask=mask).logits, model(ids, attention_mask=mask).logits)
    assert_same(reference(ids).logits, model(ids).logits)
    rows = reference.kernels.attestation()
    assert {row.backend for row in rows} == {"reference"}
    assert {row.reason for row in rows} == {"named by the user"}


@torch.inference_mode()
def test_attestation_counts_what_ran():
    model = build()
    ids = random_ids(2, 73)
    cache = model(ids[:, :70]).cache
    for t in range(70, 73):
        model(ids[:, t : t + 1], cache=cache)
    rows = model.kernels.attestation()
    calls = {(row.op, row.tokens): row.calls for row in rows}
    sequence_ops = {
        "gated_delta_rule": 3,
        "causal_conv": 3,
        "gated_rms_norm": 3,
        "attention": 1,
        "rms_norm": 11,
    }
    for op, per_pass in sequence_ops.items():
        assert calls[op, "2 and more"] == per_pass and calls[op, "1"] == 3 * per_pass
    for op in ("routing", "experts"):  # per token: a step of two sequences is two tokens
        assert sum(row.calls for row in rows if row.op == op) == 4 * 4
    served = {(row.op, row.tokens): row.backend for row in rows}
    assert served["gated_delta_rule", "1"] == "torch_recurrent"
    assert served["gated_delta_rule", "2 and more"] == "torch_chunk"
    assert calls["alignment", "2 and more"] == 4  # the prefill sorts its pairs, a step of two tokens does not
    assert all(row.device == "cpu" and row.reason for row in rows)
    assert {(row.op == "alignment", row.dtype) for row in rows} == {(False, "float32"), (True, "int64")}
    model.kernels.reset_attestation()
    assert model.kernels.attestation() == []
    model(ids[:, :1])
    assert {row.tokens for row in model.kernels.attestation() if row.op in sequence_ops} == {"1"}


# ---- gradients


def small(**changes) -> CausalLM:
    """Float64, one linear and one full layer, every MLP with experts."""
    layers = {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "full_attention_interval": None,
    }
    return build(**layers | changes).double()


def objective(logits: Tensor) -> Tensor:
    """A scalar in which every logit has another weight."""
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(4), dtype=logits.dtype)
    return (logits * weights).sum() + logits.logsumexp(-1).sum()


def check_gradients(model: CausalLM, value, names: list[str] | None = None) -> int:
    """Hold backward to a central difference along one random direction per parameter; return their number."""
    model.zero_grad(set_to_none=True)
    value().backward()
    checked = 0
    step = 1e-6
    for number, (name, parameter) in enumerate(model.named_parameters()):
        if parameter.grad is None or (names is not None and name not in names):
            continue
        direction = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)).double()
        direction /= direction.norm()
        with torch.no_grad():
            start = parameter.clone()
            values = []
            for sign in (1.0, -1.0):
                parameter.copy_(start + sign * step * direction)
                values.append(value().item())
            parameter.copy_(start)
        numeric = (values[0] - values[1]) / (2 * step)
        analytic = (parameter.grad * direction).sum().item()
        assert analytic == pytest.approx(numeric, rel=1e-5, abs=1e-6), name
        assert analytic != 0.0, name
        checked += 1
    return checked


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}], ids=["separate head", "tied head"])
def test_gradients_of_every_parameter_equal_finite_differences(changes):
    model, ids = small(**changes), random_ids(1, 70)
    count = check_gradients(model, lambda: objective(model(ids, use_cache=False).logits))
    expected = [name for name, _ in model.named_parameters() if not name.startswith("mtp.")]
    assert count == len(expected) >= 28


def test_gradients_of_packed_and_padded_batches_equal_finite_differences():
    model, sequences = small(), texts((3, 66, 1), more=0)
    ids, mask = padded(sequences, "left")
    names = [
        "embed_tokens.weight",
        "layers.0.linear_attn.A_log",
        "layers.0.linear_attn.conv1d.weight",
        "layers.0.linear_attn.in_proj_qkv.weight",
        "layers.1.self_attn.k_proj.weight",
        "layers.1.mlp.experts.gate_up_proj",
        "layers.1.mlp.gate.weight",
    ]
    assert check_gradients(model, lambda: objective(packed(model, sequences)[1].logits), names) == 7
    assert check_gradients(model, lambda: objective(model(ids, attention_mask=mask).logits), names) == 7


def test_gradients_of_the_prediction_head_equal_finite_differences():
    model, ids = small(), random_ids(1, 20)

    def value() -> Tensor:
        hidden = model(ids[:, :-1], use_cache=False).hidden
        return objective(model.mtp_logits(hidden, ids[:, 1:]))

    assert check_gradients(model, value) == len(list(model.named_parameters()))


def test_gradients_with_a_past_in_the_cache():
    """The past is constant; the graph holds its own copy of it, although the cache goes on in place."""
    model, ids = small(), random_ids(2, 90)
    with torch.no_grad():
        past = model(ids[:, :40]).cache

    def value(sizes) -> Tensor:
        cache, values = past.clone(), []
        for part in ids[:, 40:].split(sizes, dim=1):
            values.append(objective(model(part, cache=cache).logits))
        return sum(values)

    assert check_gradients(model, lambda: value([50])) >= 28
    # Several parts before one backward pass. The state that enters a part is constant too, which differences
    # that run the parts again do not know: this is held to backward passes taken after each part.
    model.zero_grad()
    value([7, 1, 42]).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    cache = past.clone()
    for part in ids[:, 40:].split([7, 1, 42], dim=1):
        objective(model(part, cache=cache).logits).backward()
    for name, gradient in found.items():
        assert_same(gradient, model.get_parameter(name).grad, limit=1e-12)


def test_gradients_after_use_in_inference_mode():
    model, ids = build(), random_ids(1, 20)
    with torch.inference_mode():
        model(ids)
    objective(model(ids).logits).backward()
    assert bool(torch.isfinite(model.layers[3].self_attn.q_proj.weight.grad).all())


def gradients_under(policy: str, decay: str) -> tuple[Tensor, dict[str, bool]]:
    """(logits, parameter -> whether its gradient is finite) of 128 tokens."""
    model = build(decay=decay)
    model.kernels = Kernels(None, policy)
    logits = model(random_ids(1, 128), use_cache=False).logits
    objective(logits).backward()
    finite = {
        n: bool(torch.isfinite(p.grad).all()) for n, p in model.named_parameters() if p.grad is not None
    }
    return logits.detach(), finite


@pytest.mark.parametrize("policy", ["safe", "fp32_cumsum", "segsum"])
def test_masking_before_exp_keeps_gradients_finite_where_gates_kill(policy):
    logits, finite = gradients_under(policy, "class_default")
    assert bool(torch.isfinite(logits).all()) and all(finite.values())


def test_masking_after_exp_is_fine_forward_and_nan_backward():
    """The upper triangle of exp(G_i - G_j) is inf: dropped forward, and 0 * inf in the gradient of exp."""
    logits, finite = gradients_under("mask_after", "class_default")
    assert_same(logits, gradients_under("safe", "class_default")[0], limit=1e-4)
    assert not any(finite[f"layers.{i}.linear_attn.A_log"] for i in range(3))
    logits, finite = gradients_under("mask_after", "realistic")  # no gate passes the limit: nothing to see
    assert all(finite.values())


def test_factored_exponents_are_nan_forward():
    with torch.no_grad():
        model = build(decay="class_default")
        model.kernels = Kernels(None, "factored")
        assert not bool(torch.isfinite(model(random_ids(1, 64)).logits).any())
        assert bool(torch.isfinite(model(random_ids(1, 1)).logits).all())  # one token takes no chunk


# ---- initial weights


def test_initial_decay_is_spread_as_promised():
    config = ModelConfig.from_hf(mini(linear_num_value_heads=512, linear_value_head_dim=2))
    for decay in ("class_default", "realistic"):
        model = CausalLM(config).init_weights(0, decay)
        layers = [layer.linear_attn for layer in model.layers[:3]]
        a = torch.cat([layer.A_log for layer in layers]).exp()
        assert 0.0099 < a.min() < 0.5 and 15.5 < a.max() <= 16.001
        assert a.mean().item() == pytest.approx(8.0, abs=0.45)  # 3.8 standard errors
        dt_bias = torch.cat([layer.dt_bias for layer in layers])
        if decay == "class_default":
            assert torch.equal(dt_bias, torch.ones(1536))
            continue
        dt = torch.nn.functional.softplus(dt_bias.double())
        assert 0.999e-3 < dt.min() < 1.03e-3 and 0.097 < dt.max() < 0.1001
        logarithm = (dt.log() - math.log(1e-3)) / math.log(100)  # uniform in [0, 1]
        assert logarithm.mean().item() == pytest.approx(0.5, abs=0.03)
        assert logarithm.std().item() == pytest.approx(12**-0.5, abs=0.015)
    with pytest.raises(InputError, match="decay: expected realistic or class_default, found 'fast'"):
        model.init_weights(0, "fast")


def test_initial_weights_depend_on_the_seed_alone():
    config = ModelConfig.from_hf(mini())
    torch.manual_seed(1)
    one = CausalLM(config).init_weights(3).state_dict()
    torch.manual_seed(2)
    two, other = CausalLM(config).init_weights(3).state_dict(), CausalLM(config).init_weights(4).state_dict()
    drawn = [name for name in one if "norm" not in name]
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in drawn)
    assert all(one[name].count_nonzero() == 0 for name in one if "norm" in name and "linear_attn" not in name)
    assert torch.equal(one["layers.0.linear_attn.norm.weight"], torch.ones(24))
    for name in drawn:
        if not name.endswith(("A_log", "dt_bias", "conv1d.weight", "shared_expert_gate.weight")):
            assert one[name].std().item() == pytest.approx(0.02, rel=0.1), name
    taps = one["layers.0.linear_attn.conv1d.weight"]
    assert 0.45 < taps.abs().max() <= 0.5 and abs(taps.mean()) < 0.03


# ---- a damaged weight shows


@torch.inference_mode()
def test_nan_in_any_single_weight_reaches_the_logits():
    model, ids = build(), random_ids(1, 200)
    with workbench.trace(model, keep=["*.moe.logits"]) as trace:
        hidden = model(ids).hidden
        model.mtp_logits(hidden[:, :-1], ids[:, 1:])
    for name, router in trace.tensors.items():
        # A NaN in an expert that serves no token is rightly not seen, so the last one must serve some.
        assert bool((router.topk(2).indices == 7).any()), name
    for name, parameter in model.named_parameters():
        where = int(ids[0, 3]) * 64 if name == "embed_tokens.weight" else parameter.numel() - 1
        values = parameter.data.view(-1)
        kept = values[where].item()
        values[where] = math.nan
        if name.startswith("mtp."):
            logits = model.mtp_logits(hidden[:, :-1], ids[:, 1:])
        else:
            logits = model(ids).logits
        assert bool(torch.isnan(logits).any()), name
        values[where] = kept
    assert torch.equal(model(ids).hidden, hidden)


def replaced_in_place(model: CausalLM, new: dict[str, Tensor]) -> CausalLM:
    with torch.no_grad():
        for name, x in new.items():
            model.get_parameter(name).copy_(x)
    return model


def replaced_data(model: CausalLM, new: dict[str, Tensor]) -> CausalLM:
    for name, x in new.items():
        model.get_parameter(name).data = x.clone()
    return model


def replaced_parameters(model: CausalLM, new: dict[str, Tensor]) -> CausalLM:
    for name, x in new.items():
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, torch.nn.Parameter(x.clone()))
    return model


def replaced_after_casts(model: CausalLM, new: dict[str, Tensor]) -> CausalLM:
    return replaced_in_place(model.half().float(), new)


def replaced_in_a_copy(model: CausalLM, new: dict[str, Tensor]) -> CausalLM:
    changed = replaced_in_place(copy.deepcopy(model), new)
    assert_same(model(random_ids(1, 9)).logits, build().requires_grad_(False)(random_ids(1, 9)).logits)
    return changed


def replaced_by_loading(model: CausalLM, new: dict[str, Tensor]) -> CausalLM:
    model.load_state_dict(new)
    return model


def replaced_by_assigning(model: CausalLM, new: dict[str, Tensor]) -> CausalLM:
    model.load_state_dict({name: x.clone() for name, x in new.items()}, assign=True)
    return model


@pytest.mark.parametrize(
    "replace",
    [
        replaced_in_place,
        replaced_data,
        replaced_parameters,
        replaced_after_casts,
        replaced_in_a_copy,
        replaced_by_loading,
        replaced_by_assigning,
    ],
)
@torch.no_grad()
def test_weights_count_however_they_are_replaced(replace):
    """Nothing that the model prepares from its weights may outlive them."""
    ids = random_ids(1, 9)
    other = CausalLM(ModelConfig.from_hf(mini())).init_weights(8).eval()
    model = build()
    assert logit_difference(model(ids).logits, other(ids).logits) > 0.1
    assert_same(replace(model, dict(other.named_parameters()))(ids).logits, other(ids).logits)


@torch.inference_mode()
def test_a_hook_on_any_projection_is_called(plain):
    """Projections of one input are joined into one product: a watched one is still computed by itself."""
    called = set()
    projections = {
        name: module for name, module in plain.named_modules() if isinstance(module, torch.nn.Linear)
    }
    handles = [
        module.register_forward_hook(lambda module, inputs, out, name=name: called.add(name))
        for name, module in projections.items()
    ]
    try:
        watched = plain(random_ids(1, 40))
        plain.mtp_logits(watched.hidden, random_ids(1, 40))
    finally:
        for handle in handles:
            handle.remove()
    assert called == set(projections)
    assert_same(plain(random_ids(1, 40)).logits, watched.logits)


# ---- bad input: one line with expected and found


@torch.inference_mode()
def test_what_a_hook_keeps_is_not_written_over_later(model):
    """A module's output may be held by a hook: no later step may work on it in place."""
    kept: dict[str, tuple[Tensor, Tensor]] = {}

    def keep(module, inputs, out, name):
        if isinstance(out, Tensor):
            kept[name] = (out, out.clone())

    handles = [
        module.register_forward_hook(functools.partial(keep, name=name)) for name, module in model.named_modules()
    ]
    try:
        out = model(random_ids(2, 70))
        model(random_ids(2, 1), cache=out.cache)
    finally:
        for handle in handles:
            handle.remove()
    assert len(kept) > 30
    assert [name for name, (held, copied) in kept.items() if not torch.equal(held, copied)] == []


@torch.inference_mode()
def test_what_a_trace_sees_is_not_written_over_later(model):
    """Like a hook, a tap may hold a tensor without copying it."""

    class Holder:
        def __init__(self, held, prefix=""):
            self.held, self.prefix = held, prefix

        def __call__(self, name, tensor):
            self.held.append((self.prefix + name, tensor, tensor.clone()))
            return tensor

        def scope(self, prefix):
            return Holder(self.held, self.prefix + prefix)

    held: list = []
    model.tap = Holder(held)
    try:
        out = model(random_ids(2, 130))
        model(random_ids(2, 1), cache=out.cache)
        model(random_ids(1, 600))
    finally:
        model.tap = None
    assert len(held) > 100
    assert sorted({name for name, tensor, copied in held if not torch.equal(tensor, copied)}) == []


def with_cache(rows: int):
    return lambda m: m(random_ids(rows, 2)).cache


BAD_INPUT = {
    "id above the vocabulary": (
        lambda m: m(torch.tensor([[0, 97]])),
        "input_ids: expected ids from 0 to 96, found 0 to 97",
    ),
    "negative id": (lambda m: m(torch.tensor([[5, -1]])), "expected ids from 0 to 96, found -1 to 5"),
    "no tokens": (lambda m: m(torch.zeros(2, 0, dtype=torch.int64)), "at least one token, found (2, 0)"),
    "no rows": (lambda m: m(torch.zeros(0, 3, dtype=torch.int64)), "at least one token, found (0, 3)"),
    "cache of another dtype": (
        lambda m: m(random_ids(2, 1), cache=Cache.empty(m.config, 2, device="cpu", dtype=torch.bfloat16)),
        "cache: expected torch.float32 as in the model, found torch.bfloat16",
    ),
    "no batch axis": (lambda m: m(torch.tensor([1, 2])), "expected shape [batch, tokens]", "found (2,)"),
    "ids that are no integers": (lambda m: m(torch.ones(1, 3)), "expected int64 or int32 token ids, found torch.float"),
    "mask of scores": (
        lambda m: m(random_ids(1, 2), attention_mask=torch.tensor([[0.0, -1e9]])),
        "attention_mask: expected 0 for padding and 1 for tokens",
    ),
    "boundaries that are no integers": (
        lambda m: m(random_ids(1, 4), cu_seqlens=torch.tensor([0.0, 4.0])),
        "cu_seqlens: expected one axis of integers, found shape (2,) of torch.float32",
    ),
    "hole in the mask": (
        lambda m: m(random_ids(2, 4), attention_mask=torch.tensor([[1, 1, 1, 1], [1, 0, 1, 1]])),
        "attention_mask row 1: expected one run of ones",
        "found 2",
    ),
    "row of padding alone": (
        lambda m: m(random_ids(2, 3), attention_mask=torch.tensor([[0, 0, 0], [1, 1, 0]])),
        "attention_mask row 0: expected one run of ones",
        "found 0",
    ),
    "mask of another shape": (
        lambda m: m(random_ids(2, 4), attention_mask=torch.ones(2, 5)),
        "attention_mask: expected the shape of the new tokens (2, 4), found (2, 5)",
    ),
    "mask that covers the past": (
        lambda m: m(random_ids(2, 1), attention_mask=torch.ones(2, 3), cache=with_cache(2)(m)),
        "expected the shape of the new tokens (2, 1), found (2, 3)",
    ),
    "mask and boundaries": (
        lambda m: m(random_ids(1, 4), attention_mask=torch.ones(1, 4), cu_seqlens=torch.tensor([0, 4])),
        "attention_mask: expected none together with cu_seqlens",
    ),
    "boundaries that fall": (
        lambda m: m(random_ids(1, 4), cu_seqlens=torch.tensor([0, 3, 2, 4])),
        "cu_seqlens: expected boundaries that do not fall, from 0 to 4, over one batch row",
        "found [0, 3, 2, 4] over 1 rows",
    ),
    "boundaries that start late": (
        lambda m: m(random_ids(1, 4), cu_seqlens=torch.tensor([1, 4])),
        "expected boundaries that do not fall, from 0 to 4",
        "found [1, 4]",
    ),
    "boundaries that stop early": (
        lambda m: m(random_ids(1, 4), cu_seqlens=torch.tensor([0, 2, 3])),
        "expected boundaries that do not fall, from 0 to 4",
        "found [0, 2, 3]",
    ),
    "one boundary": (lambda m: m(random_ids(1, 4), cu_seqlens=torch.tensor([0])), "found [0] over 1 rows"),
    "boundaries over two rows": (
        lambda m: m(random_ids(2, 4), cu_seqlens=torch.tensor([0, 2, 4])),
        "over one batch row, found [0, 2, 4] over 2 rows",
    ),
    "cache of another batch": (
        lambda m: m(random_ids(3, 1), cache=with_cache(2)(m)),
        "cache: expected 3 sequences as in the input, found 2",
    ),
    "cache of fewer packed sequences": (
        lambda m: m(random_ids(1, 6), cache=with_cache(2)(m), cu_seqlens=torch.tensor([0, 1, 3, 6])),
        "cache: expected 3 sequences as in the input, found 2",
    ),
}


@pytest.mark.parametrize("case", BAD_INPUT)
@torch.inference_mode()
def test_bad_input_is_one_line(plain, case):
    call, *words = BAD_INPUT[case]
    with pytest.raises(InputError) as caught:
        call(plain)
    message = caught.value.args[0]
    assert "\n" not in message and len(message) < 200
    assert all(word in message for word in words), message


def test_a_cache_of_inference_mode_is_refused_outside_it_and_its_clone_is_not(plain):
    with torch.inference_mode():
        out = plain(random_ids(1, 5))
        expected = plain(random_ids(1, 1), cache=out.cache.clone()).logits
    with torch.no_grad():
        with pytest.raises(InputError, match="filled under torch"):
            plain(random_ids(1, 1), cache=out.cache)
        assert_same(plain(random_ids(1, 1), cache=out.cache.clone()).logits, expected)


@torch.inference_mode()
def test_refused_input_leaves_the_cache_as_it_was(plain):
    ids = random_ids(2, 9)
    cache = plain(ids[:, :5]).cache
    for bad in ({"input_ids": torch.full((2, 4), 97)}, {"input_ids": random_ids(3, 4)}):
        with pytest.raises(WorkbenchError):
            plain(**bad, cache=cache)
    with pytest.raises(WorkbenchError):
        plain(ids[:, 5:], cache=cache, attention_mask=torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]]))
    assert cache.lengths == [5, 5]
    assert_same(plain(ids[:, 5:], cache=cache).logits, plain(ids).logits[:, 5:])


def test_configuration_decides_which_layers_there_are():
    config = ModelConfig.from_hf(mini())
    without = CausalLM(dataclasses.replace(config, mtp_num_hidden_layers=0))
    assert not [name for name, _ in without.named_parameters() if name.startswith("mtp.")]
    kinds = ["linear_attn" if hasattr(layer, "linear_attn") else "self_attn" for layer in without.layers]
    assert kinds == ["linear_attn"] * 3 + ["self_attn"]
