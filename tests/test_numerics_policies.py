"""Policies at work: every preset does what its definition predicts, every clamp acts at its place and phase alone."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from workbench import taps
from workbench.errors import BackendError
from workbench.kernels import gated_delta_rule
from workbench.kernels.agreement import relative_error
from workbench.kernels.gated_delta_rule import spec, torch_chunk
from workbench.kernels.gated_delta_rule.reference import oracle
from workbench.numerics import (
    ACCURATE_SOLVERS,
    CATALOGUE,
    CHUNK_SITES,
    CLAMP_SITES,
    CUMSUM_KINDS,
    EXPONENT_FORMS,
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
        assert f"| `{name}` | {preset.origin} |" in page, name
    for table in (EXPONENT_FORMS, CUMSUM_KINDS, SOLVERS, CLAMP_SITES):
        for name, text in table.items():
            assert f"| `{name}` | {text.replace('|', '/')} |" in page, name
