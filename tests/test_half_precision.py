"""Float16 readiness: what overflows, flushes or serves, where it is, and remedies that a rerun proves."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from models import mini, mini_dense, mini_next
from small_checkpoint import DATA, TOKENIZER_FILES
from torch import Tensor

from workbench import cli, load, taps
from workbench.analysis.half_precision import (
    COLUMNS,
    NOT_FINITE_IN_FLOAT32,
    OVERFLOW,
    REMEDY_COLUMNS,
    UNDERFLOW,
    WEIGHT_COLUMNS,
    Part,
    Readiness,
    Scaled,
    StreamPlan,
    Watch,
    build,
    fp16_readiness,
    readiness,
    watched,
)
from workbench.analysis.half_precision.islands import HEAD_PART
from workbench.analysis.half_precision.watch import STREAM, round_to_half_bits
from workbench.analysis.half_precision.weights import STREAM_WRITERS
from workbench.cards import card_named
from workbench.checkpoint import write_checkpoint
from workbench.config import ModelConfig
from workbench.errors import InputError
from workbench.kernels import Kernels
from workbench.kernels.agreement import logit_difference
from workbench.model import CausalLM
from workbench.plots import half_precision_depth

TOKENS = 24


def model_of(fields: dict, seed: int = 3, dtype: torch.dtype = torch.float32) -> CausalLM:
    with torch.no_grad():
        return CausalLM(ModelConfig.from_hf(fields)).init_weights(seed).to(dtype).eval()


def ids_of(model: CausalLM, tokens: int = TOKENS, seed: int = 0) -> Tensor:
    return torch.randint(model.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(seed))


def value_at(model: CausalLM, ids: Tensor, name: str) -> Tensor:
    """What a tap point shows, [T, channels]."""
    kept = {}

    class Keep:
        def __init__(self, prefix: str = ""):
            self.prefix = prefix

        def __call__(self, tap: str, tensor: Tensor) -> Tensor:
            kept[self.prefix + tap] = tensor.detach().clone()
            return tensor

        def scope(self, prefix: str) -> Keep:
            return Keep(prefix)

    model.tap = Keep()
    with torch.inference_mode():
        model(ids, use_cache=False)
    model.tap = None
    return kept[name].flatten(0, -2).clone()


def answer(x: Tensor, target: float) -> Tensor:
    """The row w with w . x = target and the smallest norm."""
    return target * x / x.square().sum()


def huge_hidden_unit(model: CausalLM, ids: Tensor, layer: int, unit: int, token: int, value: float = 300.0) -> None:
    """Hidden unit `unit` of a dense MLP is value * value at `token`, finite in float32; the output hardly notices."""
    x = value_at(model, ids, taps.full_name(layer, taps.POST_NORM))[token]
    mlp = model.layers[layer].mlp
    with torch.no_grad():
        mlp.gate_proj.weight[unit] = answer(x, value)
        mlp.up_proj.weight[unit] = answer(x, value)
        mlp.down_proj.weight[:, unit] *= 1e-3


def add_row(weight: Tensor, row: int, x: Tensor, target: float) -> None:
    """Make row . x reach `target` more."""
    with torch.no_grad():
        weight[row] += answer(x, target)


def grown_stream(model: CausalLM, ids: Tensor, layer: int) -> None:
    """Every write into the residual stream so many times larger that it passes 65504 from `layer` on, not before."""
    before = value_at(model, ids, taps.full_name(layer - 1, taps.RESIDUAL)).abs().max()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if STREAM_WRITERS.fullmatch(name):
                parameter *= 0.9 * 65504 / before


@pytest.fixture
def dense() -> CausalLM:
    return model_of(mini_dense())


def remedy(report: Readiness, name: str):
    return report.remedies.set_index("remedy").loc[name]


# ---- no false alarm


@pytest.mark.parametrize("fields", [mini(), mini_dense(), mini(tie_word_embeddings=True), mini_next()],
                         ids=["moe", "dense", "tied", "next"])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_healthy_model_serves_and_no_remedy_is_tried(fields, dtype):
    model = model_of(fields, dtype=dtype)
    report = fp16_readiness(model, ids_of(model))
    assert not report.verdict.is_fault and report.verdict.exit_code == 0
    assert report.remedy is None and list(report.remedies["remedy"]) == ["none"]
    assert not report.activations["fault"].any() and not report.activations["bad_float16"].any()
    assert 0 < report.difference <= report.limit < 0.01
    assert report.weights["overflows"].sum() == 0


def test_what_the_miniature_says():
    """The trained miniature has room: nothing comes near a percent of 65504 in any op."""
    report = fp16_readiness(DATA, torch.arange(40, 100)[None])
    assert not report.verdict.is_fault
    held = report.activations[report.activations["held"] == "float16"]
    assert held["absmax"].max() < 0.01 * 65504
    assert report.weights["flushes"].sum() == 4 and report.weights["overflows"].sum() == 0
    assert (report.gates["over_float16"] > 0).any()  # exp of sums in float16 would not do
    assert any(sentence.startswith("gates: ") for sentence in report.verdict.evidence)


def test_the_source_and_its_tap_are_left_alone(dense):
    ids = ids_of(dense)
    huge_hidden_unit(dense, ids, 2, 17, 5)
    before = {name: tensor.clone() for name, tensor in dense.state_dict().items()}
    kernels = dense.kernels
    fp16_readiness(dense, ids, every=True)
    assert dense.kernels is kernels and dense.tap is None
    for name, tensor in dense.state_dict().items():
        assert torch.equal(tensor, before[name]), name


# ---- a hidden unit of 300 * 300


def test_the_input_of_down_proj_overflows_and_a_power_of_two_cures_it(dense):
    ids = ids_of(dense)
    huge_hidden_unit(dense, ids, 2, 17, 5)
    report = fp16_readiness(dense, ids, every=True)
    where = report.verdict.where
    assert (where.layer, where.op, where.token) == (2, "down_proj", 5)
    assert where.tap == "layers.02.mlp.down_proj.input"
    assert report.verdict.cause_id == OVERFLOW
    assert "unit 17" in report.verdict.evidence[0] and "90000 > 65504" in report.verdict.evidence[0]

    faults = report.activations[report.activations["fault"]]
    assert list(faults["name"]) == ["layers.02.mlp.down_proj.input"] and list(faults["overflows"]) == [1]
    assert not remedy(report, "none")["finite"]
    assert remedy(report, "none")["first_bad"] == "layers.02.mlp.down_proj.input"
    proven = remedy(report, "unit scale")
    assert proven["finite"] and proven["serves"] and proven["same_experts"] <= report.limit
    assert proven["extra_bytes"] == 0 and proven["wide_flops"] == 0 and proven["values_bad"] == 0
    assert report.remedy.name == "unit scale"  # the cheaper of the two
    island = remedy(report, "float32 island")
    assert island["serves"] and island["wide_flops"] == 2 * 3 * 64 * 80
    assert "bfloat16" not in report.verdict.fix


class HalfFrom64:
    """Kernels that leave projections of 64 tokens and more to a float16 product, as some dispatchers do."""

    def __init__(self, kernels: Kernels):
        self._kernels = kernels

    def __getattr__(self, name: str):
        return getattr(self._kernels, name)

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        if x.shape[:-1].numel() < 64:
            return self._kernels.linear(x, weight)
        return self._kernels.linear(x.half(), weight.half()).float()


@pytest.mark.parametrize("tokens", [63, 64])
def test_a_product_that_turns_to_float16_at_64_tokens_is_caught_at_its_input(dense, tokens):
    """The values are finite in float32 at any length; what float16 makes of them shows where they enter."""
    ids = ids_of(dense, 64)
    huge_hidden_unit(dense, ids[:, :24], 2, 17, 5)
    dense.kernels = HalfFrom64(dense.kernels)
    with torch.inference_mode(), watched(dense) as watch:
        logits = dense(ids[:, :tokens], use_cache=False).logits
    assert bool(logits.isfinite().all()) == (tokens == 63)
    table = watch.table
    beyond = table[table["overflows"] > 0].iloc[0]
    assert beyond["name"] == "layers.02.mlp.down_proj.input" and beyond["bad"] == 0
    assert beyond["absmax"] == pytest.approx(90000, rel=1e-3)
    if tokens == 64:
        bad = table[table["bad"] > 0].iloc[0]
        assert bad["name"] == "layers.02.moe.out" and bad.name == beyond.name + 1  # the next tensor that is seen


def test_one_unit_of_one_expert_overflows():
    model = model_of(mini())
    ids = ids_of(model)
    x = value_at(model, ids, taps.full_name(1, taps.POST_NORM))[4]
    experts = model.layers[1].mlp.experts
    with watched(model) as watch, torch.no_grad():
        model(ids, use_cache=False)
    expert = int(watch.routes[1][4, 0])
    with torch.no_grad():
        experts.gate_up_proj[expert, 9] = answer(x, 300.0)
        experts.gate_up_proj[expert, 32 + 9] = answer(x, 300.0)
        experts.down_proj[expert, :, 9] *= 1e-3
    report = fp16_readiness(model, ids)
    row = report.activations[report.activations["fault"]].iloc[0]
    assert row["name"] == "layers.01.mlp.experts.down_proj.input"
    assert (row["token"], row["expert"], row["unit"]) == (4, expert, 9)
    assert report.remedy.name == "unit scale"
    assert f"expert {expert} unit 9" in report.verdict.fix


def test_values_and_norm_outputs_are_scaled_by_channel():
    """v_proj beside o_proj with grouped heads, and the gated norm's shared weight beside out_proj."""
    model = model_of(mini_dense())
    ids = ids_of(model)
    x = value_at(model, ids, taps.full_name(3, taps.INPUT_NORM))[6]
    with torch.no_grad():
        attention, delta = model.layers[3].self_attn, model.layers[0].linear_attn
        attention.v_proj.weight[40] = answer(x, 90000.0)  # key-value head 1, channel 8: query heads 2 and 3
        attention.o_proj.weight.view(64, 4, 32)[:, 2:, 8] *= 1e-6
        delta.norm.weight[5] = 1e6
        delta.out_proj.weight.view(64, 4, 24)[:, :, 5] *= 1e-6
    report = fp16_readiness(model, ids)
    assert report.remedy.name == "unit scale" and report.remedies.iloc[-1]["serves"]
    bits = {pair.kind: found for pair, found in report.remedy.units.bits.items()}
    assert bits["attention"].nonzero().flatten().tolist() == [40]
    assert bits["delta"].nonzero().flatten().tolist() == [5]


