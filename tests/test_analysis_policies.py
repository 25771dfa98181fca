"""What each policy does to a model: bound clamps, errors, and the decay that predicts a fault."""

import dataclasses
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from small_checkpoint import PROMPT, write_small_checkpoint

import workbench
from workbench import bench
from workbench.analysis import parity, policies, runs
from workbench.kernels.gated_delta_rule import spec
from workbench.numerics import (
    CATALOGUE,
    CUMSUM_KINDS,
    EXP_OVERFLOW,
    EXPONENT_FORMS,
    LARGEST,
    Clamp,
    NumericsPolicy,
)
from workbench.tokenizer import Tokenizer


@pytest.fixture(scope="module", params=["class_default", "realistic"])
def traced(request, tmp_path_factory):
    """(model, tokenizer, inputs of its delta rules) of a checkpoint with strong gates, and of one with mild ones."""
    folder = write_small_checkpoint(tmp_path_factory.mktemp(request.param) / "checkpoint", request.param)
    model, tokenizer = workbench.load(folder, dtype="float32"), Tokenizer.from_directory(folder)
    ids = runs.as_input(model, (tokenizer.encode(PROMPT) * 40)[:200], 1024)
    safe = runs.run_prompt(model, ids, "safe", keep=parity.KEEP_DELTA_RULE_INPUTS)
    return request.param, model, tokenizer, safe.trace.tensors


@pytest.mark.parametrize("policy", CATALOGUE)
def test_the_predicate_is_right_for_every_chunk_under_every_preset(traced, policy):
    name, _, _, tensors = traced
    found = policies.trigger_reading(policies.triggers(tensors, policy))
    assert found["chunks"] > 0 and found["false_alarms"] == found["misses"] == 0, found
    limit = CATALOGUE[policy].prediction.fails_above
    assert policies.overflow_limit(policy) == (None if limit is None else pytest.approx(limit))
    if name == "class_default" and limit in (EXP_OVERFLOW["float32"], EXP_OVERFLOW["float16"]):
        assert found["predicted"] > 0


@pytest.mark.parametrize("cumsum", CUMSUM_KINDS)
@pytest.mark.parametrize("exponent", EXPONENT_FORMS)
def test_the_limit_of_every_form_and_sum_is_where_it_fails(exponent, cumsum):
    policy = NumericsPolicy(exponent=exponent, cumsum=cumsum)
    limit = policies.overflow_limit(policy)
    assert ("no limit" in policies.limit_note(policy)) == (limit in (None, LARGEST["float16"]))
    for share in (0.97, 1.03):
        rates = torch.full((1, 64, 4), -share * (limit or 6000.0) / 63)
        rates[:, 0] = 0.0
        table = policies.triggers(kept(rates), policy)
        expected = limit is not None and share > 1
        assert set(table["observed"]) == set(table["predicted"]) == {expected}, (limit, share)


def test_the_readme_says_of_those_forms_alone_that_they_overflow_which_have_a_limit():
    page = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    rows = [re.findall(r"`(\w+)`", line.split("|")[1]) for line in page.splitlines() if line.startswith("| `")]
    named = [[name for name in names if name in CATALOGUE] for names in rows]
    overflows = [line for line in page.splitlines() if "forms that overflow" in line and line.startswith("|")]
    assert len(overflows) == 1 and sum(map(len, named)) > 12
    for name in {name for names in named for name in names}:
        assert (policies.overflow_limit(name) is not None) == (f"`{name}`" in overflows[0]), name


def kept(gates: torch.Tensor, layer: int = 1) -> dict[str, torch.Tensor]:
    inputs = spec.example(tokens=gates.shape[1], log_decay=gates, seed=4)
    return {f"layers.{layer:02d}.gdn.{name}": x for name, x in inputs.items()}


@pytest.mark.parametrize("policy", ["midpoint", "multiply_mask"])
def test_a_strong_first_gate_is_no_alarm_for_forms_that_take_no_exp_of_it(policy):
    gates = torch.full((1, 64, 4), -1.0)
    gates[:, 0] = -500.0
    table = policies.triggers(kept(gates), policy)
    assert not table["observed"].any() and not table["predicted"].any() and table["span"].max() == pytest.approx(63)
    assert policies.triggers(kept(gates), "factored")["observed"].all()


@pytest.mark.parametrize(("tokens", "chunks"), [(1, 1), (64, 1), (70, 2)])
def test_the_last_chunk_counts_as_the_model_fills_it_up(tokens, chunks):
    table = policies.triggers(kept(torch.full((1, tokens, 4), -90.0)), "factored")
    assert len(table) == 4 * chunks and table["predicted"].all() and table["observed"].all()


def test_clamps_are_part_of_the_prediction():
    free = NumericsPolicy(exponent="factored", cumsum="float32")
    tensors = kept(torch.full((1, 64, 4), -3.0))
    for clamp, span in ((Clamp(site="cumsum", phase="prefill", lo=-20, hi=20), 20.0),
                        (Clamp(site="raw_gate", phase="prefill", lo=-1, hi=1), 64.0)):  # fmt: skip
        table = policies.triggers(tensors, dataclasses.replace(free, clamps=(clamp,)))
        assert "that the policy's clamps leave" in policies.limit_note(dataclasses.replace(free, clamps=(clamp,)))
        assert set(table["span"]) == {span} and not table["predicted"].any() and not table["observed"].any()
    assert policies.triggers(tensors, free)["observed"].all()


