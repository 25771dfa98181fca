"""Interventions: every tap point takes a replacement, what is replaced is told, and nothing stays behind."""

import math

import pandas as pd
import pytest
import torch
from models import mini, mini_dense
from torch import Tensor

import workbench
from workbench import taps
from workbench.analysis.runs import using_policy
from workbench.config import ModelConfig
from workbench.errors import InputError
from workbench.kernels.agreement import logit_difference
from workbench.model import CausalLM
from workbench.tracing import FIELD_INTERVENTIONS
from workbench.tracing.observer import tap_names


def build(fields: dict, decay: str = "realistic") -> CausalLM:
    return CausalLM(ModelConfig.from_hf(fields)).init_weights(3, decay).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return build(mini(initializer_range=0.1))


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(0, 97, (1, 70), generator=torch.Generator().manual_seed(1))


def tilted(x: Tensor) -> Tensor:
    """Each column by another factor from 1 to 2: no norm after it can take that back."""
    return x * (1.0 + torch.arange(x.shape[-1]) / x.shape[-1]).to(x.dtype)


def everything(model: CausalLM, ids: Tensor) -> dict[str, Tensor]:
    """Logits of a prefill, of the pass after it, and of the prediction head."""
    out = model(ids)
    found = {"now": out.logits}
    if model.config.mtp_num_hidden_layers:
        found["draft"] = model.mtp_logits(out.hidden, ids)
    return found | {"next": model(ids[:, :1], cache=out.cache).logits}


def reaches(name: str) -> set[str]:
    """Which of `everything` must change with a tap point, when it is changed in the prefill alone."""
    if name.startswith("mtp."):
        return {"draft"}
    if name.endswith(taps.GDN_STATE):
        return {"next"}
    if name == taps.LOGITS:
        return {"now"}
    if name == taps.FINAL_NORM or name.startswith("layers.03."):  # no layer after it, or none with a memory but its own
        stored = name.endswith((taps.INPUT_NORM, taps.ATTN_K, taps.ATTN_V))
        return {"now", "draft", "next"} if stored else {"now", "draft"}
    return {"now", "draft", "next"}


@pytest.mark.parametrize("name", tap_names(build(mini())))
def test_a_replacement_at_every_tap_point_enters_the_computation(model, ids, name):
    plain = everything(model, ids)
    with workbench.intervene(model, {name: tilted}) as done:
        out = model(ids)
        changed = {"now": out.logits, "draft": model.mtp_logits(out.hidden, ids)}
    changed["next"] = model(ids[:, :1], cache=out.cache).logits
    differs = {what for what, logits in changed.items() if logit_difference(logits, plain[what]) > 1e-4}
    assert differs == reaches(name)
    assert done.table[["tap", "changed"]].values.tolist() == [[name, 1]]


@pytest.mark.parametrize("name", [n for n in tap_names(build(mini())) if not n.startswith("mtp.")])
def test_a_replacement_in_a_decode_step_enters_it_or_the_next(model, ids, name):
    """Points inside a chunk do not exist there, and the context says so."""
    chunked = (
        taps.GDN_CUMSUM, taps.GDN_DECAY, taps.GDN_KKT, taps.GDN_INVERSE, taps.GDN_U, taps.GDN_W, taps.GDN_INTRA,
        taps.GDN_INTER,
    )  # fmt: skip
    start = model(ids).cache
    plain = model(ids[:, :1], cache=start.clone())
    if name.endswith(chunked):
        with (
            pytest.raises(InputError, match="expected a forward pass that reaches"),
            workbench.intervene(model, {name: torch.zeros_like}),
        ):
            model(ids[:, :1], cache=start)
        return
    with workbench.intervene(model, {name: tilted}):
        found = model(ids[:, :1], cache=start)
    if name.endswith(taps.GDN_STATE):
        assert torch.equal(found.logits, plain.logits)
        plain, found = (model(ids[:, 1:2], cache=out.cache) for out in (plain, found))
    assert logit_difference(found.logits, plain.logits) > 1e-6