def test_gate_rows_cannot_be_scaled_and_get_an_island(dense):
    ids = ids_of(dense)
    x = value_at(dense, ids, taps.full_name(1, taps.POST_NORM))[8]
    add_row(dense.layers[1].mlp.gate_proj.weight, 3, x, 80000.0)
    with torch.no_grad():
        dense.layers[1].mlp.up_proj.weight[3] *= 1e-6
    report = fp16_readiness(dense, ids)
    assert report.verdict.where.op == "gate_proj"
    assert report.remedy.name == "float32 island" and report.remedy.islands.parts == (Part(1, "mlp"),)


# ---- the residual stream


@pytest.mark.parametrize("fields", [mini_dense(), mini()], ids=["dense", "moe"])
def test_a_stream_that_grows_past_the_limit_is_moved_by_a_power_of_two(fields, tmp_path):
    model = model_of(fields)
    ids = ids_of(model)
    grown_stream(model, ids, layer=2)
    report = fp16_readiness(model, ids, every=True)
    assert (report.verdict.where.layer, report.verdict.where.op) == (2, "residual")
    stream = report.activations[report.activations["kind"] == STREAM].dropna(subset="layer")
    assert set(stream["layer"][stream["fault"]]) == {2, 3}
    assert report.remedy.name == "stream scale, kept eps" and report.remedy.is_writable
    assert remedy(report, "stream in float32")["serves"]
    assert remedy(report, "stream in float32")["activation_bytes"] == 2 * 64

    scaled = report.remedied(model.state_dict())
    write_checkpoint(tmp_path / "fixed", scaled.config, scaled.tensors, dtype=None)
    with torch.inference_mode():
        logits = load(tmp_path / "fixed", dtype="float16")(ids).logits
    assert logit_difference(logits, report.logits) <= report.limit


