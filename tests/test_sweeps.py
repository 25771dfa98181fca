"""Tests of sweeps: what a cell measures, that finished cells are kept, and that a failing one ends nothing."""

import json
import math
import os
import subprocess
import sys
import time
import types
from contextlib import suppress
from pathlib import Path

import joblib
import numpy as np
import pandas as pd
import pytest
import torch
from joblib.parallel import ThreadingBackend
from models import mini
from safetensors.torch import save_file
from small_checkpoint import write_small_checkpoint

import workbench
from workbench import sweeps
from workbench.cards import card_named
from workbench.config import ModelConfig
from workbench.errors import BackendError, InputError, PolicyError, WorkbenchError
from workbench.kernels import Kernels
from workbench.kernels.gated_delta_rule import spec
from workbench.model import CausalLM
from workbench.numerics import PRESETS, Clamp, NumericsPolicy
from workbench.sweeps import METRICS, divergence, read_tensors, sweep, write_sweep
from workbench.tracing import trace

ROOT = Path(__file__).resolve().parent.parent
IDS = torch.arange(96) % 97
CHEAP = ["finite", "first_bad", "kl"]


@pytest.fixture(scope="module")
def model() -> CausalLM:
    with torch.no_grad():
        return CausalLM(ModelConfig.from_hf(mini())).init_weights(3, "class_default").eval()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return write_small_checkpoint(tmp_path_factory.mktemp("sweeps") / "checkpoint")


@pytest.fixture
def measured(monkeypatch) -> list[sweeps.Cell]:
    """The cells that were measured in this process."""
    found: list[sweeps.Cell] = []
    measure = sweeps._measure

    def counting(key, source, cell, metrics):
        found.append(cell)
        return measure(key, source, cell, metrics)

    monkeypatch.setattr(sweeps, "_measure", counting)
    return found


def example(**settings) -> dict[str, torch.Tensor]:
    return spec.example(**{"tokens": 80, **settings})


# ============================================================================================================
# What is measured
# ============================================================================================================


def test_every_combination_is_one_row_in_the_order_of_the_axes():
    grid = {"length": [16, 80], "policy": ["safe", "segsum"], "chunk": [16, 64], "dtype": ["float32", "bfloat16"]}
    frame = workbench.sweep(example(), grid, ["finite", "error_out"])
    assert list(frame.columns) == ["policy", "chunk", "dtype", "length", "finite", "error_out", "ran", "error"]
    assert frame["ran"].str.fullmatch(
        r"gated_delta_rule=torch_chunk in b?float(16|32), 1 call of 2 and more tokens: first of the automatic order .*"
    ).all()
    assert len(frame) == 16 and not frame[["policy", "chunk", "dtype", "length"]].duplicated().any()
    assert frame["policy"].tolist() == ["safe"] * 8 + ["segsum"] * 8
    assert frame["length"].tolist() == [16, 80] * 8
    assert (frame["finite"] == 1.0).all() and frame["error"].isna().all()
    wide = frame["dtype"] == "float32"
    assert (frame["error_out"][wide] < 1e-6).all() and (frame["error_out"][~wide] > 1e-4).all()


def test_the_errors_of_a_layer_are_those_of_the_rehearsed_card():
    kernels = Kernels(card=card_named("bi-v100"))
    sweeps._errors(kernels, example())
    assert {row.op for row in kernels.rehearsed} == {"gated_delta_rule"}


def test_a_card_is_rehearsed_in_every_cell_and_part_of_what_a_cell_is_known_by(checkpoint, tmp_path, measured):
    grid = {"policy": ["safe", "doubling"], "dtype": ["float16"], "length": [8]}
    resume = tmp_path / "sweep.jsonl"
    here = sweeps.sweep(checkpoint, grid, ["finite"], resume=resume)
    there = sweeps.sweep(checkpoint, grid, ["finite"], resume=resume, card="bi-v100")
    assert len(measured) == 4 and list(here["finite"]) == list(there["finite"]) == [1.0, 1.0]
    library = NumericsPolicy(solver="solve_triangular")
    failed = sweeps.sweep(
        checkpoint, {"policy": [library], "dtype": ["float16"], "length": [8]}, ["finite"], backend="torch_chunk",
        card="bi-v100",
    )  # fmt: skip
    assert "which Iluvatar BI-V100 32 GB lacks" in failed["error"][0]


def test_tensors_past_the_limit_say_where_they_break():
    # 64 tokens of -1.39 pass the 88.72 nats of exp, 64 of -1.38 do not.
    for log_decay, finite, first in ((-1.38, True, None), (-1.39, False, "gdn.decay")):
        tensors = example(tokens=64, log_decay=log_decay)
        frame = sweep(tensors, {"policy": ["factored", "safe"]})
        row, safe = frame.iloc[0], frame.iloc[1]
        assert (row["finite"] == 1.0) == finite
        assert (None if pd.isna(row["first_bad"]) else row["first_bad"]) == first
        assert math.isfinite(row["error_out"]) == math.isfinite(row["error_state"]) == finite
        assert safe["finite"] == 1.0 and pd.isna(safe["first_bad"]) and safe["error_out"] < 1e-6
        assert (frame["seconds"] > 0).all() and (frame["peak_bytes"] > tensors["v"].nbytes).all()


