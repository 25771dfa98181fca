"""The decode step of the gated delta rule in Triton: the recurrence, and the whole region in one launch."""

import math

import pytest
import torch
from models import mini
from triton_cases import DEVICE, triton_device  # noqa: F401

from workbench.config import ModelConfig
from workbench.errors import BackendError, InputError
from workbench.kernels import Kernels
from workbench.kernels.conformance import FAILED, PASSED, conform
from workbench.kernels.gated_delta_rule import spec as rule
from workbench.kernels.gated_delta_rule import torch_recurrent, triton_recurrent
from workbench.kernels.gated_delta_rule.triton_recurrent import joined
from workbench.kernels.gdn_decode import spec, torch_composed, triton_packed
from workbench.model import CausalLM
from workbench.numerics import Clamp, NumericsPolicy
from workbench.tracing import trace

pytestmark = pytest.mark.usefixtures("triton_device")
SAFE = NumericsPolicy()
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16

#: Of the cases of the contract those whose tokens an interpreter gets through; a GPU has them all.
FEW_TOKENS = (
    "random_gates, 1 token", "random_gates, 7 tokens", "mixed_decay, 2 tokens", "single channels, from zero",
    "keys wider than values, from a state", "packed, single tokens, from zero",
    "packed, an empty one and a token, from a state", "one token of three sequences, from a state",
    "heads of 128, one token, from a state",
)  # fmt: skip


def on_device(arguments):
    return {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}


def words_of(x):
    """Bits of the largest x and the largest -x, as flags have them."""
    x = x.float().cpu()
    return (torch.stack([x.amax(), (-x).amax()]).clamp(min=0.0).view(torch.int32) & 0x7FFFFFFF).tolist()


# ---- the contracts


def test_the_recurrence_keeps_the_contract():
    cases = None if DEVICE == "cuda" else FEW_TOKENS
    found = conform("gated_delta_rule", "triton_recurrent", device=DEVICE, dtypes=[F32, BF16], cases=cases)
    assert found.outcome == PASSED, found.reason


def test_the_packed_step_keeps_the_contract():
    found = conform("gdn_decode", "triton_packed", device=DEVICE, dtypes=[F32, BF16, F16])
    assert found.outcome == PASSED, found.reason
    assert not [row for row in found.rows if row.outcome == FAILED]


def test_what_cannot_run_is_refused_with_the_reason(monkeypatch):
    narrow = on_device(spec.example(dtype=F32))
    for policy, reason in (
        (NumericsPolicy(state_dtype="float64"), "keeps a state of float32; the policy asks for float64"),
        (NumericsPolicy(nan_to_num=True), "between recurrence and norm; use torch_composed"),
    ):
        with pytest.raises(BackendError, match=reason):
            Kernels({"gdn_decode": "triton_packed"}, policy).gdn_decode(**narrow)
    with pytest.raises(BackendError, match="no backward pass"):
        Kernels({"gdn_decode": "triton_packed"}).gdn_decode(**{**narrow, "z": narrow["z"].clone().requires_grad_()})
    large = on_device(spec.example(batch=1, key_heads=1, value_heads=1, key_dim=300, value_dim=128))
    with pytest.raises(BackendError, match="32768 elements, found K 300, W 128"):
        Kernels({"gdn_decode": "triton_packed"}).gdn_decode(**large)
    if DEVICE == "cpu":
        monkeypatch.delenv("TRITON_INTERPRET")
        with pytest.raises(BackendError, match="TRITON_INTERPRET=1"):
            Kernels({"gdn_decode": "triton_packed"}).gdn_decode(**narrow)


# ---- policies

CLAMPS = {
    "raw_gate": Clamp(site="raw_gate", lo=-0.3, hi=-0.1),
    "decode_gate": Clamp(site="decode_gate", phase="decode", lo=-0.3, hi=0.0),
    "state": Clamp(site="state", lo=-0.4, hi=0.7),
    "A_log": Clamp(site="A_log", lo=-1.0, hi=0.5),
}


@pytest.mark.parametrize("sites", [("raw_gate",), ("decode_gate",), ("state",), ("raw_gate", "decode_gate", "state")])
@pytest.mark.parametrize("tokens", [1, 3])
def test_the_recurrence_clamps_as_torch_does(sites, tokens):
    policy = NumericsPolicy(clamps=tuple(CLAMPS[site] for site in sites))
    inputs = on_device(rule.example(batch=2, tokens=tokens, seed=4))
    inputs["initial_state"] = torch.randn(2, 4, 16, 24, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    found, expected = (backend.run(**inputs, policy=policy) for backend in (triton_recurrent, torch_recurrent))
    free = torch_recurrent.run(**inputs, policy=SAFE)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert tokens > 1 or not torch.allclose(expected[1], free[1])


@pytest.mark.parametrize("sites", [(site,) for site in CLAMPS] + [tuple(CLAMPS)])
def test_the_packed_step_clamps_as_torch_does(sites):
    policy = NumericsPolicy(clamps=tuple(CLAMPS[site] for site in sites))
    inputs = on_device(spec.example(seed=5))
    found, expected = (backend.run(**inputs, policy=policy) for backend in (triton_packed, torch_composed))
    free = torch_composed.run(**inputs, policy=SAFE)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-6)
    assert not torch.allclose(expected[2], free[2])