def test_a_spike_beside_a_small_embedding_needs_the_eps_of_its_own_norms(dense):
    """The embedding is so small that eps counts: with the stream scaled, eps must be scaled exactly too."""
    ids = ids_of(dense)
    for layer in (1, 2):
        x = value_at(dense, ids, f"layers.0{layer}.gdn.norm")[7]
        add_row(dense.layers[layer].linear_attn.out_proj.weight, 11, x, 50000.0)
    report = fp16_readiness(dense, ids, every=True)
    assert report.verdict.where.tap == "layers.02.residual_mid" and report.verdict.where.token == 7
    assert report.activations["absmax"].max() == pytest.approx(100000, rel=1e-3)
    for eps in ("kept", "shared"):
        found = remedy(report, f"stream scale, {eps} eps")
        assert found["finite"] and not found["serves"] and found["same_experts"] > report.limit
    assert report.remedy.name == "stream scale, own eps" and not report.remedy.is_writable
    with pytest.raises(InputError, match="stream scale, own eps, which is no change of weights alone"):
        report.remedied(dense.state_dict())


def test_a_write_beyond_the_limit_needs_stream_and_mixer_in_float32_together(dense):
    ids = ids_of(dense)
    add_row(dense.layers[1].linear_attn.out_proj.weight, 11, value_at(dense, ids, "layers.01.gdn.norm")[7], 150000.0)
    report = fp16_readiness(dense, ids, every=True)
    assert not remedy(report, "stream in float32")["finite"]
    assert not remedy(report, "float32 island")["finite"]
    both = remedy(report, "stream in float32 + float32 island")
    assert both["serves"] and both["changes"].startswith("mixer of layer 1 in float32; residual stream")


