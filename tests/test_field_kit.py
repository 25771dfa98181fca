"""The field kit as its user has it: a copy of one file, away from the package, beside engines of other people."""

import ast
import dataclasses
import functools
import hashlib
import importlib.util
import json
import math
import os
import platform
import shutil
import signal
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import flat_engine
import models
import pytest
import torch
import transformers
from safetensors.torch import load_file

from workbench import bundle, taps
from workbench.analysis.compare import compare
from workbench.analysis.compare.saved import read_side
from workbench.checkpoint import write_checkpoint
from workbench.cli import main
from workbench.config import ModelConfig
from workbench.errors import InputError
from workbench.model import CausalLM
from workbench.tracing.dump import read_trace
from workbench.tracing.observer import COLUMNS
from workbench.tracing.statistics import describe

SOURCE = Path(__file__).resolve().parent.parent / "workbench" / "field_kit" / "field_kit.py"
ENGINE = Path(flat_engine.__file__)
#: Another interpreter with an old torch, where somebody has one: Python 3.8 and torch 1.10 are the oldest supported.
OLD_PYTHON = os.environ.get("FIELD_KIT_PYTHON")
PYTHONS = [
    pytest.param(sys.executable, id="this python"),
    pytest.param(OLD_PYTHON, id="old python", marks=pytest.mark.skipif(
        OLD_PYTHON is None, reason="FIELD_KIT_PYTHON names no interpreter with an old torch")),
]  # fmt: skip


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """The file alone, in a folder of its own."""
    return Path(shutil.copy(SOURCE, tmp_path_factory.mktemp("kit") / "field_kit.py"))


@pytest.fixture(scope="module")
def kit(copy):
    spec = importlib.util.spec_from_file_location("field_kit_copy", copy)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@functools.cache
def weights(family: str) -> tuple[ModelConfig, dict]:
    config = ModelConfig.from_hf({"qwen3_5_moe": models.mini, "qwen3_next": models.mini_next}[family]())
    return config, CausalLM(config).init_weights(3, "realistic").state_dict()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("kit_checkpoint") / "mini"
    write_checkpoint(path, *weights("qwen3_5_moe"), dtype=torch.float32)
    return str(path)


@functools.cache
def ids(tokens: int = 70) -> tuple[int, ...]:
    return tuple(torch.randint(0, 97, (tokens,), generator=torch.Generator().manual_seed(tokens)).tolist())


def engine(checkpoint: str) -> flat_engine.Qwen3_5ForConditionalGeneration:
    return flat_engine.Qwen3_5ForConditionalGeneration(checkpoint)


def content_of(path: Path) -> dict:
    return bundle.read_bundle(path, "trace").content


def run(python: str, copy: Path, *words, check: int = 0, **named) -> subprocess.CompletedProcess:
    """The copy as a program; -I keeps the workbench out of its reach."""
    command = [python, "-I", str(copy), *map(str, words)]
    out = subprocess.run(command, capture_output=True, text=True, cwd=copy.parent, timeout=120, **named)
    assert out.returncode == check, out.stdout + out.stderr
    return out


# ---- what it shares with the workbench


def test_its_tables_are_those_of_the_workbench(kit):
    assert kit.LAYER_TAPS == tuple(taps.LAYER_TAPS) and kit.MODEL_TAPS == tuple(taps.MODEL_TAPS)
    assert kit.COLUMNS == COLUMNS
    assert (kit.FORMAT, kit.VERSION, kit.MANIFEST) == (bundle.FORMAT, bundle.VERSION, bundle.MANIFEST)
    assert kit.full_name(3, "gdn.out") == taps.full_name(3, taps.GDN_OUT)
    known = {tap for tap, *_ in kit.LAYER_MODULES + kit.STEM_MODULES + kit.HEAD_MODULES} - {"last_logits"}
    assert known <= set(taps.LAYER_TAPS) | set(taps.MODEL_TAPS)


VALUES = [0.0, -0.0, 1.5, -2.25, 3e-41, -1e-40, 3.3e38, -1e38, math.nan, math.inf, -math.inf, 6e-8, 4e4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e5m2])
@pytest.mark.parametrize("values", [VALUES, [0.0, 1.0, -2.5], [math.nan, math.inf], []], ids=str)
def test_statistics_are_those_of_the_trace(kit, dtype, values):
    x = torch.tensor(values, dtype=torch.float64).to(dtype)
    expected = describe(x)
    found = dict(zip(COLUMNS[6:], kit.statistics(x), strict=True))
    for name, value in found.items():
        other = getattr(expected, name)
        if isinstance(other, float) and math.isnan(other):
            assert value is None, name
        elif name == "first_bad":
            assert value == (None if other is None else list(other))
        else:
            assert value == pytest.approx(other, rel=1e-12), name


def test_statistics_go_over_blocks(kit, monkeypatch):
    x = torch.randn(7, 11, 13)
    x[5, 2, 3] = math.nan
    whole = kit.statistics(x)
    monkeypatch.setattr(kit, "BLOCK_VALUES", 10)
    parts = kit.statistics(x)
    assert parts[:-1] == pytest.approx(whole[:-1], rel=1e-12) and parts[-1] == whole[-1] == [5, 2, 3]
    assert kit.statistics(torch.arange(3)) is None


def test_its_safetensors_are_read_by_the_library(kit, tmp_path, monkeypatch):
    monkeypatch.setattr(kit, "WRITE_BYTES", 24)
    base = torch.arange(-20, 20, dtype=torch.float64).reshape(5, 8)
    tensors = {f"x.{kind}": base.to(kind) for kind in kit._safetensors_names()}
    tensors |= {"turned": base.float().t(), "none": torch.empty(0, 3), "one": torch.tensor(2.5)}
    tensors |= {"odd": base.bool()[:1, :3]}
    path = tmp_path / "all.safetensors"
    size, digest = kit.write_safetensors(path, [(key, kit.host_copy(x)) for key, x in tensors.items()])
    data = path.read_bytes()
    assert len(data) == size and hashlib.sha256(data).hexdigest() == digest
    read = load_file(path)
    assert set(read) == set(tensors)
    for key, x in tensors.items():
        assert read[key].dtype == x.dtype and torch.equal(read[key].double(), x.double()), key


