"""The chunked gated delta rule in Triton against the arbiter: compiled on a GPU, interpreted elsewhere."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor
from triton_cases import triton_device  # noqa: F401 - a fixture

from workbench import taps
from workbench.kernels.agreement import relative_error
from workbench.kernels.contract import bounds_of
from workbench.kernels.gated_delta_rule import spec, triton_chunk
from workbench.kernels.gated_delta_rule.cases import random_state
from workbench.kernels.gated_delta_rule.extremes import VALID_EXTREMES
from workbench.kernels.registry import Call, backend_named
from workbench.numerics import Clamp, NumericsPolicy, resolve_policy

#: Of the whole tensor against float64, on random inputs: a few roundings of an operand.
LIMITS = {torch.float32: 3e-6, torch.float16: 8e-4, torch.bfloat16: 6e-3}
WIDE = ("log_decay", "initial_state")


@pytest.fixture(autouse=True)
def kernels_can_run(triton_device):  # noqa: F811
    """Every test of this file runs where Triton serves."""


def cast(inputs: dict[str, Tensor], dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    return {
        name: x if name == "cu_seqlens" else x.to(device, torch.float32 if name in WIDE else dtype)
        for name, x in inputs.items()
    }


def arbiter(inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    run = backend_named(spec.OP, "reference").run
    wide = {name: x.cpu() if name == "cu_seqlens" else x.cpu().double() for name, x in inputs.items()}
    return run(**wide, policy=NumericsPolicy())


def planned(
    inputs: dict[str, Tensor], policy: NumericsPolicy | None = None, **changes: object
) -> tuple[Tensor, Tensor]:
    """The kernels by a plan that differs from the chosen one."""
    named, policy = {"initial_state": None, "cu_seqlens": None, **inputs}, policy or NumericsPolicy()
    shapes = triton_chunk.Shapes.of(named["q"], named["v"], named["cu_seqlens"], policy)
    plan = dataclasses.replace(shapes.plan(named["v"].dtype, named["v"].device), **changes)
    return triton_chunk.launched(**named, policy=policy, plan=plan)


def assert_near(found: tuple[Tensor, Tensor], inputs: dict[str, Tensor], factor: float = 1.0) -> None:
    limit = factor * LIMITS[inputs["v"].dtype]
    for name, x, exact in zip(("out", "state"), found, arbiter(inputs), strict=True):
        error = relative_error(x.cpu(), exact)
        assert error <= limit, f"{name}: {error:.1e} over {limit:.1e}"


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("chunk", triton_chunk.CHUNKS)
def test_every_chunk_and_dtype_agrees_with_the_recurrence(dtype, chunk, triton_device):  # noqa: F811
    inputs = cast(spec.example(tokens=150, key_heads=1, value_heads=2, seed=chunk), dtype, triton_device)
    policy = NumericsPolicy(chunk=chunk)
    found = triton_chunk.run(**inputs, policy=policy)
    assert found[0].dtype == dtype and found[1].dtype == torch.float32
    assert_near(found, inputs)


@pytest.mark.parametrize("bulk", [True, False])
@pytest.mark.parametrize("segment", [1, 2, 4, 100])
def test_segments_change_the_result_by_rounding_alone(segment, bulk, triton_device):  # noqa: F811
    inputs = spec.example(batch=2, tokens=150, key_heads=1, value_heads=2, value_dim=32, log_decay=-0.02, seed=1)
    inputs = cast(inputs | {"initial_state": random_state(2, inputs)}, torch.float32, triton_device)
    assert_near(planned(inputs, NumericsPolicy(chunk=16), segment=segment, bulk=bulk, block=16), inputs)


@pytest.mark.parametrize(
    "lengths", [(37, 63, 1, 130, 64), (0, 5, 0, 0, 66, 0), (1, 1, 1), (0, 1), (64, 128, 7)], ids=str
)
def test_packed_sequences_are_apart(lengths, triton_device):  # noqa: F811
    inputs = spec.example(tokens=sum(lengths), key_heads=1, value_heads=2, value_dim=16, seed=2)
    inputs |= {"cu_seqlens": bounds_of(*lengths), "initial_state": random_state(len(lengths), inputs)}
    inputs = cast(inputs, torch.float32, triton_device)
    assert_near(planned(inputs), inputs)
    assert_near(planned(inputs, NumericsPolicy(chunk=16), segment=2), inputs)


@pytest.mark.parametrize("lengths", [(64, 128, 7), (70, 66)], ids=str)
def test_nan_stays_in_its_sequence_and_head(lengths, triton_device):  # noqa: F811
    inputs = spec.example(tokens=sum(lengths), key_heads=1, value_heads=2, value_dim=16, seed=3)
    inputs |= {"cu_seqlens": bounds_of(*lengths)}
    inputs["v"][0, lengths[0] : lengths[0] + lengths[1], 1] = math.nan
    out, state = triton_chunk.run(**cast(inputs, torch.float16, triton_device), policy=NumericsPolicy())
    bad = out.isnan().flatten(3).any(-1)[0]  # [T, V]
    expected = torch.zeros_like(bad)
    expected[lengths[0] : lengths[0] + lengths[1], 1] = True
    assert torch.equal(bad, expected)
    assert state.isnan().flatten(2).any(-1).nonzero().tolist() == [[1, 1]]


@pytest.mark.parametrize("name", VALID_EXTREMES)
def test_extremes_are_right_in_fp32_and_finite_in_fp16(name, triton_device):  # noqa: F811
    inputs = VALID_EXTREMES[name].make(130, 0)
    wide = cast(inputs, torch.float32, triton_device)
    assert_near(triton_chunk.run(**wide, policy=NumericsPolicy()), wide)
    narrow = cast(inputs, torch.float16, triton_device)
    out, state = triton_chunk.run(**narrow, policy=NumericsPolicy())
    assert state.isfinite().all()
    exact, _ = arbiter(narrow)
    assert out.cpu()[exact.abs() < 6e4].isfinite().all()  # what is read of a state of 1e6 may be more than fp16 holds


@pytest.mark.parametrize("name", ["repeated_keys", "repeated_keys_at_one_beta"])
def test_repeated_keys_cost_no_digits(name, triton_device):  # noqa: F811
    """Where T r is rounded for its product with (q k^T) D, as in most kernels, the output is ten times as far off."""
    inputs = cast(VALID_EXTREMES[name].make(130, 0), torch.float16, triton_device)
    assert_near(triton_chunk.run(**inputs, policy=NumericsPolicy()), inputs)


def test_a_state_beyond_fp16_keeps_its_digits(triton_device):  # noqa: F811
    inputs = cast(VALID_EXTREMES["state_beyond_fp16"].make(130, 0), torch.float16, triton_device)
    inputs["q"] *= 1e-3  # so that what is read of it is within fp16
    assert_near(triton_chunk.run(**inputs, policy=NumericsPolicy()), inputs)


SIZES = ({"key_dim": 1, "value_dim": 1}, {"key_dim": 5, "value_dim": 33}, {"key_heads": 3, "value_heads": 3})


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_any_head_size(sizes, triton_device):  # noqa: F811
    inputs = cast(spec.example(tokens=70, seed=4, **sizes), torch.float32, triton_device)
    assert_near(triton_chunk.run(**inputs, policy=NumericsPolicy()), inputs)


def test_strided_inputs_are_read_where_they_lie(triton_device):  # noqa: F811
    inputs = cast(spec.example(batch=2, tokens=70, key_dim=16, value_dim=16, seed=5), torch.float32, triton_device)
    exact = triton_chunk.run(**inputs, policy=NumericsPolicy())
    mixed = torch.cat([inputs[name].flatten(2) for name in ("q", "k", "v")], dim=-1)
    q, k, v = mixed.split([32, 32, 64], dim=-1)
    apart = {"q": q.unflatten(2, (2, 16)), "k": k.unflatten(2, (2, 16)), "v": v.unflatten(2, (4, 16))}
    apart |= {name: inputs[name].transpose(1, 2).contiguous().transpose(1, 2) for name in ("beta", "log_decay")}
    for found, expected in zip(triton_chunk.run(**apart, policy=NumericsPolicy()), exact, strict=True):
        assert torch.equal(found, expected)
    turned = {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in inputs.items()}
    for found, expected in zip(triton_chunk.run(**turned, policy=NumericsPolicy()), exact, strict=True):
        assert torch.equal(found, expected)


def test_wide_keys_beside_narrow_values_are_rounded_to_them(triton_device):  # noqa: F811
    inputs = cast(spec.example(tokens=70, key_heads=1, value_heads=2, seed=6), torch.float16, triton_device)
    mixed = inputs | {name: inputs[name].float() for name in ("q", "k", "beta")}
    out, _ = triton_chunk.run(**mixed, policy=NumericsPolicy())
    expected, _ = triton_chunk.run(**inputs, policy=NumericsPolicy())
    assert out.dtype == torch.float16 and torch.equal(out, expected)


def test_the_sum_of_gates_is_the_one_that_the_policy_names(triton_device):  # noqa: F811
    inputs = cast(VALID_EXTREMES["mixed_decay"].make(130, 0), torch.float32, triton_device)
    exact, _ = arbiter(inputs)
    errors = {
        kind: relative_error(triton_chunk.run(**inputs, policy=NumericsPolicy(cumsum=kind))[0].cpu(), exact)
        for kind in ("float64", "float32")
    }
    assert errors["float64"] < 5e-7 < 1e-6 < errors["float32"] < 1e-4


def test_flags_hold_the_largest_and_smallest_values(triton_device):  # noqa: F811
    inputs = cast(spec.example(tokens=70, key_heads=1, value_heads=2, seed=7), torch.float16, triton_device)
    words = torch.full((2, 2), -1, dtype=torch.int32, device=triton_device)
    out, state = triton_chunk.run(**inputs, policy=NumericsPolicy(), flags=words)
    rows = dict(zip(triton_chunk.FLAGS, words.view(torch.float32).tolist(), strict=True))
    assert rows == {
        taps.GDN_STATE: [state.max().item(), -state.min().item()], taps.GDN_OUT: [out.max().item(), -out.min().item()],
    }  # fmt: skip
    inputs["v"][0, 66, 1, 3] = math.nan
    triton_chunk.run(**inputs, policy=NumericsPolicy(), flags=words)
    assert words.view(torch.float32).isnan().all()


def test_the_path_says_how_a_call_is_split_and_moved(monkeypatch, triton_device):  # noqa: F811
    inputs = cast(spec.example(batch=2, tokens=150, key_dim=16, value_dim=16), torch.float16, triton_device)
    monkeypatch.setattr(triton_chunk, "_segment", lambda *_: 2)
    policy = NumericsPolicy(chunk=16)
    assert triton_chunk.path(**inputs, policy=policy).startswith("split into 10 segments of 2 chunks, tiles moved by ")
    narrow = cast(spec.example(tokens=20, key_dim=5, value_dim=5), torch.float16, triton_device)
    assert triton_chunk.path(**narrow, policy=policy) == "not split, 2 chunks, tiles moved by threads"
    assert_near(triton_chunk.run(**inputs, policy=policy), inputs)


@pytest.mark.parametrize(
    ("heads", "counts", "parts"),
    [(64, (8,), 1), (64, (256,), 2), (16, (256,), 8), (64, (128, 128), 1), (32, (64,) * 8, 1), (64, (0, 1), 1)],
)
def test_a_sequence_is_split_where_multiprocessors_would_idle(heads, counts, parts):
    segment = triton_chunk._segment(heads, heads, counts, multiprocessors=132)
    assert triton_chunk.parts_of(max(counts), segment) == parts


def test_policies_that_it_cannot_honour_are_refused():
    def refusal(tokens: int = 70, **fields: object) -> str | None:
        policy = NumericsPolicy(**fields)
        return triton_chunk.supports(Call(spec.OP, "cpu", torch.float32, tokens, False, False, policy, (2, 128, 128)))

    state = (Clamp(site="state", lo=-1.0, hi=1.0),)
    assert refusal() is None and refusal(solver="auto") is None and refusal(cumsum="float32", chunk=128) is None
    assert refusal(clamps=(Clamp(site="raw_gate", lo=-1.0, hi=0.0),)) is None
    assert "exponent difference_then_mask; the policy asks for factored" in refusal(exponent="factored")
    assert "cumsum float64 or float32; the policy asks for segsum" in refusal(cumsum="segsum")
    assert "chunk 16 or 32 or 64 or 128; the policy asks for 48" in refusal(chunk=48)
    assert "the policy clamps state" in refusal(clamps=state)
    assert "state of float32" in refusal(state_dtype="float64")
    assert refusal(tokens=1, exponent="factored", chunk=48) is None and "clamps state" in refusal(1, clamps=state)


def test_gates_are_clamped_where_the_policy_says_so(triton_device):  # noqa: F811
    inputs = cast(spec.example(tokens=70, key_heads=1, value_heads=2, seed=8), torch.float32, triton_device)
    policy = NumericsPolicy(clamps=(Clamp(site="raw_gate", lo=-0.5, hi=0.0),))
    found = triton_chunk.run(**inputs, policy=policy)
    assert_near(found, inputs | {"log_decay": inputs["log_decay"].clamp(-0.5, 0.0)})


def test_it_runs_by_the_default_policy():
    call = Call(spec.OP, "cpu", torch.bfloat16, 70, False, False, resolve_policy(None), (2, 128, 128))
    assert backend_named(spec.OP, "triton_chunk").refusal(call) is None
