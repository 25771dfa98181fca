"""The exact and the sampled check for NaN as modes of a trace, and how often the sampled one misses."""

import math

import pytest
import torch
from models import mini

import workbench
from workbench import bench
from workbench.analysis import nan_checks, nans
from workbench.analysis.nan_checks import EXTENTS, POSITIONS, miss_rates, missed_in_pass, run_miss_rate
from workbench.config import ModelConfig
from workbench.errors import InputError
from workbench.kernels import Kernels
from workbench.model import CausalLM
from workbench.tracing.checks import SAMPLE_VALUES, check_exact, check_sampled, ends, is_finite
from workbench.tracing.statistics import describe

KINDS = ["frac_nan", "frac_pinf", "frac_ninf"]


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, 97, (1, 70), generator=torch.Generator().manual_seed(1))


def overflowing() -> CausalLM:
    return CausalLM(ModelConfig.from_hf(mini()), Kernels(None, "factored")).init_weights(3, "class_default").eval()


def test_the_sample_is_the_first_and_the_last_64_values():
    x = torch.arange(1000.0)
    assert SAMPLE_VALUES == 64
    expected = torch.cat([x[:64], x[-64:]])
    assert torch.equal(ends(x), expected) and torch.equal(ends(x.view(10, 100)), expected)
    assert torch.equal(ends(x.view(100, 10).T.contiguous().T), expected)  # row-major, whatever the strides
    assert torch.equal(ends(x[:128]), x[:128]) and torch.equal(ends(x[:5]), x[:5])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 63, 64, 500, 935, 936, 999])
def test_exact_finds_every_place_and_sampled_only_the_ends(dtype, bad, place):
    x = torch.ones(10, 100, dtype=dtype)
    assert is_finite(x) and check_exact(x).first_bad is None and check_sampled(x).first_bad is None
    x.view(-1)[place] = bad
    full, exact, sampled = describe(x), check_exact(x), check_sampled(x)
    assert not is_finite(x)
    assert exact.first_bad == full.first_bad == divmod(place, 100)
    assert [getattr(exact, k) for k in KINDS] == [getattr(full, k) for k in KINDS]
    in_sample = place < 64 or place >= 936
    assert sampled.first_bad == (full.first_bad if in_sample else None)
    assert sum(getattr(sampled, k) for k in KINDS) == (1 / 128 if in_sample else 0)
    assert math.isnan(exact.absmax) and math.isnan(sampled.rms)  # not measured


def test_infinities_of_both_signs_and_empty_tensors():
    assert not is_finite(torch.tensor([math.inf, -math.inf, math.nan, 1.0]))
    assert is_finite(torch.empty(0)) and check_sampled(torch.empty(0, 3)).first_bad is None


@pytest.mark.parametrize("values", [128, 129, 500])
@pytest.mark.parametrize("bad", [1, 5, 128])
def test_the_miss_rate_of_a_run_is_that_of_all_its_places(values, bad):
    missed, places = 0, values - bad + 1
    for start in range(places):
        x = torch.zeros(values)
        x[start : start + bad] = math.nan
        missed += check_sampled(x).first_bad is None
    assert run_miss_rate(values, bad) == missed / places
    with pytest.raises(InputError, match="run of 1 to"):
        run_miss_rate(values, values + 1)


def test_measured_miss_rates_by_extent_and_position():
    table = miss_rates((1, 130, 4, 64), trials=600)
    assert set(table["extent"]) == set(EXTENTS) and set(table["position"]) == set(POSITIONS)
    assert (table["exact"] == 0).all()
    rate = table.set_index(["extent", "position"])["sampled"]
    # A row of 64 values is the sample at each end: of 520 rows the first and the last are seen.
    assert rate["row", "anywhere"] == 518 / 520
    assert rate["token", "anywhere"] == 128 / 130
    # Two of four heads lie at no end, although each is a quarter of all values.
    assert rate["head", "anywhere"] == 0.5 and rate["head", "first"] == rate["head", "last"] == 0
    # Three of four heads stay unseen to the end; the first is seen if bad from the first token on.
    assert rate["rest", "anywhere"] == (3 * 130 - 1) / 520
    assert rate["chunk", "anywhere"] == 10 / 12
    assert rate["value", "middle"] == 1
    sizes = table.set_index(["extent", "position"])["values"]
    assert sizes["value", "first"] == 1 and sizes["head", "first"] == 130 * 64 and sizes["token", "last"] == 4 * 64
    with pytest.raises(InputError, match="shape"):
        miss_rates((1, 2, 3))