# ---- models that it knows by their names


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_next"])
def test_transformers_generating_is_a_side(kit, tmp_path, family):
    write_checkpoint(tmp_path / "mini", *weights(family), dtype=torch.float32)
    kind = {"qwen3_5_moe": transformers.Qwen3_5MoeForCausalLM, "qwen3_next": transformers.Qwen3NextForCausalLM}[family]
    peer = kind.from_pretrained(tmp_path / "mini", dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode(), kit.record(peer, str(tmp_path / "run")):
        peer.generate(torch.tensor([ids()]), max_new_tokens=3, do_sample=False)
    peers_file = sys.modules[kind.__module__]
    assert "field_kit" not in peers_file.eager_attention_forward.__code__.co_filename  # everything is taken off
    assert "forward" not in vars(peer) and not any(m._forward_hooks or m._forward_pre_hooks for m in peer.modules())
    content = content_of(tmp_path / "run")
    assert [len(row) for row in content["input_ids"]] == [70, 1, 1] and content["run"]["state"] == "ended"
    assert content["dtype"] == "float32" and not content["not_recorded"] and not content["left_out"]
    assert {"last_logits"} == {row["tap"] for row in content["others"]}  # of the prompt, only one token's are computed

    same = compare(tmp_path / "mini", "hf", tmp_path / "run")
    assert same.verdict.verdict == "same"
    # Of Qwen3-Next's joint projection `compare` itself shows nothing, the kit takes it apart.
    more = {"gdn.qkv", "gdn.gate"} if family == "qwen3_next" else set()
    assert len(same.stages) > 150
    assert {taps.split_name(tap)[1] for tap in same.not_compared["tap"]} == {"logits"} | more
    ours = compare(tmp_path / "mini", "torch_chunk", tmp_path / "run")
    assert ours.verdict.verdict == "rounding" and ours.summary["judged"]
    shown = {taps.split_name(tap)[1] for tap in ours.stages["tap"]}
    assert {"embed", "gdn.qkv", "gdn.conv", "gdn.state", "gdn.out", "gdn.gate", "attn.q", "attn.gate", "attn.out",
            "residual_mid", "moe.experts", "final_norm", "logits"} <= shown  # fmt: skip


@pytest.mark.parametrize("python", PYTHONS)
def test_a_flat_engine_run_as_a_script_is_a_side(copy, tmp_path, checkpoint, python):
    out = run(python, copy, "record", "--out", tmp_path / "run", ENGINE, checkpoint, ",".join(map(str, ids())), 2)
    assert len(json.loads(out.stdout)) == 72
    assert "recording Qwen3_5ForConditionalGeneration" in out.stderr and "3 passes" in out.stderr
    content = content_of(tmp_path / "run")
    assert content["run"]["state"] == "ended" and not content["not_recorded"]
    result = compare(checkpoint, "torch_recurrent", tmp_path / "run")
    assert result.verdict.verdict == "rounding" and result.summary["judged"]
    shown = {taps.split_name(tap)[1] for tap in result.stages["tap"]}
    assert {"gdn.qkv", "gdn.conv", "gdn.beta", "gdn.log_decay", "gdn.state", "gdn.out", "gdn.gate", "gdn.norm",
            "attn.q", "attn.k", "attn.v", "attn.gate", "attn.out", "mixer_out", "residual_mid", "residual",
            "moe.logits", "moe.shared", "moe.experts", "moe.out", "final_norm", "logits"} <= shown  # fmt: skip
    trace = read_trace(tmp_path / "run")
    assert trace.tensor("layers.03.attn.k", step=1).shape == (1, 1, 2, 32)
    assert trace.origin.versions["python"] and trace.origin.versions["torch"]


@pytest.mark.parametrize(
    ("place", "tap", "side"),
    [
        ("linear_attn.out_proj.weight", "layers.02.mixer_out", "b"),
        ("mlp.experts.w2", "layers.02.moe.experts", None),  # the engine does not show which experts it chose
    ],
)
def test_an_injected_fault_is_named(kit, tmp_path, checkpoint, capsys, place, tap, side):
    model = engine(checkpoint)
    owner, _, name = place.rpartition(".")
    getattr(model.get_submodule("language_model.model.layers.2." + owner), name).mul_(2)
    with kit.record(model, str(tmp_path / "run")):
        flat_engine.generate(model, ids(20), 1)
    result = compare(checkpoint, "torch_recurrent", tmp_path / "run")
    assert result.kind == "different" and result.verdict.where.tap == tap and result.side == side
    command = ["compare", checkpoint, "--a", "auto", "--b", str(tmp_path / "run")]
    assert main(command) == 1 and tap in capsys.readouterr().out


def test_nan_is_kept_and_named(kit, tmp_path, checkpoint):
    model = engine(checkpoint)
    model.language_model.model.layers[1].linear_attn.in_proj_qkvz.weight[3, 5] = math.nan
    with kit.record(model, str(tmp_path / "run")):
        flat_engine.generate(model, ids(20), 0)
    saved = read_trace(tmp_path / "run")
    qkv = saved.tensor("layers.01.gdn.qkv")
    assert qkv[..., 3].isnan().all() and int(qkv.isnan().sum()) == 20
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in saved.content["statistics"]["rows"]]
    first = next(row for row in rows if row["frac_nan"])
    assert first["tap"] == "layers.01.gdn.qkv" and first["layer"] == 1 and first["first_bad"] == [0, 0, 3]
    assert first["frac_nan"] == pytest.approx(1 / 160) and first["absmax"] > 0
    assert next(row for row in rows if row["tap"] == "layers.02.residual")["max"] is None  # nothing finite is left
    result = compare(checkpoint, "torch_recurrent", tmp_path / "run")
    assert result.kind == "different" and result.verdict.where.tap == "layers.01.gdn.qkv" and result.side == "b"