def test_two_clamps_of_a_gate_are_one():
    x = torch.linspace(-3, 0, 61)
    pairs = [((-2, -1), (-1.5, -0.5)), ((-2, -1), (-0.5, 0)), ((-1, -0.2), (-3, -2)), ((-1, 0), (-2, 0))]
    for first, second in pairs:
        a, b = (
            Clamp(site=site, phase="decode", lo=lo, hi=hi)
            for site, (lo, hi) in (("raw_gate", first), ("decode_gate", second))
        )
        one = joined(a, None, b)
        assert torch.equal(x.clamp(*first).clamp(*second), x.clamp(one.lo, one.hi))
    assert joined(None, None) is None


def test_nan_passes_a_clamp_and_goes_where_the_policy_says():
    inputs = on_device(rule.example(batch=1, tokens=1, seed=4))
    inputs["log_decay"][0, 0, 2] = math.nan
    clamps = tuple(CLAMPS[site] for site in ("raw_gate", "state"))
    inputs["initial_state"] = torch.ones(1, 4, 16, 24, device=DEVICE)
    out, state = triton_recurrent.run(**inputs, policy=NumericsPolicy(clamps=clamps))
    assert state.isnan().flatten(2).any(-1).tolist() == [[False, False, True, False]]
    assert out[0, 0].isnan().all(-1).tolist() == [False, False, True, False]
    out, state = triton_recurrent.run(**inputs, policy=NumericsPolicy(clamps=clamps, nan_to_num=True))
    assert bool(torch.isfinite(out).all() and torch.isfinite(state).all()) and bool((state[0, 2] == 0).all())


# ---- in place, and pools


