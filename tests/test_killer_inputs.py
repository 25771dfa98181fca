"""Killer inputs do what they say: each breaks the policies that it names, spares the others, or shows its fault."""

import dataclasses
import math

import pytest
import torch

from workbench.dialogue import DATA
from workbench.errors import InputError
from workbench.kernels import Kernels, experts, gated_delta_rule
from workbench.kernels.agreement import relative_error
from workbench.kernels.experts import spec as experts_spec
from workbench.kernels.gated_delta_rule import spec
from workbench.kernels.registry import OPERATIONS, Call
from workbench.killer_inputs import (
    BROKEN_CONTRACTS,
    EXPERT_EXTREMES,
    LIMIT,
    OUTCOMES,
    VALID_EXTREMES,
    WRONG,
    Unfilled,
    block_scaled_experts,
    kkt_norm,
    outcome,
    trained_layer,
)
from workbench.numerics import ACCURATE_SOLVERS, PRESETS, NumericsPolicy

BACKENDS = ("reference", "torch_chunk", "torch_interleaved", "torch_recurrent")


def run_with(policy=None, backend: str = "torch_chunk"):
    return lambda **inputs: gated_delta_rule(**inputs, policy=policy, backend=backend)


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 130])
@pytest.mark.parametrize("name", VALID_EXTREMES)
def test_valid_extremes_keep_the_contract(name, tokens):
    inputs = VALID_EXTREMES[name].make(tokens, 3)
    spec.check(**{"initial_state": None, "cu_seqlens": None} | inputs)
    spec.check_gates(inputs["log_decay"])
    if name != "one_token_tail":
        assert inputs["q"].shape[1] == tokens
    lengths = torch.linalg.vector_norm(inputs["k"], dim=-1)
    assert bool(((lengths - 1).abs() < 1e-6).logical_or(lengths == 0).all())
    assert inputs["beta"].min() >= 0 and inputs["beta"].max() <= 1
    assert all(bool(torch.isfinite(x).all()) for x in inputs.values())
    again, other = VALID_EXTREMES[name].make(tokens, 3), VALID_EXTREMES[name].make(tokens, 4)
    assert all(torch.equal(x, again[key]) for key, x in inputs.items())
    assert not torch.equal(inputs["v"], other["v"])


@pytest.mark.parametrize(("tokens", "seeds"), [(130, (0, 1)), (320, (2,))])
@pytest.mark.parametrize("name", VALID_EXTREMES)
def test_survivors_are_right_and_victims_are_not(name, tokens, seeds):
    extreme = VALID_EXTREMES[name]
    assert not set(extreme.survivors) & set(extreme.victims) and {"safe", "segsum"} <= set(extreme.survivors)
    for seed in seeds:
        inputs = extreme.make(tokens, seed)
        for policy in extreme.survivors:
            found = outcome(run_with(policy), inputs)
            assert found.kind == "right", (policy, seed, found)
        for policy in extreme.victims:
            found = outcome(run_with(policy), inputs)
            assert found.kind in ("wrong", "not finite"), (policy, seed, found)


def test_every_form_that_can_fail_fails_on_some_extreme_and_the_random_case_shows_few():
    victims = {policy for extreme in VALID_EXTREMES.values() for policy in extreme.victims}
    can_fail = {
        name
        for name, policy in PRESETS.items()
        if policy.clamps
        or policy.exponent not in ("difference_then_mask", "mask_after")
        or policy.cumsum not in ("float64", "segsum", "float32")
        or policy.solver not in ACCURATE_SOLVERS
    }
    assert victims == can_fail
    assert set(PRESETS) == victims | set(VALID_EXTREMES["strong_decay"].survivors)  # each has its place
    unseen = victims - set(VALID_EXTREMES["random_gates"].victims)
    assert {"doubling", "factored", "midpoint", "multiply_mask", "clamp_gate_5_2", "nan_to_num"} <= unseen


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", BROKEN_CONTRACTS)
def test_broken_contracts_are_detected_as_they_say(name, backend):
    contract = BROKEN_CONTRACTS[name]
    if contract.backends is not None and backend not in contract.backends:
        broken, intended = contract.make(65, 5)  # it has no such memory
        assert outcome(run_with(backend=backend), broken, intended).kind == "right"
        return
    for tokens in (2, 65, 130):
        broken, intended = contract.make(tokens, 5)
        assert outcome(run_with(backend=backend), intended).kind == "right"
        found = outcome(run_with(backend=backend), broken, intended)
        assert found.kind == contract.detected != "right" and found.kind in OUTCOMES, found
        assert "\n" not in found.message and bool(found.message) == (found.kind == "refused")