def test_a_model_is_measured_against_its_safe_policy(model):
    grid = {"policy": ["safe", "segsum", "clamp_cumsum_20", "factored"], "length": [80]}
    frame = sweep(model, grid, ids=IDS).set_index("policy")
    assert list(frame.columns[3:-2]) == [name for name in METRICS if name not in sweeps.NAMED_ONLY]
    assert frame.loc["safe", ["kl", "flips", "finite"]].tolist() == [0.0, 0.0, 1.0]
    assert abs(frame.loc["segsum", "kl"]) < 1e-8 and frame.loc["segsum", "error_out"] < 3e-6
    assert frame.loc["clamp_cumsum_20", "kl"] > 1e-6 and frame.loc["clamp_cumsum_20", "error_out"] > 0.1
    assert frame.loc["clamp_cumsum_20", "finite"] == 1.0 and frame.loc["clamp_cumsum_20", "error_state"] > 0.1
    bad = frame.loc["factored"]
    assert bad["first_bad"] == "layers.00.gdn.decay" and bad["finite"] < 1.0 and bad["flips"] > 0.2
    assert pd.isna(bad["kl"]) and pd.isna(bad["error_out"]) and pd.isna(bad["error_state"])


def test_a_path_and_a_model_give_the_same_and_the_model_stays_as_it_was(checkpoint):
    grid, metrics = {"policy": ["clamp_cumsum_20"], "dtype": ["float32", "bfloat16"], "length": [70]}, [*CHEAP, "flips"]
    loaded = workbench.load(checkpoint)
    before = loaded.kernels
    ids = (torch.arange(70) * 37) % 4096
    from_model = sweep(loaded, grid, metrics, ids=ids)
    pd.testing.assert_frame_equal(from_model, sweep(checkpoint, grid, metrics, ids=ids))
    assert from_model["kl"].nunique() == 2  # the dtype arrived
    assert loaded.kernels is before and loaded.dtype == torch.bfloat16


def test_perplexity_and_dialogues_are_those_of_quality(checkpoint, monkeypatch):
    from workbench import quality
    from workbench.dialogue import fixed_dialogues
    from workbench.tokenizer import Tokenizer

    asked = []

    def scored(model, tokenizer, dialogues):
        asked.append((model.kernels.policy, list(dialogues)))
        return type("Score", (), {"share": 0.25})

    monkeypatch.setattr(quality, "dialogue_score", scored)
    frame = sweep(checkpoint, {"policy": ["segsum"], "length": [16]}, ["dialogue", "perplexity"])
    assert asked == [(PRESETS["segsum"], fixed_dialogues(20))] and frame["dialogue"].tolist() == [0.25]
    loaded = workbench.load(checkpoint, "float32", policy="segsum")
    tokens = quality.heldout_tokens(Tokenizer.from_directory(checkpoint), windows=4)
    assert frame["perplexity"].tolist() == [pytest.approx(quality.perplexity(loaded, tokens).perplexity, rel=1e-6)]


def test_divergence_by_hand():
    reference = torch.tensor([[[0.0, 0.0], [0.0, 9.0]]])
    logits = torch.tensor([[[math.log(3.0), 0.0], [9.0, 0.0]]])
    first = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    p = 1 / (1 + math.exp(-9))
    second = p * 9 + (1 - p) * -9
    kl, flips = divergence(logits, reference, rows=1)
    assert kl == pytest.approx((first + second) / 2) and flips == 0.5
    bad = logits.clone()
    bad[0, 0, 0] = math.nan
    kl, flips = divergence(bad, reference)
    assert math.isnan(kl) and flips == 1.0
    assert all(math.isnan(x) for x in divergence(reference, bad))


def test_policies_by_name_by_file_and_as_objects(tmp_path):
    clamped = NumericsPolicy(clamps=(Clamp(site="cumsum", lo=-1.0, hi=1.0, phase="prefill"),))
    (tmp_path / "mine.json").write_text(json.dumps(clamped.to_json()))
    grid = {"policy": [PRESETS["segsum"], clamped, str(tmp_path / "mine.json")]}
    frame = sweep(example(), grid, ["error_out"])
    assert frame["policy"][0] == "segsum" and frame["policy"][2] == str(tmp_path / "mine.json")
    assert NumericsPolicy.from_json(json.loads(frame["policy"][1])) == clamped
    assert frame["error_out"][1] == frame["error_out"][2] > 0.01


# ============================================================================================================
# Dumps of tensors
# ============================================================================================================