# ---- weights


def test_a_weight_beyond_the_limit_is_named_and_scaled(dense):
    with torch.no_grad():
        dense.layers[1].mlp.up_proj.weight[3, 5] = 80000.0
        dense.layers[1].mlp.down_proj.weight[:, 3] *= 1e-6
        dense.layers[1].mlp.gate_proj.weight[3] *= 1e-3
    report = fp16_readiness(dense, ids_of(dense))
    assert (report.verdict.where.layer, report.verdict.where.op) == (1, "layers.1.mlp.up_proj.weight")
    row = report.weights.set_index("tensor").loc["layers.1.mlp.up_proj.weight"]
    assert (row["overflows"], row["absmax"]) == (1, 80000.0)
    assert report.remedy.name == "unit scale" and report.remedies.iloc[-1]["weights_overflow"] == 0


def test_a_key_weight_beyond_the_limit_needs_its_mixer_in_float32(dense):
    with torch.no_grad():
        dense.layers[3].self_attn.k_proj.weight[3, 5] = 80000.0
    report = fp16_readiness(dense, ids_of(dense))
    assert report.remedy.islands.parts == (Part(3, "mixer"),)
    assert report.remedies.iloc[-1]["extra_bytes"] == 2 * sum(
        tensor.numel() for name, tensor in dense.state_dict().items()
        if name.startswith(("layers.3.self_attn.", "layers.3.input_layernorm."))
    )  # fmt: skip


def test_weights_that_flush_are_raised(dense):
    with torch.no_grad():
        dense.layers[1].mlp.up_proj.weight *= 2.0**-20
        dense.layers[1].mlp.down_proj.weight *= 2.0**18
    report = fp16_readiness(dense, ids_of(dense))
    assert report.verdict.cause_id == UNDERFLOW
    assert report.verdict.where.op == "layers.1.mlp.up_proj.weight"
    row = report.weights.set_index("tensor").loc["layers.1.mlp.up_proj.weight"]
    assert row["flushes"] > 0.5 * row["values"]
    assert remedy(report, "none")["finite"] and not remedy(report, "none")["serves"]
    assert report.remedy.name == "unit scale" and report.remedies.iloc[-1]["weights_flush"] == 0