def test_weights_of_another_layout_are_said_not_guessed(kit, tmp_path, checkpoint, monkeypatch, capsys):
    monkeypatch.setattr(flat_engine.GatedDeltaNetAttention, "gqa_interleaved_layout", None)
    model = engine(checkpoint)
    with kit.record(model, str(tmp_path / "run")):
        expected = flat_engine.generate(model, ids(20), 1)
    content = content_of(tmp_path / "run")
    assert [row["what"] for row in content["not_recorded"]] == [f"layers.{n:02d}.gdn.qkv" for n in range(3)]
    assert "interleaved" in content["not_recorded"][0]["error"] and "--map" in capsys.readouterr().err
    assert expected == flat_engine.generate(engine(checkpoint), ids(20), 1)  # the model itself went on


# ---- selection, cap


def test_what_does_not_fit_is_listed_and_still_measured(kit, tmp_path, checkpoint):
    model = engine(checkpoint)
    with kit.record(model, str(tmp_path / "run"), cap_bytes=60_000):
        flat_engine.generate(model, ids(20), 2)
    content = content_of(tmp_path / "run")
    kept, left_out = content["tensors"], content["left_out"]
    assert 50_000 < content["written_bytes"] <= 60_000 == content["cap_bytes"]
    sizes = {"float32": 4}
    assert sum(math.prod(row["shape"]) * sizes[row["dtype"]] for row in kept) == content["written_bytes"]
    assert left_out and {row["why"] for row in left_out} == {"cap"} and all(row["bytes"] > 0 for row in left_out)
    seen = [(row[1], row[2]) for row in content["statistics"]["rows"]]
    listed = [(row["tap"], row["step"]) for row in kept + left_out + content["others"]]
    assert sorted(seen) == sorted(listed) and len(set(seen)) == len(seen)
    saved = read_trace(tmp_path / "run")
    with pytest.raises(InputError, match="did not fit under the cap"):
        saved.tensor(left_out[0]["tap"], left_out[0]["step"])


def test_a_selection_keeps_what_was_asked_for(kit, tmp_path, checkpoint):
    model = engine(checkpoint)
    with kit.record(model, str(tmp_path / "run"), taps=["*.gdn.out", "*.residual"], layers=[1, 3], steps=(1, 3)):
        flat_engine.generate(model, ids(20), 3)
    content = content_of(tmp_path / "run")
    assert {(row["tap"], row["step"]) for row in content["tensors"]} == {
        (tap, step) for tap in ("layers.01.gdn.out", "layers.01.residual", "layers.03.residual") for step in (1, 2)
    }
    assert content["steps"] == 4 and [len(row) for row in content["input_ids"]] == [20, 1, 1, 1]
    assert compare(checkpoint, "torch_recurrent", tmp_path / "run").kind == "rounding"


def test_a_warm_up_is_not_counted(kit, tmp_path, checkpoint):
    model = engine(checkpoint)
    with kit.record(model, str(tmp_path / "run"), skip=1):
        with torch.no_grad():
            model.compute_logits(model(input_ids=torch.zeros(9, dtype=torch.int64), positions=torch.arange(9)))
        for layer in model.language_model.model.layers:
            if layer.kind == "linear_attention":
                layer.linear_attn.state.zero_()
                layer.linear_attn.window.zero_()
            else:
                layer.self_attn.attn.cache = None
        flat_engine.generate(model, ids(20), 1)
    content = content_of(tmp_path / "run")
    assert [len(row) for row in content["input_ids"]] == [20, 1]
    assert [row[5][:2] for row in content["statistics"]["rows"] if row[1] == "embed"] == [[1, 20], [1, 1]]
    assert [row["shape"] for row in content["others"]] == [[1, 1, 97]]
    assert compare(checkpoint, "torch_recurrent", tmp_path / "run").kind == "rounding"


def test_statistics_alone(kit, tmp_path, checkpoint):
    model = engine(checkpoint)
    with kit.record(model, str(tmp_path / "run"), save_tensors=False):
        flat_engine.generate(model, ids(20), 0)
    content = content_of(tmp_path / "run")
    assert not content["tensors"] and content["written_bytes"] == 0 and len(content["statistics"]["rows"]) > 60


def test_a_pass_of_many_bytes_has_several_files(kit, tmp_path, checkpoint, monkeypatch):
    monkeypatch.setattr(kit, "PART_BYTES", 20_000)
    model = engine(checkpoint)
    with kit.record(model, str(tmp_path / "run")):
        flat_engine.generate(model, ids(20), 1)
    names = sorted(bundle.read_bundle(tmp_path / "run", "trace").tensors)
    assert names[:2] == ["step-000000-000.safetensors", "step-000000-001.safetensors"]
    assert names[-1].startswith("step-000001-")
    assert compare(checkpoint, "torch_recurrent", tmp_path / "run").kind == "rounding"


def test_each_process_has_its_own_bundle(kit, tmp_path, checkpoint, monkeypatch):
    monkeypatch.setattr(kit, "_rank", lambda: (1, 2))
    model = engine(checkpoint)
    with kit.record(model, str(tmp_path / "run"), taps="*.residual"):
        flat_engine.generate(model, ids(20), 0)
    rows = content_of(tmp_path / "run" / "rank-01")["statistics"]["rows"]
    assert {row[COLUMNS.index("rank")] for row in rows} == {1}


# ---- runs that end early


