"""Every backend of the registry is held to its op's contract, and backends that are wrong on purpose fail it.

A backend that is registered later is held to the same without a word here; one that cannot run on this machine is
skipped with its own reason.
"""

import functools
import json
import math

import pytest
import torch
import torch.nn.functional as F

from workbench.errors import BackendError, InputError
from workbench.kernels import alignment, conformance
from workbench.kernels.attention import torch_sdpa
from workbench.kernels.causal_conv import torch_shift
from workbench.kernels.conformance import (
    CONTRACTS,
    EMPTY,
    FAILED,
    GRADIENT,
    INPUTS,
    MEMORY,
    NAN,
    PASSED,
    REFUSED,
    REPEAT,
    RUNS,
    SHAPE,
    STRIDES,
    VALUE,
    conform,
)
from workbench.kernels.experts import spec as experts_spec
from workbench.kernels.gated_delta_rule import spec as delta_rule_spec
from workbench.kernels.gated_delta_rule import torch_chunk
from workbench.kernels.gated_delta_rule.extremes import VALID_EXTREMES
from workbench.kernels.norms import torch_rms
from workbench.kernels.registry import OPERATIONS, Backend
from workbench.kernels.requirements import Requires, dtype_name
from workbench.kernels.routing import cases as routing_cases
from workbench.kernels.routing import spec as routing_spec

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16

#: Of each op one call in each dtype, by every backend.
EVERY = [
    (op, name, dtype_name(dtype))
    for op, contract in CONTRACTS.items()
    for name in OPERATIONS[op].backends
    for dtype in contract.dtypes
]


@functools.cache
def of_registry(op: str, name: str):
    """All checks of a backend, made once; each dtype is a test of its own."""
    return conform(op, name)


@pytest.mark.parametrize(("op", "name", "dtype"), EVERY)
def test_every_backend_keeps_the_contract(op, name, dtype):
    found = of_registry(op, name)
    rows = [row for row in found.rows if row.dtype == dtype]
    failures = [str(row) for row in rows if row.outcome == FAILED]
    assert not failures, f"{len(failures)} of {len(rows)}:\n" + "\n".join(failures[:5])
    assert rows
    if not any(row.check == VALUE for row in rows):
        reasons = dict.fromkeys(row.reason for row in rows)
        assert all(len(reason) > 9 and "\n" not in reason for reason in reasons)
        pytest.skip(f"{op} {name} refuses {dtype} here: {'; '.join(reasons)}")


@pytest.mark.parametrize("op", CONTRACTS)
def test_what_needs_no_library_serves_here(op):
    """A backend of torch that refused every call of the common dtype would go untested."""
    for name in OPERATIONS[op].backends:
        if name == "reference" or name.startswith("torch_"):
            assert of_registry(op, name).outcome == PASSED, name
            served = {row.dtype for row in of_registry(op, name).rows if row.check == VALUE}
            is_for_cards = OPERATIONS[op].backends[name].requires.devices == ("cuda",)
            assert served & {"float32", "int64"} or is_for_cards, name


def test_every_op_has_a_contract_and_more_than_its_arbiter():
    assert set(CONTRACTS) == set(OPERATIONS)
    for operation in OPERATIONS.values():
        assert "reference" in operation.backends and len(operation.backends) > 1


def test_the_cases_are_ones_that_the_ops_take():
    for name, case in CONTRACTS["gated_delta_rule"].cases().items():
        delta_rule_spec.check(**{"initial_state": None, "cu_seqlens": None} | dict(case))
        delta_rule_spec.check_gates(case["log_decay"])
        assert all(bool(torch.isfinite(x).all()) for x in case.values()), name
    for case in CONTRACTS["experts"].cases().values():
        experts_spec.check(**case)
    for case in CONTRACTS["routing"].cases().values():
        routing_spec.check(case["logits"], top_k=case["top_k"])


