"""Tests of workbench.tracing: statistics are right in every dtype, and watching changes nothing."""

import math

import pandas as pd
import pytest
import torch
from models import mini

import workbench
from workbench import taps
from workbench.config import ModelConfig
from workbench.errors import InputError
from workbench.kernels import Kernels
from workbench.model import CausalLM
from workbench.tracing import COLUMNS, describe, exponent_histogram
from workbench.tracing.observer import Observer, Trace, tap_names

INF, NAN = math.inf, math.nan


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return CausalLM(ModelConfig.from_hf(mini())).init_weights(3).eval()


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, 97, (1, 70), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_statistics_agree_with_their_definition_value_by_value(dtype):
    limits = torch.finfo(dtype)
    x = torch.tensor([[0.0, -0.0, 1.5, -3.0], [limits.max, -limits.max, limits.tiny / 2, 0.25]], dtype=dtype)
    s = describe(x)
    values = [float(v) for v in x.double().flatten()]
    assert (s.min, s.max, s.absmax) == (-limits.max, limits.max, limits.max)
    assert s.mean == pytest.approx(math.fsum(v / 8 for v in values), abs=limits.max * 1e-15)
    expected_rms = limits.max * math.sqrt(math.fsum((v / limits.max) ** 2 for v in values) / 8)
    assert s.rms == pytest.approx(expected_rms, rel=1e-14)
    assert (s.frac_zero, s.frac_subnormal, s.frac_near_limit) == (2 / 8, 1 / 8, 2 / 8)
    assert (s.frac_nan, s.frac_pinf, s.frac_ninf, s.first_bad) == (0.0, 0.0, 0.0, None)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_values_that_are_not_finite_are_counted_by_kind_and_kept_out_of_the_range(dtype):
    x = torch.tensor([[2.0, 4.0, INF], [-INF, NAN, NAN]], dtype=dtype)
    s = describe(x)
    assert (s.min, s.max, s.absmax, s.mean) == (2.0, 4.0, 4.0, 3.0)
    assert s.rms == pytest.approx(math.sqrt(10.0), rel=1e-14)
    assert (s.frac_nan, s.frac_pinf, s.frac_ninf) == (2 / 6, 1 / 6, 1 / 6)
    assert s.first_bad == (0, 2)
    assert s.frac_near_limit == 0.0  # infinity is beyond the limit, not near it


def test_half_precision_sums_do_not_overflow():
    s = describe(torch.full((5000,), 60000.0, dtype=torch.float16))
    assert (s.mean, s.rms) == pytest.approx((60000.0, 60000.0))


def test_double_precision_squares_do_not_overflow_or_vanish():
    assert describe(torch.full((3,), 1e300, dtype=torch.float64)).rms == pytest.approx(1e300)
    assert describe(torch.full((3,), 1e-300, dtype=torch.float64)).rms == pytest.approx(1e-300)


def test_moments_of_many_values_are_summed_block_by_block(monkeypatch):
    x = torch.randn(1001, generator=torch.Generator().manual_seed(0))
    whole = describe(x)
    monkeypatch.setattr("workbench.tracing.statistics.BLOCK_VALUES", 64)
    assert describe(x).mean == pytest.approx(whole.mean, abs=1e-12)
    assert describe(x).rms == pytest.approx(whole.rms, rel=1e-12)


def test_all_nan_and_empty_tensors_have_no_range():
    bad = describe(torch.full((2, 3), NAN))
    assert math.isnan(bad.min) and math.isnan(bad.mean) and bad.frac_nan == 1.0 and bad.first_bad == (0, 0)
    empty = describe(torch.empty(0, 3))
    assert math.isnan(empty.absmax) and math.isnan(empty.rms)
    assert (empty.frac_nan, empty.frac_zero, empty.first_bad) == (0.0, 0.0, None)


def test_a_scalar_and_a_transposed_tensor_keep_their_own_index():
    assert describe(torch.tensor(NAN)).first_bad == ()
    x = torch.zeros(2, 3)
    x[1, 0] = NAN
    assert describe(x.T).first_bad == (0, 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2,
                                   torch.float8_e4m3fn])  # fmt: skip
def test_exponents_are_counted_as_math_takes_them(dtype, monkeypatch):
    monkeypatch.setattr("workbench.tracing.statistics.BLOCK_VALUES", 7)
    limits = torch.finfo(dtype)
    x = torch.randn(200, generator=torch.Generator().manual_seed(0), dtype=torch.float64).mul(3).exp()
    x = x.clamp(max=limits.max).to(dtype)
    special = [0.0, -0.0, limits.max, -limits.max, limits.smallest_normal, -limits.smallest_normal / 2, 1.0, -1.99, NAN]
    special += [] if dtype == torch.float8_e4m3fn else [INF, -INF]
    x = torch.cat([x.double(), torch.tensor(special, dtype=torch.float64)]).to(dtype).view(-1, 1).expand(-1, 2)
    smallest = math.frexp(limits.smallest_normal)[1] - 1
    expected: dict[int, int] = {}
    for value in x.double().flatten().tolist():
        if value and math.isfinite(value):
            exponent = max(math.frexp(value)[1] - 1, smallest - 1)
            expected[exponent] = expected.get(exponent, 0) + 1
    found = exponent_histogram(x)
    assert found == expected and list(found) == sorted(found) and smallest - 1 in found
    assert exponent_histogram(x[:0]) == {}