@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
@pytest.mark.parametrize("gate", ["g", "log_decay"])
def test_dumps_of_tensors(tmp_path, suffix, gate):
    tensors = example()
    state = torch.full((1, 4, 16, 24), 0.5)
    stored = {gate if name == "log_decay" else name: tensor for name, tensor in tensors.items()}
    stored["initial_state"] = state
    file = tmp_path / f"layer{suffix}"
    if suffix == ".npz":
        np.savez(file, **{name: tensor.numpy() for name, tensor in stored.items()})
    else:
        save_file(stored, file)
    grid = {"policy": ["bf16_cumsum"], "length": [40]}
    frame = sweep(file, grid, ["error_out", "error_state"])
    pd.testing.assert_frame_equal(frame, sweep(tensors | {"initial_state": state}, grid, ["error_out", "error_state"]))
    assert 1e-4 < frame["error_out"][0] < 0.1
    assert sweep(file, {}, ["finite"])["length"].tolist() == [80]


def bad_dump(tmp_path, kind) -> Path:
    file = tmp_path / ("dump.safetensors" if kind == "garbage" else "dump.npz")
    arrays = {name: tensor.numpy() for name, tensor in example().items()}
    if kind in ("garbage", "no zip"):
        file.write_bytes(b"PK\x03\x04 and nothing that follows" if kind == "no zip" else b"x" * 40)
    elif kind == "empty":
        file.write_bytes(b"")
    elif kind != "absent":
        if kind == "no beta":
            del arrays["beta"]
        elif kind == "unknown":
            arrays["decay"] = arrays["beta"]
        elif kind == "both":
            arrays["g"] = arrays["log_decay"]
        elif kind == "shape":
            arrays["k"] = arrays["k"][:, :3]
        elif kind == "text":
            arrays["q"] = np.array(["a"])
        elif kind == "gates":
            arrays["log_decay"] = -arrays["log_decay"]
        elif kind == "integers":
            arrays["v"] = arrays["v"].astype(np.int64)
        np.savez(file, **arrays)
    return file


BAD_PLACES = [("q", "gdn.q"), ("k", "gdn.k"), ("v", "gdn.v"), ("beta", "gdn.beta"), ("log_decay", "gdn.log_decay"),
              ("initial_state", "gdn.state")]  # fmt: skip


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(("name", "first"), BAD_PLACES)
def test_a_dump_with_a_value_that_is_not_finite_keeps_what_can_be_said(name, first, value):
    if (name, value) == ("log_decay", math.inf):
        value = math.nan  # above 0, which is refused
    tensors = example() | {"initial_state": torch.zeros(1, 4, 16, 24)}
    tensors[name][0, 3] = value
    frame = sweep(tensors, {"policy": ["safe", "nan_to_num"], "length": [80]})
    assert frame["error"].isna().all()
    assert frame["error_out"].isna().all()
    assert math.isnan(frame["error_state"][0]) != (name == "q")  # a query is read for the output alone
    assert frame["finite"][0] < 1.0 and frame["seconds"].notna().all() and frame["peak_bytes"].notna().all()
    if name != "initial_state":
        assert frame["first_bad"].tolist() == [first] * 2
    else:
        assert frame["first_bad"].notna().all()


def test_a_dump_that_overflows_in_a_narrow_dtype_keeps_what_can_be_said():
    tensors = example()
    tensors["v"][0, 5, 0, 0] = 1e6
    frame = sweep(tensors, {"dtype": ["float32", "float16"]}, ["finite", "first_bad", "error_out", "error_state"])
    assert frame["error"].isna().all() and frame["finite"][0] == 1.0 and frame["error_out"][0] < 1e-5
    assert frame["first_bad"][1] == "gdn.v" and frame["finite"][1] < 1.0
    assert math.isnan(frame["error_out"][1]) and math.isnan(frame["error_state"][1])
    strong = {name: tensor.double() for name, tensor in example().items()}
    strong["log_decay"][0, 5] = -1e300  # -inf in float32, after the dump was checked
    frame = sweep(strong, {}, ["finite", "first_bad", "error_out"])
    assert frame["error"].isna().all() and frame["first_bad"][0] == "gdn.log_decay" and frame["finite"][0] < 1.0


@pytest.mark.parametrize("backend", ["torch_recurrent", "reference"])
def test_no_row_stands_under_a_policy_that_did_not_run(backend):
    frame = sweep(example(log_decay=-1.0), {"policy": list(PRESETS)}, ["error_out"], backend=backend)
    ran = frame["error"].isna()
    assert frame["policy"][ran].tolist() == ["safe", "segsum"]
    assert frame["error"][~ran].str.startswith("Unserved: op gated_delta_rule: ").all()
    assert frame["error"][~ran].str.endswith("use torch_chunk").all()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("no beta", "beta and perhaps initial_state, found no beta"),
        ("unknown", "found 'decay'"),
        ("both", "expected one of g and log_decay, found both"),
        ("shape", "k: expected shape"),
        ("gates", "log_decay"),
        ("text", "file of tensors, found: "),
        ("integers", "expected floating point numbers"),
        ("no zip", "file of tensors, found: "),
        ("empty", "file of tensors, found: "),
        ("absent", "file of tensors, found: "),
    ],
)
def test_a_dump_that_cannot_be_used_is_one_line_with_its_name(tmp_path, kind, expected):
    file = bad_dump(tmp_path, kind)
    with pytest.raises(InputError) as caught:
        sweep(file, {})
    assert str(caught.value).startswith(f"{file}: ") and expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_garbage_by_the_name_of_safetensors(tmp_path):
    with pytest.raises(InputError, match=r"dump.safetensors: expected a .safetensors or .npz file"):
        sweep(bad_dump(tmp_path, "garbage"), {})
    with pytest.raises(InputError, match="file of tensors"):
        read_tensors(tmp_path / "dump.safetensors")


