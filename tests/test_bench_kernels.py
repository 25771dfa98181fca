"""Timing the backends of the ops: what is drawn, what is let through, what is told of the rest."""

import importlib.util
import json
import math
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from workbench import bench, taps
from workbench.bench import clocks, measure, suite
from workbench.bench.cases import IN_PLACE, MOE_LAYER, TIMED, Words, case_of, fits, parse_tokens
from workbench.bench.limits import Limits, measure_limits
from workbench.bench.measure import Side, all_sides, flagged, side_named
from workbench.bench.shapes import WHOLE, shape_named
from workbench.bench.suite import Entry, Settings, run_suite
from workbench.cli import main
from workbench.errors import BackendError, InputError
from workbench.kernels import Kernels
from workbench.kernels.gated_delta_rule.extremes import VALID_EXTREMES
from workbench.kernels.registry import OPERATIONS, register_backend

ROOT = Path(__file__).resolve().parent.parent
SHAPE = shape_named("miniature")
LIMITS = Limits(1e10, {"float32": 1e11})


@pytest.fixture(autouse=True)
def _same_operations():
    """What a test or a benchmark registers is gone after it: other tests count the backends."""
    before = dict(OPERATIONS)
    yield
    OPERATIONS.clear()
    OPERATIONS.update(before)


def measured(op: str, tokens: str, sides: list[Side], **options: object) -> measure.Measured:
    case = case_of(op, SHAPE, parse_tokens(tokens), torch.float32)
    return measure.measure(case, sides, device="cpu", limits=LIMITS, **({"seed": 1, "rounds": 2} | options))


# ---- shapes and cases


def test_a_shape_split_over_gpus_has_its_part_of_heads_and_experts():
    whole, eighth = shape_named("397b"), shape_named("397b-tp8")
    assert (eighth.key_heads, eighth.value_heads, eighth.expert_width) == (2, 8, 128)
    assert (eighth.hidden, eighth.experts, eighth.top_k, eighth.key_dim) == (whole.hidden, 512, 10, 128)
    assert whole.channels == 2 * 16 * 128 + 64 * 128
    assert shape_named("35b-a3b") is WHOLE["35b-a3b"]


def test_the_miniature_is_the_one_in_the_repository():
    config = json.loads((ROOT / "data" / "miniature" / "config.json").read_text())["text_config"]
    assert SHAPE.hidden == config["hidden_size"] and SHAPE.conv_width == config["linear_conv_kernel_dim"]
    assert (SHAPE.key_heads, SHAPE.value_heads) == (config["linear_num_key_heads"], config["linear_num_value_heads"])
    assert (SHAPE.key_dim, SHAPE.value_dim) == (config["linear_key_head_dim"], config["linear_value_head_dim"])
    sizes = (config["num_experts"], config["num_experts_per_tok"], config["moe_intermediate_size"])
    assert (SHAPE.experts, SHAPE.top_k, SHAPE.expert_width) == sizes


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("35b", "expected one of 35b-a3b, 27b, 397b, miniature"), ("tp8", "expected one of"),
        ("397b-tp5", "divides key_heads 16, value_heads 64, expert_width 1024"), ("397b-tp0", "divides"),
    ],
)  # fmt: skip
def test_other_shapes_are_refused(name, said):
    with pytest.raises(InputError, match=said):
        shape_named(name)


def test_tokens_are_sequences_times_length():
    assert parse_tokens("8x4096") == (8, 4096) and parse_tokens(" 512 ") == (1, 512)
    for text in ("", "8x", "x8", "0x4", "4x0", "-1", "8x4x2", "many"):
        with pytest.raises(InputError, match="expected TOKENS or SEQUENCESxTOKENS"):
            parse_tokens(text)