@pytest.mark.parametrize(
    "sizes", [{}, {"key_heads": 3, "value_heads": 3}, {"value_heads": 6}, {"width": 1}, {"width": 5}]
)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_in_place_is_the_same_to_the_last_bit(sizes, dtype):
    inputs = on_device(spec.example(batch=3, seed=6, dtype=dtype, **sizes))
    expected = triton_packed.run(**inputs, policy=SAFE)
    kept = {name: inputs[name].clone() for name in ("window", "state")}
    assert all(torch.equal(inputs[name], kept[name]) for name in kept)
    for _ in range(2):  # the counts are zero again
        for name, x in kept.items():
            inputs[name].copy_(x)
        out, window, state = triton_packed.run(**inputs, policy=SAFE, in_place=True)
        assert window is inputs["window"] and state is inputs["state"]
        for a, b in zip((out, window, state), expected, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("backend", [triton_packed, torch_composed])
def test_slots_choose_rows_of_a_pool(backend):
    inputs = on_device(spec.example(batch=4, rows=7, seed=7))
    pool = {name: inputs[name].clone() for name in ("window", "state")}
    slots = torch.tensor([5, -1, 0, 3], dtype=torch.int32, device=DEVICE)
    used, given = [5, 0, 3], [0, 2, 3]
    rows = {name: inputs[name][given] for name in ("qkv", "z", "raw_beta", "raw_gate")}
    expected = torch_composed.run(**{**inputs, **rows, **{n: x[used] for n, x in pool.items()}}, policy=SAFE)
    out, window, state = backend.run(**inputs, policy=SAFE, slots=slots, in_place=True)
    for found, wanted in zip((out[given], window[used], state[used]), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=2e-6)
    assert not out[1].any()
    others = [row for row in range(7) if row not in used]
    assert torch.equal(window[others], pool["window"][others]) and torch.equal(state[others], pool["state"][others])


@pytest.mark.parametrize("backend", ["reference", "torch_composed", "triton_packed"])
def test_places_that_do_not_fit_are_named(backend):
    kernels = Kernels({"gdn_decode": backend})
    inputs = on_device(spec.example(batch=2))
    slots = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
    with pytest.raises(InputError, match="slots: expected in_place=True"):
        kernels.gdn_decode(**inputs, slots=slots)
    with pytest.raises(InputError, match="slots: expected one axis of int32"):
        kernels.gdn_decode(**inputs, slots=slots.long(), in_place=True)
    turned = {**inputs, "state": inputs["state"].transpose(2, 3).contiguous().transpose(2, 3)}
    with pytest.raises(InputError, match="state: expected a row-major tensor to update in place"):
        kernels.gdn_decode(**turned, in_place=True)


# ---- flags


@pytest.mark.parametrize("bad", [None, math.nan, -math.nan, math.inf])
def test_flags_are_the_words_of_what_was_written(bad):
    inputs = on_device(rule.example(batch=2, tokens=1, seed=4))
    if bad is not None:
        inputs["v"][1, 0, 3, 5] = bad
    flags = torch.full((2, 2), -1, dtype=torch.int32, device=DEVICE)
    out, state = triton_recurrent.run(**inputs, policy=SAFE, flags=flags)
    for raised, x in zip(flags.tolist(), (state, out), strict=True):
        assert [min(word, 0x7F800001) for word in raised] == [min(word, 0x7F800001) for word in words_of(x)]
    decode = on_device(spec.example(batch=2, seed=4, dtype=BF16))
    if bad is not None:
        decode["z"][1, 3, 5] = bad
    flags = torch.full((3, 2), -1, dtype=torch.int32, device=DEVICE)
    out, _, state = triton_packed.run(**decode, policy=SAFE, flags=flags)
    for row, x in ((0, state), (2, out)):
        assert [min(word, 0x7F800001) for word in flags[row].tolist()] == [min(w, 0x7F800001) for w in words_of(x)]
    flags.fill_(0x7F800000)  # nothing is lowered
    triton_packed.run(**decode, policy=SAFE, flags=flags)
    assert bool((flags >= 0x7F800000).all())


# ---- in the model


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = CausalLM(ModelConfig.from_hf(mini(mtp_num_hidden_layers=0))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name and "A_log" not in name and "dt_bias" not in name:
                parameter.normal_(std=0.05)
    return model.to(DEVICE)


def decoded(model, kernels, steps=3):
    """Logits of a prompt of 5 tokens and `steps` more, two sequences."""
    ids = torch.randint(0, 97, (2, 5 + steps), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    model.kernels, before = kernels, model.kernels
    try:
        with torch.inference_mode():
            out = model(ids[:, :5], use_cache=True)
            logits, cache = [out.logits[:, -1:]], out.cache
            for step in range(steps):
                out = model(ids[:, 5 + step : 6 + step], cache=cache)
                logits.append(out.logits)
    finally:
        model.kernels = before
    return torch.cat(logits, 1), cache


@pytest.mark.parametrize("backend", ["triton_packed", "torch_composed"])
def test_a_model_decodes_with_it_where_it_is_named(model, backend):
    expected, cache = decoded(model, Kernels())
    kernels = Kernels(f"gdn_decode={backend}")
    found, other = decoded(model, kernels)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for a, b in zip(other.layers, cache.layers, strict=True):
        if hasattr(a, "state"):
            torch.testing.assert_close(a.state, b.state, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(a.window, b.window, rtol=1e-4, atol=1e-5)
    rows = {(row.op, row.tokens): row for row in kernels.attestation()}
    assert rows["gdn_decode", "1"].backend == backend and rows["gdn_decode", "1"].calls == 9
    assert not {("causal_conv", "1"), ("gated_delta_rule", "1"), ("gated_rms_norm", "1")} & set(rows)
    assert ("gated_delta_rule", "2 and more") in rows


def test_an_observer_sees_the_parts(model):
    kernels = Kernels("gdn_decode=torch_composed")
    model.kernels, before = kernels, model.kernels
    try:
        with torch.inference_mode(), trace(model) as seen:
            cache = model(torch.tensor([[1, 2, 3]], device=DEVICE), use_cache=True).cache
            model(torch.tensor([[4]], device=DEVICE), cache=cache)
    finally:
        model.kernels = before
    assert seen.table["tap"].str.endswith("gdn.state").any()
    assert ("gdn_decode", "1") not in {(row.op, row.tokens) for row in kernels.attestation()}


def test_a_name_for_all_ops_and_one_for_a_part_leave_the_parts_to_it(model):
    for kernels in (Kernels("reference"), Kernels("gated_delta_rule=torch_recurrent"), Kernels()):
        decoded(model, kernels, steps=1)
        assert "gdn_decode" not in {row.op for row in kernels.attestation()}


def test_flags_of_a_decode_step_are_raised_by_the_one_launch(model):
    model.kernels, before = Kernels("gdn_decode=triton_packed"), model.kernels
    try:
        with torch.inference_mode(), trace(model, check="flags") as seen:
            cache = model(torch.tensor([[1, 2, 3]], device=DEVICE), use_cache=True).cache
            model(torch.tensor([[4]], device=DEVICE), cache=cache)
            cache.layers[1].state[0, 2, 3, 4] = math.nan
            model(torch.tensor([[5]], device=DEVICE), cache=cache)
        table = seen.flags.table
        assert ("gdn_decode", "1") in {(row.op, row.tokens) for row in model.kernels.attestation()}
    finally:
        model.kernels = before
    of_step = [
        set(table["tap"][(table["step"] == step) & table["tap"].str.startswith("layers.00.gdn")]) for step in (0, 1)
    ]
    assert (
        {name.split(".", 2)[2] for name in of_step[1]}
        == {"gdn.state", "gdn.out", "gdn.norm"}
        < {name.split(".", 2)[2] for name in of_step[0]}
    )
    assert seen.flags.tripped()[0] == (2, "layers.01.gdn.state")
