"""Two sides on the same tokens: what is the same, what is rounding, and which op of which side is to blame."""

import importlib
import json
import math
from collections.abc import Callable

import models
import pandas as pd
import pytest
import torch
from small_checkpoint import write_small_checkpoint

import workbench
from workbench import taps
from workbench.analysis.compare import Side, compare, save_side
from workbench.analysis.compare.comparison import GROWTH, compare_sides
from workbench.analysis.compare.differences import difference, is_equal
from workbench.analysis.compare.saved import read_mapping, read_side
from workbench.analysis.compare.sides import kernels_of, run_model
from workbench.analysis.stages import Seen
from workbench.bundle import MANIFEST, Origin, write_bundle
from workbench.checkpoint import write_checkpoint
from workbench.cli import main
from workbench.config import ModelConfig
from workbench.errors import BackendError, InputError
from workbench.kernels.gated_delta_rule import torch_chunk
from workbench.kernels.registry import OPERATIONS, register_backend
from workbench.model import CausalLM
from workbench.provenance import checkpoint_hash
from workbench.tracing import intervene
from workbench.tracing.dump import dump
from workbench.tracing.selection import Selection

MINIATURE = "data/miniature"
PROMPT = torch.randint(5, 2000, (70,), generator=torch.Generator().manual_seed(1)).tolist()


def model_of(decay: str = "realistic") -> CausalLM:
    return CausalLM(ModelConfig.from_hf(models.mini())).init_weights(3, decay).eval()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("compare") / "mini"
    model = model_of("class_default")
    write_checkpoint(path, model.config, model.state_dict(), dtype=torch.float32)
    return str(path)


def ids(tokens: int = 70) -> list[int]:
    return torch.randint(0, 97, (tokens,), generator=torch.Generator().manual_seed(tokens)).tolist()


# ---- verdicts


def test_a_card_on_one_side_is_rounding_of_its_dtype_on_a_sound_model(checkpoint):
    result = compare(checkpoint, "auto", "auto", prompt=ids(), card_b="t4")
    assert result.verdict.verdict == "rounding" and result.b.label == "auto on t4" and result.b.dtype == "float16"
    assert {row["backend"] for row in result.b.backends if row["op"] == "linear"} == {"torch_linear"}
    with pytest.raises(InputError, match="card of side a: expected with backends or a policy, found 'hf'"):
        compare(checkpoint, "hf", "auto", prompt=ids(), card_a="t4")


def test_one_backend_twice_is_the_same_in_every_bit(checkpoint):
    result = compare(checkpoint, "torch_chunk", "torch_chunk", prompt=ids(), decode=2)
    assert result.verdict.verdict == "same" and result.verdict.exit_code == 0 and result.side is None
    assert result.stages["equal"].all() and (result.stages["error"] == 0).all()
    assert result.stages["step"].nunique() == 3 and len(result.stages) > 200
    assert result.summary["logit_summary"]["kl_max"] == 0 and result.flips.empty and result.not_compared.empty
    assert [x.shape[1] for x in result.a.feeds] == [70, 1, 1]
    assert all(map(torch.equal, result.a.feeds, result.b.feeds))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chunks_and_recurrence_differ_by_rounding(dtype):
    result = compare(MINIATURE, "torch_chunk", "torch_recurrent", prompt=PROMPT, decode=2, dtype_a=dtype, dtype_b=dtype)
    assert result.verdict.verdict == "rounding" and result.verdict.exit_code == 0
    first = result.stages[result.stages["error"] > 0].iloc[0]
    assert first["op"] == "gated_delta_rule" and first["layer"] == 0
    assert 0 < result.stages["roundings"].max() < 64
    assert set(result.not_compared["reason"]) == {"torch_recurrent does not show it"}
    assert {"gdn.cumsum", "gdn.decay"} <= {taps.split_name(tap)[1] for tap in result.not_compared["tap"]}
    assert not result.stages["fault_a"].any() and not result.stages["fault_b"].any()