def test_a_head_beyond_the_limit_is_kept_in_float32():
    model = model_of(mini_dense(tie_word_embeddings=True))
    with torch.no_grad():
        model.norm.weight += 1e6
    report = fp16_readiness(model, ids_of(model))
    assert report.remedy.islands.parts == (HEAD_PART,)
    assert "lm_head no longer the embedding" in report.remedies.iloc[-1]["changes"]


# ---- where nothing helps, and where float16 is not the question


def test_no_remedy_helps_one_entry_of_a_billion(dense):
    """The stream that holds it flushes all the rest: float32 alone has that range."""
    ids = ids_of(dense)
    with torch.no_grad():
        dense.embed_tokens.weight[int(ids[0, 3]), 5] = 1e9
    report = fp16_readiness(dense, ids)
    assert report.verdict.is_fault and report.remedy is None and report.verdict.fix is None
    assert len(report.remedies) > 3 and not report.remedies["serves"].any()
    assert "none of" in report.verdict.verdict
    with pytest.raises(InputError, match="found none"):
        report.remedied(dense.state_dict())


def test_a_model_that_float32_cannot_run_is_no_question_of_float16(dense):
    with torch.no_grad():
        dense.layers[1].mlp.up_proj.weight *= 1e38
        dense.layers[1].mlp.gate_proj.weight *= 1e38
    report = fp16_readiness(dense, ids_of(dense))
    assert report.verdict.cause_id == NOT_FINITE_IN_FLOAT32 and report.verdict.where.layer == 1
    assert report.remedies.empty and report.remedy is None


def test_a_model_loaded_in_float16_is_refused(dense):
    with pytest.raises(InputError, match="found a model in float16"):
        fp16_readiness(dense.half(), ids_of(dense))


def test_an_overflow_that_saturates_is_told_and_no_fault(dense):
    """beta = sigmoid of an infinite number is 1, as it is of 90000."""
    ids = ids_of(dense)
    x = value_at(dense, ids, taps.full_name(0, taps.INPUT_NORM))[9]
    add_row(dense.layers[0].linear_attn.in_proj_b.weight, 2, x, 90000.0)
    report = fp16_readiness(dense, ids)
    assert not report.verdict.is_fault
    told = [line for line in report.verdict.evidence if "the logits do not feel it" in line]
    assert len(told) == 1
    assert told[0].startswith("layers.00.linear_attn.in_proj_b.output (op in_proj_b, token 9, unit 2)")


# ---- parts


def test_an_island_grows_by_what_its_rerun_shows(dense, monkeypatch):
    """Two MLPs overflow; of one that the float32 run did not foretell the rerun tells."""
    ids = ids_of(dense)
    for layer in (1, 2):
        x = value_at(dense, ids, taps.full_name(layer, taps.POST_NORM))[8]
        add_row(dense.layers[layer].mlp.gate_proj.weight, 3, x, 80000.0)
        with torch.no_grad():
            dense.layers[layer].mlp.up_proj.weight[3] *= 1e-2
    whole = readiness.Faults.of
    monkeypatch.setattr(
        readiness.Faults, "of", lambda *arguments: replace(found := whole(*arguments), names=found.names[:1])
    )
    report = fp16_readiness(dense, ids)
    assert list(report.remedies["remedy"]) == ["none", "float32 island", "float32 island"]
    assert list(report.remedies["serves"]) == [False, False, True]
    assert report.remedy.islands.parts == (Part(1, "mlp"), Part(2, "mlp"))


def test_scaled_units_leave_the_model_the_same_to_the_last_bit(dense):
    """Powers of two are exact: the float32 logits of the moved model equal those of the original."""
    ids = ids_of(dense)
    huge_hidden_unit(dense, ids, 2, 17, 5)
    report = fp16_readiness(dense, ids)
    tensors = dict(dense.state_dict())
    scaled = report.remedy.scaled(dense.config, tensors)
    assert set(scaled.tensors) == {"layers.2.mlp.up_proj.weight", "layers.2.mlp.down_proj.weight"}
    moved = build(scaled.config, {**tensors, **scaled.tensors}, Kernels(), dtype=torch.float32)
    with torch.inference_mode():
        assert torch.equal(moved(ids).logits, dense(ids).logits)