def test_a_dense_block_takes_a_replacement(ids):
    model = build(mini_dense())
    plain = model(ids).logits
    with workbench.intervene(model, {"*.moe.out": torch.zeros_like}):
        assert logit_difference(model(ids).logits, plain) > 1e-3


def test_a_zeroed_mixer_is_a_layer_without_one(model, ids):
    changes = FIELD_INTERVENTIONS["zero_linear_layer"].changes(1)
    with workbench.intervene(model, changes), workbench.trace(model, keep=["*.residual", "*.moe.out"]) as trace:
        model(ids)
    kept = trace.tensors
    expected = kept["layers.00.residual"] + kept["layers.01.moe.out"]
    torch.testing.assert_close(kept["layers.01.residual"], expected, rtol=0, atol=1e-6)


def test_a_clamp_that_binds_nowhere_changes_no_bit(model, ids):
    plain = model(ids).logits
    with workbench.intervene(model, {"layers.*.gdn.cumsum": lambda x: x.clamp(-1e9, 1e9)}) as done:
        assert torch.equal(model(ids).logits, plain)
    assert done.table["tensors"].tolist() == [1, 1, 1] and not done.table["changed"].any()
    assert str(done) == "layers.*.gdn.cumsum: reached 3 of 3 tap points, changed 0 of 3 tensors"


def test_clamped_cumsums_are_what_the_clamp_says(ids):
    model = build(mini(), "class_default")
    with workbench.trace(model, keep="*.gdn.cumsum") as plain:
        expected = model(ids).logits
    clamp = FIELD_INTERVENTIONS["clamp_cumsum"].changes(12.0)
    with workbench.intervene(model, clamp) as done, workbench.trace(model, keep="*.gdn.cumsum") as seen:
        found = model(ids).logits
    assert logit_difference(found, expected) > 1e-3
    before = plain.tensors["layers.00.gdn.cumsum"]  # what later layers have to clamp is changed by this one
    assert torch.equal(seen.tensors["layers.00.gdn.cumsum"], before.clamp(min=-12.0))
    assert done.table["share"][0] == pytest.approx((before < -12.0).double().mean().item())
    assert (done.table["share"] > 0.1).all() and all(x.min() == -12.0 for x in seen.tensors.values())


def test_replaced_nan_let_a_model_write_that_should_not(ids):
    model = build(mini(), "class_default")
    entry = FIELD_INTERVENTIONS["replace_nan"]
    with using_policy(model, entry.policy):
        assert not bool(model(ids).logits.isfinite().all())
        with workbench.intervene(model, entry.changes()) as done:
            out = model(ids)
            more = model(ids[:, :1], cache=out.cache).logits
    assert bool(out.logits.isfinite().all()) and bool(more.isfinite().all())
    assert all(bool(layer.state.isfinite().all()) for layer in out.cache.layers if hasattr(layer, "state"))
    assert set(done.table["changed"]) == {1}  # in the prefill; the recurrence of a step has no exponent to overflow


def test_every_named_intervention_says_where_it_comes_from_and_runs(model, ids):
    for entry in FIELD_INTERVENTIONS.values():
        assert entry.origin
        changes = entry.changes(0) if entry.changes.__code__.co_varnames[:1] == ("layer",) else entry.changes()
        with using_policy(model, entry.policy), workbench.intervene(model, changes):
            model(ids)


def test_traces_around_and_inside_record_the_changed_tensors(model, ids):
    name, double = "layers.01.gdn.v", {"*.01.gdn.v": lambda x: 2.0 * x}
    with workbench.trace(model, keep=name) as plain:
        model(ids)
    with (
        workbench.trace(model, keep=name) as around,
        workbench.intervene(model, {name: lambda x: x + 1.0}),
        workbench.trace(model, keep=name) as between,
        workbench.intervene(model, double),
        workbench.trace(model, keep=name) as inside,
    ):
        model(ids)
    assert model.tap is None
    for trace in (around, between, inside):  # the inner intervention first
        assert torch.equal(trace.tensors[name], 2.0 * plain.tensors[name] + 1.0)
    pd.testing.assert_frame_equal(around.table, inside.table)