def test_a_narrow_dtype_is_rounding_and_its_flips_are_listed():
    result = compare(MINIATURE, "auto", "auto", prompt=PROMPT, dtype_a="float32", dtype_b="bfloat16")
    assert result.kind == "rounding"
    assert set(result.stages["rounding"]) == {"bfloat16"}
    routing = result.summary["routing"]
    assert routing["choices"] == 8 * 70 and routing["flips"] + routing["near_ties"] == len(result.flips) > 0
    assert (result.flips["is_near_tie"] == (result.flips["margin"] < 1e-5)).all()
    logits = result.summary["logit_summary"]
    assert 0 < logits["kl_mean"] < logits["kl_max"] and 1e-4 < logits["parity"] < 0.5


@pytest.mark.parametrize("swapped", [False, True])
def test_factored_beside_safe_departs_at_the_decay_of_its_side(swapped):
    a, b = (":safe", "torch_chunk:factored") if swapped else (":factored", ":safe")
    result = compare(MINIATURE, a, b, prompt=PROMPT)
    assert result.verdict.verdict == "different at gated_delta_rule" and result.verdict.exit_code == 1
    assert result.verdict.where.tap == "layers.00.gdn.decay" and result.side == ("b" if swapped else "a")
    assert result.verdict.where.layer == 0 and result.verdict.where.head is not None
    assert result.summary["logit_summary"]["not_finite"] == 70
    row = result.stages.set_index("tap").loc["layers.00.gdn.decay"]
    assert math.isinf(row["error"]) and row["finite_a"] == swapped and row["finite_b"] != swapped


def test_factored_on_both_sides_is_the_same():
    result = compare(MINIATURE, ":factored", ":factored", prompt=PROMPT)
    assert result.verdict.verdict == "same"
    assert any("not finite" in sentence for sentence in result.verdict.evidence)


def test_a_fault_shows_without_the_stage_on_the_other_side():
    result = compare(MINIATURE, ":factored", "torch_recurrent", prompt=PROMPT)
    assert result.verdict.where.tap == "layers.00.gdn.decay" and result.side == "a"


@pytest.fixture
def wrong_heads():
    """A backend of the gated delta rule whose value head h reads key head h % H instead of h // (V / H)."""
    name = "wrong_heads"

    def run(q, k, v, **named):
        groups = v.shape[2] // q.shape[2]
        return torch_chunk.run(q.repeat(1, 1, groups, 1), k.repeat(1, 1, groups, 1), v, **named)

    register_backend("gated_delta_rule", name, run, torch_chunk.supports)
    yield name
    before = OPERATIONS["gated_delta_rule"]
    kept = {key: backend for key, backend in before.backends.items() if key != name}
    OPERATIONS["gated_delta_rule"] = type(before)(before.name, kept, before.automatic_order)


def test_a_wrong_map_of_heads_names_the_op(checkpoint, wrong_heads):
    result = compare(checkpoint, "auto", f"gated_delta_rule={wrong_heads}", prompt=ids())
    assert result.verdict.verdict == "different at gated_delta_rule" and result.side == "b"
    assert result.verdict.where.tap == "layers.00.gdn.kkt"  # the first stage that reads k


CHANGES: dict[str, Callable] = {
    "layers.02.gdn.conv": lambda x: x.roll(1, dims=1),
    "layers.03.attn.k": lambda x: x.flip(2),
    "layers.01.moe.experts": lambda x: x * 1.01,
    "layers.01.post_norm": lambda x: x * 0.5,
    "final_norm": lambda x: x * 1.5,
}


@pytest.mark.parametrize("tap", CHANGES)
def test_an_intervention_on_one_side_names_its_tap_point(tap):
    a, b = model_of(), model_of()
    with intervene(b, {tap: CHANGES[tap]}):
        result = compare(None, a, b, prompt=ids(), decode=1)
    assert result.kind == "different" and result.side == "b" and result.verdict.where.tap == tap
    assert result.verdict.where.op in result.verdict.verdict


def test_a_fault_of_a_decode_step_is_found_there():
    a, b = model_of(), model_of()
    change = {"layers.01.gdn.norm": lambda x: x if x.shape[1] > 1 else x * 1.5}
    with intervene(b, change):
        result = compare(None, a, b, prompt=ids(), decode=2)
    assert result.verdict.where.tap == "layers.01.gdn.norm"
    assert result.faults.iloc[0]["step"] == 1


# ---- the measures


