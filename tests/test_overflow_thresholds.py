"""Where each form of the gated delta rule fails: the gate from which on, and the rows, which name the fault.

Each limit is met from both sides. exp overflows past 88.72 nats in fp32 and bf16, past 11.09 in fp16; a chunk of C
tokens at g has C |g| nats between its start and its end, (C - 1) |g| between its rows.
"""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from workbench.kernels import gated_delta_rule
from workbench.kernels.agreement import first_bad_row, relative_error
from workbench.kernels.gated_delta_rule import spec
from workbench.kernels.gated_delta_rule.reference import oracle
from workbench.numerics import ACCURATE_SOLVERS, EXP_OVERFLOW, EXPONENT_FORMS, Clamp, NumericsPolicy

SAFE = NumericsPolicy()
FP32_CUMSUM = NumericsPolicy(cumsum="float32")
SEGSUM = NumericsPolicy(cumsum="segsum")

Result = tuple[Tensor, Tensor]


def policy_of(form: str, chunk: int = 64, cumsum: str = "float32") -> NumericsPolicy:
    return NumericsPolicy(exponent=form, cumsum=cumsum, chunk=chunk)


def run(inputs: dict, policy: NumericsPolicy = SAFE, backend: str = "torch_chunk") -> Result:
    return gated_delta_rule(**inputs, policy=policy, backend=backend)


def error(inputs: dict, policy: NumericsPolicy = SAFE) -> float:
    """Larger relative error of output and final state."""
    return max(relative_error(*pair) for pair in zip(run(inputs, policy), oracle(**inputs), strict=True))


def bad_rows(out: Tensor) -> list[int]:
    """Tokens of the first sequence with a NaN or Inf in any head."""
    return (~torch.isfinite(out[0])).flatten(1).any(1).nonzero().flatten().tolist()


def rows_at(gate: float | Tensor, policy: NumericsPolicy, tokens: int = 128) -> list[int]:
    return bad_rows(run(spec.example(tokens=tokens, log_decay=gate), policy)[0])


def part_of(inputs: dict, start: int, stop: int) -> dict:
    return {name: x[:, start:stop] for name, x in inputs.items()}


def all_of(tokens: int) -> list[int]:
    return list(range(tokens))


def gradients(inputs: dict, policy: NumericsPolicy) -> dict[str, Tensor]:
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    out, state = run(leaves, policy)
    (out.sum() + state.square().sum()).backward()
    return {name: x.grad for name, x in leaves.items()}


# ---- exp(G) exp(-G)


@pytest.mark.parametrize("form", ["factored", "factored_mask_after"])
@pytest.mark.parametrize(
    ("gate", "chunk"),
    [(-1.38, 64), (-2.0, 16), (-2.0, 32), (-2.0, 44), (-5.54, 16), (-0.1, 128)],
)
def test_factored_is_fine_up_to_the_limit(form, gate, chunk):
    assert -gate * chunk < EXP_OVERFLOW["float32"]
    assert error(spec.example(tokens=128, log_decay=gate), policy_of(form, chunk)) <= 1e-6


@pytest.mark.parametrize("cumsum", ["float32", "bfloat16"])
@pytest.mark.parametrize(("gate", "chunk"), [(-1.39, 64), (-2.0, 45), (-2.0, 64), (-5.56, 16), (-20.0, 16)])
def test_factored_times_a_mask_loses_every_row_past_the_limit(gate, chunk, cumsum):
    """bf16 has the exponents of fp32: it moves nothing."""
    policy = policy_of("factored", chunk, cumsum)
    assert rows_at(gate, policy) == all_of(128) and rows_at(gate, policy, tokens=chunk) == all_of(chunk)
    assert not bool(torch.isfinite(run(spec.example(tokens=128, log_decay=gate), policy)[1]).any())


@pytest.mark.parametrize(("gate", "chunk"), [(-1.39, 64), (-1.40, 64), (-2.0, 45)])
def test_factored_under_a_where_mask_loses_the_last_row_at_the_limit(gate, chunk):
    """One row is past it. The state that leaves the chunk spoils the chunks that follow."""
    policy = policy_of("factored_mask_after", chunk)
    assert rows_at(gate, policy, tokens=chunk) == [chunk - 1]
    assert rows_at(gate, policy) == list(range(chunk - 1, 128))


