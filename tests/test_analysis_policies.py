"""What each policy does to a model: bound clamps, errors, and the decay that predicts a fault."""

import pytest
import torch
from small_checkpoint import PROMPT, write_small_checkpoint

import workbench
from workbench.analysis import parity, policies, runs
from workbench.numerics import CATALOGUE, EXP_OVERFLOW
from workbench.tokenizer import Tokenizer


@pytest.fixture(scope="module", params=["class_default", "realistic"])
def traced(request, tmp_path_factory):
    """(model, tokenizer, inputs of its delta rules) of a checkpoint with strong gates, and of one with mild ones."""
    folder = write_small_checkpoint(tmp_path_factory.mktemp(request.param) / "checkpoint", request.param)
    model, tokenizer = workbench.load(folder, dtype="float32"), Tokenizer.from_directory(folder)
    ids = runs.as_input(model, (tokenizer.encode(PROMPT) * 40)[:200], 1024)
    safe = runs.run_prompt(model, ids, "safe", keep=parity.KEEP_DELTA_RULE_INPUTS)
    return request.param, model, tokenizer, safe.trace.tensors


def test_the_predicate_is_right_for_every_chunk(traced):
    name, _, _, tensors = traced
    for policy in ("factored", "factored_mask_after", "fp16_factored"):
        table = policies.triggers(tensors, policy)
        found = policies.trigger_reading(table)
        assert found["chunks"] == len(table) > 0 and found["differ"] == 0, (policy, found)
        if name == "class_default":
            assert found["predicted"] > 0
    assert policies.trigger_reading(policies.triggers(tensors, "safe"))["observed"] == 0
    assert policies.overflow_limit("fp16_factored") == EXP_OVERFLOW["float16"] < policies.overflow_limit("factored")


def test_a_chunk_inherits_no_fault_from_the_one_before():
    inputs = {name: torch.zeros(1, 128, 2, 8) for name in ("q", "k", "v")}
    gates = torch.full((1, 128, 2), -0.1)
    gates[0, :64, 1] = -3.0
    tensors = {f"layers.02.gdn.{name}": x for name, x in (*inputs.items(), ("beta", gates.neg()), ("log_decay", gates))}
    table = policies.triggers(tensors)
    assert table["observed"].tolist() == [False, True, False, False] == table["predicted"].tolist()
    assert table[["layer", "chunk", "head"]].to_numpy().tolist() == [[2, 0, 0], [2, 0, 1], [2, 1, 0], [2, 1, 1]]


def test_the_verdicts_name_every_policy_and_what_it_costs(traced):
    name, model, tokenizer, tensors = traced
    lines: list[str] = []
    table = policies.verdicts(model, tokenizer, tensors, progress=lines.append).set_index("policy")
    assert list(table.index) == list(CATALOGUE) and lines[-1] == f"{len(table)} of {len(table)} policies"
    clamped = [policy for policy, preset in CATALOGUE.items() if preset.policy.clamps]
    assert table["binds"].notna().pipe(lambda has: list(has[has].index)) == clamped
    assert table.loc["safe", "error_out"] < 3e-6 and table.loc["safe", "bad_out"] == 0
    if name == "class_default":
        assert table.loc["clamp_cumsum_20", "binds"] and table.loc["clamp_cumsum_20", "error_out"] > 0.01
        assert table.loc["factored", "bad_out"] > 0 and table["error_out"].isna()["factored"]
        assert table["perplexity"].isna()["factored"] and not table["perplexity"].isna()["safe"]
    else:
        assert not table.loc["clamp_gate_5_2", "binds"] and table.loc["clamp_gate_5_2", "error_out"] < 3e-6