def test_a_crash_leaves_what_was_recorded_marked(kit, tmp_path, checkpoint):
    model = engine(checkpoint)
    experts, calls = model.language_model.model.layers[1].mlp.experts, []
    forward = experts.forward

    def failing(**named):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("vendor error 719\nunspecified launch failure")
        return forward(**named)

    experts.forward = failing
    with pytest.raises(RuntimeError, match="vendor error 719"), kit.record(model, str(tmp_path / "run")):
        flat_engine.generate(model, ids(20), 3)
    assert "forward" not in vars(model)
    state = content_of(tmp_path / "run")["run"]
    assert state["state"] == "failed" and len(state["failures"]) == 1
    (failure,) = state["failures"]
    assert (failure["step"], failure["after"]) == (1, "layers.01.moe.logits") and failure["type"] == "RuntimeError"
    assert "unspecified launch failure" in failure["text"] and "in failing" in failure["traceback"]
    result = compare(checkpoint, "torch_recurrent", tmp_path / "run")
    assert result.kind == "rounding" and set(result.stages["step"]) == {0, 1}
    assert any("side b failed in pass 1 after layers.01.moe.logits: RuntimeError: vendor error 719" in sentence
               for sentence in result.verdict.evidence)  # fmt: skip


def test_a_failure_that_the_engine_catches_is_marked_too(kit, tmp_path, checkpoint):
    model = engine(checkpoint)
    with kit.record(model, str(tmp_path / "run")):
        flat_engine.generate(model, ids(20), 0)
        with pytest.raises(IndexError):
            flat_engine.generate(model, [5000], 0)
    state = content_of(tmp_path / "run")["run"]
    assert state["state"] == "failed" and state["failures"][0]["step"] == 1


@pytest.mark.parametrize("python", PYTHONS)
def test_a_failing_script_ends_with_its_own_error(copy, tmp_path, checkpoint, python):
    words = [ENGINE, checkpoint, ",".join(map(str, ids(20))), 2, "--fail-pass", 1]
    out = run(python, copy, "record", "--out", tmp_path / "run", *words, check=1)
    assert "vendor error 719: unspecified launch failure" in out.stderr and "1 pass FAILED" in out.stderr
    assert content_of(tmp_path / "run")["run"]["state"] == "failed"


def test_a_killed_process_leaves_its_finished_passes(copy, tmp_path, checkpoint):
    script = tmp_path / "killed.py"
    script.write_text(
        f"import os, sys; sys.path[:0] = [{str(ENGINE.parent)!r}, {str(copy.parent)!r}]\n"
        "import field_kit, flat_engine, torch\n"
        f"model = flat_engine.Qwen3_5ForConditionalGeneration({checkpoint!r})\n"
        f"field_kit.record(model, {str(tmp_path / 'run')!r})\n"
        f"flat_engine.generate(model, {ids(20)}, 0)\n"
        "os._exit(9)\n"
    )
    out = subprocess.run([sys.executable, "-I", str(script)], capture_output=True, text=True, timeout=120)
    assert out.returncode == 9, out.stderr
    assert content_of(tmp_path / "run")["run"]["state"] == "open"
    side = read_side(tmp_path / "run")
    assert "never closed" in side.interrupted and "layers.03.residual" in side.passes[0].tensors
    assert compare(checkpoint, "torch_recurrent", tmp_path / "run").kind == "rounding"


# ---- modules that return what nobody expects


class Returns(torch.nn.Module):
    """Calls `give` of its input; what comes back may be anything."""

    def __init__(self, give):
        super().__init__()
        self.give = give

    def forward(self, x):
        return self.give(x)


class Holds(torch.nn.Module):
    """Calls its parts one after the other on the input and returns what `last` makes of it."""

    def __init__(self, last=lambda x: x, **parts):
        super().__init__()
        self.last = last
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x):
        for part in self._modules.values():
            part(x)
        return self.last(x)


@dataclasses.dataclass
class Output:
    rows: torch.Tensor


@pytest.mark.parametrize(
    ("give", "said"),
    [
        (lambda x: Output(x), "expected a tensor, found Output"),
        (lambda x: (row for row in x), "expected a tensor, found generator"),
        (lambda x: x.to(torch.complex64), "safetensors has no complex64 here"),
        (lambda x: torch.empty(2, 3, device="meta"), "Cannot copy out of meta tensor"),
        (lambda x: x.to_sparse(), "sparse"),
        (lambda x: x.to_mkldnn(), "mkldnn"),
        (lambda x: torch.nested.nested_tensor([x, x[:1]]), "NestedTensor"),
        (lambda x: None, None),
        (lambda x: (), None),
        (lambda x: (None, x), None),
    ],
)
@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_cannot_be_written_is_told_and_stops_nothing(kit, tmp_path, capsys, give, said, raw):
    model = Holds(part=Returns(give), after=torch.nn.Identity())
    (tmp_path / "map.json").write_text('{"embed": "part", "final_norm": "after"}')
    how = {"raw": True} if raw else {"map": str(tmp_path / "map.json")}
    with kit.record(model, str(tmp_path / "run"), **how):
        for _ in range(2):
            model(torch.ones(2, 3))
    content = content_of(tmp_path / "run")
    assert content["run"]["state"] == "ended"
    assert [row["tap"] for row in content["tensors"]].count("after" if raw else "final_norm") == 2
    problems = [row["error"] for row in content["not_recorded"] if row["what"] == ("part" if raw else "embed")]
    told = [line for line in capsys.readouterr().err.splitlines() if "is not recorded" in line]
    if said is not None:
        assert len(problems) == len(told) == 1 and said in problems[0] and said in told[0]