def test_a_histogram_is_a_column_after_those_of_the_contract(model, ids):
    with workbench.trace(model, histogram=True) as trace:
        model(ids)
    assert tuple(trace.table.columns) == (*COLUMNS, "exponents")
    for row in trace.table.itertuples():
        finite = 1 - row.frac_nan - row.frac_pinf - row.frac_ninf - row.frac_zero
        assert sum(row.exponents.values()) == round(finite * math.prod(row.shape)), row.tap
        assert max(row.exponents, default=0) == (math.frexp(row.absmax)[1] - 1 if row.absmax else 0), row.tap
    with pytest.raises(InputError, match=r"exponent histogram: expected one of .*int64"):
        exponent_histogram(torch.arange(3))


def test_integers_are_refused():
    with pytest.raises(InputError, match=r"floating-point.*int64"):
        describe(torch.arange(3))


def test_table_has_the_contract_columns_and_every_tap_point_in_order(model, ids):
    with workbench.trace(model) as trace:
        model(ids)
    assert tuple(trace.table.columns) == COLUMNS == (
        "layer", "tap", "step", "rank", "dtype", "shape", "min", "max", "absmax", "mean", "rms", "frac_nan",
        "frac_pinf", "frac_ninf", "frac_zero", "frac_subnormal", "frac_near_limit", "first_bad",
    )  # fmt: skip
    expected = [name for name in tap_names(model) if not name.startswith("mtp.")]
    assert sorted(trace.table["tap"]) == sorted(expected)
    assert trace.table["tap"].iloc[0] == taps.EMBED and trace.table["tap"].iloc[-1] == taps.LOGITS
    layer_of = dict(zip(trace.table["tap"], trace.table["layer"], strict=True))
    assert layer_of["layers.03.attn.scores"] == 3 and pd.isna(layer_of["logits"])
    cumsum = trace.table.set_index("tap").loc["layers.00.gdn.cumsum"]
    assert (cumsum["shape"], cumsum["dtype"]) == ((2, 4, 64), "float64")
    assert (trace.table[["frac_nan", "frac_pinf", "frac_ninf"]] == 0).all(axis=None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("policy", ["safe", "factored"])
def test_tracing_changes_no_bit_of_the_output(ids, dtype, policy):
    model = CausalLM(ModelConfig.from_hf(mini()), Kernels(None, policy)).init_weights(3, "class_default")
    model = model.to(dtype).eval()
    plain = model(ids)
    with workbench.trace(model, keep="*"):
        traced = model(ids)
    assert plain.logits.isnan().any() == (policy == "factored")  # the comparison below covers NaN as well
    for a, b in ((plain.logits, traced.logits), (plain.hidden, traced.hidden)):
        bits = {2: torch.int16, 4: torch.int32}[a.dtype.itemsize]
        assert torch.equal(a.view(bits), b.view(bits))


def test_decode_steps_are_counted_and_every_step_is_kept(model, ids):
    with workbench.trace(model, keep=["layers.00.gdn.state"]) as trace:
        output = model.generate(ids, max_new_tokens=3)
    assert trace.steps == 3 and len(output.sequences[0]) == 3
    assert sorted(set(trace.table["step"])) == [0, 1, 2]
    history = trace.history["layers.00.gdn.state"]
    assert [step for step, _ in history] == [0, 1, 2]
    assert trace.tensors["layers.00.gdn.state"] is history[-1][1]


def test_the_prediction_head_belongs_to_the_pass_before_it(model, ids):
    with workbench.trace(model) as trace:
        out = model(ids)
        model.mtp_logits(out.hidden, ids)
    mtp = trace.table[trace.table["tap"].str.startswith("mtp.")]
    assert len(mtp) > 5 and set(mtp["step"]) == {0} and mtp["layer"].isna().all()


def test_packed_sequences_have_a_row_for_each_call_of_a_tap_point(model, ids):
    with workbench.trace(model) as trace:
        model(ids, cu_seqlens=torch.tensor([0, 30, 70]))
    assert (trace.table["tap"] == "layers.03.attn.scores").sum() == 2


def test_kept_tensors_are_copies_that_later_work_cannot_change(model, ids):
    with workbench.trace(model, keep=["*.gdn.q", "logits"]) as trace:
        logits = model(ids).logits
    assert list(trace.tensors) == [*(f"layers.0{i}.gdn.q" for i in range(3)), "logits"]
    logits.zero_()
    assert trace.tensors["logits"].abs().max() > 0
    with pytest.raises(InputError, match=r"'layers.00.gdn.k' was not kept"):
        trace.tensors["layers.00.gdn.k"]


def test_kept_tensors_hold_no_graph(model, ids):
    with torch.enable_grad(), workbench.trace(model, keep="logits") as trace:
        assert model(ids).logits.requires_grad
    assert not trace.tensors["logits"].requires_grad


def test_pattern_that_can_match_nothing_is_refused_before_the_run(model):
    refusal = pytest.raises(InputError, match=r"'\*.gdn.cumsun' matches no tap point")
    with refusal, workbench.trace(model, ["*.gdn.cumsun"]):
        raise AssertionError("the context must not be entered")
    assert model.tap is None


def test_the_tap_is_put_back_after_an_error(model, ids):
    with pytest.raises(InputError, match="ids from 0"), workbench.trace(model) as trace:
        model(ids + 97)
    assert model.tap is None and trace.table.empty and tuple(trace.table.columns) == COLUMNS


class Scaling:
    """An intervention: everything at one tap point is multiplied."""

    def __init__(self, name: str, factor: float):
        self.name, self.factor = name, factor

    def __call__(self, name, tensor):
        return tensor * self.factor if name == self.name else tensor

    def scope(self, prefix):
        return Scaling(self.name.removeprefix(prefix), self.factor) if self.name.startswith(prefix) else self


def test_a_trace_records_what_an_intervention_before_it_returns(model, ids):
    model.tap = scaling = Scaling("layers.01.gdn.v", 0.0)
    try:
        with workbench.trace(model, keep="*.gdn.v") as trace:
            changed = model(ids).logits
        assert model.tap is scaling
    finally:
        model.tap = None
    assert trace.tensors["layers.01.gdn.v"].abs().max() == 0.0
    assert trace.tensors["layers.00.gdn.v"].abs().max() > 0.0
    assert not torch.equal(changed, model(ids).logits)


def test_nested_traces_record_the_same_and_leave_in_order(model, ids):
    with workbench.trace(model) as outer, workbench.trace(model) as inner:
        model(ids)
    pd.testing.assert_frame_equal(outer.table, inner.table)
    assert model.tap is None


def test_a_tap_left_behind_inside_the_context_is_an_error(model):
    with pytest.raises(InputError, match="reverse order"), workbench.trace(model):
        model.tap = Scaling("logits", 1.0)
    assert model.tap is None


class Kernel:
    """An op that shows a stage by its ranges where the observer takes them."""

    def __init__(self, stage: torch.Tensor):
        self.stage = stage

    def __call__(self, tap: taps.Tap) -> None:
        if not taps.takes_ranges(tap):
            tap(taps.GDN_KKT, self.stage)
            return
        finite = self.stage.isfinite()
        axes = tuple(range(2, self.stage.dim()))
        values = [torch.where(finite, self.stage, INF).amin(axes), torch.where(finite, self.stage, -INF).amax(axes)]
        values += [bad.sum(axes) for bad in (self.stage.isnan(), self.stage == INF, self.stage == -INF)]
        tap.see_ranges(taps.GDN_KKT, taps.Ranges(torch.stack(values, -1).float(), self.stage.shape, self.stage.dtype))


@pytest.mark.parametrize("bad", [[], [NAN], [INF, -INF], [NAN] * 96])
def test_ranges_of_a_stage_are_those_of_its_tensor(bad):
    stage = torch.randn(3, 2, 4, 4, generator=torch.Generator().manual_seed(5))
    stage.view(-1)[: len(bad)] = torch.tensor(bad)
    rows = []
    for takes in (True, False):
        seen = Trace(check="ranges")
        observer = Observer(seen, None)
        assert taps.takes_ranges(observer)
        observer.takes_ranges = takes
        Kernel(stage)(observer)
        rows.append(seen.table.drop(columns="first_bad"))
    pd.testing.assert_frame_equal(*rows)
    assert rows[0]["absmax"].notna().item() == (len(bad) < 96)


def test_whoever_wants_more_than_ranges_is_shown_tensors():
    assert not taps.takes_ranges(None) and not taps.takes_ranges(Observer(Trace(), None))
    assert not taps.takes_ranges(Observer(Trace(["*"], check="ranges"), None))
    inner = Observer(Trace(check="ranges"), None)
    assert taps.takes_ranges(Observer(Trace(check="ranges"), inner))
    assert not taps.takes_ranges(Observer(Trace(check="ranges"), Observer(Trace(), None)))