@pytest.mark.parametrize(("gate", "chunk"), [(-1.41, 64), (-2.0, 64), (-2.0, 46)])
def test_factored_under_a_where_mask_loses_the_chunk_when_two_rows_are_past_the_limit(gate, chunk):
    """NaN in v' reaches every row as 0 * NaN."""
    assert rows_at(gate, policy_of("factored_mask_after", chunk), tokens=chunk) == all_of(chunk)


@pytest.mark.parametrize(("gate", "chunk"), [(-1.41, 64), (-2.8, 64), (-5.0, 16)])
def test_an_anchor_half_way_doubles_the_span(gate, chunk):
    assert -gate * chunk > 0.9 * EXP_OVERFLOW["float32"]
    assert error(spec.example(tokens=128, log_decay=gate), policy_of("midpoint", chunk)) <= 1e-6


@pytest.mark.parametrize(("gate", "chunk"), [(-5.0, 64), (-20.0, 16)])
def test_an_anchor_half_way_fails_past_twice_the_span(gate, chunk):
    assert rows_at(gate, policy_of("midpoint", chunk)) == all_of(128)


def test_an_anchor_half_way_loses_both_ends_of_a_chunk_first():
    assert rows_at(-2.81, policy_of("midpoint"), tokens=64) == []
    assert rows_at(-2.85, policy_of("midpoint"), tokens=64) == [0, 63]


# ---- a mask after exp


@pytest.mark.parametrize(
    ("gate", "rows"),
    [(-1.40, []), (-1.41, [0, 64]), (-1.45, [0, 1, 64, 65]), (-1.50, [0, 1, 2, 3, 64, 65, 66, 67])],
)
def test_a_multiplied_mask_loses_the_first_rows_of_each_chunk(gate, rows):
    inputs = spec.example(tokens=128, log_decay=gate)
    out, state = run(inputs, policy_of("multiply_mask"))
    assert bad_rows(out) == rows and bool(torch.isfinite(state).all())


@pytest.mark.parametrize(("gate", "chunk", "count"), [(-5.0, 64, 46), (-20.0, 16, 11)])
def test_a_multiplied_mask_loses_the_rows_that_are_too_far_from_the_last(gate, chunk, count):
    assert count == math.ceil(chunk - 1 - EXP_OVERFLOW["float32"] / -gate)
    assert rows_at(gate, policy_of("multiply_mask", chunk), tokens=chunk) == all_of(count)


def spike() -> Tensor:
    """-90 at token 70, -0.05 elsewhere."""
    gates = torch.full((1, 128, 1), -0.05)
    gates[:, 70] = -90.0
    return gates


def test_a_spike_under_a_multiplied_mask_loses_the_rows_before_it():
    out, state = run(spec.example(tokens=128, log_decay=spike()), policy_of("multiply_mask"))
    assert bad_rows(out) == list(range(64, 70)) and bool(torch.isfinite(state).all())


@pytest.mark.parametrize("form", ["factored", "factored_mask_after"])
def test_a_spike_under_a_factored_form_loses_its_whole_chunk(form):
    assert rows_at(spike(), policy_of(form)) == list(range(64, 128))


def test_a_spike_under_a_where_mask_is_fine_forward_and_nan_backward():
    inputs = spec.example(tokens=128, log_decay=spike())
    assert error(inputs, policy_of("mask_after")) <= 1e-5  # an fp32 cumsum, so not 3e-7
    found = gradients(inputs, policy_of("mask_after"))
    assert bool(torch.isnan(found["log_decay"]).any())
    assert all(bool(torch.isfinite(found[name]).all()) for name in ("q", "k", "v", "beta"))


