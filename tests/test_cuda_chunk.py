"""The CUDA C++ kernels of the gated delta rule, run on the CPU by `cuda_on_host`, against the float64 arbiter.

The sources are the ones that nvcc compiles. What stands for the GPU is a block of threads that run one at a time, with
barriers, exchanges between lanes and products of tensor cores; the Python side is run as it is.
"""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from workbench import taps
from workbench.errors import BackendError
from workbench.kernels import cuda_build
from workbench.kernels.agreement import relative_error
from workbench.kernels.contract import bounds_of
from workbench.kernels.gated_delta_rule import (
    cases,
    cuda_chunk,
    cuda_chunk_split,
    cuda_recurrent,
    reference,
    spec,
    torch_chunk,
    torch_recurrent,
)
from workbench.kernels.gated_delta_rule.extremes import VALID_EXTREMES
from workbench.kernels.machine import Machine
from workbench.kernels.registry import Call
from workbench.numerics import PRESETS, SAFE, Clamp, NumericsPolicy

HOST = Path(__file__).parent / "cuda_on_host"
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
BACKENDS = {"cuda_chunk": cuda_chunk, "cuda_chunk_split": cuda_chunk_split, "cuda_recurrent": cuda_recurrent}
CHUNKED = {name: BACKENDS[name] for name in ("cuda_chunk", "cuda_chunk_split")}
SHORT = replace(SAFE, chunk=16)


#: What kernels.cpp is built with where a source has no such macro.
ANY = {
    "BUILD_ELEMENT": "float", "BUILD_KEYS": 64, "BUILD_ROWS": 16, "BUILD_WARPS": 2, "BUILD_KEY_PARTS": 1,
    "ROW_PADDING_BYTES": 16, "BUILD_RANGES": 0,
}  # fmt: skip


class Host:
    """Libraries of the kernels for the CPU, by what they are built for; `order` shuffles the threads of a block."""

    def __init__(self, folder: Path):
        self.folder, self.built, self.order, self.has_tensor_cores = folder, {}, 1, True

    def library(self, macros: Mapping[str, object]) -> ctypes.CDLL:
        macros = dict(macros) | {"TENSOR_CORES": int(self.has_tensor_cores)}
        key = "_".join(map(str, macros.values()))
        if key not in self.built:
            target = self.folder / f"{key}.so"
            subprocess.run(
                [
                    "g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", f"-I{HOST}", f"-I{cuda_chunk.SOURCE.parent}",
                    *(f"-D{name}={value}" for name, value in macros.items()), str(HOST / "kernels.cpp"), "-o",
                    str(target),
                ],
                check=True,
            )  # fmt: skip
            self.built[key] = ctypes.CDLL(str(target))
        return self.built[key]


@pytest.fixture(scope="module")
def built_host(tmp_path_factory):
    if shutil.which("g++") is None or sys.platform != "linux":
        pytest.skip("needs g++ and the contexts of Linux's C library")
    return Host(tmp_path_factory.mktemp("cuda_on_host"))


@pytest.fixture
def host(built_host, monkeypatch):
    """Every launch of this test runs on the CPU."""
    built_host.order, built_host.has_tensor_cores = 1, True

    monkeypatch.setattr(cuda_build, "built", lambda _source, macros, _capability: built_host.library(ANY | macros))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    monkeypatch.setattr(cuda_chunk, "launch_stream", lambda _device: ctypes.c_void_p(built_host.order))
    monkeypatch.setattr(cuda_chunk, "most_shared_bytes", lambda _device: 227 << 10)
    return built_host


def cast(inputs, dtype):
    return cases.CONTRACTS[0].cast(inputs, dtype)


def errors(found, expected):
    """Of output and state; an output beyond float16 must be infinite there, as rounding makes it."""
    (out, state), (exact, exact_state) = found, expected
    if out.dtype == F16:
        assert bool(out[exact.abs() > 66500].isinf().all())
        beyond = exact.abs() > 65000
        out, exact = out.masked_fill(beyond, 0.0), exact.masked_fill(beyond, 0.0)
    return relative_error(out, exact), relative_error(state, exact_state)