def test_the_cases_have_more_chunks_than_are_evaluated_at_once():
    case = CONTRACTS["gated_delta_rule"].cases()["637 tokens of two sequences, from a state"]
    batch, tokens, heads = case["beta"].shape
    assert batch * -(-tokens // 64) * heads * 64 * 64 * 4 > 2 * torch_chunk.BYTES_AT_ONCE["cpu"]


def test_the_arbiter_gives_ties_to_the_lowest_number():
    ties = CONTRACTS["routing"].cases()["ties, 7 tokens"]
    weights, experts = OPERATIONS["routing"].backends["reference"].run(**ties)
    assert experts.tolist() == [chosen for _, chosen in routing_cases.TIES]
    assert bool((weights.diff(dim=-1) <= 0).all()) and torch.allclose(weights.sum(-1), torch.ones(7))


# ---- backends that are wrong on purpose: each fails where it is wrong, and there alone


def failed(found) -> set[str]:
    """Names of the checks that failed."""
    assert found.outcome == FAILED and found.reason == str(found.failures[0])
    return {row.check for row in found.failures}


def first(found, check: str):
    return next(row for row in found.failures if row.check == check)


def test_a_wrong_scale_is_an_error_of_value_in_every_case():
    found = conform("linear", lambda x, weight: 1.01 * F.linear(x, weight), dtypes=[F32])
    assert failed(found) - {NAN} == {VALUE, STRIDES, GRADIENT}
    rows = [row for row in found.rows if row.check == VALUE]
    assert len(rows) == len(CONTRACTS["linear"].cases()) and all(row.outcome == FAILED for row in rows)
    row = first(found, VALUE)
    assert row.error == pytest.approx(0.01, rel=1e-3) and row.limit == 8 * torch.finfo(F32).eps
    assert row.found == pytest.approx(1.01 * row.expected, rel=1e-6)
    assert row.first_bad_row == (0, 0) and (row.case, row.output) == ("one row", "y")
    assert row.inputs["weight"] == "[7, 33] float32 strides [33, 1]"
    text = str(row)
    assert text.startswith("value against the arbiter: case 'one row', float32, y: failed; error 0.01, limit 9.5e-07;")
    assert "at [0, 0, " in text and "first bad row [0, 0]" in text and "\n" not in text


def transposed_after(q, k, v, *, log_decay, beta, initial_state=None, cu_seqlens=None, policy, tap=None):
    out, state = torch_chunk.run(q, k, v, log_decay=log_decay, beta=beta, initial_state=initial_state,
                                 cu_seqlens=cu_seqlens, policy=policy, tap=tap)  # fmt: skip
    return out, state.transpose(2, 3).contiguous()


def transposed_before(q, k, v, *, log_decay, beta, initial_state=None, cu_seqlens=None, policy, tap=None):
    if initial_state is not None and q.shape[-1] == v.shape[-1]:
        initial_state = initial_state.transpose(2, 3)
    return torch_chunk.run(q, k, v, log_decay=log_decay, beta=beta, initial_state=initial_state,
                           cu_seqlens=cu_seqlens, policy=policy, tap=tap)  # fmt: skip


SQUARE = ["square heads, from zero", "square heads, from a state"]


def test_a_transposed_state_shows_by_its_shape_and_in_square_heads_by_its_value():
    found = conform("gated_delta_rule", transposed_after, dtypes=[F32], cases=["keys wider than values, from zero"])
    assert failed(found) == {SHAPE, GRADIENT}
    assert "state: expected [1, 4, 24, 8] float32 on cpu, found [1, 4, 8, 24]" in first(found, SHAPE).reason
    found = conform("gated_delta_rule", transposed_after, dtypes=[F32], cases=SQUARE)
    assert {row.output for row in found.failures if row.check in (VALUE, STRIDES)} == {"state"}
    assert VALUE in failed(found) and SHAPE not in failed(found)


def test_a_state_that_enters_transposed_shows_in_square_heads_alone():
    found = conform("gated_delta_rule", transposed_before, dtypes=[F32], cases=SQUARE)
    rows = [row for row in found.failures if row.check == VALUE]
    assert {row.case for row in rows} == {"square heads, from a state"} and {r.output for r in rows} == {"out", "state"}
    assert all(row.error > 1e-3 for row in rows) and rows[0].first_bad_row == (0, 0, 0)


def wrong_past_64(q, k, v, *, log_decay, beta, initial_state=None, cu_seqlens=None, policy, tap=None):
    out, state = torch_chunk.run(q, k, v, log_decay=log_decay, beta=beta, initial_state=initial_state,
                                 cu_seqlens=cu_seqlens, policy=policy, tap=tap)  # fmt: skip
    return torch.cat([out[:, :64], 1.5 * out[:, 64:]], dim=1), state


def test_a_fault_past_64_tokens_is_placed_at_the_first_row_that_has_it():
    lengths = [f"random_gates, {tokens} tokens" for tokens in (2, 7, 63, 64, 65, 127, 128, 130)]
    found = conform("gated_delta_rule", wrong_past_64, dtypes=[F32], cases=lengths)
    rows = {row.case: row for row in found.rows if row.check == VALUE and row.output == "out"}
    assert [rows[case].outcome for case in lengths] == 4 * [PASSED] + 4 * [FAILED]
    assert all(rows[case].first_bad_row[:2] == (0, 64) for case in lengths[4:])
    assert all(row.output == "out" for row in found.failures if row.check == VALUE)


def reads_leftovers(x, weight):
    """Multiplies what it never wrote by zero, as a masked read of padding does."""
    return F.linear(x, weight) + 0.0 * torch.empty(weight.shape[0], dtype=x.dtype)


def test_memory_that_was_never_written_shows():
    found = conform("linear", reads_leftovers, dtypes=[F32])
    assert EMPTY in failed(found) and failed(found) <= {EMPTY, VALUE, STRIDES, GRADIENT, NAN, REPEAT}
    row = first(found, EMPTY)
    assert math.isnan(row.found) and math.isfinite(row.expected) and row.output == "y" and len(row.index) == 3


def reads_leftovers_of_its_own(x, weight):
    """The same in memory that no Python function handed out, as compiled code does."""
    rows = torch.ops.aten.empty.memory_format([weight.shape[0]], dtype=x.dtype, device=x.device)
    return F.linear(x, weight) + 0.0 * rows


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_that_compiled_code_allocates_is_full_of_nan_too():
    """CUDA's allocator hands freed blocks out again by their size; what a CPU's does is its own affair."""
    found = conform("linear", reads_leftovers_of_its_own, dtypes=[F32], device="cuda")
    assert found.outcome == FAILED and failed(found) <= {EMPTY, VALUE, STRIDES, GRADIENT, NAN, REPEAT}


def test_freed_blocks_of_every_size_of_the_call_are_left_behind(monkeypatch):
    left = []
    monkeypatch.setattr(conformance, "_leave_nan_behind", lambda tensors: left.extend(tuple(x.shape) for x in tensors))
    conform("linear", F.linear, dtypes=[F32], cases=["one output"])
    assert left == [(2, 40, 1), (2, 40, 17), (1, 17)]


def spoils_its_input(x, weight, *, eps):
    y = torch_rms.run_rms_norm(x, weight, eps=eps)
    if not x.requires_grad:
        x.mul_(2.0)
    return y


def test_an_input_that_is_changed_shows_by_name():
    found = conform("rms_norm", spoils_its_input, dtypes=[F32])
    assert failed(found) == {INPUTS}
    row = first(found, INPUTS)
    assert row.output == "x" and row.found == 2 * row.expected
    assert "x changed by the call" in row.reason and "may update, if it declares so in MUTATES: none" in row.reason


def updates_its_window(x, weight, *, window=None, cu_seqlens=None):
    y, new = torch_shift.run(x, weight, window=window, cu_seqlens=cu_seqlens)
    return y, new if window is None or window.requires_grad else window.copy_(new)


def test_a_window_that_is_updated_in_place_has_to_be_declared():
    found = conform("causal_conv", updates_its_window, dtypes=[F32])
    assert failed(found) == {INPUTS, MEMORY} and {row.output for row in found.failures} == {"window"}
    declared = Backend("causal_conv", "in_place", updates_its_window, lambda call: None, mutates=("window",))
    assert conform("causal_conv", declared, dtypes=[F32]).outcome == PASSED
    beyond = Backend("rms_norm", "in_place", spoils_its_input, lambda call: None, mutates=("x",))
    assert failed(conform("rms_norm", beyond, dtypes=[F32])) == {INPUTS}  # the contract allows none of it


def ignores_strides(x, weight):
    """Takes x for rows that follow each other, as a kernel does that is given a pointer alone."""
    dense = [math.prod(x.shape[i + 1 :]) for i in range(x.dim())]
    return F.linear(x.as_strided(x.shape, dense), weight)


def test_strides_that_are_ignored_show():
    found = conform("linear", ignores_strides, dtypes=[F32])
    assert STRIDES in failed(found)
    assert {row.case for row in found.failures if row.check not in (STRIDES, NAN)} <= {"strided"}
    row = next(row for row in found.failures if row.case == "33 rows")
    assert row.inputs["x"] == "[1, 33, 20] float32 strides [1320, 40, 2]"


def returns_its_input(x, weight, *, window=None, cu_seqlens=None):
    y, new = torch_shift.run(x, weight, window=window, cu_seqlens=cu_seqlens)
    rows = weight.shape[1] - 1
    return y, x[:, -rows:] if cu_seqlens is None and 0 < rows <= x.shape[1] else new


def test_an_output_in_the_memory_of_an_input_shows():
    found = conform("causal_conv", returns_its_input, dtypes=[F32])
    assert failed(found) == {MEMORY}
    assert first(found, MEMORY).reason == "window lies in the memory of x"


def swallows_nan(x, weight, *, eps):
    return torch_rms.run_rms_norm(x, weight, eps=eps).nan_to_num()


def test_a_nan_that_is_swallowed_shows():
    found = conform("rms_norm", swallows_nan, dtypes=[F32])
    assert failed(found) == {NAN}
    row = first(found, NAN)
    assert (row.reason, row.case, row.index, row.found) == ("a NaN was swallowed", "one row", (1, 2, 0), 0.0)


def spreads_nan(x, weight):
    return F.linear(x, weight) + 0.0 * x.sum()


def test_a_nan_that_reaches_other_rows_shows():
    found = conform("linear", spreads_nan, dtypes=[F32])
    assert NAN in failed(found) and failed(found) <= {NAN, GRADIENT}
    row = first(found, NAN)
    assert row.case == "a row of x" and row.reason.startswith("a NaN reached what does not read it")
    assert row.index == (0, 0, 0) and math.isnan(row.found) and math.isfinite(row.expected)


def higher_expert_wins(logits, *, top_k, normalise, dtype=None):
    probabilities = torch.softmax(logits, -1, dtype=torch.promote_types(logits.dtype, F32))
    order = logits.flip(-1).sort(dim=-1, descending=True, stable=True).indices
    experts = logits.shape[-1] - 1 - order[:, :top_k]
    weights = probabilities.gather(-1, experts)
    return (weights / weights.sum(-1, keepdim=True) if normalise else weights).to(logits.dtype), experts


def test_ties_that_go_to_the_higher_number_show_in_the_experts():
    found = conform("routing", higher_expert_wins, dtypes=[F32])
    assert failed(found) == {VALUE, STRIDES, GRADIENT}
    rows = [row for row in found.failures if row.check == VALUE]
    assert {row.output for row in rows} == {"experts"} and all(row.case.startswith("ties") for row in rows)
    assert rows[0].first_bad_row == (0,) and (rows[0].found, rows[0].expected) == (7, 0)


def crashes_at_65(q, k, v, *, log_decay, beta, initial_state=None, cu_seqlens=None, policy, tap=None):
    if q.shape[1] == 65:
        raise RuntimeError("CUDA error: an illegal\nmemory access") from OSError("libvendor.so: undefined symbol gdn")
    return torch_chunk.run(q, k, v, log_decay=log_decay, beta=beta, initial_state=initial_state,
                           cu_seqlens=cu_seqlens, policy=policy, tap=tap)  # fmt: skip


def test_a_crash_is_told_in_full_and_ends_nothing():
    lengths = [f"random_gates, {tokens} tokens" for tokens in (64, 65, 127)]
    found = conform("gated_delta_rule", crashes_at_65, dtypes=[F32], cases=lengths)
    assert failed(found) - {GRADIENT} == {RUNS}
    assert {row.case for row in found.failures} == {"random_gates, 65 tokens"}
    reason = first(found, RUNS).reason
    assert reason.startswith("RuntimeError: CUDA error: an illegal memory access, caused by OSError: libvendor.so")
    assert first(found, RUNS).inputs["q"] == "[1, 65, 2, 16] float32 strides [2080, 32, 16, 1]"


class Drifts:
    """Gives a little more from call to call, as a buffer that is never cleared does."""

    def __init__(self):
        self.calls = 0

    def __call__(self, x, weight):
        self.calls += 1
        return F.linear(x, weight) * (1.0 + self.calls * 2**-23)


def test_a_result_that_depends_on_what_was_called_before_shows():
    found = conform("linear", Drifts(), dtypes=[F32], cases=["33 rows"])
    assert failed(found) == {REPEAT} and first(found, REPEAT).reason == "the same call gave other bits"


def narrows(x, weight):
    return F.linear(x, weight).float()


def test_an_output_of_another_dtype_shows_and_is_not_compared():
    found = conform("linear", narrows, dtypes=[F32, BF16])
    assert failed(found) == {SHAPE} and {row.dtype for row in found.failures} == {"bfloat16"}
    assert "y: expected [1, 1, 7] bfloat16 on cpu, found [1, 1, 7] float32 on cpu" in found.reason
    assert not any(row.check == VALUE and row.dtype == "bfloat16" for row in found.rows)


def drops_a_gradient(x, weight):
    return F.linear(x, weight.detach())


def test_a_gradient_that_is_dropped_shows_by_the_name_of_its_input():
    found = conform("linear", drops_a_gradient, dtypes=[F32])
    assert failed(found) == {GRADIENT} and {row.output for row in found.failures} == {"weight"}
    found = conform("linear", lambda x, weight: F.linear(x, weight).detach(), dtypes=[F32])
    assert failed(found) == {GRADIENT} and "backward pass: RuntimeError: element 0" in found.reason


def sees_the_future(q, k, v, *, scale, key_lengths=None, cu_seqlens=None, tap=None):
    if key_lengths is not None or cu_seqlens is not None or q.shape[1] != k.shape[1]:
        return torch_sdpa.run(q, k, v, scale=scale, key_lengths=key_lengths, cu_seqlens=cu_seqlens)
    heads = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(*heads, scale=scale, enable_gqa=True).transpose(1, 2)


def reads_behind_lengths(q, k, v, *, scale, key_lengths=None, cu_seqlens=None, tap=None):
    if cu_seqlens is None and key_lengths is not None and set(key_lengths) == {q.shape[1]}:
        v = v + 1e-3 * v[:, key_lengths[0] :].mean(1, keepdim=True)
    return torch_sdpa.run(q, k, v, scale=scale, key_lengths=key_lengths, cu_seqlens=cu_seqlens)


def test_the_laws_of_attention_have_checks_of_their_own():
    found = conform("attention", sees_the_future, dtypes=[F32])
    rows = [row for row in found.failures if row.check == "no query sees the future"]
    assert rows and rows[0].case == "prefill" and rows[0].index[1] == 0
    found = conform("attention", reads_behind_lengths, dtypes=[F32])
    rows = [row for row in found.failures if row.check == "keys behind a length are not read"]
    assert [row.case for row in rows] == ["spare rows"]


def forgets_blocks(experts, *, num_experts, block):
    return alignment.torch_sort.run(experts, num_experts=num_experts, block=1)


def test_an_alignment_without_its_blocks_shows():
    found = conform("alignment", forgets_blocks)
    assert failed(found) >= {SHAPE}
    assert not any(row.case.endswith("blocks of 1") for row in found.failures)


# ---- what is refused, and what cannot be asked


def test_a_function_with_another_signature_is_told_before_it_runs():
    def never(*_arguments):
        raise AssertionError("it was run")

    for function, words in (
        (lambda weight, x: never(), "it has weight where x is passed, x where weight is passed; expected linear(x: Te"),
        (lambda x: never(), "too many positional arguments; expected linear(x: Tensor, weight: Tensor) -> Tensor, fou"),
        (lambda x, weight, *, scale: never(), "missing a required argument: 'scale'"),
    ):
        with pytest.raises(BackendError) as caught:
            conform("linear", function)
        assert words in str(caught.value) and "has not the signature of the contract" in str(caught.value)
    assert conformance.unfit("linear", lambda x, weight, scale=1.0: None) is None
    assert conformance.unfit("linear", lambda *arguments: None) is None
    assert conformance.unfit("linear", torch.nn.functional.linear) is None  # compiled, without a signature to read
    for op, operation in OPERATIONS.items():
        for backend in operation.backends.values():
            assert conformance.unfit(op, backend.run) is None, (op, backend.name)


def test_a_backend_that_refuses_everything_is_refused_and_has_not_passed():
    backend = Backend("linear", "elsewhere", F.linear, lambda call: None, requires=Requires(devices=("cuda",)))
    found = conform("linear", backend)
    assert (found.outcome, found.reason) == (REFUSED, "serves cuda, not cpu") and not found.failures
    missing = Requires(symbols=("a_library_that_is_not_there.ops:matmul",))
    found = conform("linear", Backend("linear", "library", F.linear, lambda call: None, requires=missing), dtypes=[F32])
    assert found.outcome == REFUSED and "No module named 'a_library_that_is_not_there'" in found.reason


def test_what_is_refused_is_no_failure_and_the_rest_is_checked_in_the_dtype_that_is_served():
    """As of a card whose library takes float16 alone."""
    backend = Backend("linear", "narrow", F.linear, lambda call: None, requires=Requires(dtypes=(F16,)))
    found = conform("linear", backend)
    assert found.outcome == PASSED
    served = {(row.check, row.dtype) for row in found.rows if row.outcome == PASSED}
    assert {(check, "float16") for check in (RUNS, SHAPE, VALUE, INPUTS, MEMORY, REPEAT, EMPTY, STRIDES, NAN)} == served
    assert {row.reason for row in found.rows if row.outcome == REFUSED} > {"takes float16, found float32"}


def test_a_policy_is_not_held_to_inputs_that_are_known_to_be_too_much_for_it():
    assert "fla" not in VALID_EXTREMES["mixed_decay"].survivors
    backend = Backend("gated_delta_rule", "like_fla", torch_chunk.run, torch_chunk.supports, policy="fla")
    cases = ["mixed_decay, 130 tokens", "strong_decay, 130 tokens"]
    found = conform("gated_delta_rule", backend, dtypes=[F32], cases=cases)
    assert found.outcome == PASSED
    (refused,) = {row.case: row.reason for row in found.rows if row.outcome == REFUSED}.items()
    assert refused[0] == cases[0] and "the policy fla, which is not right on mixed_decay: cancellation" in refused[1]


def test_what_is_moved_stays_exact_where_a_kernel_rounds_inside():
    def rounds_its_window(x, weight, *, window=None, cu_seqlens=None):
        y, new = torch_shift.run(x, weight, window=window, cu_seqlens=cu_seqlens)
        return y, (new * (1.0 + 2**-8)).to(new.dtype)

    backend = Backend("causal_conv", "rounding", rounds_its_window, lambda call: None, rounds_inside=True)
    found = conform("causal_conv", backend, dtypes=[BF16])
    assert {row.output for row in found.failures if row.check == VALUE} == {"window"}
    assert CONTRACTS["gated_delta_rule"].allowed(BF16, "state", backend) == 2**-8
    assert CONTRACTS["gated_delta_rule"].allowed(BF16, "state") == 3e-6


def test_the_registry_is_as_before():
    before = {op: dict(operation.backends) for op, operation in OPERATIONS.items()}
    conform("linear", F.linear, dtypes=[F32], cases=["one row"])
    with pytest.raises(InputError):
        conform("linear", F.linear, cases=["two rows"])
    assert {op: dict(operation.backends) for op, operation in OPERATIONS.items()} == before


def test_what_cannot_be_asked_is_told():
    with pytest.raises(BackendError, match="unknown op 'softmax', expected one of alignment, attention"):
        conform("softmax", "reference")
    with pytest.raises(BackendError, match="op linear: unknown backend 'fast', expected one of reference"):
        conform("linear", "fast")
    with pytest.raises(InputError, match="op linear: unknown case 'two rows', expected one of one row, a vector"):
        conform("linear", "reference", cases=["two rows"])
    with pytest.raises(InputError, match="op alignment: expected dtypes of int64, found float32"):
        conform("alignment", "reference", dtypes=[F32])


def test_the_result_is_plain_json_and_counts_what_it_has():
    found = conform("rms_norm", swallows_nan, dtypes=[F32])
    read = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert (read["outcome"], read["op"], read["device"]) == (FAILED, "rms_norm", "cpu")
    assert read["backend"].endswith("test_conformance:swallows_nan")
    assert sum(sum(counts.values()) for counts in read["counts"].values()) == len(read["rows"]) == len(found.rows)
    assert read["counts"][NAN] == {PASSED: 0, REFUSED: 0, FAILED: 2}
    row = next(row for row in read["rows"] if row["outcome"] == FAILED)
    assert (row["case"], row["index"], row["expected"]) == ("one row", [1, 2, 0], "nan")
    assert list(found.counts()) == [check for check in conformance.CHECKS if check in found.counts()]