def test_the_first_value_of_a_dict_is_its_first_result(kit, tmp_path):
    model = Holds(part=Returns(lambda x: {"rows": x + 1, "more": x}))
    with kit.record(model, str(tmp_path / "run"), raw=True):
        model(torch.ones(2, 3))
    assert torch.equal(read_trace(tmp_path / "run").tensor("part"), torch.full((2, 3), 2.0))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_compiled_modules_are_told(kit, tmp_path):
    part = torch.jit.script(torch.nn.Linear(3, 3))
    with pytest.raises(kit.KitError, match="found a compiled TorchScript module, which takes no hooks"):
        kit.record(part, str(tmp_path / "run"), raw=True)
    model = Holds(part=part, after=torch.nn.Identity())
    with kit.record(model, str(tmp_path / "run"), raw=True):
        model(torch.ones(2, 3))
    content = content_of(tmp_path / "run")
    assert [row["tap"] for row in content["tensors"]] == ["after"]
    assert [row["what"] for row in content["not_recorded"]] == ["part"]


def test_threads_take_turns(kit, tmp_path):
    inside, most = [], []

    def slow(x):
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.01)
        inside.pop()
        return x

    model = Holds(part=Returns(slow))
    with kit.record(model, str(tmp_path / "run"), raw=True), ThreadPoolExecutor(4) as pool:
        list(pool.map(model, [torch.full((2, 3), float(number)) for number in range(8)]))
    saved = content_of(tmp_path / "run")
    assert max(most) == 1 and saved["steps"] == 8 and saved["run"]["state"] == "ended"
    assert sorted(row["step"] for row in saved["tensors"]) == list(range(8))


def test_a_model_that_calls_itself_is_one_pass(kit, tmp_path):
    model = Holds(part=torch.nn.Identity())
    model.last = lambda x: model(x[1:]) if len(x) > 1 else x
    with kit.record(model, str(tmp_path / "run"), raw=True):
        model(torch.ones(3, 2))
    saved = content_of(tmp_path / "run")
    assert saved["steps"] == 1 and [row["occurrence"] for row in saved["tensors"]] == [0, 1, 2]


# ---- functions that are no modules


def test_a_function_is_seen_before_it_overwrites_its_arguments(kit, tmp_path):
    def rule(q, k, v, g, beta=None, scale=1.0):
        v.zero_()
        return q * scale, k.sum()

    x = {name: torch.randn(1, 4, 2, 3) for name in ("q", "k", "v")}
    before = x["v"].clone()
    with kit.record(None, str(tmp_path / "run")) as tape:
        named = tape.function(rule, {"v": "gdn.v", "g": "gdn.log_decay", 0: "gdn.out"})
        plain = tape.function(rule)
        assert named.__name__ == "rule"
        tape.begin_pass()
        tape.layer = 2
        named(x["q"], x["k"], x["v"].clone(), g=torch.full((1, 4, 2), -0.5))
        tape.begin_pass()
        tape.layer = 2
        out, total = plain(x["q"], x["k"], x["v"], torch.zeros(1), scale=2.0)
    assert torch.equal(out, x["q"] * 2) and total == x["k"].sum()
    saved = read_trace(tmp_path / "run")
    assert torch.equal(saved.tensor("layers.02.gdn.v"), before)
    assert (saved.tensor("layers.02.gdn.log_decay") == -0.5).all()
    assert torch.equal(saved.tensor("layers.02.gdn.out"), x["q"])
    others = [row["tap"] for row in saved.content["others"]]
    assert others == [f"layers.02.rule.{end}" for end in ("in.q", "in.k", "in.v", "in.g", "out.0", "out.1")]


def test_a_failing_function_leaves_its_inputs(kit, tmp_path):
    with pytest.raises(ZeroDivisionError), kit.record(None, str(tmp_path / "run")) as tape:
        tape.function(lambda v: 1 / 0, {"v": "layers.00.gdn.v"})(torch.ones(1, 2, 1, 3))
    saved = read_trace(tmp_path / "run")
    assert saved.tensor("layers.00.gdn.v").shape == (1, 2, 1, 3)
    assert saved.content["run"]["failures"][0]["type"] == "ZeroDivisionError"


def test_a_function_of_a_module_is_put_back(kit, tmp_path):
    original = math.hypot
    with kit.record(None, str(tmp_path / "run")) as tape:
        with tape.patched("flat_engine:F.silu", {"input": "layers.00.gdn.conv"}):
            flat_engine.F.silu(torch.ones(1, 2, 3))
        assert "field_kit" not in flat_engine.F.silu.__code__.co_filename
        with pytest.raises(kit.KitError, match="MODULE:NAME"), tape.patched("math:nosuch"):
            pass
    assert math.hypot is original
    assert read_trace(tmp_path / "run").tensor("layers.00.gdn.conv").shape == (1, 2, 3)


def test_a_rule_that_the_mixer_holds_as_a_function_is_seen(kit, tmp_path, checkpoint):
    """As in transformers before 5, beside a function that the user names."""
    model = engine(checkpoint)
    for layer in list(model.language_model.model.layers)[:3]:
        rule = layer.linear_attn.chunk_gated_delta_rule
        del layer.linear_attn.chunk_gated_delta_rule

        def fla_like(q, k, v, g, beta, initial_state, output_final_state, rule=rule):
            return rule(q, k, v, g, beta, initial_state, output_final_state)

        layer.linear_attn.chunk_gated_delta_rule = fla_like
    silu = flat_engine.F.silu
    with kit.record(model, str(tmp_path / "run"), functions=["flat_engine:F.silu"]):
        flat_engine.generate(model, ids(20), 1)
    assert flat_engine.F.silu is silu
    assert model.language_model.model.layers[0].linear_attn.chunk_gated_delta_rule.__name__ == "fla_like"
    saved = read_trace(tmp_path / "run")
    assert saved.tensor("layers.02.gdn.state", step=1).shape == (1, 4, 16, 24)
    assert {"layers.00.F.silu.in.input", "layers.03.F.silu.out.0"} <= {row["tap"] for row in saved.content["others"]}
    assert compare(checkpoint, "torch_recurrent", tmp_path / "run").kind == "rounding"