#: Error of output and state that one rounding of every operand of a product may come to, in units of eps / 2: random
#: inputs, and the hardest, one key for all tokens, where v' telescopes and its roundings do not.
ROUNDINGS, HARD = 2.0, 6.0


def limit(dtype, module, is_hard=False):
    if dtype == F32 or module is cuda_recurrent:
        return (cases.LIMIT if dtype == F32 else torch.finfo(dtype).eps / 2), cases.LIMIT
    each = (HARD if is_hard else ROUNDINGS) * torch.finfo(dtype).eps / 2
    return each, each


def assert_right(module, inputs, dtype, policy=SHORT, is_hard=False):
    inputs = cast(inputs, dtype)
    found = errors(module.run(**inputs, policy=policy), reference.oracle(**inputs))
    for name, error, most in zip(("out", "state"), found, limit(dtype, module, is_hard), strict=True):
        assert error <= most, f"{name}: {error:.2g}, at most {most:.2g}"


SIZES = {
    "one chunk and a row": {"tokens": 17},
    "odd heads": {"tokens": 35, "key_heads": 2, "value_heads": 6, "key_dim": 5, "value_dim": 33, "batch": 2},
    "rows of 16 bytes": {"tokens": 40, "key_dim": 24, "value_dim": 40},
    "single channels": {"tokens": 20, "key_heads": 1, "value_heads": 2, "key_dim": 1, "value_dim": 1},
    "two blocks of columns": {"tokens": 18, "key_heads": 1, "value_heads": 1, "value_dim": 136},
    "one token": {"tokens": 1, "batch": 3},
}


