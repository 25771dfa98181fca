"""Policies at work: every preset does what its definition predicts, every clamp acts at its place and phase alone."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from models import mini

from workbench import taps
from workbench.analysis.runs import using_policy
from workbench.config import ModelConfig
from workbench.errors import BackendError
from workbench.kernels import gated_delta_rule
from workbench.kernels.agreement import relative_error
from workbench.kernels.gated_delta_rule import spec, torch_chunk
from workbench.kernels.gated_delta_rule.reference import oracle
from workbench.kernels.registry import OPERATIONS
from workbench.model import CausalLM
from workbench.numerics import (
    ACCURATE_SOLVERS,
    CATALOGUE,
    CHUNK_SITES,
    CLAMP_SITES,
    CUMSUM_KINDS,
    EXPONENT_FORMS,
    SAFE,
    SOLVERS,
    Clamp,
    NumericsPolicy,
)

FINITE = [name for name, preset in CATALOGUE.items() if preset.prediction.fails_above is None and name != "nan_to_num"]


def one_head(log_decay: float, tokens: int = 256) -> dict:
    """What `Prediction.constant` refers to: one head of 64, the same gate for every token."""
    return spec.example(tokens=tokens, key_heads=1, value_heads=1, key_dim=64, value_dim=64, log_decay=log_decay)


def run(inputs: dict, policy: NumericsPolicy, backend: str = "torch_chunk", **more):
    return gated_delta_rule(**inputs, **more, policy=policy, backend=backend)


def stepwise(inputs: dict, policy: NumericsPolicy) -> torch.Tensor:
    """The output of one decode step after another."""
    outs, state = [], None
    for t in range(inputs["q"].shape[1]):
        token = {name: x[:, t : t + 1] for name, x in inputs.items()}
        out, state = run(token, policy, "torch_recurrent", initial_state=state)
        outs.append(out)
    return torch.cat(outs, dim=1)


@pytest.mark.parametrize("name", CATALOGUE)
def test_the_error_of_a_preset_is_the_predicted_one(name):
    preset = CATALOGUE[name]
    for gate, predicted in preset.prediction.constant:
        inputs = one_head(gate)
        found = relative_error(run(inputs, preset.policy)[0], oracle(**inputs)[0])
        if predicted <= 1e-6:
            assert found <= predicted, (gate, found)
        else:
            assert 0.7 * predicted <= found <= 1.4 * predicted, (gate, found)


@pytest.mark.parametrize("name", [name for name, preset in CATALOGUE.items() if preset.prediction.repeated_keys])
def test_repeated_keys_do_to_a_preset_what_is_predicted(name):
    preset = CATALOGUE[name]
    for beta, predicted in preset.prediction.repeated_keys:
        inputs = one_head(-1e-3)
        inputs["k"] = inputs["k"][:, :1].expand_as(inputs["k"]).contiguous()
        inputs["beta"] = torch.full_like(inputs["beta"], beta)
        found = relative_error(run(inputs, preset.policy)[0], oracle(**inputs)[0])
        assert found == predicted == math.inf or predicted / 10 < found < predicted * 10, (beta, found)


def test_a_series_for_the_inverse_states_its_failure():
    series = {name for name, preset in CATALOGUE.items() if preset.policy.solver not in ACCURATE_SOLVERS}
    assert series == {name for name, preset in CATALOGUE.items() if preset.prediction.repeated_keys} == {"doubling"}
    assert "error 5e+07 at beta 0.5, " in (words := CATALOGUE["doubling"].prediction.in_words()), words
    assert words.endswith("not finite at beta 1")


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_preset_fails_beyond_the_predicted_decay_and_not_below(name):
    preset = CATALOGUE[name]
    limit = preset.prediction.fails_above
    if limit is None:
        for gate in (-0.1, -1.0, -5.0, -20.0, -300.0):
            assert torch.isfinite(run(one_head(gate), preset.policy)[0]).all(), gate
        return
    chunk = preset.policy.chunk
    assert torch.isfinite(run(one_head(-0.98 * limit / chunk), preset.policy)[0]).all()
    assert not torch.isfinite(run(one_head(-1.02 * limit / (chunk - 1)), preset.policy)[0]).all()


@pytest.mark.parametrize("name", [name for name, preset in CATALOGUE.items() if preset.policy.clamps])
def test_a_clamp_changes_nothing_until_it_binds(name):
    policy, prediction = CATALOGUE[name].policy, CATALOGUE[name].prediction
    without = dataclasses.replace(policy, clamps=())
    by_chunk = math.inf if prediction.binds_above is None else prediction.binds_above / policy.chunk
    by_token = math.inf if prediction.binds_per_token is None else prediction.binds_per_token
    first = min(by_chunk, by_token)
    mild, strong = one_head(-0.98 * first), one_head(-1.1 * first)
    assert torch.equal(run(mild, policy)[0], run(mild, without)[0])
    assert not torch.equal(run(strong, policy)[0], run(strong, without)[0])


@pytest.mark.parametrize("name", FINITE)
def test_prefill_and_decode_diverge_where_a_clamp_acts_in_one_of_them(name):
    preset = CATALOGUE[name]
    inputs = one_head(-2.0, tokens=100)
    gap = relative_error(stepwise(inputs, preset.policy), run(inputs, preset.policy)[0].double())
    assert (gap > 0.1) == preset.prediction.diverges, gap
    assert gap < 1e-4 or preset.prediction.diverges or preset.policy.cumsum == "bfloat16"


def clamp_at(site: str, limit: float) -> Clamp:
    phase = "prefill" if site in CHUNK_SITES else "decode" if site == "decode_gate" else "both"
    return Clamp(site=site, phase=phase, lo=-limit, hi=limit)


@pytest.mark.parametrize("cumsum", [kind for kind in CUMSUM_KINDS if kind != "segsum"])
@pytest.mark.parametrize("site", [site for site in CLAMP_SITES if site != "A_log"])
def test_each_site_binds_by_itself_and_a_wide_clamp_nowhere(site, cumsum):
    tokens = 1 if site == "decode_gate" else 130
    inputs = spec.example(tokens=tokens, log_decay=-0.7, seed=3)
    inputs["v"] = 30 * inputs["v"]
    initial = torch.randn(1, 4, 16, 24, generator=torch.Generator().manual_seed(1))
    base = NumericsPolicy(solver="row_loop", cumsum=cumsum)
    plain = run(inputs, base, initial_state=initial)
    wide = run(inputs, dataclasses.replace(base, clamps=(clamp_at(site, 1e6),)), initial_state=initial)
    narrow = run(inputs, dataclasses.replace(base, clamps=(clamp_at(site, 0.5),)), initial_state=initial)
    assert all(torch.equal(a, b) for a, b in zip(plain, wide, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(plain, narrow, strict=True))


@pytest.mark.parametrize("backend", ["torch_chunk", "torch_interleaved", "torch_recurrent"])
def test_clamps_that_every_form_has_act_in_every_backend(backend):
    inputs = spec.example(tokens=70, seed=4)
    gates = NumericsPolicy(clamps=(Clamp(site="raw_gate", lo=-0.5, hi=0.5),))
    clamped = inputs | {"log_decay": inputs["log_decay"].clamp(-0.5, 0.5)}
    assert relative_error(run(inputs, gates, backend)[0], oracle(**clamped)[0]) < 1e-6
    state = run(inputs, NumericsPolicy(clamps=(Clamp(site="state", lo=-0.1, hi=0.1),)), backend)[1]
    assert state.abs().max() <= 0.1


def test_the_clamp_of_the_cumulative_sum_is_the_one_that_an_observer_would_make():
    class Clamping:
        def __call__(self, name, tensor):
            return tensor.clamp(-3.0, 3.0) if name == taps.GDN_CUMSUM else tensor

        def scope(self, prefix):
            return self

    inputs = spec.example(tokens=130, seed=5)
    policy = NumericsPolicy(clamps=(Clamp(site="cumsum", phase="prefill", lo=-3.0, hi=3.0),))
    out, _ = run(inputs, policy)
    assert relative_error(out, run(inputs, NumericsPolicy(), tap=Clamping())[0].double()) < 1e-6


def test_a_backend_without_the_site_refuses_with_the_reason():
    inputs = spec.example(tokens=8)
    policy = NumericsPolicy(clamps=(Clamp(site="cumsum", phase="prefill", lo=-20.0, hi=20.0),))
    with pytest.raises(BackendError, match="policy clamps cumsum, which only the chunked form has; use"):
        run(inputs, policy, "torch_recurrent")
    one = {name: x[:, :1] for name, x in inputs.items()}
    assert torch.equal(run(one, policy, "torch_recurrent")[0], run(one, NumericsPolicy(), "torch_recurrent")[0])


def honest_outcomes(policy: NumericsPolicy, tokens: int) -> dict[str, bool]:
    """Backend -> whether it gives what chunks give under `policy`; without those that refuse it in one line."""
    inputs = spec.example(tokens=tokens, log_decay=-1.0, seed=8)
    inputs["v"] = 30 * inputs["v"]
    expected, found = run(inputs, policy), {}
    for backend in (b.name for b in OPERATIONS[spec.OP].backends.values() if not b.requires.devices):  # no library's
        try:
            out, state = run(inputs, policy, backend)
        except BackendError as error:
            assert "\n" not in str(error) and "torch_chunk" in str(error)
            continue
        finite = torch.isfinite(expected[0]).all() and torch.isfinite(expected[1]).all()
        found[backend] = bool(finite) and max(
            relative_error(out, expected[0]), relative_error(state, expected[1])
        ) < 3e-6  # fmt: skip
    return found


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_backend_gives_what_the_policy_says_or_refuses_it(name):
    policy = CATALOGUE[name].policy
    found = honest_outcomes(policy, 130)
    assert found["torch_chunk"] == found["torch_interleaved"]
    if found["torch_chunk"]:
        assert all(found.values()), found
    else:  # what no other form can give
        assert set(found) == {"torch_chunk", "torch_interleaved"}, found
    others = {"reference", "torch_recurrent"} & set(found)
    is_plain = (policy.exponent, policy.clamps, policy.nan_to_num) == ("difference_then_mask", (), False)
    is_exact = is_plain and policy.cumsum in ("float64", "segsum") and policy.solver in ACCURATE_SOLVERS
    assert others == ({"reference", "torch_recurrent"} if is_exact else set())


@pytest.mark.parametrize("cumsum", CUMSUM_KINDS)
@pytest.mark.parametrize("exponent", EXPONENT_FORMS)
def test_forms_without_chunks_refuse_what_only_chunks_can_do_and_one_token_binds_nothing(exponent, cumsum):
    inputs = spec.example(tokens=2)
    one = {name: x[:, :1] for name, x in inputs.items()}
    for solver in SOLVERS:
        policy = NumericsPolicy(exponent=exponent, cumsum=cumsum, solver=solver, chunk=16)
        asked = {"exponent": exponent, "cumsum": cumsum, "solver": solver}
        honoured = ("difference_then_mask", "float64", "segsum", *ACCURATE_SOLVERS)
        refused = next((f"{field} {value}," for field, value in asked.items() if value not in honoured), None)
        for backend in ("reference", "torch_recurrent"):
            assert torch.equal(run(one, policy, backend)[0], run(one, NumericsPolicy(), backend)[0])
            if refused is None:
                assert torch.equal(run(inputs, policy, backend)[0], run(inputs, NumericsPolicy(), backend)[0])
            else:
                with pytest.raises(BackendError, match=f"asks for {refused} which only the chunked form has; use"):
                    run(inputs, policy, backend)


@pytest.mark.parametrize("tokens", [1, 8])
@pytest.mark.parametrize("site", CLAMP_SITES)
def test_the_arbiter_takes_no_clamp_and_replaces_nothing(site, tokens):
    inputs = spec.example(tokens=tokens)
    solver = "row_loop" if site == "solve_rows" else "auto"
    with pytest.raises(BackendError, match=f"policy clamps {site}, and the arbiter is the exact recurrence; use torch"):
        run(inputs, NumericsPolicy(clamps=(clamp_at(site, 1.0),), solver=solver), "reference")
    with pytest.raises(BackendError, match="policy replaces NaN, and the arbiter shows what there is; use torch_chunk"):
        run(inputs, NumericsPolicy(nan_to_num=True), "reference")


def test_the_recurrence_honours_the_clamps_that_it_takes():
    inputs = spec.example(tokens=70, seed=4)
    for site in CLAMP_SITES:
        policy = NumericsPolicy(clamps=(clamp_at(site, 0.3),), solver="row_loop")
        if site in CHUNK_SITES:
            with pytest.raises(BackendError, match=f"clamps {site}"):
                run(inputs, policy, "torch_recurrent")
        elif site in ("A_log", "decode_gate"):  # before the op, and of one token
            assert torch.equal(run(inputs, policy, "torch_recurrent")[0], run(inputs, SAFE, "torch_recurrent")[0])
        else:
            assert relative_error(run(inputs, policy, "torch_recurrent")[0], run(inputs, SAFE)[0].double()) > 0.01


@pytest.mark.parametrize("limit", [1e39, 1e300, 10**300])
@pytest.mark.parametrize("site", CLAMP_SITES)
def test_a_limit_beyond_float32_clamps_nothing_that_is_finite(site, limit):
    model = CausalLM(ModelConfig.from_hf(mini())).init_weights(3, "class_default").eval()
    for dtype, state_dtype in ((torch.float32, "float32"), (torch.float32, "float64"), (torch.bfloat16, "float32")):
        inputs = spec.example(tokens=1 if site == "decode_gate" else 70, seed=9, dtype=dtype)
        base = NumericsPolicy(solver="row_loop", state_dtype=state_dtype)
        policy = dataclasses.replace(base, clamps=(clamp_at(site, limit),))
        assert all(torch.equal(a, b) for a, b in zip(run(inputs, policy), run(inputs, base), strict=True))
        with torch.inference_mode(), using_policy(model.to(dtype), policy):
            clamped = model(torch.arange(5)[None]).logits
        with torch.inference_mode(), using_policy(model, base):
            assert torch.equal(clamped, model(torch.arange(5)[None]).logits)
    at_most = Clamp(site="state", lo=-limit, hi=limit)
    assert spec.limited(torch.tensor([math.inf, -1.0]), at_most).tolist() == [torch.finfo(torch.float32).max, -1.0]


@pytest.mark.parametrize("backend", ["torch_chunk", "torch_recurrent"])
def test_nan_is_replaced_only_where_the_policy_asks_for_it(backend):
    inputs = spec.example(tokens=70, seed=6)
    inputs["beta"][0, 40, 0] = math.nan
    clamps = tuple(Clamp(site=site, lo=-1e4, hi=1e4) for site in ("raw_gate", "state"))
    for policy in (NumericsPolicy(), NumericsPolicy(clamps=clamps)):
        out, state = run(inputs, policy, backend)
        assert out.isnan().any() and state.isnan().any()
    out, state = run(inputs, NumericsPolicy(nan_to_num=True), backend)
    assert torch.isfinite(out).all() and torch.isfinite(state).all() and (out[0, 40, 0] == 0).all()


@pytest.mark.parametrize("solver", SOLVERS)
def test_repeated_keys_tell_the_series_from_the_solvers(solver):
    inputs = spec.example(tokens=128, log_decay=-1e-3, seed=7)
    inputs["k"] = inputs["k"][:, :1].expand_as(inputs["k"]).contiguous()
    inputs["beta"] = 0.99 + 0.0099 * inputs["beta"]
    found = relative_error(run(inputs, NumericsPolicy(solver=solver))[0], oracle(**inputs)[0])
    assert found < 3e-6 if solver in ACCURATE_SOLVERS else found > 1.0, found


# ---- a solver is taken because it works on the device, not because a library lies there


@pytest.fixture
def without(monkeypatch):
    """Breaks a routine of torch.linalg, as on a device whose library lacks it; forgets what was found before."""

    def broken(name: str, error: Exception | None = None) -> None:
        def call(*args, **options):
            if error is not None:
                raise error
            return torch.zeros_like(args[1])

        monkeypatch.setattr(torch.linalg, name, call)
        torch_chunk.solver_refusal.cache_clear()

    yield broken
    monkeypatch.undo()
    torch_chunk.solver_refusal.cache_clear()


@pytest.mark.parametrize("error", [RuntimeError("no such routine\non this card"), NotImplementedError("absent"), None])
def test_a_named_solver_that_does_not_work_is_refused_with_the_reason(without, error):
    without("solve_triangular", error)
    inputs = spec.example(tokens=8)
    said = "fails on cpu on a system of 9 rows: (no such routine|absent)$" if error else "is off by .* on cpu"
    with pytest.raises(BackendError, match=f"torch_chunk was asked for .*solver solve_triangular {said}"):
        run(inputs, NumericsPolicy(solver="solve_triangular"))
    assert torch.isfinite(run(inputs, NumericsPolicy(solver="auto"))[0]).all()


def test_auto_takes_the_next_solver_that_works(monkeypatch, without):
    inputs = spec.example(tokens=130)
    assert torch_chunk.chosen_solver("auto", "cpu") == "block_substitution"

    def absent(lower):
        raise RuntimeError("absent")

    monkeypatch.setattr(torch_chunk, "block_inverses", absent)
    torch_chunk.solver_refusal.cache_clear()
    assert torch_chunk.chosen_solver("auto", "cpu") == "solve_triangular"
    assert torch.equal(
        run(inputs, NumericsPolicy(solver="auto"))[0], run(inputs, NumericsPolicy(solver="solve_triangular"))[0]
    )
    without("solve_triangular", RuntimeError("absent"))
    assert torch_chunk.chosen_solver("auto", "cpu") == "row_loop"
    monkeypatch.setattr(torch_chunk, "AUTOMATIC_SOLVERS", ("solve_triangular",))
    with pytest.raises(BackendError, match="no solver works here: solver solve_triangular fails on cpu"):
        run(inputs, NumericsPolicy(solver="auto"))


def test_the_page_of_policies_names_all_there_are():
    page = (Path(__file__).parent.parent / "docs" / "policies.md").read_text(encoding="utf-8")
    for name, preset in CATALOGUE.items():
        assert f"| `{name}` | {preset.origin} | {preset.prediction.in_words()} |" in page, name
    for table in (EXPONENT_FORMS, CUMSUM_KINDS, SOLVERS, CLAMP_SITES):
        for name, text in table.items():
            assert f"| `{name}` | {text.replace('|', '/')} |" in page, name