# ============================================================================================================
# Finished cells are kept
# ============================================================================================================


def test_finished_cells_are_not_measured_again(tmp_path, measured):
    tensors, file = example(), tmp_path / "kept.jsonl"
    first = sweep(tensors, {"policy": ["safe", "segsum"]}, ["finite", "seconds"], resume=file)
    assert len(measured) == 2
    again = sweep(tensors, {"policy": ["safe", "segsum"]}, ["seconds", "finite"], resume=file)
    assert len(measured) == 2
    pd.testing.assert_frame_equal(first, again)  # times too: they are the old ones
    more = sweep(tensors, {"policy": ["segsum", "midpoint"], "length": [80]}, ["finite", "seconds"], resume=file)
    assert [cell.policy for cell in measured[2:]] == ["midpoint"]
    assert more["seconds"][0] == first["seconds"][1]


def test_two_names_of_one_policy_are_measured_once_and_have_a_row_each(measured):
    assert PRESETS["fla"] == PRESETS["vllm"]
    frame = sweep(example(), {"policy": ["fla", "safe", "vllm"]}, ["seconds"])
    assert [cell.policy for cell in measured] == ["fla", "safe"]
    assert frame["policy"].tolist() == ["fla", "safe", "vllm"] and frame["seconds"][0] == frame["seconds"][2]


@pytest.mark.parametrize("changed", ["tensors", "metrics", "dtype", "length", "chunk", "backend", "policy"])
def test_another_cell_is_not_taken_for_a_finished_one(tmp_path, measured, changed):
    tensors, grid, metrics, options = example(), {"policy": ["safe"]}, ["finite"], {}
    sweep(tensors, grid, metrics, resume=tmp_path / "kept.jsonl")
    if changed == "tensors":
        tensors["beta"][0, 79, 3] *= 0.5
    elif changed == "metrics":
        metrics = ["finite", "error_out"]
    elif changed == "backend":
        options = {"backend": "torch_recurrent"}
    else:
        grid = grid | {changed: [{"dtype": "bfloat16", "length": 79, "chunk": 16, "policy": "segsum"}[changed]]}
    sweep(tensors, grid, metrics, resume=tmp_path / "kept.jsonl", **options)
    assert len(measured) == 2


def test_weights_and_text_of_a_model_belong_to_a_cell_and_a_longer_text_does_not(tmp_path, model, measured):
    grid, file = {"length": [32]}, tmp_path / "kept.jsonl"
    sweep(model, grid, ["finite"], ids=IDS[:32], resume=file)
    sweep(model, grid, ["finite"], ids=IDS, resume=file)
    assert len(measured) == 1
    sweep(model, grid, ["finite"], ids=IDS.flip(0), resume=file)
    with torch.no_grad():
        other = CausalLM(model.config).init_weights(4, "class_default").eval()
    sweep(other, grid, ["finite"], ids=IDS, resume=file)
    assert len(measured) == 3


KILLED = """
import os, sys
from workbench import sweeps
from workbench.kernels.gated_delta_rule import spec
sweeps.sweep(spec.example(tokens=80), {"policy": ["safe", "segsum", "midpoint"]}, ["finite"], resume=sys.argv[1],
             progress=lambda done, total, row: os._exit(9) if done == 2 else None)
"""


def test_a_killed_sweep_goes_on_where_it_was(tmp_path, measured):
    file = tmp_path / "kept.jsonl"
    done = subprocess.run([sys.executable, "-c", KILLED, str(file)], cwd=ROOT, timeout=120)
    assert done.returncode == 9 and len(file.read_bytes().splitlines()) == 2
    with open(file, "ab") as stream:
        stream.write(b'{"key": "cut of')  # what a kill in the middle of a write leaves
    seen = []
    frame = sweep(example(), {"policy": ["safe", "segsum", "midpoint"]}, ["finite"], resume=file,
                  progress=lambda *state: seen.append(state))  # fmt: skip
    assert [cell.policy for cell in measured] == ["midpoint"] and frame["finite"].tolist() == [1.0] * 3
    assert [(done, total) for done, total, _ in seen] == [(2, 3), (3, 3)]
    assert seen[0][2] is None and seen[1][2]["policy"] == "midpoint" and seen[1][2]["finite"] == 1.0
    assert [json.loads(line)["policy"] for line in file.read_text().splitlines()] == ["safe", "segsum", "midpoint"]
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert all("gated_delta_rule=torch_chunk" in text for row in rows for text in row["ran"]) and rows[0]["ran"]