@pytest.mark.parametrize("policy", [SAFE, SEGSUM, FP32_CUMSUM], ids=["float64", "segsum", "float32"])
def test_a_spike_under_a_mask_before_exp_loses_nothing(policy):
    inputs = spec.example(tokens=128, log_decay=spike())
    assert error(inputs, policy) <= (1e-5 if policy is FP32_CUMSUM else 3e-7)
    assert all(bool(torch.isfinite(gradient).all()) for gradient in gradients(inputs, policy).values())


@pytest.mark.parametrize("gate", [-0.1, -0.5, -1.0, -1.38, -1.39, -1.45, -2.0, -5.0, -11.09, -20.0, -27.6, -1e30])
def test_a_mask_before_exp_needs_no_clamp_at_any_constant_gate(gate):
    inputs = spec.example(tokens=256, log_decay=gate)
    assert error(inputs, SAFE) <= 3e-7 and error(inputs, SEGSUM) <= 3e-7
    # Under an fp32 cumsum differences of sums of up to 1e3 keep fewer digits than the gates.
    assert error(inputs, FP32_CUMSUM) <= 1e-6


# ---- fp16, whose exp ends at 11.09 nats


@pytest.mark.parametrize(
    ("form", "fine", "bad", "rows"),
    [
        ("factored", -0.17, -0.18, all_of(128)),
        ("factored_mask_after", -0.17, -0.18, all_of(128)),  # rows 61 to 63 of the chunk are past the limit
        ("factored_mask_after", -0.173, -0.175, list(range(63, 128))),  # row 63 alone, then through the state
        ("multiply_mask", -0.17, -0.18, [0, 1, 64, 65]),
    ],
)
def test_fp16_fails_an_eighth_of_the_way(form, fine, bad, rows):
    policy = policy_of(form, cumsum="float16")
    assert -fine * 64 < EXP_OVERFLOW["float16"] < -bad * 64
    assert rows_at(fine, policy) == [] and rows_at(bad, policy) == rows
    assert error(spec.example(tokens=128, log_decay=fine), policy) <= 5e-3


def test_fp16_in_chunks_of_16_ends_at_0_69():
    policy = policy_of("factored", 16, "float16")
    assert rows_at(-0.69, policy) == [] and rows_at(-0.70, policy) == all_of(128)


@pytest.mark.parametrize("cumsum", ["float16", "bfloat16"])
def test_half_precision_under_a_mask_before_exp_is_finite_and_imprecise(cumsum):
    for gate in (-0.17, -0.18, -1.39, -20.0):
        assert rows_at(gate, policy_of("difference_then_mask", cumsum=cumsum)) == []
    found = error(spec.example(tokens=128, log_decay=-1.38), policy_of("difference_then_mask", cumsum=cumsum))
    assert (1e-3 if cumsum == "float16" else 1e-2) < found < 0.1


# ---- a NaN that comes in


@pytest.mark.parametrize(
    ("name", "recurrent", "chunked"),
    [
        ("beta", range(77, 128), range(64, 128)),
        ("v", range(77, 128), range(64, 128)),
        ("k", range(77, 128), range(64, 128)),
        ("log_decay", range(77, 128), range(64, 128)),
        ("q", [77], [77]),
    ],
)
def test_a_nan_at_token_77_reaches_rows_from_77_in_the_recurrence_and_from_64_in_chunks(name, recurrent, chunked):
    """From the start of its chunk as 0 * NaN. A query is read by its own row only."""
    inputs = spec.example(tokens=128, log_decay=-0.1)
    inputs[name][0, 77] = math.nan
    for backend in ("reference", "torch_recurrent"):
        out, _ = run(inputs, backend=backend)
        assert bad_rows(out) == list(recurrent) and first_bad_row(out) == 77
    for solver in ACCURATE_SOLVERS:
        for cumsum in ("float64", "segsum"):
            out, state = run(inputs, NumericsPolicy(solver=solver, cumsum=cumsum))
            assert bad_rows(out) == list(chunked)
            assert bool(torch.isfinite(state).all()) == (name == "q")


# ---- what stays finite and is wrong


