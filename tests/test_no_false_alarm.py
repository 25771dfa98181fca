"""No false alarm: three checkpoints that are sound, in float32 and bfloat16, under the safe policy.

The weights as the model's class draws them (decay so strong that factored exponents overflow), weights with the mild
decay that training starts from, and the trained miniature.
"""

import dataclasses
from pathlib import Path

import pytest
import torch
from small_checkpoint import PROMPT, write_small_checkpoint

import workbench
from workbench.analysis import gates, nans, parity, runs
from workbench.kernels import gated_delta_rule
from workbench.kernels.agreement import relative_error
from workbench.kernels.gated_delta_rule import spec
from workbench.kernels.gated_delta_rule.reference import oracle
from workbench.numerics import CATALOGUE
from workbench.tokenizer import Tokenizer

MINIATURE = Path(__file__).resolve().parent.parent / "data" / "miniature"
CHECKPOINTS = ("class_default", "realistic", "miniature")
CLAMPED = [name for name, preset in CATALOGUE.items() if preset.policy.clamps]
LIMIT = 3e-6


@pytest.fixture(scope="module", params=CHECKPOINTS)
def folder(request, tmp_path_factory) -> Path:
    if request.param == "miniature":
        return MINIATURE
    return write_small_checkpoint(tmp_path_factory.mktemp(request.param) / "checkpoint", request.param)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def safe(request, folder) -> runs.Run:
    model, tokenizer = workbench.load(folder, dtype=request.param), Tokenizer.from_directory(folder)
    ids = runs.as_input(model, (tokenizer.encode(PROMPT) * 40)[:200], 1024)
    return runs.run_prompt(model, ids, "safe", keep=parity.KEEP_DELTA_RULE_INPUTS)


def test_all_is_finite_and_no_fault_is_found(safe):
    assert torch.isfinite(safe.logits).all()
    verdict = nans.diagnose(safe.trace.table, safe.policy)
    assert not verdict.is_fault and verdict.exit_code == 0, verdict
    assert nans.first_bad(safe.trace.table) is None


def test_the_gates_of_every_layer_are_accepted(safe):
    for log_decay in gates.log_decays(safe.trace.tensors).values():
        spec.check_gates(log_decay)


def test_the_error_keeps_its_bound(safe):
    """On the inputs as they are; the output of a narrow one is rounded to it, half a unit in the last place at most."""
    for layer, inputs in parity.kept_inputs(safe.trace.tensors).items():
        exact = oracle(**inputs)
        wide = gated_delta_rule(**{name: x.float() for name, x in inputs.items()}, policy="safe", backend="torch_chunk")
        own = gated_delta_rule(**inputs, policy="safe", backend="torch_chunk")
        for name, found, reference in zip(("output", "state"), wide, exact, strict=True):
            assert relative_error(found, reference) <= LIMIT, (layer, name)
        assert relative_error(own[1], exact[1]) <= LIMIT, layer
        rounding = 0.0 if own[0].dtype == torch.float32 else torch.finfo(own[0].dtype).eps / 2
        assert relative_error(own[0], exact[0]) <= LIMIT + rounding, layer


def test_a_clamp_that_is_predicted_not_to_bind_changes_no_bit_of_a_head(safe, folder):
    """Head by head, as heads do not know each other: the mild ones of a checkpoint stand beside the strong ones."""
    cleared = dict.fromkeys(CLAMPED, 0)
    for layer, inputs in parity.kept_inputs(safe.trace.tensors).items():
        by_token = inputs["log_decay"].abs().amax((0, 1))  # [V]
        by_chunk = gates.chunk_cumsum(inputs["log_decay"], 64).abs().amax((0, 1, 2))
        for name in CLAMPED:
            policy, prediction = CATALOGUE[name].policy, CATALOGUE[name].prediction
            limits = ((prediction.binds_above, by_chunk), (prediction.binds_per_token, by_token))
            free = torch.stack([reach <= limit for limit, reach in limits if limit is not None]).all(0)
            with_clamps, without = (
                gated_delta_rule(**inputs, policy=chosen, backend="torch_chunk")
                for chosen in (policy, dataclasses.replace(policy, clamps=()))
            )
            assert torch.equal(with_clamps[0][:, :, free], without[0][:, :, free]), (layer, name)
            assert torch.equal(with_clamps[1][:, free], without[1][:, free]), (layer, name)
            cleared[name] += int(free.sum())
    if folder.parent.name.startswith("class_default"):  # about exp(A_log) nats at every token
        return
    assert min(cleared.values()) >= 1 and cleared["clamp_gate_5_2"] >= 12, cleared