@pytest.mark.parametrize("name", ["unfilled_u", "unfilled_w"])
def test_a_row_of_scratch_memory_that_was_not_written_is_one_of_the_chunk(name):
    broken, intended = BROKEN_CONTRACTS[name].make(130, 0)
    assert outcome(run_with(), broken, intended).first_bad_row == 0  # 0 * NaN in its rows before
    tap = broken["tap"]
    assert tap.scope("layers.00.") is tap and torch.equal(tap("gdn.kkt", torch.ones(2, 2)), torch.ones(2, 2))


def test_a_log_in_bf16_shows_the_more_the_state_has_decayed():
    broken, intended = BROKEN_CONTRACTS["a_log_in_bf16"].make(130, 0)
    off = (broken["log_decay"] / intended["log_decay"] - 1).abs()
    assert 0.0005 < off.max() < 0.016
    assert outcome(run_with(), broken, intended).error > 1e-3


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", EXPERT_EXTREMES)
def test_experts_are_right_on_extremes_and_a_scale_of_zero_is_not(name, seed):
    inputs = EXPERT_EXTREMES[name].make(40, seed)
    wide = {key: x.double() if x.is_floating_point() else x for key, x in inputs.items()}
    expected = experts(**wide, backend="experts=reference")
    for backend in OPERATIONS["experts"].backends:
        call = Call("experts", "cpu", torch.float32, 40, False, False, NumericsPolicy(), inputs["gate_up"].shape)
        if OPERATIONS["experts"].backends[backend].refusal(call) is None:
            assert relative_error(experts(**inputs, backend=f"experts={backend}"), expected) < 1e-6, backend
    # Eight bits cost a few percent; a scale of zero costs every token that asks for a dead expert.
    assert block_scaled_experts(**inputs).isnan().all()
    assert relative_error(block_scaled_experts(**inputs, smallest=1e-12), expected) < 0.1
    random = experts_spec.example(tokens=40, seed=seed)
    found = block_scaled_experts(**random)  # no random input shows it
    assert relative_error(found, experts(**random).double()) < 0.1


def test_a_trained_layer_is_harder_than_what_is_drawn():
    checkpoint = DATA / "miniature"
    if not (checkpoint / "model.safetensors").is_file():
        pytest.skip(f"no trained checkpoint in {checkpoint}")
    inputs = trained_layer(320)
    drawn = kkt_norm(VALID_EXTREMES["random_gates"].make(320, 0))
    print(f"\nkkt norm of the trained layer {kkt_norm(inputs):.2f}, of random inputs {drawn:.2f}")
    assert kkt_norm(inputs) > 2 * drawn
    assert inputs["q"].shape[1] == 320 and not torch.equal(inputs["v"], trained_layer(320, 1)["v"])
    for policy in ("safe", "segsum"):
        for backend in BACKENDS:
            found = outcome(run_with(policy, backend), inputs)
            assert found.kind == "right", (policy, backend, found)
    for victim in ("doubling", "fp16_factored", "clamp_cumsum_20"):  # the first is right on random inputs
        assert outcome(run_with(victim), inputs).kind in ("wrong", "not finite"), victim


def test_the_norm_of_the_kkt_matrix_is_that_which_a_solver_gets():
    inputs, seen = spec.example(tokens=100, seed=2), []

    class Recorder(Unfilled):
        def __call__(self, name, tensor):
            seen.extend([tensor] if name == self.name else [])
            return tensor

    gated_delta_rule(**inputs, tap=Recorder("gdn.kkt"))
    assert kkt_norm(inputs) == pytest.approx(seen[0].abs().sum(-1).max().item(), rel=1e-5)


def test_without_a_checkpoint_the_trained_layer_says_what_is_missing(tmp_path):
    with pytest.raises(InputError, match=r"expected a checkpoint with a tokenizer in .* found none; what is missing"):
        trained_layer(64, checkpoint=tmp_path)