@pytest.mark.parametrize("cut", [1, 37, 63, 64, 65, 100, 129])
def test_a_split_prefill_is_whole_with_the_state_and_wrong_without(cut):
    inputs = spec.example(tokens=130, log_decay=-0.05)
    expected, _ = oracle(**inputs)
    first, state = run(part_of(inputs, 0, cut))
    rest = part_of(inputs, cut, 130)
    handed_on, _ = run(rest | {"initial_state": state})
    dropped, _ = run(rest)
    assert relative_error(torch.cat([first, handed_on], dim=1), expected) <= 2e-7
    assert relative_error(dropped, expected[:, cut:]) > 0.01 and bool(torch.isfinite(dropped).all())
    if 1 < cut < 129:  # of the whole output
        assert 0.1 < relative_error(torch.cat([first, dropped], dim=1), expected) < 0.3


def test_packed_sequences_without_boundaries_are_wrong_from_the_first_token_of_the_second():
    inputs = spec.example(tokens=100, log_decay=-0.05)
    packed, _ = oracle(**inputs, cu_seqlens=torch.tensor([0, 37, 100]))
    whole, _ = run(inputs)
    assert relative_error(whole[:, :37], packed[:, :37]) <= 2e-7
    assert 0.1 < relative_error(whole[:, 37:], packed[:, 37:]) < 0.5
    assert relative_error(whole[:, 37:38], packed[:, 37:38]) > 1.0
    right, _ = run(inputs | {"cu_seqlens": torch.tensor([0, 37, 100])})
    assert relative_error(right, packed) <= 2e-7


def test_decode_from_a_transposed_state_is_finite_and_wrong():
    inputs = spec.example(tokens=65, key_dim=16, value_dim=16, log_decay=-0.05)
    expected, _ = oracle(**inputs)
    _, state = run(part_of(inputs, 0, 64))
    last = part_of(inputs, 64, 65)
    for backend in ("torch_chunk", "torch_recurrent"):
        right, _ = run(last | {"initial_state": state}, backend=backend)
        swapped, _ = run(last | {"initial_state": state.transpose(2, 3)}, backend=backend)
        assert relative_error(right, expected[:, 64:]) <= 1e-6
        assert 1.0 < relative_error(swapped, expected[:, 64:]) < 2.0


def test_tiled_key_heads_are_wrong_in_value_heads_1_and_2():
    inputs = spec.example(tokens=65)
    expected, _ = oracle(**inputs)
    tiled, _ = run(inputs | {name: inputs[name].repeat(1, 1, 2, 1) for name in ("q", "k")})
    by_head = [relative_error(tiled[:, :, h], expected[:, :, h]) for h in range(4)]
    assert max(by_head[0], by_head[3]) <= 3e-7 and min(by_head[1], by_head[2]) > 0.5