def test_what_does_not_fit_together_is_refused():
    dense = shape_named("27b")
    assert fits("causal_conv", dense, (1, 9)) and not fits(MOE_LAYER, dense, (1, 9))
    assert fits("gdn_decode", dense, (9, 1)) and not fits("gdn_decode", dense, (1, 9))
    with pytest.raises(InputError, match="shape 27b has no experts"):
        case_of("experts", dense, (1, 9), torch.float32)
    with pytest.raises(InputError, match=r"expected one that is timed: gated_delta_rule"):
        case_of("softmax", dense, (1, 9), torch.float32)
    if "gdn_decode" in TIMED:
        with pytest.raises(InputError, match="expected one token of each sequence"):
            case_of("gdn_decode", dense, (1, 9), torch.float32)


@pytest.mark.parametrize("op", TIMED)
def test_every_case_is_right_by_the_automatic_choice_and_has_a_time_and_a_limit(op):
    tokens = "3x1" if op in ("gdn_decode", IN_PLACE) else "2x9"
    found = measured(op, tokens, [Side(label="automatic")])
    assert found.not_timed == {} and found.not_held == {} and found.share <= 1.0
    times = {row.backend: row for row in found.rows if row.unit == "ms"}
    (limit,) = [name for name in times if name.startswith("limit, ")]
    own = times["automatic"]
    assert own.median > 0 and own.share_of_limit == pytest.approx(times[limit].median / own.median)
    assert any(text.startswith(op if op in OPERATIONS else ("experts", "gdn_decode")) for text in own.attested)
    assert own.attested[-1] == "wall clock, one call"
    errors = [row.unit for row in found.rows if row.unit.startswith("relative error")]
    assert any("worst hard input" in unit for unit in errors) and any("worst" not in unit for unit in errors)


def test_inputs_are_drawn_anew_for_each_seed_and_alike_for_one():
    case = case_of("gated_delta_rule", SHAPE, (1, 5), torch.bfloat16)
    a, b, c = (case.draw("cpu", seed) for seed in (1, 1, 2))
    assert torch.equal(a["v"], b["v"]) and not torch.equal(a["v"], c["v"])
    assert a["q"].dtype == torch.bfloat16 and a["log_decay"].dtype == torch.float32
    assert "initial_state" not in a and "initial_state" in case_of(
        "gated_delta_rule", SHAPE, (2, 1), torch.bfloat16
    ).draw("cpu", 1)


def test_hard_inputs_keep_what_they_provoke_in_other_head_sizes():
    case = case_of("gated_delta_rule", SHAPE, (1, 130), torch.float32)
    hard = case.hard("cpu", 3)
    assert {"repeated_keys", "strong_decay", "one_token_tail", "state_beyond_fp16"} <= set(hard)
    assert "ragged_tails" not in hard, "packed rows are another call"
    keys = hard["repeated_keys"]["k"]
    assert keys.shape[-1] == SHAPE.key_dim and torch.allclose(keys.norm(dim=-1), torch.ones(()), atol=1e-5)
    assert torch.allclose((keys[0, 0] * keys[0, 100]).sum(-1), torch.ones(()), atol=1e-5)
    assert keys[0, 0, 0].count_nonzero() == SHAPE.key_dim, "no channel is idle"
    assert hard["state_beyond_fp16"]["initial_state"].abs().max() > 65504
    one = case_of("gated_delta_rule", SHAPE, (1, 1), torch.float32).hard("cpu", 3)
    assert one and all(given["q"].shape[1] == 1 for given in one.values())


def test_hard_inputs_have_the_heads_of_the_shape():
    """Heads are repeated with their gates: each value head computes what one of the input's own did."""
    three = replace(SHAPE, name="three", key_heads=3, value_heads=9)
    case = case_of("gated_delta_rule", three, (1, 130), torch.float32)
    given = case.hard("cpu", 3)["heads_apart"]
    assert given["q"].shape[2] == 3 and given["v"].shape[2] == 9 and given["log_decay"].shape[2] == 9
    own = VALID_EXTREMES["heads_apart"].make(130, 3)
    assert torch.equal(given["log_decay"][0, :, 0], own["log_decay"][0, :, 0])
    assert torch.equal(given["log_decay"][0, :, 3], own["log_decay"][0, :, 2]), "of the second key head"
    out, _ = case.expected(given)
    first, _ = case_of("gated_delta_rule", SHAPE, (1, 130), torch.float32).expected(own)
    assert torch.allclose(out[0, :, 4].norm(dim=-1), first[0, :, 3].norm(dim=-1), rtol=1e-4)