@pytest.mark.parametrize("line", ["notes on a sweep", "[1]", '{"key": "a"}', '{"key": 1, "values": {}, "error": null}'])
def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path, line):
    (tmp_path / "notes").write_text(line + "\n")
    with pytest.raises(InputError, match="notes: line 1: expected a finished cell of a sweep"):
        sweep(example(), {}, resume=tmp_path / "notes")
    assert (tmp_path / "notes").read_text() == line + "\n"


# ============================================================================================================
# Failing cells and bad questions
# ============================================================================================================


def test_a_failing_cell_is_a_row_with_its_error_and_is_tried_again(tmp_path, measured):
    grid, file = {"policy": ["safe", "segsum"], "length": [80, 81]}, tmp_path / "kept.jsonl"
    frame = sweep(example(), grid, ["finite", "first_bad", "peak_bytes"], resume=file)
    assert frame["finite"].isna().tolist() == [False, True, False, True] == frame["peak_bytes"].isna().tolist()
    assert frame["error"].isna().tolist() == [True, False, True, False]
    assert frame["error"][1] == "InputError: length: expected at most the 80 tokens of the tensors, found 81"
    sweep(example(), grid, ["finite", "first_bad", "peak_bytes"], resume=file)
    assert [cell.length for cell in measured[4:]] == [81, 81]


def test_what_a_backend_refuses_and_what_torch_cannot_do_are_rows(monkeypatch):
    grid = {"policy": ["safe", "clamp_cumsum_20"]}
    frame = sweep(example(), grid, ["finite"], backend="torch_recurrent")
    assert pd.isna(frame["error"][0]) and frame["error"][1].startswith("Unserved: op gated_delta_rule: ")

    def exhausted(*args, **options):
        raise RuntimeError("out of\nmemory")

    monkeypatch.setattr(sweeps, "peak_tensor_bytes", exhausted)
    frame = sweep(example(), grid, ["peak_bytes"])
    assert frame["error"].tolist() == ["RuntimeError: out of memory"] * 2 and frame["peak_bytes"].isna().all()


def test_a_defect_is_not_hidden_in_a_row(monkeypatch):
    def broken(*args, **options):
        raise TypeError("a defect")

    monkeypatch.setattr(sweeps, "peak_tensor_bytes", broken)
    with pytest.raises(TypeError, match="a defect"):
        sweep(example(), {}, ["peak_bytes"])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"grid": {"plicy": ["safe"]}}, "unknown axis 'plicy', expected policy, chunk, dtype, length"),
        ({"grid": {"policy": "safe"}}, "axis policy: expected a list"),
        ({"grid": {"policy": []}}, "axis policy: expected a list of at least one value"),
        ({"grid": {"policy": ["sfae"]}}, "neither a preset"),
        ({"grid": {"policy": [3]}}, "expected a NumericsPolicy"),
        ({"grid": None}, "grid: expected a mapping of axes, found None"),
        ({"grid": []}, "grid: expected a mapping of axes, found []"),
        ({"grid": {"length": 5}}, "axis length: expected a list"),
        ({"grid": {"length": {8}}}, "axis length: expected a list"),
        ({"grid": {"length": np.array([])}}, "axis length: expected a list of at least one value"),
        ({"grid": {"length": np.ones((2, 2), int)}}, "axis length: expected a list"),
        ({"grid": {"length": np.array([8.5])}}, "axis length: expected whole numbers of at least 1, found 8.5"),
        ({"grid": {"length": [np.float64(8)]}}, "axis length: expected whole numbers"),
        ({"grid": {"length": [np.array(8)]}}, "axis length: expected whole numbers"),
        ({"grid": {"length": [True]}}, "axis length: expected whole numbers"),
        ({"grid": {"length": [10**5000]}}, "axis length: expected whole numbers of at least 1, found a whole"),
        ({"grid": {"chunk": np.array([16.0])}}, "chunk: expected a whole number from 1 to 1024, found 16.0"),
        ({"grid": {"chunk": [np.array([16])]}}, "chunk: expected a whole number from 1 to 1024, found array"),
        ({"grid": {"policy": [np.array(["safe"])]}}, "expected a NumericsPolicy"),
        ({"grid": {"policy": np.array([1.0])}}, "expected a NumericsPolicy"),
        ({"grid": {"dtype": [None]}}, "axis dtype: expected names"),
        ({"metrics": 5}, "metrics: expected a list of at least one of finite, first_bad"),
        ({"metrics": [5]}, "metrics: expected some of finite, first_bad"),
        ({"metrics": [["finite"]]}, "metrics: expected some of finite, first_bad"),
        ({"resume": 5}, "resume: expected a path or None, found 5"),
        ({"progress": 5}, "progress: expected a function or None, found 5"),
        ({"backend": 5}, "backend: expected a name or None, found 5"),
        ({"device": 5}, "device: expected a name, found 5"),
        ({"cluster": 5}, "cluster: expected a name or None, found 5"),
        ({"jobs": 1.5}, "jobs: expected a whole number of at least 1, found 1.5"),
        ({"target": {name: x.to("meta") for name, x in example().items()}}, "without data (meta)"),
        ({"target": {name: x.numpy() for name, x in example().items()}}, "q: expected a tensor, found ndarray"),
        ({"target": {name: x.to(torch.float8_e5m2) for name, x in example().items()}}, "found q torch.float8_e5m2"),
        ({"grid": {"chunk": [0]}}, "chunk: expected a whole number from 1 to 1024"),
        ({"grid": {"dtype": ["float8"]}}, "dtype: expected one of"),
        ({"grid": {"dtype": [torch.float32]}}, "axis dtype: expected names"),
        ({"grid": {"length": [0]}}, "axis length: expected whole numbers of at least 1, found 0"),
        ({"grid": {"length": [1.5]}}, "axis length: expected whole numbers"),
        ({"metrics": ["speed"]}, "metrics: expected some of finite, first_bad"),
        ({"metrics": ["kl"]}, "for tensors, found 'kl'"),
        ({"metrics": []}, "metrics: expected a list of at least one"),
        ({"metrics": "finite"}, "metrics: expected a list"),
        ({"jobs": 0}, "jobs: expected a whole number of at least 1, found 0"),
        ({"backend": "torch_chunk:factored"}, "policies are an axis of the grid"),
        ({"backend": "fast"}, "no op has a backend of that name"),
        ({"device": "tpu"}, "device: expected cpu"),
        ({"cluster": "slurm:here"}, "cluster: expected dask:ADDRESS or ray:ADDRESS"),
        ({"cluster": "dask"}, "cluster: expected dask:ADDRESS or ray:ADDRESS"),
        ({"ids": [1, 2]}, "with a model alone"),
        ({"target": 3}, "expected a path, a CausalLM or tensors by name, found int"),
        ({"target": "/none/here"}, "expected a checkpoint or a file of tensors, found nothing there"),
        ({"resume": "/none/here/kept.jsonl"}, "cannot keep finished cells: No such file"),
    ],
)
def test_a_sweep_that_makes_no_sense_is_refused_in_one_line(measured, settings, expected):
    told: list = []
    arguments = {"target": example(), "grid": {}, "metrics": ["finite"], "progress": lambda *state: told.append(state)}
    arguments |= settings
    with pytest.raises((InputError, PolicyError, BackendError)) as caught:
        sweep(**arguments)
    assert expected in str(caught.value) and "\n" not in str(caught.value) and not measured and not told
    assert len(str(caught.value)) < 800  # some name all that there is