@pytest.mark.parametrize("dtype", (F32, BF16, F16), ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", BACKENDS)
def test_sizes(host, name, sizes, dtype):
    inputs = spec.example(**SIZES[sizes], seed=3)
    assert_right(BACKENDS[name], inputs, dtype)
    assert_right(BACKENDS[name], {**inputs, "initial_state": cases.random_state(len(inputs["q"]), inputs)}, dtype)


@pytest.mark.parametrize("lengths", ((0, 5, 0, 0, 34, 0), (1, 1, 1), (33, 16, 2)), ids=str)
@pytest.mark.parametrize("name", BACKENDS)
def test_packed_sequences(host, name, lengths):
    inputs = spec.example(tokens=sum(lengths), seed=11) | {"cu_seqlens": bounds_of(*lengths)}
    assert_right(BACKENDS[name], {**inputs, "initial_state": cases.random_state(len(lengths), inputs)}, F32)


def test_heads_of_128_in_chunks_of_64(host):
    inputs = spec.example(tokens=130, key_heads=1, value_heads=1, key_dim=128, value_dim=128, log_decay=-0.1, seed=4)
    assert_right(cuda_chunk, inputs, BF16, SAFE)


@pytest.mark.parametrize("dtype", (F32, BF16, F16), ids=str)
@pytest.mark.parametrize("extreme", VALID_EXTREMES)
def test_killer_inputs(host, extreme, dtype):
    assert_right(cuda_chunk_split, VALID_EXTREMES[extreme].make(66, 0), dtype, SAFE, extreme.startswith("repeated"))


@pytest.mark.parametrize("dtype", (BF16, F16), ids=str)
def test_a_gpu_without_tensor_cores_for_a_dtype_multiplies_the_same_roundings_in_fp32(host, dtype):
    inputs = cast(spec.example(tokens=50, key_heads=1, value_heads=2, seed=5), dtype)
    out, state = cuda_chunk.run(**inputs, policy=SHORT)
    host.has_tensor_cores = False
    plain_out, plain_state = cuda_chunk.run(**inputs, policy=SHORT)
    assert relative_error(plain_out, out.double()) < torch.finfo(dtype).eps / 4
    assert relative_error(plain_state, state.double()) < torch.finfo(dtype).eps / 4


@pytest.mark.parametrize("name", BACKENDS)
def test_the_order_in_which_threads_run_changes_no_bit(host, name):
    inputs = cast(spec.example(tokens=40, seed=6), BF16)
    first = BACKENDS[name].run(**inputs, policy=SHORT)
    for order in (2, 3):
        host.order = order
        again = BACKENDS[name].run(**inputs, policy=SHORT)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_little_shared_memory_makes_other_blocks_and_the_same_result(host, monkeypatch):
    """Two stages or one: the same bits. One warp for all keys and not two: sums in another order."""
    inputs = cast(spec.example(tokens=40, seed=6), F32)
    warps = cuda_chunk.SPLIT_WARPS
    stage, exchange = cuda_chunk.stage_bytes(F32, 16, 16, warps, False), cuda_chunk.exchange_bytes(16, warps, 2)
    found = {}
    for most in (2 * stage + exchange, stage + exchange, stage):
        monkeypatch.setattr(cuda_chunk, "most_shared_bytes", lambda _device, most=most: most)
        blocks = cuda_chunk.blocks_of(F32, 16, 16, warps, False, most)
        found[blocks.key_parts, blocks.stages] = cuda_chunk_split.run(**inputs, policy=SHORT)
    assert list(found) == [(2, 2), (2, 1), (1, 1)]
    for a, b, c in zip(*found.values(), strict=True):
        assert torch.equal(a, b) and relative_error(c, a.double()) < 1e-6


def test_eight_warps_that_share_their_columns_give_the_result_of_eight(host, monkeypatch):
    """Slower on an H200 and taken by no backend: kept right for another GPU to be measured on."""
    inputs = cast(spec.example(tokens=40, seed=6), F32)
    plain = cuda_chunk.run(**inputs, policy=SHORT)
    monkeypatch.setattr(cuda_chunk, "blocks_of", lambda *_: cuda_chunk.Blocks(cuda_chunk.WARPS, 2, 1))
    shared = cuda_chunk.run(**inputs, policy=SHORT)
    assert all(relative_error(a, b.double()) < 1e-6 for a, b in zip(shared, plain, strict=True))


def served(policy, tokens=75, warps=2):
    call = Call(spec.OP, "cuda", F32, tokens, False, False, policy, (4, 16, 24), Machine("cuda", "a card", (9, 0)))
    return cuda_chunk.form_refusal(call, warps) is None


@pytest.mark.parametrize("preset", [name for name in PRESETS if served(PRESETS[name])])
def test_every_policy_does_what_it_does_in_pytorch(host, preset):
    """Also where it breaks: the same values are not finite."""
    policy = replace(PRESETS[preset], chunk=32)
    with_state = spec.example(tokens=75, seed=3)
    with_state["initial_state"] = cases.random_state(1, with_state)
    for inputs in (with_state, VALID_EXTREMES["sparse_resets"].make(40, 1)):
        expected = torch_chunk.run(**inputs, policy=policy)
        for found, exact in zip(cuda_chunk_split.run(**inputs, policy=policy), expected, strict=True):
            assert torch.equal(found.isfinite(), exact.isfinite())
            kept = exact.isfinite()
            assert relative_error(found[kept], exact[kept].double()) < 3e-5


@pytest.mark.parametrize("name", BACKENDS)
def test_clamps_of_a_decode_step(host, name):
    sites = ("raw_gate", "decode_gate", "state")
    policy = NumericsPolicy(clamps=tuple(
        Clamp(site=site, phase="decode", lo=-low, hi=0.1) for site, low in zip(sites, (0.4, 0.3, 0.2), strict=True)
    ))  # fmt: skip
    inputs = spec.example(tokens=1, batch=2, seed=3)
    inputs["initial_state"] = cases.random_state(2, inputs)
    same_form = torch_recurrent if name == "cuda_recurrent" else torch_chunk  # which reads the state before its limit
    found, expected = BACKENDS[name].run(**inputs, policy=policy), same_form.run(**inputs, policy=policy)
    assert all(relative_error(a, b.double()) < 1e-6 for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("place", (("v", (0, 20, 2, 5)), ("k", (0, 20, 1, 3)), ("log_decay", (0, 20, 1))), ids=str)
def test_nan_shows_from_its_chunk_on_and_in_no_other_head_or_sequence(host, name, place):
    lengths = (5, 30, 4)
    inputs = spec.example(tokens=sum(lengths), log_decay=-0.1, seed=16) | {"cu_seqlens": bounds_of(*lengths)}
    key, index = place
    inputs[key][index] = math.nan
    exact, exact_state = reference.oracle(**inputs)
    out, state = BACKENDS[name].run(**inputs, policy=SHORT)
    assert bool(out[exact.isnan()].isnan().all()) and bool(state[exact_state.isnan()].isnan().all())
    heads = exact.isnan().any(-1).any(1)[0]  # [V]
    assert bool(out[:, :, ~heads].isfinite().all())
    assert bool(out[:, :5].isfinite().all()) and bool(out[:, 35:].isfinite().all())
    assert bool(state[[0, 2]].isfinite().all())


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("has_nan", (False, True), ids=("finite", "with a NaN"))
def test_flags_hold_the_largest_values_of_both_signs(host, name, has_nan):
    inputs = cast(spec.example(tokens=21, value_dim=33, seed=7), BF16)
    if has_nan:
        inputs["v"][0, 9, 1, 2] = math.nan
    flags = torch.full((2, 2), -1, dtype=torch.int32)
    out, state = BACKENDS[name].run(**inputs, policy=SHORT, flags=flags)
    values = dict(zip(BACKENDS[name].FLAGS, flags.view(torch.float32).tolist(), strict=True))
    for tap, x in ((taps.GDN_OUT, out), (taps.GDN_STATE, state)):
        if has_nan:
            assert all(math.isnan(value) for value in values[tap])
        else:
            assert values[tap] == [max(x.max().item(), 0.0), max(-x.min().item(), 0.0)]


class Ranges:
    """An observer that takes ranges of the stages inside."""

    takes_ranges = True

    def __init__(self):
        self.seen = {}

    def see_ranges(self, name, ranges):
        self.seen[name] = ranges

    def __call__(self, name, tensor):
        raise AssertionError(f"{name}: expected ranges alone")

    def scope(self, prefix):
        return self


class Stages(Ranges):
    """One that takes tensors."""

    takes_ranges = False

    def __call__(self, name, tensor):
        self.seen[name] = tensor
        return tensor


@pytest.mark.parametrize("preset", ("safe", "five_clamps", "fp16_factored"))
@pytest.mark.parametrize("name", CHUNKED)
def test_an_observer_that_takes_ranges_gets_those_of_the_stages(host, name, preset):
    """The same as of PyTorch's stages, with the same values that are not finite where they are made."""
    policy = replace(PRESETS[preset], chunk=32)
    inputs = spec.example(tokens=75, key_heads=1, value_heads=2, value_dim=40, seed=3)
    ranges, stages = Ranges(), Stages()
    plain = CHUNKED[name].run(**inputs, policy=policy)
    found = CHUNKED[name].run(**inputs, policy=policy, tap=ranges)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(found, plain, strict=True))
    torch_chunk.run(**inputs, policy=policy, tap=stages)
    solved = (taps.GDN_INVERSE,) if preset != "five_clamps" else (taps.GDN_U, taps.GDN_W)
    always = (taps.GDN_CUMSUM, taps.GDN_DECAY, taps.GDN_KKT, taps.GDN_INTRA, taps.GDN_INTER, taps.GDN_STATE)
    assert sorted(ranges.seen) == sorted((*always, *solved))
    for stage, (values, shape, _dtype) in ranges.seen.items():
        tensor = stages.seen[stage]
        assert shape == tuple(tensor.shape) and values.shape == (*shape[:2], 5)
        finite = tensor.isfinite()
        if preset == "safe" or stage in (taps.GDN_DECAY, taps.GDN_KKT):
            counts = [tensor.isnan().sum(), (tensor == math.inf).sum(), (tensor == -math.inf).sum()]
            assert values[..., 2:].sum((0, 1)).tolist() == [count.item() for count in counts]
        if stage != taps.GDN_CUMSUM or preset == "safe":  # one that is held in fp16 is shown before by PyTorch
            low, high = (tensor[finite].min(), tensor[finite].max()) if finite.any() else (math.inf, -math.inf)
            close = pytest.approx((float(low), float(high)), rel=1e-5, abs=1e-6)
            assert (values[..., 0].min().item(), values[..., 1].max().item()) == close


def test_an_observer_of_tensors_sees_the_state_and_no_stage(host):
    observer = Stages()
    _, state = cuda_chunk.run(**spec.example(tokens=20), policy=SHORT, tap=observer)
    assert list(observer.seen) == [taps.GDN_STATE] and observer.seen[taps.GDN_STATE] is state


@pytest.mark.parametrize(("warps", "key_parts"), ((8, 1), (2, 2)))
def test_structs_and_sizes_are_those_of_the_sources(host, warps, key_parts):
    macros = {"BUILD_ELEMENT": "Bfloat16", "BUILD_WARPS": warps, "BUILD_KEY_PARTS": key_parts}
    found = host.library(ANY | macros)
    for limits_rows in (0, 1):
        size = cuda_chunk.stage_bytes(BF16, 16, 24, warps, bool(limits_rows))
        assert found.stage_bytes(limits_rows) == size
    assert found.exchange_bytes() == cuda_chunk.exchange_bytes(16, warps, key_parts)
    assert found.chunk_argument_bytes() == ctypes.sizeof(cuda_chunk.ChunkArguments)
    assert found.recurrent_argument_bytes() == ctypes.sizeof(cuda_recurrent.RecurrentArguments)


def test_a_launch_that_fails_is_an_error(host, monkeypatch):
    class Failing:
        def launch_chunks(self, *_):
            return 2

        def error_text(self, _code):
            return b"out of memory"

    monkeypatch.setattr(cuda_chunk, "library", lambda *_: Failing())
    with pytest.raises(BackendError, match="CUDA error 2: out of memory"):
        cuda_chunk.run(**spec.example(tokens=3), policy=SAFE)


def test_the_path_is_told(host):
    inputs = spec.example(tokens=40, value_dim=128)
    assert cuda_chunk.path(**inputs, policy=SHORT) == (
        "chunks of 16, 1 block of 8 warps for each head, 2 chunks in shared memory"
    )
    assert cuda_chunk_split.path(**inputs, policy=SAFE).startswith("chunks of 64, 4 blocks of 4 warps for each head")


def call(policy=SAFE, dtype=BF16, shape=(32, 128, 128), capability=(9, 0), tokens=64, needs_grad=False):
    machine = Machine("cuda", "a card", capability, is_here=False)
    return Call(spec.OP, "cuda", dtype, tokens, False, needs_grad, policy, shape, machine)


@pytest.mark.parametrize(
    ("given", "reason"),
    (
        ({"needs_grad": True}, "no backward pass"),
        ({"policy": NumericsPolicy(state_dtype="float64")}, "the policy asks for float64"),
        ({"policy": NumericsPolicy(chunk=48)}, "has chunks of 16, 32, 64 rows; the policy asks for 48"),
        ({"policy": NumericsPolicy(solver="doubling")}, "solves by substitution"),
        ({"shape": (4, 192, 128)}, "key sizes up to 128, found 192"),
        ({"capability": (7, 5)}, "needs 70 KiB of shared memory for chunks of 64 in Bfloat16, a card has 64"),
        ({"dtype": F32, "capability": (8, 6)}, "needs 134 KiB"),
    ),
)
def test_what_it_cannot_serve_is_refused_with_the_reason(given, reason):
    assert reason in cuda_chunk.supports(call(**given))


def test_what_it_serves():
    assert cuda_chunk.supports(call()) is None
    assert cuda_chunk.supports(call(policy=replace(SAFE, chunk=48), tokens=1)) is None
    assert cuda_chunk_split.supports(call(capability=(7, 5))) is None
    assert cuda_chunk.supports(call(policy=replace(SAFE, chunk=32), dtype=F32, capability=(7, 5))) is None
    assert cuda_recurrent.supports(call(tokens=1)) is None
    assert "chunked form" in cuda_recurrent.supports(call(policy=PRESETS["fla"]))
    assert "key sizes up to 256" in cuda_recurrent.supports(call(shape=(4, 300, 8), tokens=1))
    assert cuda_build.shared_bytes((12, 1)) == 99 << 10