def test_the_least_cost_is_that_of_the_bytes_and_products_of_the_model():
    big = shape_named("35b-a3b")

    def cost(op: str, tokens: tuple[int, int], **given: torch.Tensor) -> tuple[float, float]:
        return case_of(op, big, tokens, torch.bfloat16).cost(given)

    state, zero = 2 * 32 * 128 * 128 * 4, torch.zeros(())
    moved, flops = cost("gated_delta_rule", (64, 1), initial_state=zero)
    assert moved / (64 * state) == pytest.approx(1.0, abs=0.02), "the state is nearly all of it"
    assert flops == 64 * 32 * 6 * 128 * 128
    moved, flops = cost("gated_delta_rule", (1, 16384))
    assert flops == 16384 * 32 * 163_840 and moved == pytest.approx(16384 * (8192 + 16384 + 64 + 128), rel=0.01)
    distinct = torch.arange(8)[None]
    moved, flops = cost(MOE_LAYER, (1, 1), logits=-torch.arange(256.0)[None])
    assert moved == pytest.approx(8 * 3 * 2048 * 512 * 2, rel=1e-3) and flops == 2 * 8 * 3 * 2048 * 512
    assert cost("experts", (1, 1), experts=distinct)[0] == pytest.approx(moved, rel=1e-3)


# ---- right or not, and how long


def test_a_wrong_backend_has_no_time_and_says_what_is_wrong():
    run = OPERATIONS["rms_norm"].backends["torch_rms"].run
    wrong = {
        "off": lambda x, weight, *, eps: 1.001 * run(x, weight, eps=eps),
        "off_when_large": lambda x, weight, *, eps: run(x.clamp(-50, 50), weight, eps=eps),
    }
    for name, function in wrong.items():
        register_backend("rms_norm", name, function, lambda call: None)
    case = case_of("rms_norm", SHAPE, (1, 9), torch.float32)
    found = measured("rms_norm", "1x9", [side_named(case, name) for name in ("torch_rms", *wrong)])
    assert {row.backend for row in found.rows if row.unit == "ms"} == {"torch_rms", "limit, memory"}
    reasons = {name.rpartition(": ")[2]: why for name, why in found.not_timed.items()}
    assert reasons["off"].startswith(f"wrong: {case.contract.outputs[0]}: error 0.001")
    assert reasons["off_when_large"].startswith("wrong on x times 1000: ")


def test_a_backend_that_refuses_or_fails_says_why():
    def broken(x, weight, *, eps):
        raise RuntimeError("no such kernel image")

    register_backend("rms_norm", "broken", broken, lambda call: None)
    register_backend("rms_norm", "never", broken, lambda call: "serves nobody")
    sides = [Side(label=name, requested={"rms_norm": name}) for name in ("broken", "never")]
    found = measured("rms_norm", "1x9", sides)
    first, second = found.not_timed.values()
    assert first.startswith("failed: ") and "no such kernel image" in first
    assert second.startswith("refused: ") and "serves nobody" in second
    assert found.rows == []


def test_a_hard_input_that_the_policy_of_a_backend_is_not_right_on_is_told_and_no_failure():
    inner = OPERATIONS["gated_delta_rule"].backends["torch_chunk"]
    register_backend("gated_delta_rule", "factored", inner.run, inner.supports, policy="factored")
    found = measured("gated_delta_rule", "1x130", [Side(label="factored", requested={"gated_delta_rule": "factored"})])
    assert found.not_timed == {}
    assert any("strong_decay" in name for name in found.not_held)
    assert all("computes by the policy factored, which is not right on" in why for why in found.not_held.values())


