"""Policies as data: presets, JSON, refusals; and the limits of the formats against torch itself."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch

from workbench.errors import PolicyError
from workbench.numerics import (
    CHUNK_SITES,
    CLAMP_SITES,
    CUMSUM_KINDS,
    DECAY_SITES,
    EXP_OVERFLOW,
    EXP_UNDERFLOW,
    EXPONENT_FORMS,
    LARGEST,
    PRESETS,
    SAFE,
    SMALLEST_NORMAL,
    SOLVERS,
    Clamp,
    NumericsPolicy,
    resolve_policy,
)


@pytest.mark.parametrize("name", LARGEST)
def test_limits_are_those_of_the_formats(name):
    info = torch.finfo(getattr(torch, name))
    assert LARGEST[name] == info.max
    assert SMALLEST_NORMAL[name] == info.tiny


@pytest.mark.parametrize("name", ["float64", "float32"])
def test_exp_overflows_and_vanishes_at_the_limits(name):
    dtype = getattr(torch, name)

    def exp(x: float) -> float:
        return torch.tensor(x, dtype=dtype).exp().item()

    assert math.isfinite(exp(EXP_OVERFLOW[name] - 0.01)) and exp(EXP_OVERFLOW[name] + 0.01) == math.inf
    assert exp(-EXP_UNDERFLOW[name] + 0.1) > 0.0 and exp(-EXP_UNDERFLOW[name] - 0.1) == 0.0


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_exp_limits_of_the_narrow_formats_hold_for_a_rounded_result(name):
    dtype = getattr(torch, name)

    def rounded_exp(x: float) -> float:
        return torch.tensor(x, dtype=torch.float64).exp().to(dtype).item()

    assert math.isfinite(rounded_exp(EXP_OVERFLOW[name] - 0.01))
    assert rounded_exp(EXP_OVERFLOW[name] + 0.01) == math.inf
    assert rounded_exp(-EXP_UNDERFLOW[name] + 0.1) > 0.0 and rounded_exp(-EXP_UNDERFLOW[name] - 0.1) == 0.0


def one_clamp(**changes) -> dict:
    return {"clamps": [{"site": "raw_gate", "phase": "both", "lo": 0.0, "hi": 1.0} | changes]}


def test_the_default_is_safe():
    assert NumericsPolicy() == SAFE == PRESETS["safe"] == resolve_policy(None)
    assert (SAFE.exponent, SAFE.cumsum, SAFE.state_dtype) == ("difference_then_mask", "float64", "float32")
    assert (SAFE.chunk, SAFE.clamps, SAFE.nan_to_num) == (64, (), False)


def test_a_clamp_acts_in_its_phase_alone():
    clamp = Clamp(site="state", phase="decode", lo=-1.0, hi=1.0)
    policy = NumericsPolicy(clamps=(clamp, Clamp(site="raw_gate", lo=-5.0, hi=2.0)))
    assert policy.clamp("state", "decode") is clamp and policy.clamp("state", "prefill") is None
    assert policy.clamp("raw_gate", "prefill") == policy.clamp("raw_gate", "decode") != None  # noqa: E711
    assert len({policy, NumericsPolicy.from_json(policy.to_json())}) == 1  # hashable, and equal after JSON


def test_each_preset_is_what_its_name_says():
    assert PRESETS["fp32_cumsum"] == dataclasses.replace(SAFE, cumsum="float32")
    assert PRESETS["segsum"] == dataclasses.replace(SAFE, cumsum="segsum")
    for form in ("factored", "factored_mask_after", "mask_after", "multiply_mask"):
        assert PRESETS[form] == dataclasses.replace(SAFE, exponent=form, cumsum="float32")


@pytest.mark.parametrize("policy", PRESETS.values(), ids=PRESETS)
def test_json_keeps_every_field(policy):
    text = json.dumps(policy.to_json())
    assert set(json.loads(text)) == {
        "exponent", "cumsum", "state_dtype", "solver", "chunk", "clamps", "nan_to_num"
    }  # fmt: skip
    assert NumericsPolicy.from_json(json.loads(text)) == policy


def test_absent_fields_take_the_safe_value():
    assert NumericsPolicy.from_json({}) == SAFE
    assert NumericsPolicy.from_json({"chunk": 16}) == dataclasses.replace(SAFE, chunk=16)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"exponent": "fast"}, "field exponent: expected one of difference_then_mask, .*found 'fast'"),
        ({"cumsum": "float8"}, "field cumsum: expected one of float64, float32, segsum, .*found 'float8'"),
        ({"solver": "neumann"}, "field solver: expected one of .*found 'neumann'"),
        ({"state_dtype": "bfloat16"}, "field state_dtype: expected float32 or float64, found 'bfloat16'"),
        ({"chunk": 0}, "field chunk: expected a whole number from 1 to 1024, found 0"),
        ({"chunk": 2048}, "field chunk: .* found 2048"),
        ({"chunk": 64.0}, "field chunk: .* found 64.0"),
        ({"chunk": True}, "field chunk: .* found True"),
        ({"clamps": [{"site": "cumsum", "lo": -20}]}, "clamps: expected site, phase, lo, hi in each, found no 'hi'"),
        ({"clamps": [{"site": "cumsum", "lo": 0, "hi": 1, "at": 2}]}, "field clamps: .* found unknown 'at'"),
        ({"clamps": [3]}, "field clamps: expected objects, found int"),
        (one_clamp(site="gate"), "clamps.site: expected one of A_log, .*found 'gate'"),
        (one_clamp(phase="training"), "clamps.phase: expected one of prefill, decode, both, found 'training'"),
        (one_clamp(lo=2.0), "clamps at raw_gate: expected lo <= hi, found 2 and 1"),
        (one_clamp(hi=float("nan")), "clamps.hi: expected a finite number, found nan"),
        (one_clamp(hi=10**400), "clamps.hi: expected a finite number that float64 holds, found a whole number of 1329"),
        (one_clamp(lo=-(10**5000)), "clamps.lo: .* found a whole number of 16610 bits"),
        (one_clamp(hi=np.inf), "clamps.hi: expected a finite number, found inf"),
        (one_clamp(hi=np.ones(3)), r"clamps.hi: expected a finite number, found array"),
        (one_clamp(hi="1"), "clamps.hi: expected a finite number, found '1'"),
        (one_clamp(lo=0.5), "clamps at raw_gate: expected lo <= 0, since what it limits is never above 0, found 0.5"),
        (one_clamp(site="decode_gate", phase="decode", lo=0.5), "clamps at decode_gate: expected lo <= 0"),
        (one_clamp(site="cumsum", phase="prefill", lo=0.5), "clamps at cumsum: expected lo <= 0"),
        ({"chunk": 10**5000}, "field chunk: .* found a whole number of 16610 bits"),
        ({"chunk": np.float64(64)}, "field chunk: .* found np.float64"),
        ({"chunk": np.array([16, 32])}, "field chunk: .* found array"),
        ({"state_dtype": np.array(["float32", "float64"])}, "field state_dtype: .* found array"),
        ({"exponent": np.array(["factored"])}, "field exponent: .* found array"),
        ({"nan_to_num": np.bool_(True)}, "nan_to_num: expected true or false, found np.True_"),
        ({"nan_to_num": np.int64(1)}, "nan_to_num: expected true or false, found np.int64"),
        (one_clamp(hi=True), "clamps.hi: expected a finite number, found True"),
        (one_clamp(site="cumsum", phase="both"), "clamps at cumsum: expected phase 'prefill'.* found 'both'"),
        (one_clamp(site="decode_gate", phase="prefill"), "clamps at decode_gate: expected phase 'decode'"),
        (one_clamp(site="solve_rows", phase="prefill"), "clamps at solve_rows: expected solver row_loop.*block_substi"),
        (one_clamp(site="cumsum", phase="prefill") | {"cumsum": "segsum"}, "at cumsum: expected a cumulative sum"),
        ({"clamps": 2 * one_clamp()["clamps"]}, "expected one clamp at raw_gate in prefill, found two"),
        ({"nan_to_num": 1}, "nan_to_num: expected true or false, found 1"),
        ({"clamps": "none"}, "field clamps: expected a list, found str"),
        ({"chunks": 64}, "unknown field 'chunks', expected chunk, clamps, cumsum, exponent, "),
        ([], "expected a JSON object, found list"),
    ],
)
def test_a_wrong_field_is_refused_by_name(fields, message):
    with pytest.raises(PolicyError, match=message) as caught:
        NumericsPolicy.from_json(fields)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_numbers_of_numpy_are_kept_as_numbers_of_python():
    clamp = Clamp(site="state", lo=np.float32(-2), hi=np.int64(3))
    policy = NumericsPolicy(chunk=np.int32(16), nan_to_num=True, clamps=(clamp,), solver=np.str_("auto"))
    expected = NumericsPolicy(
        chunk=16, nan_to_num=True, clamps=(Clamp(site="state", lo=-2.0, hi=3.0),), solver="auto"
    )
    assert policy == expected and json.dumps(policy.to_json()) == json.dumps(expected.to_json())
    assert (type(policy.chunk), type(clamp.lo), type(clamp.hi)) == (int, float, float)
    # Equal policies are one text, whatever number their limits were written as.
    assert json.dumps(Clamp(site="state", lo=-2, hi=3).to_json()) == json.dumps(clamp.to_json())


@pytest.mark.parametrize("site", CLAMP_SITES)
def test_only_limits_of_a_decay_must_leave_what_is_not_above_0(site):
    phase = "prefill" if site in CHUNK_SITES else "decode" if site == "decode_gate" else "both"
    assert Clamp(site=site, phase=phase, lo=0.0, hi=1.0).lo == 0.0
    if site in DECAY_SITES:
        with pytest.raises(PolicyError, match=f"at {site}: expected lo <= 0"):
            Clamp(site=site, phase=phase, lo=1e-9, hi=1.0)
    else:
        assert Clamp(site=site, phase=phase, lo=1e-9, hi=1.0).lo == 1e-9


def test_every_known_value_is_accepted():
    for field, known in (("exponent", EXPONENT_FORMS), ("cumsum", CUMSUM_KINDS), ("solver", SOLVERS)):
        for value in known:
            assert getattr(NumericsPolicy(**{field: value}), field) == value


def test_a_policy_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SAFE.chunk = 16


def test_a_policy_comes_from_itself_a_name_or_a_file(tmp_path):
    assert resolve_policy(SAFE) is SAFE
    assert resolve_policy("segsum") is PRESETS["segsum"]
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"cumsum": "float32", "chunk": 32}), encoding="utf-8")
    assert resolve_policy(path) == resolve_policy(str(path)) == NumericsPolicy(cumsum="float32", chunk=32)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "neither a preset \\(safe, fp32_cumsum, .*\\) nor a file"),
        ("{", "mine.json: not JSON"),
        (b"\xff\xfe", "mine.json: not JSON"),
        ("[1]", "mine.json: expected a JSON object, found list"),
        ('{"stat": 1}', "mine.json: unknown field 'stat'"),
    ],
)
def test_an_unusable_file_is_one_line_that_names_it(tmp_path, content, message):
    path = tmp_path / "mine.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(PolicyError, match=message) as caught:
        resolve_policy(path)
    assert "\n" not in str(caught.value)