def test_measures_of_a_difference():
    a = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    b = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
    found = difference(a, b)
    assert (found.error, found.max_error, found.worst_row, found.worst_row_error) == (0.2, 0.25, (1,), 0.2)
    same = torch.tensor([math.nan, 1.0])
    assert difference(same, same.clone()).equal
    assert difference(same, torch.tensor([math.nan, 1.5])).error == 0.5
    assert math.isinf(difference(same, torch.tensor([1.0, 1.0])).error)
    assert math.isinf(difference(torch.tensor([math.inf]), torch.tensor([-math.inf])).error)
    assert not is_equal(torch.tensor([0.0]), torch.tensor([-0.0])) and difference(
        torch.tensor([0.0]), torch.tensor([-0.0])).error == 0.0  # fmt: skip
    assert not is_equal(torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.bfloat16))
    assert is_equal(torch.tensor(1.0), torch.tensor(1.0))


def test_flips_and_kl_are_those_of_the_tensors():
    def side(label, logits, router):
        tensors = {
            "layers.00.moe.logits": router, "layers.00.moe.topk": torch.ones(2, 1), "logits": logits[None],
        }  # fmt: skip
        return Side(label, "bundle", [Seen(torch.tensor([[4, 7]]), 0, [], tensors, {}, list(tensors))])

    near = torch.tensor([[1.0, 1.0 + 4e-6], [2.0, 0.5]])
    a = side("a", torch.tensor([[0.0, 1.0], [0.0, 3.0]]), near)
    b = side("b", torch.tensor([[0.0, 1.0], [0.0, -3.0]]), torch.tensor([[1.0, 0.9], [0.5, 2.0]]))
    result = compare_sides(a, b)
    assert result.flips[["layer", "position", "token", "is_near_tie"]].to_numpy().tolist() == [
        [0, 0, 4, True], [0, 1, 7, False],
    ]  # fmt: skip
    assert result.summary["routing"] == {"choices": 2, "flips": 1, "near_ties": 1}
    p = 1 / (1 + math.exp(-3.0))
    assert result.logits["kl"].tolist() == pytest.approx([0.0, p * 3.0 - (1 - p) * 3.0 + 0.0], abs=1e-6)
    assert result.logits["top1_flip"].tolist() == [False, True]
    assert result.summary["logit_summary"]["parity"] == pytest.approx(2.0)


# ---- what is refused


@pytest.mark.parametrize(
    ("text", "words"),
    [(":", "an empty policy"), ("hf,experts=torch_loop", "hf with something else"), ("nosuch", "nosuch"),
     (":safe,torch_chunk:factored", "two policies")],
)  # fmt: skip
def test_a_side_that_is_none_is_refused(text, words):
    with pytest.raises(BackendError, match=words):
        kernels_of(text)


def test_the_grammar_of_sides():
    assert kernels_of(":factored").policy.exponent == "factored"
    found = kernels_of("torch_recurrent,experts=torch_loop,:segsum")
    assert found.requested == {"gated_delta_rule": "torch_recurrent", "experts": "torch_loop"}
    assert found.policy.cumsum == "segsum"


def test_other_input_is_refused_in_one_line(checkpoint, tmp_path):
    one, other = model_of(), CausalLM(ModelConfig.from_hf(models.mini())).init_weights(4).eval()
    cases = [
        (lambda: compare(checkpoint, "auto", "auto"), "expected a prompt"),
        (lambda: compare(None, "auto", "auto", prompt=[1]), "expected a checkpoint"),
        (lambda: compare(None, one, other, prompt=[1]), "same weights"),
        (lambda: compare(checkpoint, "auto", "auto", prompt=[1], decode=-1), "decode"),
        (lambda: compare(checkpoint, "auto", "auto", prompt=[1] * 5000), "max_position_embeddings"),
        (lambda: compare(None, one, one, prompt=torch.zeros(0, dtype=torch.int64)), "at least one token"),
        (lambda: compare(None, one, one, prompt=[[1, 2], [3, 4]]), "one sequence"),
        (lambda: compare(None, one, one, prompt=[97]), "ids from 0 to 96"),
        (lambda: compare(None, one, one, prompt="text"), "tokenizer"),
        (lambda: compare(checkpoint, "auto", "auto", prompt=[1], mapping_a={"logits": "x"}), "saved bundle"),
    ]
    for call, words in cases:
        with pytest.raises(InputError, match=words) as caught:
            call()
        assert "\n" not in str(caught.value)