def test_what_rounds_inside_may_be_further_off_on_hard_inputs_and_says_by_how_much():
    run = OPERATIONS["rms_norm"].backends["torch_rms"].run

    def rounds(x, weight, *, eps):
        return run(x, weight, eps=eps) * (1.0 + 5e-6 * (x.abs().max() > 50))

    for name, inside in (("rounds", True), ("does_not", False)):
        register_backend("rms_norm", name, rounds, lambda call: None, rounds_inside=inside)
    found = measured(
        "rms_norm", "1x9", [Side(label=name, requested={"rms_norm": name}) for name in ("rounds", "does_not")]
    )
    ((name, why),) = found.not_timed.items()
    assert name.endswith("does_not") and why.startswith("wrong on x times 1000")
    (of_output,) = found.hard["rounds"].values()
    assert of_output["x times 1000"] == pytest.approx(5e-6, rel=0.1) and of_output["x times 0.0001"] < 1e-6
    assert found.share <= 1.0


def test_a_hard_input_that_a_backend_refuses_is_told_and_the_others_count():
    inner = OPERATIONS["gated_delta_rule"].backends["torch_chunk"]
    register_backend(
        "gated_delta_rule", "short", inner.run, lambda call: "takes 128 tokens" if call.tokens > 128 else None
    )
    found = measured("gated_delta_rule", "1x128", [Side(label="short", requested={"gated_delta_rule": "short"})])
    ((name, why),) = found.not_held.items()
    assert name.endswith("short: one_token_tail") and "takes 128 tokens" in why
    assert found.not_timed == {} and any(row.backend == "short" and row.unit == "ms" for row in found.rows)


def test_inputs_that_a_backend_writes_to_are_its_own():
    inner = OPERATIONS["causal_conv"].backends["torch_shift"]

    def writes(x, weight, *, window=None, cu_seqlens=None):
        found = inner.run(x, weight, window=window, cu_seqlens=cu_seqlens)
        window.fill_(7.0)
        return found

    register_backend("causal_conv", "writes", writes, lambda call: None, mutates=("window",))
    sides = [Side(label=name, requested={"causal_conv": name}) for name in ("writes", "torch_shift")]
    found = measured("causal_conv", "1x9", sides)
    assert found.not_timed == {}, "the second side finds its window as it was drawn"


def test_samples_that_spread_are_taken_again_and_then_told(monkeypatch):
    """A side that is quiet at the second attempt has those samples, one that never is has its last ones."""
    taken = {"torch_rms": iter([1.0, 2.0] * 2 + [3.0] * 40), "automatic": iter([1.0, 9.0] * 40)}
    made = iter(["torch_rms", "automatic"])

    def prepare(calls, device, clock):
        name = next(made)
        return clocks.Clock("by hand", lambda: 1e3 * next(taken[name]), calls[0]())

    monkeypatch.setattr(measure, "prepare", prepare)
    sides = [Side(label="torch_rms", requested={"rms_norm": "torch_rms"}), Side(label="automatic")]
    rows = {row.backend: row for row in measured("rms_norm", "1x9", sides).rows if row.unit == "ms"}
    assert rows["torch_rms"].median == 3.0 and rows["torch_rms"].rejected == ""
    assert "allowed 5 %, 3 times" in rows["automatic"].rejected


def test_what_a_side_gave_when_it_was_timed_is_checked_too(monkeypatch):
    """A captured graph runs none of Python's checks: its own result is compared."""

    def prepare(calls, device, clock):
        return clocks.Clock("by hand", lambda: 1.0, tuple(x + 1.0 for x in calls[0]()))

    monkeypatch.setattr(measure, "prepare", prepare)
    found = measured("rms_norm", "1x9", [Side(label="automatic")])
    (why,) = found.not_timed.values()
    assert why.startswith("wrong when it was timed (by hand): ")