@pytest.mark.parametrize("fields", [mini(), mini_next(), mini_dense(tie_word_embeddings=True)],
                         ids=["moe", "next", "tied"])  # fmt: skip
def test_a_scaled_stream_with_eps_of_its_own_is_the_same_model(fields):
    model = model_of(fields)
    ids, tensors = ids_of(model), dict(model.state_dict())
    scaled = StreamPlan(4, "own").apply(Scaled(model.config, {}), tensors)
    moved = build(scaled.config, {**tensors, **scaled.tensors}, Kernels(), dtype=torch.float32, eps=scaled.eps)
    with torch.inference_mode():
        found, expected = moved(ids), model(ids)
        assert logit_difference(found.logits, expected.logits) < 1e-5
        if model.config.mtp_num_hidden_layers:
            heads = [m.mtp_logits(out.hidden, ids) for m, out in ((moved, found), (model, expected))]
            assert logit_difference(*heads) < 1e-5


@pytest.mark.parametrize("tied", [False, True])
def test_a_scaled_stream_with_one_smaller_eps_is_the_same_model_without_linear_layers(tied):
    """Query and key rows are scaled along, gate rows are not: every norm then has the eps that is exact for it."""
    model = model_of(mini_dense(full_attention_interval=1, layer_types=None, tie_word_embeddings=tied))
    ids, tensors = ids_of(model), dict(model.state_dict())
    scaled = StreamPlan(4, "shared").apply(Scaled(model.config, {}), tensors)
    assert scaled.config.rms_norm_eps == 1e-6 / 256 and not scaled.config.tie_word_embeddings
    assert scaled.extra_bytes == (2 * tensors["embed_tokens.weight"].numel() if tied else 0)
    moved = build(scaled.config, {**tensors, **scaled.tensors}, Kernels(), dtype=torch.float32)
    kept = StreamPlan(4, "kept").apply(Scaled(model.config, {}), tensors)
    worse = build(kept.config, {**tensors, **kept.tensors}, Kernels(), dtype=torch.float32)
    with torch.inference_mode():
        expected = model(ids).logits
        assert logit_difference(moved(ids).logits, expected) < 1e-5
        assert logit_difference(worse(ids).logits, expected) > 1e-3  # this stream is small beside eps


def test_rounding_to_half_bits_is_that_of_float16_inside_its_range():
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    x = x[x.abs() > 1e-3]
    assert torch.equal(round_to_half_bits(x), x.half().float())
    wide = round_to_half_bits(torch.tensor([1e9, -1e9, 1e-20, torch.inf, -torch.inf]))
    assert torch.allclose(wide, torch.tensor([1e9, -1e9, 1e-20, torch.inf, -torch.inf]), rtol=2**-11)
    generator = torch.Generator().manual_seed(0)
    many = round_to_half_bits(torch.full((20000,), 1.0 + 2**-12), generator)  # a quarter of a step
    assert set(many.tolist()) == {1.0, 1.0 + 2**-10} and abs(float((many > 1).float().mean()) - 0.25) < 0.02


def test_the_watch_counts_what_a_cast_makes_of_values():
    watch = Watch()
    x = torch.tensor([[65519.0, 65520.0, -1e6, 2.0**-25, 2.0**-24, 1e-5, 0.0, torch.nan]])
    found = watch.see("x", 0, "op", STREAM, x)
    half = x.half()
    assert found.overflows == int((half.isinf() & x.isfinite()).sum()) == 2
    assert found.flushes == int(((half == 0) & (x != 0)).sum()) == 1
    assert (found.subnormals, found.zeros, found.bad, found.absmax) == (2, 1, 1, 1e6)


def test_columns_and_the_plot(dense):
    ids = ids_of(dense)
    huge_hidden_unit(dense, ids, 2, 17, 5)
    report = fp16_readiness(dense, ids)
    assert tuple(report.remedies.columns) == REMEDY_COLUMNS
    assert tuple(report.weights.columns) == WEIGHT_COLUMNS
    assert tuple(report.activations.columns[: len(COLUMNS)]) == COLUMNS
    plate = half_precision_depth(report.activations)
    assert "layers.02.mlp.down_proj.input" in plate.caption and "overflow" in plate.caption
    assert "input of a last projection" in plate.svg()