# ---- saved runs


@pytest.fixture(scope="module")
def saved(checkpoint, tmp_path_factory):
    """Directories of saved sides, with the run of each."""
    folder = tmp_path_factory.mktemp("saved")
    model = workbench.load(checkpoint)
    sides = {}
    for name, selection in (("chunk", "torch_chunk"), ("recurrent", "torch_recurrent"), ("factored", ":factored")):
        model.kernels = kernels_of(selection)
        sides[name] = run_model(model, selection, [torch.tensor([ids()])], 0)
        save_side(sides[name], folder / name)
    return folder, sides


def test_a_saved_run_is_the_run(checkpoint, saved):
    folder, sides = saved
    read = read_side(folder / "chunk")
    assert read.source == "bundle" and read.policy == sides["chunk"].policy and read.dtype == "float32"
    assert all(map(torch.equal, read.feeds, sides["chunk"].feeds))
    for name, tensor in sides["chunk"].passes[0].tensors.items():
        assert is_equal(read.passes[0].tensors[name], tensor), name
    assert compare(checkpoint, str(folder / "chunk"), "torch_chunk").verdict.verdict == "same"
    assert compare(None, str(folder / "chunk"), str(folder / "chunk")).verdict.verdict == "same"


def test_saved_runs_are_judged_with_the_weights_and_without(checkpoint, saved):
    folder, _ = saved
    chunk, recurrent, factored = (str(folder / name) for name in ("chunk", "recurrent", "factored"))
    for weights in (checkpoint, None):
        result = compare(weights, chunk, recurrent)
        assert result.kind == "rounding" and result.summary["judged"] == (weights is not None)
        floor = result.stages["limit"].combine(result.stages["inherited"], max)
        assert (result.stages["error"] / floor).max() < GROWTH / 2
        result = compare(weights, chunk, factored)
        assert result.verdict.verdict == "different at gated_delta_rule"
        assert result.verdict.where.tap == "layers.00.gdn.decay"
        assert result.side == (None if weights is None else "b")


@pytest.mark.parametrize("tap", CHANGES)
def test_a_fault_in_a_saved_run_is_found_by_how_errors_grow(tap, tmp_path):
    sides = []
    for name, changes in (("a", {}), ("b", {tap: CHANGES[tap]})):
        model = model_of()
        with intervene(model, changes) if changes else torch.no_grad():
            side = run_model(model, name, [torch.tensor([ids()])], 0)
        save_side(side, tmp_path / name)
        sides.append(str(tmp_path / name))
    result = compare(None, *sides)
    assert result.kind == "different" and result.verdict.where.tap == tap and result.side is None


def test_a_dump_of_later_passes_is_not_judged_at_positions_that_nobody_knows(checkpoint, tmp_path):
    model = workbench.load(checkpoint)
    for name in ("one", "other"):
        with torch.inference_mode(), dump(model, tmp_path / name, select=Selection(steps=(1, 2))):
            model(torch.tensor([ids()[-1:]]), cache=model(torch.tensor([ids()])).cache)
        model.kernels = kernels_of("linear=reference")
    result = compare(checkpoint, str(tmp_path / "one"), str(tmp_path / "other"))
    assert result.kind == "rounding" and not result.summary["judged"]
    assert set(result.stages["step"]) == {1} and len(result.stages) > 80


@pytest.mark.parametrize("has_weights", [True, False])
def test_what_no_weights_can_judge_is_judged_by_growth(checkpoint, tmp_path, has_weights):
    """Runs of which only the residual stream was kept: an op cannot be named, a layer can."""
    for name, changes in (("a", {}), ("b", {"layers.02.moe.out": lambda x: x * 2}), ("c", {})):
        model = workbench.load(checkpoint)
        model.kernels = kernels_of("torch_recurrent" if name == "c" else "torch_chunk")
        with intervene(model, changes) if changes else torch.no_grad():
            side = run_model(model, name, [torch.tensor([ids()])], 0)
        for seen in side.passes:
            seen.tensors = {key: x for key, x in seen.tensors.items() if key.split(".")[-1] in ("residual", "embed")}
        save_side(side, tmp_path / name)
    weights = checkpoint if has_weights else None
    result = compare(weights, str(tmp_path / "a"), str(tmp_path / "b"))
    assert result.kind == "different" and result.verdict.where.tap == "layers.02.residual" and result.side is None
    assert compare(weights, str(tmp_path / "a"), str(tmp_path / "c")).kind == "rounding"