def test_sides_are_named_by_backend_or_by_several():
    case = case_of(MOE_LAYER, SHAPE, (1, 9), torch.float32)
    side = side_named(case, "torch_sorted+routing=torch_max")
    assert side.requested["experts"] == "torch_sorted" and side.requested["routing"] == "torch_max"
    assert side_named(case, "automatic").requested == {}
    with pytest.raises(BackendError, match="moe_layer has none of that name, expected one of"):
        side_named(case, "torch_chunk")
    labels = [side.label for side in all_sides(case)]
    assert labels[0] == "automatic" and "torch_grouped" in labels and "reference" not in labels


def test_flags_are_of_backends_that_raise_them():
    inner = OPERATIONS["causal_conv"].backends["torch_shift"]

    def raises(x, weight, *, window=None, cu_seqlens=None, flags=None):
        found = inner.run(x, weight, window=window, cu_seqlens=cu_seqlens)
        if flags is not None:
            extremes = torch.stack([found[0].max(), (-found[0]).max()]).clamp(min=0.0)
            flags[0] = torch.maximum(flags[0], extremes.view(torch.int32))
        return found

    register_backend("causal_conv", "raises", raises, lambda call: None, flags=(taps.GDN_CONV,))
    register_backend("causal_conv", "promises", lambda *args, flags=None, **named: inner.run(*args, **named),
                     lambda call: None, flags=(taps.GDN_CONV,))  # fmt: skip
    sides = [Side(label=name, requested={"causal_conv": name}) for name in ("raises", "promises", "torch_shift")]
    twins = flagged(sides)
    assert [side.label for side in twins] == ["raises, flags", "promises, flags"]
    found = measured("causal_conv", "1x9", [*sides, *twins])
    times = {row.backend: row for row in found.rows if row.unit == "ms"}
    assert times["raises, flags"].attested[-1] == "flags raised by its kernels"
    (why,) = found.not_timed.values()
    assert why == "refused: its kernels raise no flags in this call"


def test_words_are_kept_by_the_names_that_ask_for_them():
    words = Words("cpu")
    assert not words.are_raised
    rows = words.flag_rows(["a", "b"])
    assert rows.shape == (2, 2) and rows is words.flag_rows(("a", "b")) and not words.are_raised
    rows.fill_(0)
    assert words.are_raised


def test_counts_are_of_the_kernels_and_syncs_of_a_side():
    side = Side(label="torch_loop", requested={"experts": "torch_loop"}, has_counts=True)
    found = {row.unit: row.median for row in measured("experts", "1x9", [side]).rows if row.backend == "torch_loop"}
    assert found["host syncs"] >= SHAPE.experts and found["kernels launched"] > 0


def test_two_samples_at_least():
    with pytest.raises(InputError, match="rounds: expected at least 2"):
        measured("rms_norm", "1x9", [Side(label="automatic")], rounds=1)


def test_sets_of_inputs_are_larger_than_the_cache_together():
    assert clocks.sets_needed(1.0, "cpu") == 64
    assert clocks.sets_needed(clocks.CACHE_BYTES, "cpu") == clocks.CACHES
    assert clocks.sets_needed(1e12, "cpu") == 1
    with pytest.raises(InputError, match="clock 'sundial': expected graph or eager"):
        clocks.prepare([lambda: None], "cpu", "sundial")


def test_limits_are_measured_and_bound_what_they_should():
    found = measure_limits("cpu", torch.float32)
    assert found.bandwidth > 1e8 and found.rates["float32"] > 1e8
    limits = Limits(100.0, {"float32": 10.0})
    assert limits.seconds(200.0, 10.0, torch.float32) == (2.0, "memory")
    assert limits.seconds(200.0, 40.0, torch.float32) == (4.0, "compute")
    assert limits.seconds(200.0, 0.0, torch.bfloat16) == (2.0, "memory")
    with pytest.raises(InputError, match="expected a measured rate of bfloat16, found float32"):
        limits.seconds(1.0, 1.0, torch.bfloat16)