def test_a_double_precision_model_has_the_limit_of_its_own_format():
    assert policies.overflow_limit("factored", "float64") == EXP_OVERFLOW["float64"]
    assert policies.overflow_limit("fp16_factored", "float64") == EXP_OVERFLOW["float16"]
    tensors = {name: x.double() for name, x in kept(torch.full((1, 64, 4), -3.0)).items()}
    table = policies.triggers(tensors, "factored")
    assert not table["observed"].any() and not table["predicted"].any()


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


@pytest.fixture(scope="module")
def miniature():
    folder = Path(__file__).parent.parent / "data" / "miniature"
    return workbench.load(folder, dtype="float32"), Tokenizer.from_directory(folder)


def test_prefill_and_decode_part_where_a_clamp_acts_in_prefill_alone(miniature):
    model, tokenizer = miniature
    ids = runs.as_input(model, tokenizer.encode(PROMPT * 2)[:130], 1024)
    found = {}
    for policy in ("safe", "clamp_cumsum_20_prefill", "five_clamps", "factored"):
        with runs.using_policy(model, policy):
            found[policy] = policies.prefill_decode_divergence(model, ids)
    assert found["safe"] < 1e-5 < 0.01 < min(found["clamp_cumsum_20_prefill"], found["five_clamps"])
    assert math.isnan(found["factored"])


def test_the_answers_are_the_scores_of_each_policy(miniature, monkeypatch):
    model, tokenizer = miniature
    asked = []

    def score(model, tokenizer, dialogues):
        asked.append((model.kernels.policy.exponent, len(dialogues)))
        return SimpleNamespace(share=len(asked) / 10)

    monkeypatch.setattr(policies.quality, "dialogue_score", score)
    table = policies.answers(model, tokenizer, ["safe", "mask_after"])
    assert asked == [("difference_then_mask", 20)] * 2 + [("mask_after", 20)] * 2
    assert table[["dialogues", "recall"]].to_numpy().tolist() == [[0.1, 0.2], [0.3, 0.4]]
    assert table["divergence"].max() < 1e-4 and list(table["policy"]) == ["safe", "mask_after"]


def recorded(checkpoint: str, dtype: str = "float32") -> dict:
    rows = [
        bench.Row(case, policy, "share", value, 0.0, 20)
        for policy, figures in {"safe": (1.0, 0.9, 1e-6), "factored": (0.2, 0.1, None)}.items()
        for case, value in zip(policies.RECORDED_CASES.values(), figures, strict=True)
        if value is not None
    ]
    rows.append(bench.Row("perplexity", "safe", "1", 44.0, 0.0, 20))
    return {
        "hardware": {"checkpoint": checkpoint, "dtype": dtype, "model": "a processor"}, "commit": "c" * 40,
        "rows": [dataclasses.asdict(row) for row in rows],
    }  # fmt: skip


def test_recorded_answers_are_shown_for_the_measured_checkpoint_alone(traced, monkeypatch):
    _, model, tokenizer, tensors = traced
    monkeypatch.setattr(policies, "checkpoint_hash", lambda folder: f"sha256:{folder}")
    names = ["safe", "factored"]

    def made(result, **changes):
        table, caption, headings = policies.verdict_table(
            model, tokenizer, tensors, checkpoint="here", recorded=result, names=names, **changes
        )
        assert list(table["policy"]) == names and list(table.columns[-3:]) == list(policies.ANSWERS)
        return table.set_index("policy")[list(policies.ANSWERS)], caption, headings

    table, caption, headings = made(recorded("sha256:here"))
    assert table.loc["safe"].tolist() == [1.0, 0.9, 1e-6] and table.loc["factored", "dialogues"] == 0.2
    assert math.isnan(table.loc["factored", "divergence"])
    assert "benchmarks/policy_verdicts.py measured it on this very checkpoint" in caption and "cccccccccc" in caption
    assert all(headings[name].startswith("recorded: ") for name in policies.ANSWERS)
    for result, why in (
        (recorded("sha256:there"), "measured another checkpoint or dtype"),
        (recorded("sha256:here", "bfloat16"), "measured another checkpoint or dtype"),
        (None, "No result of benchmarks/policy_verdicts.py is installed here"),
    ):
        table, caption, headings = made(result)
        assert table.isna().all(axis=None) and why in caption and headings == policies.VERDICT_HEADINGS
    table, caption, _ = made(recorded("sha256:here"), full=True)  # this tokenizer has no template
    assert table.isna().all(axis=None) and "no chat template" in caption


def test_with_full_the_dialogues_are_held_now(traced, monkeypatch):
    _, model, tokenizer, tensors = traced
    held = []

    def answers(model, tokenizer, names):
        held.append(names)
        return pd.DataFrame([(name, 0.5, 0.25, 0.1) for name in names], columns=["policy", *policies.ANSWERS])

    monkeypatch.setattr(policies, "answers", answers)
    monkeypatch.setattr(tokenizer, "chat_template", "a template", raising=False)
    table, caption, headings = policies.verdict_table(
        model, tokenizer, tensors, checkpoint="a", recorded=recorded("a"), full=True, names=["safe"]
    )
    assert held == [["safe"]] and table["dialogues"].tolist() == [0.5]
    assert "computed here" in caption and headings == policies.VERDICT_HEADINGS