def test_patterns_act_in_their_order_and_are_counted_apart(model, ids):
    changes = {"*.gdn.v": lambda x: x + 1.0, "layers.01.gdn.v": torch.zeros_like, "*.gdn.?": lambda x: x}
    with workbench.intervene(model, changes) as done, workbench.trace(model, keep="*.gdn.v") as trace:
        model(ids)
    assert not trace.tensors["layers.01.gdn.v"].any() and trace.tensors["layers.00.gdn.v"].any()
    table = done.table[done.table["tap"] == "layers.01.gdn.v"]
    assert table[["pattern", "changed"]].values.tolist() == [["*.gdn.v", 1], ["layers.01.gdn.v", 1], ["*.gdn.?", 0]]
    assert str(done).splitlines() == [
        "*.gdn.v: reached 3 of 3 tap points, changed 3 of 3 tensors",
        "layers.01.gdn.v: reached 1 of 1 tap points, changed 1 of 1 tensors",
        "*.gdn.?: reached 15 of 15 tap points, changed 0 of 15 tensors",  # q, k, v, u and w
    ]


def test_a_function_that_works_in_place_is_counted_and_reaches_nothing_else(model, ids):
    with workbench.intervene(model, {"layers.00.gdn.inverse": lambda x: x.zero_()}) as done:
        in_place = model(ids).logits
    with workbench.intervene(model, {"layers.00.gdn.inverse": torch.zeros_like}):
        assert torch.equal(model(ids).logits, in_place)
    assert done.table["changed"].tolist() == [1]


def test_layers_that_nobody_touches_have_no_tap(model, ids, monkeypatch):
    seen = []
    monkeypatch.setattr(type(model.layers[0]), "forward", lambda self, x, shared, cache, tap: seen.append(tap) or x)
    with (
        pytest.raises(InputError, match="reaches one of its tap points"),
        workbench.intervene(model, {"layers.01.*": torch.zeros_like}),
    ):
        model(ids)
    assert [tap is None for tap in seen] == [True, False, True, True]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda x: x.double(), r"torch.float64 with shape \(1, 70, 64\)"),
        (lambda x: x[:, :1], r"torch.float32 with shape \(1, 1, 64\)"),
        (lambda x: None, "found NoneType"),
    ],
)
def test_a_function_that_returns_another_kind_is_named(model, ids, change, found):
    with (
        pytest.raises(InputError, match=rf"pattern 'layers.02.residual' at layers.02.residual.*{found}"),
        workbench.intervene(model, {"layers.02.residual": change}),
    ):
        model(ids)
    assert model.tap is None


def test_a_pattern_that_can_match_nothing_is_refused_before_the_run(model):
    with (
        pytest.raises(InputError, match=r"'layers.\*.gdn.cumsun' matches no tap point"),
        workbench.intervene(model, {"layers.*.gdn.cumsun": torch.zeros_like}),
    ):
        raise AssertionError("the context must not be entered")
    assert model.tap is None


@pytest.mark.parametrize("changes", [["embed"], {"embed": None}, {"embed": 0.0}, {3: torch.zeros_like}])
def test_what_is_no_name_with_a_function_is_refused_before_the_run(model, changes):
    with pytest.raises(InputError, match="intervene: expected "), workbench.intervene(model, changes):
        raise AssertionError("the context must not be entered")
    assert model.tap is None


@pytest.mark.parametrize("limit", [-1.0, math.nan])
def test_a_clamp_without_room_is_refused(limit):
    with pytest.raises(InputError, match="clamp_cumsum: expected a limit of at least 0"):
        FIELD_INTERVENTIONS["clamp_cumsum"].changes(limit)


def test_an_error_inside_comes_out_as_it_is(model, ids):
    with pytest.raises(InputError, match="ids from 0"), workbench.intervene(model, {"logits": torch.zeros_like}):
        model(ids + 97)
    assert model.tap is None


def test_a_nan_that_stays_a_nan_is_no_change(model, ids):
    with workbench.intervene(
        model, {"embed": lambda x: torch.full_like(x, math.nan), "layers.00.residual": lambda x: x}
    ) as done:
        model(ids)
    assert done.table["changed"].tolist() == [1, 0]