def test_a_trace_with_a_check_sees_what_all_statistics_see(ids):
    model = overflowing()
    tables = {}
    with torch.no_grad():
        for check in ("statistics", "exact", "sampled"):
            with workbench.trace(model, check=check) as trace:
                model(ids)
            tables[check] = trace.table
    full, exact, sampled = tables.values()
    assert full[KINDS].equals(exact[KINDS]) and full["first_bad"].equals(exact["first_bad"])
    assert exact["absmax"].isna().all() and full["absmax"].notna().any()
    found = missed_in_pass(exact, sampled)
    assert len(found) == (full[KINDS].sum(axis=1) > 0).sum() > 0
    assert found["missed"].any() and not found["missed"].all()
    assert (sampled["first_bad"].notna() <= exact["first_bad"].notna()).all()  # no false alarm
    with pytest.raises(InputError, match="same passes"):
        missed_in_pass(exact, sampled.iloc[1:])


def test_an_unknown_check_is_refused():
    with pytest.raises(InputError, match=r"statistics, exact, sampled.*'fast'"), workbench.trace(
        overflowing(), check="fast"
    ):
        pass


def traced(model: CausalLM, ids: torch.Tensor) -> tuple:
    tables = []
    with torch.no_grad():
        for check in ("exact", "sampled"):
            with workbench.trace(model, check=check) as trace:
                model(ids)
            tables.append(trace.table)
    return tuple(tables)


def test_the_map_says_of_each_tap_point_what_the_sample_makes_of_it(ids):
    exact, sampled = traced(overflowing(), ids)
    words = nan_checks.sampled_map(exact, sampled)
    assert words.shape == nans.share_map(exact).shape
    found = missed_in_pass(exact, sampled)
    by_word = words.stack().value_counts()
    assert by_word["missed"] == found["missed"].sum() and set(by_word.index) == {"finite", "seen", "missed"}
    inside = found["tap"].str.startswith("layers.")
    assert by_word["seen"] == (inside & ~found["missed"]).sum()
    assert words.loc[0, "gdn.q"] == "finite" and words.loc[0, "attn.q"] is None
    first = found.iloc[0]
    assert words.loc[0, "gdn.decay"] == ("missed" if first["missed"] else "seen")


def test_the_reading_names_what_is_blamed_and_claims_no_miss_where_there_is_none(ids):
    exact, sampled = traced(overflowing(), ids)
    found = missed_in_pass(exact, sampled)
    reading = nan_checks.missed_reading(found, len(exact))
    assert f"{len(found)} of {len(exact)} tensors" in reading and f"of {found['missed'].sum()} of them" in reading
    hidden = found.assign(missed=[True, *[False] * (len(found) - 1)])
    blamed = hidden.iloc[1]["tap"]
    reading = nan_checks.missed_reading(hidden, 9)
    assert f"born at layers.00.gdn.decay (gated_delta_rule), it blames {blamed} (" in reading
    assert "it blames nothing" in nan_checks.missed_reading(found.assign(missed=True), 9)
    assert "too large to miss" in nan_checks.missed_reading(found.assign(missed=False), 9)
    assert "nothing to miss" in nan_checks.missed_reading(found.iloc[:0], 9)


def test_the_rates_read_as_a_table_with_the_recorded_cost():
    shape = (1, 130, 4, 64)
    rates = miss_rates(shape, trials=20)
    table = nan_checks.rate_table(rates)
    assert list(table.columns) == ["what", "share", *POSITIONS] == list(nan_checks.RATE_HEADINGS)
    assert table["what"].tolist() == [extent.what for extent in EXTENTS.values()]
    assert table.iloc[-1][["share", "first", "anywhere"]].tolist() == [0.25, 0.0, 0.5]
    reading = nan_checks.rate_reading(rates, shape)
    assert "1 x 130 x 4 x 64" in reading and "missed at 50 %" in reading and "the exact check misses none" in reading
    cost = nan_checks.cost_reading(bench.recorded_result("nan_checks"))
    assert "the exact check adds" in cost and "thread, benchmarks/nan_checks.py" in cost
    assert "no result is installed here" in nan_checks.cost_reading(None)
