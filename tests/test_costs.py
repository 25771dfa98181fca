"""Flops, bytes and memory of a model, counted from its configuration: against what runs, and against known floors."""

from pathlib import Path

import pytest
import torch
from models import mini, mini256, mini_dense, mini_next

from workbench.analysis.costs import cost_table, distinct_experts, op_costs, price_of, total_seconds
from workbench.analysis.launches import count_launches
from workbench.analysis.memory import peak_tensor_bytes
from workbench.analysis.memory_plan import (
    memory_plan,
    sequence_bytes,
    token_bytes,
    weight_bytes,
    weights_in_files,
    working_bytes,
)
from workbench.cards import card_named
from workbench.config import ModelConfig
from workbench.errors import InputError
from workbench.kernels import Kernels
from workbench.kernels.gated_delta_rule import torch_chunk
from workbench.kernels.rehearsal import Rehearsal
from workbench.loading import load
from workbench.model import CausalLM

MINIATURE = Path(__file__).resolve().parent.parent / "data" / "miniature"
H200, BI_V100 = card_named("h200"), card_named("bi-v100")


@pytest.fixture(scope="module")
def large():
    """Sizes of the 35B-A3B model."""
    return ModelConfig.from_hf(
        mini256(
            vocab_size=248320, hidden_size=2048, num_hidden_layers=40, num_attention_heads=16, head_dim=256,
            linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128,
            moe_intermediate_size=512, shared_expert_intermediate_size=512, layer_types=None,
            max_position_embeddings=262_144,
            rope_parameters={"rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]},
        )
    )  # fmt: skip


def built(fields, backend=None):
    model = CausalLM(ModelConfig.from_hf(fields), Kernels(backend))
    return model.init_weights(0).eval()


def by_op(rows, value):
    sums = {}
    for row in rows:
        sums[row.op] = sums.get(row.op, 0) + value(row)
    return sums


@pytest.mark.parametrize("tokens", [64, 130, 1])
@pytest.mark.parametrize("builder", [mini, mini256, mini_dense, mini_next])
def test_flops_are_those_of_a_run(builder, tokens):
    model = built(builder())
    ids = torch.arange(tokens)[None] % 97
    rehearsal = Rehearsal(H200)
    with torch.no_grad():
        past = model(ids[:, :1].expand(1, 33)).cache if tokens == 1 else None
        with rehearsal:
            model(ids, cache=past, last_only=True)
    seen = by_op(rehearsal.seen, lambda row: row.flops)
    counted = op_costs(
        model.config, tokens=tokens, context=33 if tokens == 1 else 0, dtype="float32",
    )  # fmt: skip
    expected = by_op(counted, lambda cost: cost.flops)
    assert seen["linear"] == expected["linear"]
    if model.config.is_moe:
        assert seen["experts"] == pytest.approx(expected["experts"], rel=0.35)  # padded to whole groups at most
    chunks = -(-tokens // 64) * 64 / tokens if tokens > 1 else 1.0
    assert expected["gated_delta_rule"] * chunks == pytest.approx(
        seen["gated_delta_rule"], rel=0.12 if tokens > 1 else 0.51  # a step's update is no product of torch's
    )
    if tokens == 1:
        assert expected["attention"] == seen["attention"]


def test_bytes_of_products_are_those_that_cross_the_bus():
    model = built(mini(), backend="torch_linear,torch_sorted")
    ids = torch.arange(40)[None]
    counted = op_costs(model.config, tokens=40, dtype="float32")
    (head,) = (cost for cost in counted if cost.part == "lm_head")
    with torch.no_grad():
        hidden = model(ids).hidden[0, -1:]
        assert count_launches(lambda: model.head(hidden)).bytes == head.bytes
        layer = model.layers[0].linear_attn
        (inputs,) = (cost for cost in counted if cost.part == "gdn.in_proj")
        layer.joint.lay_out()
        x = torch.randn(40, 64)
        assert count_launches(lambda: layer.joint(x, model.kernels)).bytes == inputs.bytes / inputs.calls


@pytest.mark.parametrize(
    ("batch", "milliseconds"), [(1, 1.253), (8, 4.03), (16, 6.57), (32, 10.2), (64, 14.2), (128, 17.4)]
)
def test_a_decode_step_moves_the_bytes_of_the_known_floor(large, batch, milliseconds):
    costs = op_costs(large, tokens=1, context=1, sequences=batch)
    moved = sum(cost.weights + cost.state for cost in costs)
    assert moved / H200.bandwidth * 1e3 == pytest.approx(milliseconds, rel=0.005)
    assert total_seconds(op_costs(large, tokens=1, context=1, sequences=batch, delta_dtype="bfloat16"), H200) * 1e3 == (
        pytest.approx(milliseconds, rel=0.02)
    )


def test_known_floors_of_prefill_and_kernels(large):
    costs = {cost.part: cost for cost in op_costs(large, tokens=8192, delta_dtype="bfloat16")}
    flops = sum(cost.flops for part, cost in costs.items() if part != "lm_head")
    assert flops / 1e12 == pytest.approx(46.7, rel=0.001)
    delta = costs["gdn.delta_rule"]
    assert delta.flops / delta.calls == pytest.approx(42.9e9, rel=0.002)
    assert delta.bytes / delta.calls == pytest.approx(199e6, rel=0.05)
    assert delta.seconds(H200)[0] / delta.calls == pytest.approx(45e-6, rel=0.05)
    for tokens, microseconds in ((1, 10.5), (8, 75), (16, 134), (32, 214), (256, 335)):
        experts = next(c for c in op_costs(large, tokens=tokens) if c.part == "moe.experts")
        assert experts.seconds(H200)[0] / experts.calls * 1e6 == pytest.approx(microseconds, rel=0.01)


def test_distinct_experts():
    assert distinct_experts(256, 8, 1) == pytest.approx(8)
    assert distinct_experts(256, 8, 64) == pytest.approx(222, abs=1)
    assert distinct_experts(16, 4, 10_000) == pytest.approx(16)


def test_unknown_figures_stay_unknown(large):
    cpu = card_named("cpu")
    costs = op_costs(large, tokens=4)
    assert total_seconds(costs, cpu) is None
    assert cost_table(costs, cpu)["seconds"].isna().all()
    seconds, why = next(c for c in costs if c.part == "gdn.out_proj").seconds(cpu)
    assert seconds is None and "rates.bfloat16" in why and "bandwidth" in why


def test_price_of_a_route(large):
    delta = next(c for c in op_costs(large, tokens=8192, dtype="float16") if c.part == "gdn.delta_rule")
    price = price_of(delta, BI_V100, "float32", BI_V100.rule("matmul", "float32"))
    assert price.seconds == pytest.approx(delta.flops / 37e12)  # bound by the products in float32
    assert price.before == pytest.approx(max(delta.flops / 147e12, delta.bytes / 1.2e12))
    assert price.factor > 1
    assert price_of(delta, BI_V100, "bfloat16").seconds is None
    step = next(c for c in op_costs(large, tokens=1, dtype="float16") if c.part == "lm_head")
    assert price_of(step, BI_V100, "float32").factor == pytest.approx(2.0)  # bound by memory: twice as wide


@pytest.mark.parametrize("wrong", [{"tokens": 0}, {"tokens": 1, "context": -1}, {"tokens": 1, "dtype": "int8"}])
def test_sizes_that_make_no_sense_are_refused(large, wrong):
    with pytest.raises(InputError, match="costs: "):
        op_costs(large, **wrong)


# ---- memory


@pytest.mark.parametrize("dtype", [None, "float64", "float32", "bfloat16", "float16"])
def test_weights_are_those_of_the_model_in_memory(dtype):
    model = load(MINIATURE, dtype=dtype)
    held = sum(p.nbytes for p in model.parameters())
    assert weights_in_files(MINIATURE, dtype) == (model.config, held)
    assert weights_in_files(MINIATURE, dtype, with_mtp=False)[1] == held - sum(p.nbytes for p in model.mtp.parameters())
    if dtype is not None:
        assert weight_bytes(model.config, dtype) == held


def test_caches_are_those_of_a_run():
    model = load(MINIATURE)
    with torch.inference_mode():
        cache = model(torch.arange(100)[None]).cache
    state = sum(layer.window.nbytes + layer.state.nbytes for layer in cache.layers if hasattr(layer, "state"))
    keys = sum(2 * layer.keys[:, :100].nbytes for layer in cache.layers if hasattr(layer, "keys"))
    assert state == sequence_bytes(model.config, "bfloat16")
    assert keys == 100 * token_bytes(model.config, "bfloat16")


@pytest.mark.parametrize("tokens", [128, 1024])
@pytest.mark.parametrize("name", ["miniature", "mini", "mini_dense", "mini256"])
def test_the_estimate_of_a_pass_is_what_its_tensors_take(name, tokens, monkeypatch):
    monkeypatch.setitem(torch_chunk.BYTES_AT_ONCE, "cpu", torch_chunk.BYTES_AT_ONCE["cuda"])
    fields = {"mini": mini, "mini_dense": mini_dense, "mini256": mini256}
    model = load(MINIATURE) if name == "miniature" else built(fields[name]())
    ids = torch.arange(tokens)[None] % 97
    held = peak_tensor_bytes(lambda: model(ids, last_only=True, use_cache=False))
    estimate = working_bytes(model.config, str(model.dtype).removeprefix("torch."), tokens)
    assert 0.95 < estimate / held < 1.3


def test_the_35b_model_does_not_fit_the_card_of_the_bring_up_in_float16(large):
    plan = memory_plan(large, BI_V100)
    assert plan.dtype == "float16" and plan.weights / 2**30 == pytest.approx(66.1, abs=0.1)
    assert plan.fits is False and plan.free < 0 and plan.longest == 0 and plan.most_sequences == 0


def test_the_35b_model_on_an_h200_is_what_an_engine_reported(large):
    """vLLM reported 64.61 GiB of weights, without the prediction head, and room for 87 sequences of 33,000 tokens."""
    plan = memory_plan(large, H200, length=33_000, sequences=64, with_mtp=False)
    assert plan.weights / 2**30 == pytest.approx(64.6, abs=0.1)
    assert plan.fits and plan.longest == 262_144 and 80 < plan.most_sequences < 95


def test_a_plan_without_a_figure_says_so(large):
    plan = memory_plan(large, card_named("cpu"))
    assert (plan.usable, plan.fits, plan.longest, plan.most_sequences) == (None, None, None, None)
    assert plan.to_json()["fits"] is None


@pytest.mark.parametrize("wrong", [{"length": 0}, {"sequences": 0}, {"utilisation": 1.5}, {"dtype": "int8"}])
def test_plans_that_make_no_sense_are_refused(large, wrong):
    with pytest.raises(InputError, match="memory plan: "):
        memory_plan(large, H200, **wrong)