# ---- many cases


@pytest.fixture
def clone(tmp_path):
    """A git clone with one commit."""
    (tmp_path / "file").write_text("1")
    identity = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.org"]
    for arguments in (["init", "-q"], ["add", "file"], [*identity, "commit", "-q", "-m", "start"]):
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True)
    return tmp_path


def entries(*tokens: str) -> list[Entry]:
    cases = [case_of("rms_norm", SHAPE, parse_tokens(text), torch.float32) for text in tokens]
    return [Entry(case, [Side(label="torch_rms", requested={"rms_norm": "torch_rms"})]) for case in cases]


def test_a_stopped_suite_goes_on_and_writes_one_result(clone, monkeypatch):
    settings, said = Settings(rounds=2), []
    inner = suite.measure

    def stopped(case, *args, **named):
        if case.tokens == 3:
            raise KeyboardInterrupt
        return inner(case, *args, **named)

    monkeypatch.setattr(suite, "measure", stopped)
    with pytest.raises(KeyboardInterrupt):
        run_suite(entries("1x2", "1x3"), settings, name="name", folder=clone / "results", say=said.append)
    half = bench.read_result(clone / "results" / "name.cpu.json")
    assert {row["case"] for row in half["rows"]} == {"rms_norm, miniature, 1x2, float32"}
    monkeypatch.setattr(suite, "measure", inner)
    outcome = run_suite(entries("1x2", "1x3"), settings, name="name", folder=clone / "results", say=said.append)
    assert any("going on after 1 cases" in line for line in said)
    content = bench.read_result(outcome.path)
    assert content["rows"][: len(half["rows"])] == half["rows"], "what was over is not measured again"
    assert {row["case"] for row in content["rows"]} == {f"rms_norm, miniature, 1x{n}, float32" for n in (2, 3)}
    assert set(content["hardware"]["seeds"]) == {row["case"] for row in content["rows"]}
    assert content["hardware"]["limits"]["float32"]["bandwidth"] > 0
    assert "x times 1000" in str(content["hardware"]["errors on hard inputs"]["rms_norm, miniature, 1x2, float32"])
    assert content["correctness"]["metric"] == suite.METRIC and content["correctness"]["limit"] == 1.0
    assert [path.name for path in (clone / "results").iterdir()] == ["name.cpu.json"]


def test_what_there_is_no_time_for_is_told(clone):
    outcome = run_suite(entries("1x2"), Settings(rounds=2, minutes=-1.0), name="name", folder=clone / "results")
    assert outcome.left == ["rms_norm, miniature, 1x2, float32"] and outcome.path is None
    found = run_suite(entries("1x2"), Settings(rounds=2, minutes=1.0), name="name", folder=clone / "results",
                      measured=("0" * 40, True))  # fmt: skip
    content = bench.read_result(found.path)
    assert content["hardware"]["cases left"] == [] and (content["commit"], content["dirty"]) == ("0" * 40, True)


def test_a_rejected_row_stays_in_the_result_and_says_so(clone):
    noisy = bench.Row.of("case", "side", "ms", [1.0, 2.0], rejected="spread 47 % of the mean")
    green = bench.Correctness("difference", 0.0, 1.0)
    path = bench.write_result(clone, "name", green, [noisy, bench.Row.of("case", "quiet", "ms", [1.0])])
    first, second = bench.read_result(path)["rows"]
    assert first["rejected"] == "spread 47 % of the mean" and "rejected" not in second
    assert bench.Row(**first).to_json() == first and bench.Row(**second).rejected == ""


# ---- the command