def test_a_dump_is_a_side(checkpoint, tmp_path):
    model = workbench.load(checkpoint)
    with torch.inference_mode(), dump(model, tmp_path / "run"):
        model(torch.tensor([ids()]), use_cache=False)
    path = str(tmp_path / "run")
    assert compare(checkpoint, path, "auto", prompt=ids()).verdict.verdict == "same"
    with pytest.raises(InputError, match="says its tokens"):
        compare(checkpoint, path, "auto")
    other = [(token + 1) % 97 for token in ids()]
    with pytest.raises(InputError, match="same tokens"):
        compare(checkpoint, path, "auto", prompt=other)


def test_another_engine_is_read_by_a_mapping(saved, tmp_path):
    folder, sides = saved
    seen = sides["chunk"].passes[0].tensors
    theirs = {
        "logits_padded": torch.nn.functional.pad(seen["logits"], (0, 31)),
        **{f"h.{layer}.q": seen[taps.full_name(layer, "gdn.q")].transpose(1, 2).contiguous() for layer in range(3)},
        **{f"h.{layer}.out": seen[taps.full_name(layer, "gdn.out")].flatten(2) for layer in range(3)},
        "unrelated": torch.zeros(3),
    }  # fmt: skip
    content = {
        "tensors": [{"tap": name, "step": 0, "file": "t.safetensors", "key": name} for name in theirs],
        "input_ids": [ids()],
    }  # fmt: skip
    write_bundle(tmp_path / "theirs", "trace", {"t.safetensors": theirs}, Origin(), content=content)
    mapping = {
        "logits": {"name": "logits_padded", "slice": [None, None, [0, 97]]},
        "layers.{layer}.gdn.q": {"name": "h.{layer}.q", "transpose": [0, 2, 1, 3]},
        "layers.{layer}.gdn.out": {"name": "h.{layer}.out", "reshape": [1, 70, 4, -1]},
    }
    file = tmp_path / "map.json"
    file.write_text(json.dumps(mapping))
    ours = str(folder / "chunk")
    result = compare(None, ours, str(tmp_path / "theirs"), mapping_b=file)
    assert result.verdict.verdict == "same" and len(result.stages) == 7
    del mapping["logits"]["slice"]
    with pytest.raises(InputError, match=r"logits: expected one shape.*\(1, 70, 97\) and \(1, 70, 128\)"):
        compare(None, ours, str(tmp_path / "theirs"), mapping_b=mapping)
    with pytest.raises(InputError, match="give a mapping file"):
        compare(None, ours, str(tmp_path / "theirs"))


@pytest.mark.parametrize(
    ("mapping", "words"),
    [
        ({}, "expected an object"),
        ({"layers.{layer}.nosuch": "x.{layer}"}, "workbench.taps"),
        ({"layers.{layer}.gdn.q": "x"}, "on both sides or on neither"),
        ({"logits": {"name": "x", "scale": 2}}, "found"),
        ({"logits": {"name": "x", "reshape": "1"}}, "whole numbers"),
        ({"logits": {"name": "x", "slice": [[1]]}}, "start, stop"),
    ],
)
def test_a_mapping_that_is_none_is_refused(mapping, words):
    with pytest.raises(InputError, match=words):
        read_mapping(mapping)


def test_damaged_and_foreign_bundles_are_refused_in_one_line(saved, tmp_path, checkpoint):
    folder, sides = saved
    save_side(sides["chunk"], tmp_path / "cut")
    (file,) = (tmp_path / "cut").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-100])
    save_side(sides["chunk"], tmp_path / "unfinished")
    (tmp_path / "unfinished" / MANIFEST).unlink()
    write_bundle(tmp_path / "routing", "routing", {}, Origin())
    write_bundle(tmp_path / "empty", "trace", {}, Origin(), content={"tensors": []})
    write_bundle(tmp_path / "strange", "trace", {}, Origin(), content={"tensors": [{"tap": "embed"}]})
    cases = {"cut": "cut", "unfinished": "never finished", "routing": "routing", "empty": "found none",
             "strange": "content of a trace"}  # fmt: skip
    for name, words in cases.items():
        with pytest.raises(InputError, match=words) as caught:
            compare(None, str(folder / "chunk"), str(tmp_path / name))
        assert "\n" not in str(caught.value)
    model = workbench.load(checkpoint)
    save_side(run_model(model, "other", [torch.tensor([ids(20)])], 0), tmp_path / "other")
    with pytest.raises(InputError, match=r"same tokens.*70 tokens.*20 tokens"):
        compare(None, str(folder / "chunk"), str(tmp_path / "other"))


