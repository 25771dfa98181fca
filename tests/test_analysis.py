"""Tests of workbench.analysis: gates, values that are not finite, parity with the oracle, findings."""

import json
import math
import re

import pandas as pd
import pytest
import torch
from models import mini

import workbench
from workbench import taps
from workbench.analysis import gates, nans, overflow, parity, runs
from workbench.analysis.verdict import NOT_ESTABLISHED, Verdict
from workbench.config import ModelConfig
from workbench.errors import InputError
from workbench.kernels.agreement import relative_error
from workbench.kernels.gated_delta_rule import spec
from workbench.kernels.gated_delta_rule.reference import oracle
from workbench.model import CausalLM
from workbench.numerics import PRESETS

NAN = math.nan


@pytest.fixture(scope="module")
def model() -> CausalLM:
    """Class-default decay: |G| passes 88.72 in a 64-token chunk of most heads from the start."""
    return CausalLM(ModelConfig.from_hf(mini())).init_weights(3, "class_default").eval()


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(0, 97, (1, 100), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def safe(model, ids) -> runs.Run:
    return runs.run_prompt(model, ids, "safe", keep=parity.KEEP_DELTA_RULE_INPUTS)


@pytest.fixture(scope="module")
def unsafe(model, ids) -> runs.Run:
    return runs.run_prompt(model, ids, "factored")


# ============================================================================================================
# Gates
# ============================================================================================================


def test_chunk_cumsum_restarts_in_each_chunk_and_holds_its_last_value_in_the_padding():
    log_decay = -torch.arange(1.0, 6.0).view(1, 5, 1)
    assert gates.chunk_cumsum(log_decay, 3)[0, :, :, 0].tolist() == [[-1, -3, -6], [-4, -9, -9]]


def test_gate_table_by_hand():
    weak, strong = torch.full((130,), -0.01), torch.full((130,), -2.0)
    strong[70] = -50.0
    table = gates.gate_table({"layers.05.gdn.log_decay": torch.stack([weak, strong], -1)[None]}, chunk=64)
    first, second = table.to_dict("records")
    assert (first["layer"], first["head"], first["chunks"]) == (5, 0, 3)
    assert (first["over_float16"], first["over_float32"]) == (0, 0)
    assert first["span_max"] == pytest.approx(0.64) and first["half_life"] == pytest.approx(
        math.log(2) / 0.01
    )
    # chunks of 128, 176 and 4 nats
    assert (second["span_max"], second["span_median"], second["worst_chunk"]) == (176.0, 128.0, 1)
    assert (second["over_float16"], second["over_float32"]) == (2, 2)
    assert (second["log_decay_min"], second["log_decay_max"]) == (-50.0, -2.0)


def test_gate_table_counts_the_chunks_of_every_sequence_and_names_the_chunk_inside_it():
    log_decay = torch.full((2, 128, 1), -0.1)
    log_decay[1, 64:] = -0.2
    (row,) = gates.gate_table({"layers.00.gdn.log_decay": log_decay}).to_dict("records")
    assert (row["chunks"], row["worst_chunk"]) == (4, 1)


def test_a_gate_that_never_decays_has_no_half_life():
    (row,) = gates.gate_table({"layers.00.gdn.log_decay": torch.zeros(1, 3, 1)}).to_dict("records")
    assert row["half_life"] == math.inf and row["span_max"] == 0.0


def test_gate_table_equals_the_cumsum_tap_of_the_model(model, ids):
    with workbench.trace(model, keep=["*.gdn.log_decay", "*.gdn.cumsum"]) as trace, torch.no_grad():
        model(ids)
    table = gates.gate_table(trace.tensors)
    for row in table.itertuples():
        seen = trace.tensors[taps.full_name(row.layer, taps.GDN_CUMSUM)][:, row.head]
        assert row.span_max == pytest.approx(seen.abs().max().item(), rel=1e-12)
    assert len(table) == 3 * 4


def test_gates_without_kept_tensors_say_what_to_keep():
    with pytest.raises(InputError, match=r"keep=\['\*\.gdn\.log_decay'\]"):
        gates.gate_table({"logits": torch.zeros(1)})
    with pytest.raises(InputError, match=r"chunk: expected at least 1, found 0"):
        gates.gate_table({"layers.00.gdn.log_decay": torch.zeros(1, 3, 1)}, chunk=0)


def test_paths_follow_the_strongest_and_the_weakest_head_through_their_worst_chunk():
    log_decay = torch.stack([torch.full((70,), -g) for g in (0.5, 0.1, 2.0)], -1)[None]
    tensors = {"layers.00.gdn.log_decay": log_decay}
    table = gates.gate_table(tensors)
    paths = gates.chunk_paths(tensors, table)
    heads = paths.groupby("role", sort=False)["head"].first()
    assert heads.to_dict() == {"strongest": 2, "median": 0, "weakest": 1}
    strongest = paths[paths["role"] == "strongest"]
    assert len(strongest) == 64 and strongest["cumsum"].iloc[-1] == -128.0
    assert gates.strongest(table, 2)["head"].tolist() == [2, 0]


def test_a_path_ends_with_its_sequence():
    log_decay = torch.full((1, 70, 1), -0.1)
    log_decay[0, 64:] = -5.0
    tensors = {"layers.00.gdn.log_decay": log_decay}
    assert len(gates.chunk_paths(tensors, gates.gate_table(tensors))) == 6


# ============================================================================================================
# Values that are not finite
# ============================================================================================================


def test_every_tap_point_has_an_op_and_axes():
    assert set(nans.OP_OF_TAP) == {*taps.LAYER_TAPS, *taps.MODEL_TAPS}
    assert nans.axes_of("layers.03.attn.gate") == ["B", "T", "heads * head_dim"]
    assert nans.axes_of("mtp.layers.00.moe.logits") == ["tokens", "E"]


def test_axes_of_the_table_fit_the_tensors_of_the_model(safe):
    for row in safe.trace.table.itertuples():
        assert len(nans.axes_of(row.tap)) == len(row.shape), row.tap


def test_share_map_places_layers_and_tap_points(unsafe):
    shares = nans.share_map(unsafe.trace.table)
    assert list(shares.index) == [0, 1, 2, 3]
    assert [name for name in taps.LAYER_TAPS if name in shares.columns] == list(shares.columns)
    assert shares.loc[0, "gdn.cumsum"] == 0.0 and 0.0 < shares.loc[0, "gdn.decay"] < 1.0
    assert (shares["residual"] == 1.0).all()
    assert math.isnan(shares.loc[3, "gdn.q"]) and math.isnan(shares.loc[0, "attn.q"])


def test_share_map_averages_the_rows_of_one_tap_point_by_size(model):
    ids = torch.ones(1, 50, dtype=torch.int64)
    with workbench.trace(model) as trace, torch.no_grad():
        model(ids, cu_seqlens=torch.tensor([0, 10, 50]))
    table = trace.table.copy()
    scores = table.index[table["tap"] == "layers.03.attn.scores"]
    table.loc[scores[1], "frac_nan"] = 1.0  # 40 x 40 scores of 10 x 10 + 40 x 40
    assert nans.share_map(table).loc[3, "attn.scores"] == pytest.approx(1600 / 1700)


def test_a_safe_run_has_no_bad_op_and_names_the_tensor_nearest_to_its_limit(safe):
    assert nans.first_bad(safe.trace.table) is None and nans.output_share(safe.trace.table) == 0.0
    verdict = nans.diagnose(safe.trace.table, safe.policy)
    assert (verdict.exit_code, verdict.cause_id, verdict.where.tap) == (0, None, None)
    assert "nearest to the limit" in verdict.evidence[0]


@pytest.mark.parametrize("policy", ["factored", "factored_mask_after", "multiply_mask"])
def test_overflow_of_the_exponent_form_is_established_from_the_order_of_tap_points(model, ids, policy):
    run = runs.run_prompt(model, ids, policy)
    verdict = nans.diagnose(run.trace.table, run.policy)
    assert (verdict.cause_id, verdict.confidence, verdict.exit_code) == (
        "exponent_overflow",
        "established",
        1,
    )
    assert (verdict.where.layer, verdict.where.op) == (0, "gated_delta_rule")
    assert verdict.where.tap == "layers.00.gdn.decay" and verdict.where.head is not None
    assert "88.72" in " ".join(verdict.evidence) and "safe" in verdict.fix


class Spoil:
    """Writes NaN at one place of one tap point."""

    def __init__(self, name: str, index: tuple, prefix: str = ""):
        self.name, self.index, self.prefix = name, index, prefix

    def __call__(self, name, tensor):
        if self.prefix + name == self.name:
            tensor = tensor.clone()
            tensor[self.index] = NAN
        return tensor

    def scope(self, prefix):
        return Spoil(self.name, self.index, self.prefix + prefix)


@pytest.mark.parametrize(
    ("name", "index", "token", "head", "op"),
    [
        ("layers.01.gdn.beta", (0, 77, 2), 77, 2, "in_proj_b"),
        ("layers.02.gdn.cumsum", (1, 3, 13), 77, 3, "gated_delta_rule"),
        ("layers.02.gdn.decay", (1, 1, 13, 5), 77, 1, "gated_delta_rule"),
        ("layers.03.attn.scores", (0, 2, 50, 9), 50, 2, "attention"),
        ("layers.00.moe.logits", (33, 4), 33, None, "router"),
        ("layers.03.attn.gate", (0, 9, 100), 9, None, "q_proj"),
        ("embed", (0, 5, 0), 5, None, "embed_tokens"),
    ],
)
def test_the_place_of_a_planted_nan_is_found_and_its_cause_left_open(
    model, ids, name, index, token, head, op
):
    model.tap = Spoil(name, index)
    try:
        run = runs.run_prompt(model, ids, "safe")
    finally:
        model.tap = None
    verdict = nans.diagnose(run.trace.table, run.policy)
    where = verdict.where
    assert (where.tap, where.token, where.head, where.op) == (name, token, head, op)
    assert (verdict.cause_id, verdict.confidence, verdict.fix) == (NOT_ESTABLISHED, NOT_ESTABLISHED, None)
    assert str(index) in verdict.evidence[0]


def test_a_planted_nan_in_the_decay_is_not_blamed_on_a_safe_or_shallow_exponent(ids):
    mild = CausalLM(ModelConfig.from_hf(mini())).init_weights(3, "realistic").eval()
    mild.tap = Spoil("layers.00.gdn.decay", (0, 0, 1, 0))
    for policy in ("safe", "factored"):
        run = runs.run_prompt(mild, ids, policy)
        assert nans.diagnose(run.trace.table, run.policy).cause_id == NOT_ESTABLISHED


def test_chunks_of_a_batch_are_read_step_by_step(model):
    ids = torch.ones(2, 100, dtype=torch.int64)
    model.tap = Spoil("layers.00.gdn.cumsum", (3, 0, 7))  # second step, second sequence
    try:
        run = runs.run_prompt(model, ids, "safe")
    finally:
        model.tap = None
    assert nans.diagnose(run.trace.table, run.policy).where.token == 64 + 7


def test_verdict_as_json_has_the_shared_fields():
    fields = Verdict("fine").to_json()
    assert list(fields) == ["verdict", "where", "cause_id", "evidence", "ruled_out", "fix", "confidence"]
    assert list(fields["where"]) == ["layer", "op", "tap", "token", "head"]
    json.dumps(fields, allow_nan=False)


# ============================================================================================================
# Parity
# ============================================================================================================


def test_errors_against_the_oracle_separate_the_policies():
    log_decay = torch.full((1, 192, 4), -1e-6)
    log_decay[:, ::2] = -20.0  # strong and weak gates in one chunk: a float32 cumulative sum cancels
    inputs = spec.example(tokens=192, log_decay=log_decay)
    tensors = {taps.full_name(2, tap): inputs[name] for name, tap in parity.ARGUMENT_TAPS.items()}
    errors = parity.delta_rule_errors(tensors, ["safe", "fp32_cumsum", "segsum", "factored"])
    by_policy = errors.set_index("policy")
    assert (errors["layer"] == 2).all()
    assert by_policy.loc["safe", "error_out"] < 5e-7 and by_policy.loc["safe", "error_state"] < 5e-7
    assert by_policy.loc["segsum", "error_out"] < 5e-7
    assert by_policy.loc["fp32_cumsum", "error_out"] > 3 * by_policy.loc["safe", "error_out"]
    assert math.isnan(by_policy.loc["factored", "error_out"]) and by_policy.loc["factored", "bad_out"] > 0.5
    assert 0.0 < by_policy.loc["safe", "worst_row"] < 5e-7 and math.isnan(by_policy.loc["factored", "worst_row"])


@pytest.mark.parametrize(("name", "value"), [("v", NAN), ("beta", math.inf), ("log_decay", -math.inf)])
def test_inputs_that_are_not_finite_leave_an_error_missing_and_the_rest_of_the_table(name, value):
    tensors = {}
    for layer in (0, 1):
        inputs = spec.example(tokens=80, seed=layer)
        if layer == 1:
            inputs[name][0, 3] = value
        tensors |= {taps.full_name(layer, tap): inputs[argument] for argument, tap in parity.ARGUMENT_TAPS.items()}
    errors = parity.delta_rule_errors(tensors, ["safe"]).set_index("layer")
    assert errors.loc[0, "error_out"] < 1e-6 and errors.loc[0, "bad_out"] == 0.0
    assert math.isnan(errors.loc[1, "error_out"]) and math.isnan(errors.loc[1, "error_state"])
    assert errors.loc[1, "bad_out"] > 0.9
    if name != "log_decay":  # the oracle takes exp(-inf), a decay of 0
        assert pd.isna(errors.loc[1, "worst_token"]) and math.isnan(errors.loc[1, "worst_row"])
    worst = parity.worst_errors(errors.reset_index())
    assert worst["layer"].tolist() == [1] and worst["error_out"].isna().all()


def test_errors_are_those_of_the_tensors_the_model_computed(model, ids):
    keep = (*parity.KEEP_DELTA_RULE_INPUTS, "*.gdn.out")
    run = runs.run_prompt(model, ids, "safe", keep=keep)
    errors = parity.delta_rule_errors(run.trace.tensors, ["safe"])
    for layer, inputs in parity.kept_inputs(run.trace.tensors).items():
        expected = relative_error(
            run.trace.tensors[taps.full_name(layer, taps.GDN_OUT)], oracle(**inputs)[0]
        )
        assert errors.set_index("layer").loc[layer, "error_out"] == expected


def test_worst_errors_keep_the_order_and_let_nan_win():
    errors = pd.DataFrame(
        {
            "layer": [0, 0, 1, 1],
            "policy": ["b", "a", "b", "a"],
            "error_out": [1e-7, 1e-6, 3e-7, NAN],
            "error_state": [5e-7, 1e-6, 1e-7, 1e-8],
            "bad_out": [0.0, 0.0, 0.0, 0.5],
        }
    )
    b, a = parity.worst_errors(errors).to_dict("records")
    assert (b["policy"], b["error_out"], b["error_state"], b["layer"]) == ("b", 3e-7, 5e-7, 0)
    assert (a["policy"], a["layer"], a["bad_out"]) == ("a", 1, 0.5) and math.isnan(a["error_out"])


def test_inputs_that_were_not_kept_are_asked_for():
    with pytest.raises(InputError, match="expected the kept inputs"):
        parity.delta_rule_errors({}, ["safe"])


# ============================================================================================================
# Runs and findings
# ============================================================================================================


def test_a_policy_is_put_back_after_its_run_also_after_an_error(model, ids):
    before = model.kernels
    with pytest.raises(InputError), runs.using_policy(model, "factored"):
        assert model.kernels.policy is PRESETS["factored"]
        model(ids + 97)
    assert model.kernels is before


def test_a_policy_from_a_file_is_called_by_the_name_of_the_file(model, ids, safe, tmp_path):
    (tmp_path / "mine.json").write_text('{"chunk": 32}')
    name = str(tmp_path / "mine.json")
    assert runs.run_prompt(model, ids, name).label == runs.continue_prompt(model, ids, name, 1).label == "mine.json"
    errors = parity.delta_rule_errors(safe.trace.tensors, [name])
    assert set(errors["policy"]) == {"mine.json"}
    assert [runs.label_of(policy) for policy in ("safe", "a/safe")] == ["safe", "a/safe"]


def test_as_input_refuses_empty_and_overlong_prompts(model):
    assert runs.as_input(model, [1, 2], 2).tolist() == [[1, 2]]
    with pytest.raises(InputError, match="at least one token"):
        runs.as_input(model, [], 10)
    with pytest.raises(InputError, match="at most 2 tokens, found 3"):
        runs.as_input(model, [1, 2, 3], 2)


def test_generation_from_values_that_are_not_finite_is_an_error_in_the_continuation(model, ids):
    text = runs.continue_prompt(model, ids, "factored", 4)
    assert text.tokens == () and "NaN or Inf" in text.error
    good = runs.continue_prompt(model, ids, "safe", 4)
    assert len(good.tokens) == 4 and good.error is None
    assert good.tokens == tuple(model.generate(ids, max_new_tokens=4).sequences[0])


def _findings(model, ids, safe, unsafe, policies=("safe", "fp32_cumsum", "factored"), policy=None):
    return overflow.overflow_findings(
        gates=gates.gate_table(safe.trace.tensors),
        safe=safe,
        unsafe=unsafe,
        safe_text=runs.continue_prompt(model, ids, "safe", 3),
        unsafe_text=runs.continue_prompt(model, ids, policy or unsafe.label, 3),
        errors=parity.delta_rule_errors(safe.trace.tensors, policies),
    )


def test_findings_state_the_overflow_in_three_lines_and_four_numbers(model, ids, safe, unsafe):
    found = _findings(model, ids, safe, unsafe)
    assert len(found["verdict"]) == 3 and len(found["numbers"]) == 4
    assert found["fault_found"] is False
    assert "float32 limit of 88.7" in found["verdict"][0]
    assert "gated_delta_rule at layers.00.gdn.decay" in found["verdict"][1]
    assert "100 % of the logits" in found["verdict"][1] and "generation is refused" in found["verdict"][1]
    assert "finite everywhere" in found["verdict"][2] and "fp32_cumsum" in found["verdict"][2]
    assert "factored" not in found["verdict"][2]
    assert found["unsafe"]["logits_bad_share"] == 1.0 and found["safe"]["logits_bad_share"] == 0.0
    assert found["safe"]["tokens_written"] and not found["unsafe"]["tokens_written"]


def test_findings_do_not_claim_an_overflow_that_did_not_happen(ids):
    mild = CausalLM(ModelConfig.from_hf(mini())).init_weights(3, "realistic").eval()
    short = ids[:, :8]
    safe = runs.run_prompt(mild, short, "safe", keep=parity.KEEP_DELTA_RULE_INPUTS)
    found = _findings(mild, short, safe, runs.run_prompt(mild, short, "factored"))
    assert "0 of 12 heads pass the float32 limit" in found["verdict"][0]
    assert "finite on this prompt" in found["verdict"][1]
    assert found["unsafe"]["fault"]["cause_id"] is None


CLAMPED = {"exponent": "factored", "cumsum": "float32", "clamps": [
    {"site": "cumsum", "phase": "prefill", "lo": -20, "hi": 20}]}  # fmt: skip
HELD = CLAMPED | {"clamps": [{"site": "state", "lo": -1e9, "hi": 1e9}], "exponent": "mask_after"}
GROUNDS = {
    "safe": ("form", "since this form cannot overflow; error against the fp64 oracle"),
    "mask_after": ("form", "since this form cannot overflow; error against the fp64 oracle"),
    "clamp_cumsum_20": ("form", "this form cannot overflow; a clamp binds here, and the result is wrong: error"),
    "bf16_cumsum": ("form", "this form cannot overflow; off for another reason, a sum held in bfloat16: error"),
    "nan_to_num": ("nan_to_num", "but only because of nan_to_num: without it"),
    "clamped.json": ("clamp", "but only because of a clamp: without it"),
    "held.json": ("form", "since this form cannot overflow; error against the fp64 oracle"),
}


@pytest.mark.parametrize("policy", GROUNDS)
def test_a_finite_run_is_given_its_own_reason_and_its_error(model, ids, safe, policy, tmp_path):
    name = policy
    if policy.endswith(".json"):
        name = str(tmp_path / policy)
        (tmp_path / policy).write_text(json.dumps({"clamped.json": CLAMPED, "held.json": HELD}[policy]))
    found = _findings(model, ids, safe, runs.run_prompt(model, ids, name), ("safe", name), name)
    key, clause = GROUNDS[policy]
    line = found["verdict"][1]
    assert found["unsafe"]["finite_because"][0] == key
    start = "first bad op gated_delta_rule" if policy == "nan_to_num" else "finite on this prompt, "
    assert line.startswith(f"Policy {policy}: {start}") and clause in line
    wrong = float(re.search(r"error against the fp64 oracle (\S+),", line)[1]) if "fp64" in line else math.inf
    assert (wrong > 1e-3) == (policy in ("clamp_cumsum_20", "bf16_cumsum", "nan_to_num", "clamped.json"))
    assert ("wrong" in line or "off for another reason" in line) == (wrong > 1e-3)
    assert "no chunk" not in line


def test_a_run_below_its_own_limit_says_so_and_only_then(ids):
    strong = CausalLM(ModelConfig.from_hf(mini())).init_weights(3, "realistic").eval()
    with torch.no_grad():
        for layer in strong.layers:
            if layer.is_linear:
                layer.mixer.A_log.fill_(3.5)
    safe = runs.run_prompt(strong, ids, "safe", keep=parity.KEEP_DELTA_RULE_INPUTS)
    span = gates.gate_table(safe.trace.tensors)["span_max"].max()
    found = _findings(strong, ids, safe, runs.run_prompt(strong, ids, "midpoint"), ("safe", "midpoint"))
    assert 88.8 < span < 177 and found["gates"]["heads_over_float32"] > 0, span
    assert found["unsafe"]["finite_because"][0] == "below_limit"
    assert "since no chunk reaches this form's own limit of 177.4 nats; the strongest" in found["verdict"][1]


def test_one_token_is_read_by_the_recurrence_and_the_line_says_so(model, ids):
    one = ids[:, :1]
    safe = runs.run_prompt(model, one, "safe", keep=parity.KEEP_DELTA_RULE_INPUTS)
    found = _findings(model, one, safe, runs.run_prompt(model, one, "factored"))
    assert found["unsafe"]["finite_because"][0] == "one_token" and "a single token" in found["verdict"][1]


def test_findings_of_a_model_that_is_bad_by_itself_say_so(model, ids):
    healthy = runs.run_prompt(model, ids, "safe", keep=parity.KEEP_DELTA_RULE_INPUTS)
    model.tap = Spoil("layers.03.attn.v", (0, 0, 0, 0))
    try:
        safe = runs.run_prompt(model, ids, "safe")
        unsafe = runs.run_prompt(model, ids, "factored")
        found = overflow.overflow_findings(
            gates=gates.gate_table(healthy.trace.tensors),
            safe=safe,
            unsafe=unsafe,
            safe_text=runs.continue_prompt(model, ids, "safe", 3),
            unsafe_text=runs.continue_prompt(model, ids, "factored", 3),
            errors=parity.delta_rule_errors(healthy.trace.tensors, ["safe"]),
        )
    finally:
        model.tap = None
    assert found["fault_found"] is True
    assert "NOT finite either, first at layers.03.attn.v" in found["verdict"][2]


def test_conditions_name_what_ran(safe):
    found = overflow.conditions(safe)
    assert found["dtype"] == "float32" and found["threads"] == 1 and found["policy"]["cumsum"] == "float64"
    assert found["backends"]["gated_delta_rule (float32, 2 and more tokens)"] == "torch_chunk"


def test_the_answers_of_policies_are_told_by_where_they_part():
    def wrote(label: str, *tokens: int, error: str | None = None) -> runs.Continuation:
        return runs.Continuation(label, tokens, error)

    safe = wrote("safe", 1, 2, 3)
    read = overflow.answer_reading([safe, wrote("a", error="no token"), wrote("b", 1, 2, 3), wrote("c", 1, 9, 3)])
    assert "Under a it refuses to draw a token. Under b it writes the same." in read
    assert read.endswith("Under c it goes on without a warning, and leaves the text of safe after 1 of 3 tokens.")
    assert "after 2 of 3 tokens" in overflow.answer_reading([safe, wrote("d", 1, 2)])


def test_the_shape_of_an_output_is_that_of_the_values(safe):
    assert parity.output_shape(safe.trace.tensors) == (1, 100, 4, 24)


def test_a_fault_is_followed_over_the_rows_of_its_head(model, ids, safe, unsafe):
    where = nans.diagnose(unsafe.trace.table, unsafe.policy).where
    rows = overflow.row_spread(model, ids, "factored", where)
    assert list(rows.index) == list(overflow.ROW_STAGES) and rows.shape[1] == ids.shape[1]
    assert (rows.loc["gdn.decay", :63] > 0).all()  # factored with a multiplied mask: every row of the chunk
    assert (rows.loc["gdn.inter", :63] == 0).all() and (rows.loc["gdn.inter", 64:] == 1).all()  # handed on by the state
    assert rows.loc["gdn.kkt", 0] == 0 and (rows.loc["gdn.out"] == 1).all()
    assert overflow.row_spread(model, ids, "safe", nans.diagnose(safe.trace.table, safe.policy).where).empty