def test_where_a_fault_shows_first():
    broken, intended = BROKEN_CONTRACTS["unfilled_state"].make(130, 0)
    assert outcome(run_with(), broken, intended).first_bad_row == 0
    broken, intended = BROKEN_CONTRACTS["unfilled_rows"].make(130, 0)
    assert outcome(run_with(), broken, intended).first_bad_row == 128  # its chunk's first row: 0 * NaN
    assert outcome(run_with(backend="torch_recurrent"), broken, intended).first_bad_row == 129


def test_tiled_key_heads_spare_the_first_and_the_last_value_head():
    broken, intended = BROKEN_CONTRACTS["key_heads_tiled"].make(65, 0)
    (tiled, _), (right, _) = gated_delta_rule(**broken), gated_delta_rule(**intended)
    equal = [torch.allclose(tiled[:, :, h], right[:, :, h], atol=1e-6) for h in range(4)]
    assert equal == [True, False, False, True]


def test_outcomes_are_told_apart():
    inputs = spec.example(tokens=8)

    def off_by(share: float):
        def run(**inputs):
            out, state = gated_delta_rule(**inputs, backend="reference")
            return out * (1 + share), state

        return run

    assert [outcome(off_by(share), inputs).kind for share in (0.0, 0.5 * LIMIT, 2 * LIMIT, 2 * WRONG)] == [
        "right", "right", "imprecise", "wrong",
    ]  # fmt: skip
    found = outcome(off_by(math.nan), inputs)
    assert (found.kind, found.error, found.first_bad_row) == ("not finite", math.inf, 0)


# ---- log decay above 0


SIGNS = {
    "alpha_for_log_alpha": "likely alpha passed for log alpha, else raw `a` passed as g, sign lost;",
    "sign_lost": "likely sign lost, else alpha passed for log alpha, raw `a` passed as g;",
    "raw_gate_for_log_decay": "likely raw `a` passed as g, else alpha passed for log alpha, sign lost;",
}


@pytest.mark.parametrize("name", SIGNS)
def test_a_positive_gate_is_reported_with_the_cause_that_its_signs_speak_for(name):
    broken, intended = BROKEN_CONTRACTS[name].make(65, 0)
    message = outcome(run_with(None, None), broken, intended).message
    assert message.startswith("gated_delta_rule: log_decay: expected <= 0 everywhere, found ")
    assert SIGNS[name] in message and message.endswith("pass -exp(A_log) softplus(a + dt_bias)")
    assert "\n" not in message and len(message) < 300


def test_one_positive_gate_is_named_with_its_place():
    broken, intended = BROKEN_CONTRACTS["one_positive_gate"].make(65, 0)
    message = outcome(run_with(None, None), broken, intended).message
    assert "found 0.001 at batch row 0, token 32, head 1, 1 of 260 above 0" in message
    broken["log_decay"][0, 3] = math.nan  # NaN hides no positive gate
    assert "token 32, head 1, 1 of 260" in outcome(run_with(None, None), broken, intended).message


@pytest.mark.parametrize("gate", [0.0, -0.0, -1e-45, -3e38, math.nan])
def test_what_is_not_above_0_passes(gate):
    spec.check_gates(torch.full((1, 2, 3), gate))
    spec.check_gates(torch.ones(1, 2, 3, device="meta"))


def test_the_check_needs_no_graph_and_costs_a_model_nothing(monkeypatch):
    inputs = spec.example(tokens=8)
    inputs["log_decay"].requires_grad_()
    assert gated_delta_rule(**inputs)[0].requires_grad

    def refuse(log_decay):
        raise AssertionError("the values of a model's own gates were read")

    monkeypatch.setattr(spec, "check_gates", refuse)
    Kernels().gated_delta_rule(**inputs)
    with pytest.raises(AssertionError):
        gated_delta_rule(**inputs)


@pytest.mark.parametrize("solver", ACCURATE_SOLVERS)
def test_a_chunk_longer_than_the_input_is_one_chunk(solver):
    for name in ("mixed_decay", "repeated_keys", "grown_state"):
        inputs = VALID_EXTREMES[name].make(5, 0)
        policy = NumericsPolicy(chunk=1024, solver=solver)
        assert outcome(run_with(policy), inputs).kind == "right"
        assert outcome(run_with(dataclasses.replace(policy, chunk=5)), inputs).kind == "right"