def test_axes_of_numpy_and_pandas_are_those_of_python(tmp_path):
    plain = sweep(example(), {"policy": ["safe"], "chunk": [16, 64], "length": [8, 80]}, ["finite"],
                  resume=tmp_path / "kept.jsonl")  # fmt: skip
    for grid in (
        {"policy": np.array(["safe"]), "chunk": np.array([16, 64]), "length": pd.Series([8, 80])},
        {"policy": [np.str_("safe")], "chunk": [np.int32(16), np.int64(64)], "length": [np.int64(8), np.uint8(80)]},
        {"policy": [None], "chunk": (16, 64), "length": range(8, 81, 72)},
        {"policy": [NumericsPolicy(chunk=np.int64(64))], "chunk": [16, 64], "length": pd.Index([8, 80])},
    ):
        frame = sweep(example(), grid, ("finite",), resume=str(tmp_path / "kept.jsonl"), jobs=np.int64(1))
        pd.testing.assert_frame_equal(frame, plain)
        assert {type(cell.length) for cell in sweeps.cells(grid)} == {type(cell.numerics.chunk) for cell in
                                                                      sweeps.cells(grid)} == {int}  # fmt: skip
    assert len((tmp_path / "kept.jsonl").read_bytes().splitlines()) == 4
    assert plain["policy"].tolist() == ["safe"] * 4