def test_probe_says_that_a_device_is_not_there(kit):
    found, _ = kit.probe(device="cuda:77", quick=True)
    steps = {step["step"]: step for step in found.steps}
    assert steps["device cuda:77"]["status"] == "FAIL" and steps["device cuda:77"]["error"]
    assert steps["matmul float32 on cpu"]["status"] == "PASS"


# ---- other names


def test_a_mapping_names_modules_of_another_engine(kit, tmp_path, checkpoint):
    class Vendor(torch.nn.Module):
        """Blocks that the kit does not know; they give [T, heads, width] turned round."""

        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList([torch.nn.Identity(), torch.nn.Identity()])

        def forward(self, x):
            return self.blocks[1](self.blocks[0](x).clone() + 1)

    model, x = Vendor(), torch.randn(4, 5, 3)
    file = tmp_path / "map.json"
    entry = {"name": "blocks.{layer}", "slice": [None, [0, 4]], "reshape": [1, 4, 4, 3], "transpose": [0, 2, 1, 3]}
    file.write_text(json.dumps({"layers.{layer}.gdn.out": entry}))
    with kit.record(model, str(tmp_path / "run"), map=str(file)):
        model(x)
    saved = read_trace(tmp_path / "run")
    assert torch.equal(saved.tensor("layers.00.gdn.out"), x[None, :, :4].transpose(1, 2))
    assert torch.equal(saved.tensor("layers.01.gdn.out"), x[None, :, :4].transpose(1, 2) + 1)

    with pytest.raises(kit.KitError, match="or --raw"):
        kit.record(model, str(tmp_path / "unknown"))
    with kit.record(model, str(tmp_path / "raw"), raw=True):
        model(x)
    mapping = {"layers.{layer}.gdn.out": entry}
    assert compare(None, tmp_path / "run", tmp_path / "raw", mapping_b=mapping).verdict.verdict == "same"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[1]", "expected an object"),
        ("{", "expected a JSON file"),
        ('{"layers.{layer}.nosuch": "x.{layer}"}', "expected a tap point"),
        ('{"layers.{layer}.gdn.out": "x"}', "on both sides"),
        ('{"logits": {"name": "x", "scale": 2}}', "expected a name or an object"),
        ('{"logits": "nosuch"}', "expected a module nosuch"),
    ],
)
def test_a_mapping_that_is_none_is_refused(kit, tmp_path, checkpoint, content, words):
    (tmp_path / "map.json").write_text(content)
    with pytest.raises(kit.KitError, match=words):
        kit.record(engine(checkpoint), str(tmp_path / "run"), map=str(tmp_path / "map.json"))