def test_the_command_prints_a_table_and_writes_json(tmp_path, capsys):
    file = tmp_path / "found.json"
    options = ["--op", "rms_norm", "--tokens", "1x3,2x4", "--rounds", "2", "--device", "cpu", "--seed", "5"]
    assert main(["bench", *options, "--json", str(file)]) == 0
    content = json.loads(file.read_text())
    cases = ["rms_norm, miniature, 1x3, float32", "rms_norm, miniature, 2x4, float32"]
    assert list(dict.fromkeys(row["case"] for row in content["rows"])) == cases
    assert content["seeds"] == dict.fromkeys(cases, 5) and content["error_over_limit"] <= 1.0
    shown = capsys.readouterr()
    assert "torch_rms" in shown.out and "% of limit" in shown.out and "not timed: " in shown.out
    assert " s: 2 of 2: rms_norm, miniature, 2x4, float32" in shown.err


def test_the_command_ends_with_a_fault_where_a_backend_is_wrong(capsys):
    register_backend("rms_norm", "zeros", lambda x, weight, *, eps: torch.zeros_like(x), lambda call: None)
    options = ["--op", "rms_norm", "--tokens", "1x3", "--rounds", "2", "--device", "cpu"]
    assert main(["bench", *options, "--backend", "torch_rms,zeros"]) == 1
    assert "zeros: wrong: " in capsys.readouterr().out
    assert main(["bench", *options, "--backend", "zeros"]) == 2
    assert "bench: nothing was timed: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--op", "softmax"], "expected one that is timed"), (["--shape", "9b"], "expected one of 35b-a3b"),
        (["--tokens", "4x"], "expected TOKENS"), (["--op", "rms_norm", "--backend", "fast"], "expected one of"),
        (["--device", "tpu"], "expected cpu, cuda or cuda:N"), (["--dtype", "int8"], "int8"),
    ],
)  # fmt: skip
def test_the_command_refuses_in_one_line(options, said, capsys):
    assert main(["bench", "--device", "cpu", *options]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


# ---- the benchmarks that are made of it


def script(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_plan_of_the_gpu_benchmark_names_what_there_is(monkeypatch, tmp_path):
    monkeypatch.delenv("FLA_FLASH_QLA", raising=False)
    gpu = script("gpu_kernels")
    plan = gpu.entries(None, None, torch.bfloat16, None)
    names = [entry.case.name for entry in plan]
    assert len(set(names)) == len(names) and "gated_delta_rule, 35b-a3b, 1x16384, bfloat16" in names
    for entry in plan:
        labels = [side.label for side in entry.sides]
        assert labels and len(set(labels)) == len(labels)
        for side in entry.sides:
            Kernels(side.requested)
    arguments = ["--device", "cpu", "--dtype", "float32", "--shape", "miniature", "--only", "gated_delta_rule",
                 "--tokens", "8x1", "--rounds", "2", "--out", str(tmp_path), "--commit", "0" * 40]  # fmt: skip
    assert gpu.main(arguments) == 0
    content = bench.read_result(tmp_path / "gpu_kernels.cpu.json")
    assert content["hardware"]["fla"] == "FLA_FLASH_QLA=0"
    assert "torch_recurrent" in {row["backend"] for row in content["rows"]}


def test_the_variants_have_a_time_and_counts_each(tmp_path, monkeypatch):
    variants = script("gdn_variants")
    arguments = ["--device", "cpu", "--dtype", "float32", "--shape", "miniature", "--tokens", "1x40", "--chunk", "16",
                 "--solver", "row_loop", "--rounds", "2", "--clock", "graph", "--out", str(tmp_path), "--commit",
                 "0" * 40]  # fmt: skip
    assert variants.main(arguments) == 0
    rows = bench.read_result(tmp_path / "gdn_variants.cpu.json")["rows"]
    for structure in variants.STRUCTURES:
        found = {row["unit"]: row for row in rows if row["backend"] == f"{structure}, chunk 16, row_loop"}
        assert found["ms"]["median"] > 0 and math.isfinite(found["host syncs"]["median"])
        assert found["kernels launched"]["median"] > 0