@pytest.mark.parametrize("kind", ["text", "folder", "no weights", "no config", "weights alone"])
def test_what_is_neither_a_checkpoint_nor_a_dump_is_called_so(tmp_path, checkpoint, kind):
    target = tmp_path / "target"
    if kind == "text":
        target = tmp_path / "target.txt"
        target.write_text("notes")
    else:
        target.mkdir()
    if kind == "no weights":
        (target / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    elif kind in ("no config", "weights alone"):
        save_file({"model.a": torch.ones(2)}, target / "model.safetensors")
        target = target / "model.safetensors" if kind == "weights alone" else target
    with pytest.raises(InputError, match="neither a checkpoint nor a dump: expected a folder with config"):
        sweep(target, {})


def test_models_that_cannot_be_swept_are_refused(model):
    with pytest.raises(InputError, match="expected a model with weights, found tensors without data"):
        sweep(CausalLM(model.config).to("meta"), {}, ["finite"], ids=IDS)
    with pytest.raises(InputError, match="expected ids or a tokenizer"):
        sweep(model, {})
    with pytest.raises(InputError, match="perplexity: expected a tokenizer, found none"):
        sweep(model, {}, ["perplexity"], ids=IDS)
    for ids in ([], [0.5], [[1, 2]], ["a"]):
        with pytest.raises(InputError, match="ids: expected"):
            sweep(model, {}, ["finite"], ids=ids)
    with trace(model), pytest.raises(InputError, match="expected a model without a tap"):
        sweep(model, {}, ["finite"], ids=IDS)


def test_a_text_or_a_position_table_that_is_too_short_is_a_row(checkpoint):
    frame = sweep(checkpoint, {"length": [8, 33]}, ["finite"], ids=list(range(32)))
    assert frame["finite"][0] == 1.0 and "expected at most the 32 tokens of the text, found 33" in frame["error"][1]
    frame = sweep(checkpoint, {"length": [4097]}, ["finite"], ids=[1] * 4097)
    assert "expected at most 4096 tokens (max_position_embeddings)" in frame["error"][0]


# ============================================================================================================
# Files, processes, clusters
# ============================================================================================================


def test_tables_come_back_from_every_format(tmp_path):
    frame = sweep(example(log_decay=-2.0), {"policy": ["safe", "factored"], "length": [80, 81]})
    for suffix, read in ((".csv", pd.read_csv), (".json", pd.read_json), (".parquet", pd.read_parquet)):
        write_sweep(frame, tmp_path / f"table{suffix}")
        back = read(tmp_path / f"table{suffix}")
        assert back.columns.tolist() == frame.columns.tolist()
        pd.testing.assert_frame_equal(back.astype(frame.dtypes), frame, rtol=1e-12)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["table.csv", "table.json", "table.parquet"]
    with pytest.raises(InputError, match=r"expected a name that ends in one of \.csv, \.json, \.parquet"):
        write_sweep(frame, tmp_path / "table.xlsx")
    with pytest.raises(InputError, match="cannot be written"):
        write_sweep(frame, tmp_path / "none" / "table.parquet")


def test_processes_give_what_one_process_gives(tmp_path, model):
    grid = {"policy": ["safe", "clamp_cumsum_20"], "length": [64, 80, 97]}
    kept = tmp_path / "kept.jsonl"
    apart = sweep(model, grid, [*CHEAP, "error_out"], ids=IDS, jobs=2, resume=kept)
    assert len(kept.read_bytes().splitlines()) == 6
    together = sweep(model, grid, [*CHEAP, "error_out"], ids=IDS)
    pd.testing.assert_frame_equal(apart, together, rtol=1e-4)
    assert apart["error"].notna().tolist() == [False, False, True] * 2


def test_a_table_that_could_not_be_written_is_known_before_anything_is_measured(tmp_path, monkeypatch):
    (tmp_path / "folder.csv").mkdir()
    (tmp_path / "kept.json").write_text("mine")
    long = "x" * 250 + ".csv"  # a name that fits, and does not with what a scratch file adds
    for name, reason in (("folder.csv", "found a folder"), (long, "name too long"), ("none/a.csv", "is no folder")):
        with pytest.raises(InputError, match=f"cannot be written: .*{reason}") as caught:
            sweeps.check_output(tmp_path / name)
        assert "\n" not in str(caught.value)
    sweeps.check_output(tmp_path / "kept.json")
    assert (tmp_path / "kept.json").read_text() == "mine"
    monkeypatch.setattr(sweeps.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="expected the package pyarrow, found none"):
        sweeps.check_output(tmp_path / "a.parquet")
    monkeypatch.undo()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["folder.csv", "kept.json"]

    def no_space(*given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sweeps, "open", no_space, raising=False)
    with pytest.raises(InputError, match=r"a\.csv: cannot be written: No space left on device"):
        sweeps.check_output(tmp_path / "a.csv")


def test_the_command_proves_its_files_first_and_prints_the_table_before_them(tmp_path, monkeypatch, capsys, measured):
    from workbench.cli import main

    save_file(example(), tmp_path / "dump.safetensors")
    (tmp_path / "a.csv").mkdir()
    code = main(["sweep", str(tmp_path / "dump.safetensors"), "--out", str(tmp_path / "b.csv"), "--out",
                 str(tmp_path / "a.csv")])  # fmt: skip
    assert code == 2 and not measured and "a.csv: cannot be written" in capsys.readouterr().err

    def gone(frame, path):
        raise InputError(f"{path}: cannot be written: gone meanwhile")

    monkeypatch.setattr(sweeps, "write_sweep", gone)
    code = main(["sweep", str(tmp_path / "dump.safetensors"), "--metric", "finite", "--out", str(tmp_path / "b.csv")])
    printed = capsys.readouterr()
    assert code == 2 and "gone meanwhile" in printed.err and printed.out.splitlines()[1].split() == [
        "safe", "64", "float32", "80", "100.0%",
    ]  # fmt: skip


LONG = """
import sys, torch
from workbench import sweeps
from workbench.kernels.gated_delta_rule import spec
if __name__ == "__main__":
    torch.set_num_threads(1)
    lengths = [8, 9, *range(29980, 30000)]  # seconds for each but the first two: the oracle goes token by token
    sweeps.sweep(spec.example(tokens=30000), {"length": lengths}, ["error_out"], jobs=2,
                 progress=lambda *state: print("told", flush=True))
"""


def children(of: set[int]) -> set[int]:
    """`of` and every process below them, by /proc."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            fields = status.read_text().rpartition(")")[2].split()
            if fields[0] != "Z":
                parents[int(status.parent.name)] = int(fields[1])
    found = set(of)
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found & (set(parents) | of)


def alive(processes: set[int]) -> set[int]:
    found = set()
    for process in processes:
        with suppress(OSError):
            if Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.add(process)
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads the processes of Linux")
def test_a_sweep_that_is_killed_leaves_no_process_behind(tmp_path):
    (tmp_path / "long.py").write_text(LONG)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, tmp_path / "long.py"], env=environment, stdout=subprocess.PIPE) as parent:
        try:
            assert parent.stdout.readline() == b"told\n" and parent.stdout.readline() == b"told\n"  # cells are at work
            workers = children({parent.pid}) - {parent.pid}
            assert len(workers) >= 2
        finally:
            parent.kill()
    deadline = time.monotonic() + 15
    while (left := alive(workers)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


class EndsItsProcess:
    """In the place of a tokenizer: the process that unpickles it ends at once, as one that the system killed."""

    def __reduce__(self):
        return os._exit, (9,)


def test_a_process_that_dies_is_one_line_with_what_to_do(model):
    with pytest.raises(WorkbenchError, match=r"found one that ended, .* run it again with fewer jobs"):
        sweep(model, {"length": [8, 9]}, ["finite"], ids=IDS, tokenizer=EndsItsProcess(), jobs=2)


# ============================================================================================================
# Clusters
# ============================================================================================================


def kept_by_this_process() -> list[str]:
    from workbench import sweeps

    return sorted(sweeps._KEPT)


def test_a_dask_cluster_of_two_workers_gives_what_one_process_gives(tmp_path):
    from distributed import Client, LocalCluster

    kept = tmp_path / "kept.jsonl"
    grid = {"policy": ["safe", "midpoint"], "chunk": [16, 32, 64], "length": [79, 80, 81]}
    settings = {"n_workers": 2, "threads_per_worker": 1, "processes": True, "dashboard_address": None}
    with LocalCluster(**settings, local_directory=tmp_path / "dask") as cluster:
        address = cluster.scheduler_address
        frame = sweep(example(), grid, ["finite", "error_out"], cluster=f"dask:{address}", resume=kept)
        with Client(address, set_as_default=False) as client:
            computed = client.run(kept_by_this_process)
    assert len(computed) == 2 and set(map(tuple, computed.values())) == {("oracle",)} and kept_by_this_process() == []
    assert len(kept.read_bytes().splitlines()) == 18
    pd.testing.assert_frame_equal(frame, sweep(example(), grid, ["finite", "error_out"]), rtol=0.1)
    assert frame["error"].notna().sum() == 6
    # Nobody is asked for what is kept.
    sweep(example(), {**grid, "length": [79, 80]}, ["finite", "error_out"], cluster=f"dask:{address}", resume=kept)
    with pytest.raises(InputError, match="expected a Dask scheduler there, found none"):
        sweep(example(), grid, cluster=f"dask:{address}")


@pytest.mark.parametrize("address", ["nonsense", "foo://host:1", "inproc://1/2/3", "tcp://127.0.0.1:1"])
def test_an_address_without_a_dask_scheduler_is_one_line(address):
    with pytest.raises(InputError, match="expected a Dask scheduler there, found none"):
        sweep(example(), {}, ["finite"], cluster=f"dask:{address}")


@pytest.mark.parametrize(("cluster", "package"), [("dask:tcp://127.0.0.1:1", "distributed"), ("ray:auto", "ray")])
def test_a_package_that_is_not_installed_is_one_line(monkeypatch, cluster, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InputError, match=f"expected the package {package}, found no .*pip install {package}"):
        sweep(example(), {}, ["finite"], cluster=cluster)


class AllAtOnce(ThreadingBackend):
    """Returns results as Ray's backend does: none before all are there."""

    supports_return_generator = False


def test_cells_go_to_a_backend_that_cannot_stream_a_few_at_a_time(monkeypatch, measured):
    asked = []
    ray, connection = types.ModuleType("ray"), types.ModuleType("ray.util.joblib")
    ray.init = lambda **options: asked.append(options)
    connection.register_ray = lambda: joblib.register_parallel_backend("ray", AllAtOnce)
    for name, module in (("ray", ray), ("ray.util", types.ModuleType("ray.util")), ("ray.util.joblib", connection)):
        monkeypatch.setitem(sys.modules, name, module)
    grid, states = {"policy": ["safe", "segsum", "midpoint"], "length": [79, 80]}, []
    frame = sweep(example(), grid, ["finite"], cluster="ray:auto", jobs=2,
                  progress=lambda done, total, row: states.append((done, len(measured))))  # fmt: skip
    assert asked == [{"address": "auto", "ignore_reinit_error": True}] and len(frame) == 6
    assert frame["finite"].tolist() == [1.0] * 6
    assert states == [(0, 0), (1, 2), (2, 2), (3, 4), (4, 4), (5, 6), (6, 6)]