def test_a_directory_in_use_is_refused(kit, tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    assert kit.main(["record", "--out", str(tmp_path), str(ENGINE)]) == 2
    assert "expected a new or empty directory" in capsys.readouterr().err and (tmp_path / "notes.txt").exists()


def test_a_script_without_a_model_says_where_it_may_be(kit, tmp_path, capsys):
    script = tmp_path / "empty.py"
    script.write_text("import sys; print(sys.argv[1:], __name__)")
    before = torch.nn.Module.__call__
    assert kit.main(["record", "--out", str(tmp_path / "run"), str(script), "--flag", "3"]) == 2
    told = capsys.readouterr()
    assert told.out == "['--flag', '3'] __main__\n" and "VLLM_ENABLE_V1_MULTIPROCESSING=0" in told.err
    assert torch.nn.Module.__call__ is before
    assert kit.main(["record", "--out", str(tmp_path / "other"), str(tmp_path / "nosuch.py")]) == 2
    assert kit.main([]) == 2


# ---- probe


@pytest.mark.parametrize("python", PYTHONS)
def test_probe_says_pass_or_fail_and_the_next_step(copy, tmp_path, python):
    broken = tmp_path / "site"
    broken.mkdir()
    (broken / "vendor_broken.py").write_text("raise ImportError('libvendor.so.3: cannot open shared object file')")
    (broken / "vendor_fatal.py").write_text("import os; os.abort()")
    (broken / "vendor_fine.py").write_text("__version__ = '4.2'")
    modules = ["vendor_broken", "vendor_fatal", "vendor_fine", "vendor_absent"]
    words = [word for name in modules for word in ("--module", name)]
    # Without -I, which hides PYTHONPATH.
    out = subprocess.run([python, str(copy), "probe", "--quick", *words, "--json", str(tmp_path / "probe.json")],
                         capture_output=True, text=True, timeout=120, cwd=tmp_path,
                         env={**os.environ, "PYTHONPATH": str(broken)})  # fmt: skip
    assert out.returncode == 1, out.stderr
    content = json.loads((tmp_path / "probe.json").read_text())
    steps = {step["step"]: step for step in content["steps"]}
    assert steps["matmul float32 on cpu"]["status"] == steps["triangular solve on cpu"]["status"] == "PASS"
    assert steps["import vendor_fine"]["text"].startswith("4.2 ")
    assert "cannot open shared object file" in steps["import vendor_broken"]["error"]
    assert f"ended by signal {int(signal.SIGABRT)}" in steps["import vendor_fatal"]["text"]
    assert steps["import vendor_absent"]["status"] == "FAIL" and steps["import vendor_absent"]["next"]
    assert set(content) >= {"verdict", "where", "cause_id", "evidence", "ruled_out", "fix", "confidence"}
    assert content["machine"]["torch"] and "Traceback" in out.stdout and "       next: " in out.stdout


def test_probe_of_a_sound_machine_ends_with_zero(copy):
    out = run(sys.executable, copy, "probe", "--quick", "--json", "-", env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    content = json.loads(out.stdout)
    assert content["cause_id"] is None and content["verdict"] == "every step passed"


def test_probe_shows_a_dtype_that_multiplies_wrongly(kit, monkeypatch):
    multiply = torch.Tensor.__matmul__

    def narrow(a, b):
        if a.dtype == torch.bfloat16:
            raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED\nwhen calling cublasGemmEx")
        if a.dtype == torch.float32:
            return multiply(a.half(), b.half()).float()
        return multiply(a, b) * (math.nan if a.dtype == torch.float16 else 1)

    monkeypatch.setattr(torch.Tensor, "__matmul__", narrow)
    found = kit.Probe()
    kit._probe_arithmetic(found, torch, "cpu")
    status = {step["step"].partition(" on")[0]: step for step in found.steps}
    assert status["matmul float64"]["status"] == "PASS"
    assert status["matmul float32"]["status"] == "FAIL" and "TF32" in status["matmul float32"]["next"]
    assert status["matmul float16"]["status"] == "FAIL"
    assert "when calling cublasGemmEx" in status["matmul bfloat16"]["error"]


def test_probe_shows_a_solver_that_is_missing(kit, monkeypatch):
    def missing(*args, **named):
        raise RuntimeError("Error in dlopen: libcusolver.so: cannot open shared object file")

    monkeypatch.setattr(torch.linalg, "solve_triangular", missing)
    found = kit.Probe()
    kit._probe_arithmetic(found, torch, "cpu")
    (failed,) = [step for step in found.steps if step["status"] == "FAIL"]
    assert failed["step"] == "triangular solve on cpu" and "libcusolver" in failed["error"]
    assert "substitution" in failed["next"]


def elf(symbols: dict[str, bool], *, wide: bool = True, little: bool = True, machine: int = 62) -> bytes:
    """The smallest shared object with these dynamic symbols (name -> whether it is defined)."""
    order = "<" if little else ">"
    strings = b"\0" + b"".join(name.encode() + b"\0" for name in symbols)
    entries = struct.pack(order + ("IBBHQQ" if wide else "IIIBBH"), 0, 0, 0, 0, 0, 0)
    for name, is_defined in symbols.items():
        place, index = strings.index(name.encode() + b"\0"), 7 if is_defined else 0
        entries += struct.pack(order + "IBBHQQ", place, 0x12, 0, index, 64, 8) if wide else struct.pack(
            order + "IIIBBH", place, 64, 8, 0x12, 0, index)  # fmt: skip
    head = 64 if wide else 52
    section = order + ("IIQQQQIIQQ" if wide else "IIIIIIIIII")
    step = 24 if wide else 16
    table = head + len(strings) + len(entries)
    sections = struct.pack(section, *[0] * 10)
    sections += struct.pack(section, 1, 11, 0, 0, head + len(strings), len(entries), 2, 1, 8, step)
    sections += struct.pack(section, 1, 3, 0, 0, head, len(strings), 0, 0, 1, 0)
    start = b"\x7fELF" + bytes([2 if wide else 1, 1 if little else 2, 1]) + bytes(9)
    size = struct.calcsize(section)
    fields = 3, machine, 1, 0, 0, table, 0, head, 0, 0, size, 3, 2
    start += struct.pack(order + ("HHIQQQIHHHHHH" if wide else "HHIIIIIHHHHHH"), *fields)
    return start + strings + entries + sections


SYMBOLS = {"topk_softmax": True, "_Z9fused_moePvi": True, "cublasCreate": False}


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("little", [True, False])
def test_symbols_of_every_form_of_elf(kit, tmp_path, wide, little):
    path = tmp_path / "vendor.so"
    path.write_bytes(elf(SYMBOLS, wide=wide, little=little, machine=183))
    assert kit.elf_symbols(str(path)) == ("aarch64", SYMBOLS)


def test_symbols_are_found_absent_mangled_or_asked_for(kit, tmp_path):
    here = {"x86_64": 62, "aarch64": 183, "arm64": 183}[platform.machine()]
    path = tmp_path / "vendor.so"
    path.write_bytes(elf(SYMBOLS, machine=here))
    assert kit.find_symbol(str(path), "topk_softmax") == ("PASS", "defined")
    assert kit.find_symbol(str(path), "fused_moe") == ("PASS", "defined as _Z9fused_moePvi")
    assert kit.find_symbol(str(path), "cublasCreate") == ("FAIL", "only asked for, defined elsewhere")
    assert kit.find_symbol(str(path), "nosuch") == ("FAIL", "absent among 3 dynamic symbols")
    path.write_bytes(elf(SYMBOLS, machine=40))
    status, text = kit.find_symbol(str(path), "topk_softmax")
    assert status == "FAIL" and "built for arm" in text
    path.write_bytes(b"!<arch>\n")
    assert "expected an ELF file" in kit.find_symbol(str(path), "x")[1]
    path.write_bytes(elf(SYMBOLS)[:90])
    assert "damaged" in kit.find_symbol(str(path), "x")[1]


@pytest.mark.skipif(sys.platform != "linux", reason="shared objects of other systems are no ELF files")
def test_symbols_of_a_real_library_are_those_of_nm(kit):
    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    _, found = kit.elf_symbols(str(library))
    assert len(found) > 300 and any(found.values()) and not all(found.values())
    if shutil.which("nm"):
        by_nm = kit._nm_symbols(str(library))
        assert {name for name in by_nm if by_nm[name]} == {name for name in found if found[name]}


def test_probe_looks_into_folders(copy, tmp_path):
    (tmp_path / "lib").mkdir()
    here = {"x86_64": 62, "aarch64": 183, "arm64": 183}[platform.machine()]
    (tmp_path / "lib" / "libvendor.so.3").write_bytes(elf(SYMBOLS, machine=here))
    words = ["--symbol", "topk_softmax", "--symbol", "nosuch", "--lib", tmp_path / "lib"]
    out = run(sys.executable, copy, "probe", "--quick", *words, check=1)
    assert "libvendor.so.3: defined" in out.stdout and "in none of 1 shared objects" in out.stdout


# ---- old Pythons and old torches, read off the source

#: Looked up in Python 3.8.18: what the file uses of the standard library. Add a name once it was seen there.
STANDARD = set("""
    argparse.ArgumentParser argparse.ArgumentTypeError argparse.REMAINDER contextlib.contextmanager ctypes.CDLL
    ctypes.c_char fnmatch.fnmatchcase functools.wraps glob.glob hashlib.sha256 importlib.import_module
    importlib.util.find_spec inspect.Parameter.VAR_KEYWORD inspect.Parameter.VAR_POSITIONAL inspect.isclass
    inspect.signature json.dump json.dumps json.load math.inf math.sqrt os.cpu_count os.environ os.environ.get
    os.fsync os.listdir os.makedirs os.path.abspath os.path.basename os.path.dirname os.path.exists os.path.isdir
    os.path.isfile os.path.join os.replace os.walk platform.machine platform.platform platform.python_version
    re.compile re.escape re.findall re.match re.search runpy.run_path shutil.rmtree shutil.which struct.error
    struct.pack struct.unpack_from subprocess.TimeoutExpired subprocess.run sys.argv sys.byteorder sys.executable
    sys.exit sys.modules sys.modules.get sys.modules.setdefault sys.path sys.path.insert sys.stderr sys.stdout.write
    sys.version.split sys.version_info tempfile.mkdtemp threading.RLock
    time.gmtime time.strftime time.time
    traceback.format_exception traceback.print_exc
""".split())  # fmt: skip
#: The same of torch 1.10.2.
TORCH = set("""
    torch.Generator torch.__version__ torch.cat torch.cuda.device torch.cuda.device_count
    torch.cuda.get_device_name torch.cuda.get_device_properties torch.cuda.is_available torch.distributed torch.empty
    torch.eye torch.finfo torch.int32 torch.int64 torch.is_tensor torch.isfinite torch.isnan torch.jit.ScriptModule
    torch.linalg
    torch.nn.Module torch.ones torch.randn torch.softmax torch.triangular_solve torch.version.cuda
""".split())  # fmt: skip
#: Used only where `hasattr` has said that they are there.
GUARDED = {"torch.cuda.mem_get_info", "torch.linalg.solve_triangular"}
#: Methods and fields that came after Python 3.8 or torch 1.10.
TOO_NEW = {
    "removeprefix", "removesuffix", "bit_count", "file_digest", "is_relative_to", "batched", "pairwise", "itemsize",
    "nbytes", "untyped_storage", "smallest_normal", "unravel_index", "mT", "mH", "adjoint", "set_default_device",
    "unflatten", "get_submodule_or_none", "named_buffers_or_none",
}  # fmt: skip
BUILT_IN_TYPES = {"list", "dict", "tuple", "set", "frozenset", "type"}


def chains(tree: ast.AST, roots: set[str]) -> set[str]:
    """Dotted names that begin at one of `roots`, the longest of each."""
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            name = ast.unparse(node)
            # A call in the middle ends what can be known of the name.
            while not all(part.isidentifier() for part in name.split(".")):
                node = node.value if isinstance(node, ast.Attribute) else None
                if node is None:
                    break
                name = ast.unparse(node)
            if node is not None and name.split(".")[0] in roots:
                found.add(name)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = ast.unparse(node.func)
            if all(part.isidentifier() for part in name.split(".")) and name.split(".")[0] in roots:
                found.add(name)
    return found


def too_new(source: str) -> list[str]:
    """What of a source would not run on Python 3.8 with torch 1.10, as far as its text shows."""
    tree = ast.parse(source, feature_version=(3, 8))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import)]
    modules = {alias.name.split(".")[0] for node in imports for alias in node.names}
    broken = []
    for name in chains(tree, modules - {"torch"}):
        if name not in STANDARD:
            broken.append(f"{name} is not among the names looked up in Python 3.8")
    for name in chains(tree, {"torch"}):
        if name not in TORCH | GUARDED and name not in {"torch.linalg", "torch.cuda", "torch.nn"}:
            broken.append(f"{name} is not among the names looked up in torch 1.10")
    for name in GUARDED & chains(tree, {"torch"}):
        owner, _, attribute = name.rpartition(".")
        if f'hasattr({owner}, "{attribute}")' not in source:
            broken.append(f"{name} needs a hasattr")
    for node in ast.walk(tree):
        where = f"line {getattr(node, 'lineno', '?')}"
        if isinstance(node, ast.Attribute) and node.attr in TOO_NEW:
            broken.append(f"{where}: .{node.attr}")
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id in BUILT_IN_TYPES:
            broken.append(f"{where}: {ast.unparse(node)}")
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            broken.append(f"{where}: |")
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "zip" and node.keywords:
            broken.append(f"{where}: zip(strict=)")
        if type(node).__name__ in ("Match", "TryStar"):
            broken.append(f"{where}: {type(node).__name__}")
    return broken


def test_the_file_is_written_for_python_3_8_and_torch_1_10():
    source = SOURCE.read_text(encoding="utf-8")
    assert too_new(source) == []
    imported = {alias.name.split(".")[0] for node in ast.walk(ast.parse(source)) for alias in getattr(node, "names", [])
                if isinstance(node, ast.Import)}  # fmt: skip
    assert imported - {"torch"} <= set(sys.stdlib_module_names)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("'a'.removeprefix('a')", "removeprefix"),
        ("import torch\ntorch.unravel_index(x, y)", "torch.unravel_index"),
        ("import torch\ntorch.linalg.solve_triangular(a, b)", "needs a hasattr"),
        ("import hashlib\nhashlib.file_digest(f, 'x')", "hashlib.file_digest"),
        ("x = {} | {}", "|"),
        ("def f(x): return list[int]", "list[int]"),
        ("zip(a, b, strict=True)", "strict"),
        ("x.itemsize", "itemsize"),
    ],
)
def test_the_check_sees_what_is_too_new(source, words):
    assert any(words in line for line in too_new(source))


def test_new_syntax_is_refused():
    with pytest.raises(SyntaxError):
        ast.parse("match x:\n    case 1: pass", feature_version=(3, 8))