# ---- transformers


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_miniature_beside_transformers_is_rounding(dtype):
    pytest.importorskip("transformers", reason="transformers is not installed")
    result = compare(MINIATURE, "auto", "hf", prompt=PROMPT, decode=2, dtype_a=dtype, dtype_b=dtype)
    assert result.verdict.verdict == "rounding"
    shown = {taps.split_name(tap)[1] for tap in result.stages["tap"]}
    assert shown >= {"embed", "input_norm", "gdn.qkv", "gdn.conv", "gdn.v", "gdn.beta", "gdn.log_decay", "gdn.state",
                     "gdn.out", "gdn.norm", "attn.q", "attn.k", "attn.v", "attn.gate", "attn.out", "mixer_out",
                     "post_norm", "moe.logits", "moe.topk", "moe.experts", "moe.out", "residual", "logits"}  # fmt: skip
    assert {"gdn.q", "gdn.decay", "attn.scores", "moe.shared"} <= {
        taps.split_name(tap)[1] for tap in result.not_compared["tap"]
    }
    judged = result.b.judged
    assert len(judged) > 0.9 * len(result.stages) and set(judged["step"]) == {0, 1, 2}
    assert result.stages["roundings"].max() < 64 and result.stages["step"].nunique() == 3
    assert not result.stages["own_b"].isna().all()