def test_a_log_in_bf16_moves_the_decay_of_long_texts():
    """960 heads with A from U(0, 16): A is off by 0.3 % in the mean, a state that has decayed by 20 nats by 5 %."""
    rates = 16 * torch.rand(960, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    rounded = rates.log().bfloat16().double().exp()
    off = (rounded / rates - 1).abs()
    assert 0.002 < off.mean() < 0.004 and 0.007 < off.max() < 0.035
    after = ((20 * (1 - rounded / rates)).exp() - 1).abs()
    assert 0.04 < after.mean() < 0.07 and 0.15 < after.max() < 0.6


# ---- clamps: one head of 64, 256 tokens


def one_head(gate: float) -> dict:
    return spec.example(tokens=256, key_heads=1, value_heads=1, key_dim=64, value_dim=64, log_decay=gate)


def clamped(site: str, limit: float) -> NumericsPolicy:
    phase = "prefill" if site == "cumsum" else "both"
    return dataclasses.replace(FP32_CUMSUM, clamps=(Clamp(site=site, phase=phase, lo=-limit, hi=limit),))


@pytest.mark.parametrize(
    ("site", "limit", "gate", "expected", "first_wrong"),
    [
        ("cumsum", 20.0, -1.0, 3.3, 20),
        ("cumsum", 12.0, -1.0, 4.0, 12),
        ("cumsum", 80.0, -5.0, 4.0, 16),
        ("raw_gate", 0.5, -1.0, 0.37, 1),
    ],
)
def test_a_clamp_that_binds_is_finite_and_wrong_from_the_row_where_it_binds(site, limit, gate, expected, first_wrong):
    inputs = one_head(gate)
    (out, _), (reference, _) = run(inputs, clamped(site, limit)), oracle(**inputs)
    assert bool(torch.isfinite(out).all())
    assert 0.8 * expected < relative_error(out, reference) < 1.2 * expected
    assert relative_error(out[:, :first_wrong], reference[:, :first_wrong]) < 1e-6
    assert relative_error(out[:, first_wrong], reference[:, first_wrong]) > 1e-3


def test_a_clamp_of_the_cumulative_sum_at_88_changes_nothing_until_a_chunk_decays_that_far():
    for gate in (-0.1, -1.0, -1.37):
        inputs = one_head(gate)
        assert torch.equal(run(inputs, clamped("cumsum", 88.0))[0], run(inputs, FP32_CUMSUM)[0])
    # Rows past the limit stop decaying there too: no limit is wide enough for every gate.
    for gate, low, high in ((-1.38, 1e-3, 1e-2), (-5.0, 3.0, 4.5)):
        inputs = one_head(gate)
        assert low < relative_error(run(inputs, clamped("cumsum", 88.0))[0], oracle(**inputs)[0]) < high
    assert bool(torch.isfinite(run(one_head(-1.38), policy_of("factored"))[0]).all())  # nor is it needed there


# ---- accuracy: differences of an fp32 cumulative sum beside accurate ones


def mixed(tokens: int, strong: float, share: float, weak: float, seed: int) -> dict:
    """`strong` on `share` of the tokens, `weak` on the others."""
    chosen = torch.rand(1, tokens, 1, generator=torch.Generator().manual_seed(1000 + seed)) < share
    return spec.example(tokens=tokens, log_decay=torch.where(chosen, strong, weak), seed=seed)


@pytest.mark.parametrize("tokens", [128, 320])
@pytest.mark.parametrize(
    ("strong", "share", "weak", "low", "high"),
    [
        (-20.0, 0.5, -1e-6, 1e-6, 1.5e-5),
        (-72.0, 0.05, -1e-3, 4e-6, 3e-5),
        (-72.0, 0.2, -1e-3, 1e-5, 5e-5),
        (-72.0, 0.6, -1e-3, 2e-5, 6e-5),
    ],
)
def test_an_fp32_cumsum_cancels_where_strong_and_weak_gates_share_a_chunk(tokens, strong, share, weak, low, high):
    for seed in (0, 1):
        inputs = mixed(tokens, strong, share, weak, seed)
        assert error(inputs, SAFE) <= 2e-7 and error(inputs, SEGSUM) <= 2e-7
        assert low < error(inputs, FP32_CUMSUM) < high


def test_an_fp32_cumsum_loses_digits_behind_one_spike():
    inputs = spec.example(tokens=320, log_decay=torch.nn.functional.pad(spike(), (0, 0, 0, 192), value=-0.05))
    assert error(inputs, SAFE) <= 2e-7 and error(inputs, SEGSUM) <= 2e-7
    assert 1e-6 < error(inputs, FP32_CUMSUM) < 5e-6


def test_accurate_differences_have_a_floor_on_repeated_keys():
    """2048 tokens that write under one key: the rounding of the state itself, the same with any exponent."""
    inputs = spec.example(tokens=2048, log_decay=-1e-3)
    inputs["k"] = inputs["k"][:, :1].expand_as(inputs["k"]).contiguous()
    inputs["beta"] = 0.99 + 0.0099 * inputs["beta"]
    expected = oracle(**inputs)
    for policy in (SAFE, SEGSUM, FP32_CUMSUM):
        found = run(inputs, policy)
        assert 3e-7 < max(relative_error(*pair) for pair in zip(found, expected, strict=True)) < 3e-6


@pytest.mark.parametrize("form", EXPONENT_FORMS)
def test_no_form_has_an_error_of_its_own_where_nothing_overflows(form):
    assert error(spec.example(tokens=128, log_decay=-0.98), policy_of(form)) <= 5e-7