# ---- the command


@pytest.fixture
def broken_checkpoint(tmp_path) -> Path:
    """H07 on disk in bfloat16, with a tokenizer beside it."""
    model = model_of(mini_dense(vocab_size=4096))
    huge_hidden_unit(model, IDS, 2, 17, 5)
    write_checkpoint(tmp_path / "broken", model.config, dict(model.state_dict()))
    for name in TOKENIZER_FILES:
        shutil.copy(DATA / name, tmp_path / "broken" / name)
    return tmp_path / "broken"


IDS = torch.arange(100, 124)[None]
ARGUMENT = ",".join(map(str, IDS[0].tolist()))


def test_the_command_writes_a_checkpoint_that_runs_in_float16(broken_checkpoint, tmp_path, capsys):
    fixed, table = tmp_path / "fixed", tmp_path / "readiness.json"
    arguments = ["readiness", str(broken_checkpoint), "--ids", ARGUMENT]
    assert cli.main([*arguments, "--json", str(table)]) == 1
    content = json.loads(table.read_text())
    assert content["where"]["tap"] == "layers.02.mlp.down_proj.input" and content["remedy"] == "unit scale"
    assert content["written"] is None and len(content["remedies"]) == 2
    assert "unit 17" in capsys.readouterr().out

    assert cli.main([*arguments, "--write", str(fixed)]) == 0
    printed = capsys.readouterr().out
    assert f"{fixed}: written, read back and run in float16: logits off by" in printed
    assert (fixed / "tokenizer.json").read_bytes() == (DATA / "tokenizer.json").read_bytes()
    again = load(fixed)
    assert again.dtype == torch.float16 and not again.narrowing
    with torch.inference_mode():
        wide = load(broken_checkpoint, dtype="float32")(IDS).logits
        assert not load(broken_checkpoint, dtype="float16")(IDS).logits.isfinite().all()
        assert logit_difference(again(IDS).logits, wide) < content["limit"]
    assert cli.main(["readiness", str(fixed), "--ids", ARGUMENT]) == 2  # float16 already
    assert "found a model in float16" in capsys.readouterr().err
    assert cli.main([*arguments, "--write", str(fixed)]) == 2  # nothing is replaced
    assert "expected a name that is free" in capsys.readouterr().err


def test_the_command_says_that_nothing_is_to_be_written(tmp_path, capsys):
    model = model_of(mini_dense())
    write_checkpoint(tmp_path / "healthy", model.config, dict(model.state_dict()))
    options = ["readiness", str(tmp_path / "healthy"), "--ids", "1,2,3,4,5", "--write", str(tmp_path / "fixed")]
    assert cli.main(options) == 0
    assert "not written, float16 serves as it is" in capsys.readouterr().out
    assert not (tmp_path / "fixed").exists()


def test_float16_runs_rehearse_a_card(dense):
    ids = ids_of(dense)
    huge_hidden_unit(dense, ids, 2, 17, 5)
    report = fp16_readiness(dense, ids, card=card_named("bi-v100"))
    assert report.verdict.where.tap == "layers.02.mlp.down_proj.input" and report.remedy.name == "unit scale"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
@pytest.mark.parametrize("fields", [mini(), mini_dense()], ids=["moe", "dense"])
def test_the_same_verdicts_on_a_gpu(fields):
    model = model_of(fields)
    ids = ids_of(model)
    assert not fp16_readiness(model.cuda(), ids).verdict.is_fault
    model = model.cpu()
    grown_stream(model, ids, layer=2)
    report = fp16_readiness(model.cuda(), ids)
    assert report.verdict.where.layer == 2 and report.remedy.name == "stream scale, kept eps"
    if not model.config.is_moe:
        model = model_of(fields)
        huge_hidden_unit(model, ids, 2, 17, 5)
        report = fp16_readiness(model.cuda(), ids, every=True)
        assert report.verdict.where.token == 5 and report.remedy.name == "unit scale"