@pytest.mark.parametrize("family", ["mini_dense", "mini_next"])
def test_other_families_beside_transformers_are_rounding(family, tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    model = CausalLM(ModelConfig.from_hf(getattr(models, family)())).init_weights(3).eval()
    layout = {"layout": "qwen3_next"} if family == "mini_next" else {}
    write_checkpoint(tmp_path / "m", model.config, model.state_dict(), dtype=torch.float32, **layout)
    result = compare(tmp_path / "m", "auto", "hf", prompt=ids(), decode=1)
    assert result.kind == "rounding", str(result)


def test_a_fault_of_ours_beside_transformers_is_on_our_side(checkpoint, wrong_heads):
    pytest.importorskip("transformers", reason="transformers is not installed")
    result = compare(checkpoint, "hf", f"gated_delta_rule={wrong_heads}", prompt=ids())
    assert result.verdict.verdict == "different at gated_delta_rule" and result.side == "b"


@pytest.mark.parametrize(
    ("function", "tap", "op"),
    [
        ("torch_chunk_gated_delta_rule", "layers.00.gdn.out", "gated_delta_rule"),
        ("eager_attention_forward", "layers.03.attn.out", "attention"),
    ],
)
def test_a_fault_of_theirs_is_on_their_side(checkpoint, monkeypatch, function, tap, op):
    pytest.importorskip("transformers", reason="transformers is not installed")
    file = "transformers.models.qwen3_5_moe.modeling_qwen3_5_moe"
    right = getattr(importlib.import_module(file), function)

    def wrong(*args, **named):
        out, other = right(*args, **named)
        return out * 1.01, other

    monkeypatch.setattr(f"{file}.{function}", wrong)
    result = compare(checkpoint, "auto", "hf", prompt=ids())
    assert result.verdict.verdict == f"different at {op}" and result.side == "b"
    assert result.verdict.where.tap == tap
    assert getattr(importlib.import_module(file), function) is wrong  # what was watched is put back


def test_without_transformers_it_is_said(checkpoint, monkeypatch):
    monkeypatch.setattr("workbench.analysis.compare.hf.find_spec", lambda name: None)
    with pytest.raises(InputError, match="not installed"):
        compare(checkpoint, "auto", "hf", prompt=ids())


# ---- the command


def command(capsys, *words: str) -> tuple[int, str]:
    from workbench.cli import main

    code = main(["compare", *words])
    return code, capsys.readouterr().out


def test_the_command_ends_with_the_code_of_the_verdict(checkpoint, capsys, tmp_path):
    text = ",".join(map(str, ids()))
    code, out = command(
        capsys, checkpoint, "--a", "torch_chunk", "--b", "torch_recurrent", "--ids", text, "--json", "-"
    )
    content = json.loads(out)
    assert code == 0 and content["verdict"] == "rounding" and content["side"] is None
    assert set(content) >= {"verdict", "where", "cause_id", "evidence", "ruled_out", "fix", "confidence", "stages",
                            "flips", "logits", "logit_summary", "routing", "not_compared", "a", "b"}  # fmt: skip
    page = tmp_path / "page.html"
    words = ("--a", ":factored", "--b", ":safe", "--ids", text)
    code, out = command(capsys, checkpoint, *words, "--out", str(page), "--save-b", str(tmp_path / "b"))
    assert code == 1 and out.startswith("different at gated_delta_rule, side a") and "layers.00.gdn.decay" in out
    html = page.read_text()
    assert "layers.00.gdn.decay" in html and "http" not in html.replace("http-equiv", "") and "<script" not in html
    code, out = command(capsys, "--a", str(tmp_path / "b"), "--b", str(tmp_path / "b"), "--out", str(tmp_path / "d"))
    assert code == 0 and out.startswith("same") and (tmp_path / "d" / "comparison.json").is_file()


def test_the_command_explains_itself(capsys):
    code, out = command(capsys, "--help")
    assert code == 0 and "hf for transformers" in " ".join(out.split())
    assert "example:\n  workbench compare data/miniature --a torch_chunk --b torch_recurrent" in out


def test_the_command_refuses_in_one_line(checkpoint, capsys):
    for words in (
        [checkpoint, "--a", "nosuch", "--b", "auto", "--ids", "1"], [checkpoint, "--a", "auto", "--ids", "1"],
        [checkpoint, "--a", "auto", "--b", "auto"], ["--a", "auto", "--b", "auto", "--prompt", "x"],
        ["nowhere", "--a", "auto", "--b", "auto", "--ids", "1"], ["--a", "no/such", "--b", "no/such"],
        [checkpoint, "--a", "auto", "--b", "auto", "--ids", "1", "--decode", "-1"],
    ):  # fmt: skip
        from workbench.cli import main

        assert main(["compare", *words]) == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1, words


def test_tables_have_what_the_docstring_says(checkpoint):
    result = compare(checkpoint, "auto", ":segsum", prompt=ids(10))
    for column in ("error", "max_error", "roundings", "inherited", "limit", "own_a", "own_b"):
        assert pd.api.types.is_float_dtype(result.stages[column]), column
    json.dumps(result.to_json(), default=str)


def test_a_saved_run_of_other_weights_is_not_judged_by_these(tmp_path):
    """It would be blamed for weights that it never had."""
    write_small_checkpoint(tmp_path / "ours")
    other = "0" * 64
    save_side(run_model(workbench.load(tmp_path / "ours"), "x", [torch.tensor([ids(9)])], 0), tmp_path / "run",
              model_hash=other)  # fmt: skip
    with pytest.raises(InputError, match=r"bundle .*run: expected a run of the checkpoint .* found one of another"):
        compare(tmp_path / "ours", str(tmp_path / "run"), "torch_chunk")
    save_side(run_model(workbench.load(tmp_path / "ours"), "x", [torch.tensor([ids(9)])], 0), tmp_path / "own",
              model_hash=checkpoint_hash(tmp_path / "ours"))  # fmt: skip
    assert compare(tmp_path / "ours", str(tmp_path / "own"), "torch_chunk").verdict.exit_code == 0


def test_a_run_is_not_saved_over_what_is_read_or_saved(tmp_path, capsys):
    write_small_checkpoint(tmp_path / "c")
    command = ["compare", str(tmp_path / "c"), "--a", "torch_chunk", "--b", "torch_chunk", "--ids", "1,2,3"]
    where = str(tmp_path / "d")
    assert main([*command, "--save-a", where, "--save-b", where]) == 2
    assert "expected a directory of its own" in capsys.readouterr().err
