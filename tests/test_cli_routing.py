"""`workbench routing`: what it prints and writes, every source of prompts, every comparison, and its exit codes."""

import json
import re

import pytest
import torch
from small_checkpoint import PROMPT, write_small_checkpoint

from workbench import cli
from workbench.analysis.routing import load_record
from workbench.checkpoint import write_checkpoint
from workbench.cli.routing import Progress

FLAT = ["--prompt", PROMPT]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_small_checkpoint(tmp_path_factory.mktemp("routing") / "checkpoint", "realistic")


@pytest.fixture
def run(capsys):
    def call(*arguments):
        code = cli.main(["routing", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_help_has_an_example_that_parses(run):
    code, out, _ = run("--help")
    words = out.partition("example:\n")[2].split()
    assert code == 0 and words[:2] == ["workbench", "routing"]
    assert callable(cli.build_parser().parse_args(words[1:]).run)


def test_the_table_has_a_row_for_each_layer_and_the_head(run, checkpoint):
    code, out, err = run(checkpoint, *FLAT)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert re.match(r"\d+ tokens of 1 prompt, 4 layers, top 2 of 8 experts, bfloat16, policy safe", lines[0])
    assert lines[1] == "the logits of every router are finite"
    heading = lines[3].split("  ")
    assert [cell.strip() for cell in heading if cell.strip()] == [
        "part", "layer", "effective", "Gini", "dead", "hot", "hottest", "its share", "margin", "top-k mass", "entropy",
        "near ties", "not finite",
    ]  # fmt: skip
    assert [line.split()[:2] for line in lines[4:9]] == [["model", str(n)] for n in range(4)] + [["mtp", "0"]]
    assert all(len(line) <= 140 for line in lines)


def test_every_source_of_prompts(run, tmp_path):
    (tmp_path / "text.txt").write_text(PROMPT)
    (tmp_path / "ids.json").write_text("[[5, 6, 7], [8]]")
    chat = {"messages": [{"role": "user", "content": "Hello"}]}
    code = {"kind": "code", "title": "t", "text": "x = 1"}
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ([1, 2], code, chat))))
    with_template = write_small_checkpoint(tmp_path / "with_template", "realistic")
    (with_template / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    files = [word for name in ("text.txt", "ids.json", "rows.jsonl") for word in ("--file", tmp_path / name)]
    code, out, err = run(with_template, *files, "--prompt", "no more", "--json", "-")
    assert (code, err) == (0, "")
    content = json.loads(out)
    assert [(p["kind"], p["title"]) for p in content["prompts"]] == [
        ("text", "--prompt 1"), ("text", "text.txt"), ("ids", "ids.json [0]"), ("ids", "ids.json [1]"),
        ("ids", "rows.jsonl line 1"), ("code", "t"), ("chat", "rows.jsonl line 3"),
    ]  # fmt: skip
    assert len(content["layers"]) == 5 and len(content["load"]) == 5 * 8
    assert content["model_hash"].startswith("sha256:") and content["not_finite"] == []
    assert {row["part"] for row in content["drift"]} == {row["part"] for row in content["coactivation"]} == {
        "model", "mtp",
    }  # fmt: skip


def test_a_saved_record_is_loaded_and_compared(run, checkpoint, tmp_path):
    saved = tmp_path / "saved"
    code, out, _ = run(checkpoint, *FLAT, "--save", saved, "--logits")
    assert code == 0
    record = load_record(saved)
    assert record.part("model").logits is not None and record.origin.model_hash is not None
    code, out, _ = run(checkpoint, *FLAT, "--against", saved)
    assert code == 0 and "other experts in 0 of" in out and "the weights differ" not in out
    code, out, _ = run(checkpoint, *FLAT, "--dtype", "float32", "--against", saved, "--json", tmp_path / "flips.json")
    against = json.loads((tmp_path / "flips.json").read_text())["against"]
    total = against["totals"][0]
    assert code == 0 and against["same_checkpoint"] is True and 0 < total["set_flips"] < total["pairs"] / 4
    assert f"other experts in {total['set_flips']:,} of {total['pairs']:,} choices" in out
    assert total["tokens_flipped"] == sum(r["part"] == "model" and r["set_flips"] > 0 for r in against["tokens"])
    other = write_small_checkpoint(tmp_path / "other", "class_default")
    code, out, _ = run(other, *FLAT, "--against", saved)
    assert code == 0 and "the weights differ: the two records are of different checkpoints" in out


def test_second_runs_of_another_dtype_policy_router_and_backend(run, checkpoint):
    code, out, _ = run(checkpoint, *FLAT, "--dtype", "float32", "--against-dtype", "float16")
    assert code == 0 and "Against float16, policy safe:" in out
    code, out, _ = run(checkpoint, *FLAT, "--dtype", "float32", "--against-policy", "segsum")
    assert code == 0 and "Against float32, policy segsum:" in out and "other experts in 0 of" in out
    code, out, _ = run(checkpoint, *FLAT, "--dtype", "float32", "--against-router-dtype", "bfloat16")
    assert code == 0 and "Against float32, router bfloat16, policy safe:" in out
    assert not re.search(r"^model: other experts in 0 of", out, re.MULTILINE)
    code, out, _ = run(checkpoint, *FLAT, "--router-dtype", "bfloat16", "--against-router-dtype", "bfloat16")
    assert code == 0 and re.search(r"^model: other experts in 0 of", out, re.MULTILINE)
    code, out, _ = run(
        checkpoint, *FLAT, "--dtype", "float32", "--against-backend", "gated_delta_rule=torch_recurrent"
    )
    assert code == 0 and "other experts in 0 of" in out


def test_router_logits_that_are_not_finite_end_with_one(run, tmp_path):
    strong = write_small_checkpoint(tmp_path / "strong")  # factored exponents overflow in it
    code, out, _ = run(strong, *FLAT, "--policy", "factored")
    assert code == 1
    assert re.search(r"NOT FINITE: router logits of \d+ choices, first part model, layer 0, prompt 0, position \d", out)
    code, out, _ = run(strong, *FLAT, "--against-policy", "factored")
    assert code == 1 and "the logits of every router are finite" in out and "NOT FINITE" in out.partition("Against")[2]


def ids_file(folder):
    (folder / "ids.json").write_text("[1, 2, 3]")
    return folder / "ids.json"


BAD_INPUTS = [
    (["{checkpoint}"], "routing: expected --prompt or --file at least once, found none"),
    (["{none}", "--prompt", "x"], "expected a directory, found nothing there"),
    (["{checkpoint}", "--prompt", " "], "--prompt: expected some text, found none"),
    (["{checkpoint}", "--file", "{none}"], "none: expected a text in UTF-8, found: No such file"),
    (["{checkpoint}", "--file", "{wrong}"], "line 1: expected token ids"),
    (["{checkpoint}", "--file", "{far}"], "far.jsonl line 1: expected token ids from 0 to 4095, found 1 to 9999"),
    (["{checkpoint}", "--file", "{chat}"], "expected a chat template beside it, found none"),
    (["{checkpoint}", "--prompt", "x", "--hot", "0"], "--hot: expected a finite number above 0, found 0"),
    (["{checkpoint}", "--prompt", "x", "--hot", "inf"], "--hot: expected a finite number above 0, found inf"),
    (["{checkpoint}", "--prompt", "x", "--hot", "nan"], "--hot: expected a finite number above 0, found nan"),
    (["{checkpoint}", "--prompt", "x", "--logits"], "--logits: expected with --save, found it alone"),
    (["{checkpoint}", "--prompt", "x", "--save", "{checkpoint}"], "expected a new or empty directory, or a bundle"),
    (["{checkpoint}", "--prompt", "x", "--against", "{none}"], "with manifest.json, found nothing there"),
    (["{checkpoint}", "--prompt", "x", "--against", "{checkpoint}"], "expected manifest.json, found none: no bundle"),
    (["{checkpoint}", "--prompt", "x", "--against", "{none}", "--against-dtype", "float16"], "expected one comparison"),
    (["{checkpoint}", "--prompt", "x", "--against-dtype", "int8"], "dtype: expected one of float64"),
    (["{checkpoint}", "--prompt", "x", "--against-policy", "unsafe"], "neither a preset (safe, "),
    (["{checkpoint}", "--prompt", "x", "--router-dtype", "int8"], "argument --router-dtype: invalid choice: 'int8'"),
    (["{dense}", "--file", "{ids}"], "expected a model with experts, found a dense one"),
]


@pytest.mark.parametrize(("arguments", "expected"), BAD_INPUTS)
def test_unusable_input_is_one_line(run, checkpoint, tmp_path, arguments, expected):
    contents = {"wrong": '{"x": 1}', "far": "[1, 9999]", "chat": '{"messages": [{"role": "user", "content": "x"}]}'}
    names = {"checkpoint": checkpoint, "ids": ids_file(tmp_path), **{n: tmp_path / n for n in ("none", "dense")}}
    for name, content in contents.items():
        names[name] = tmp_path / f"{name}.jsonl"
        names[name].write_text(content)
    if "{dense}" in arguments:
        write_dense(tmp_path / "dense")
    code, out, err = run(*(argument.format(**names) for argument in arguments))
    assert (code, out) == (2, "")
    assert expected in err and err.startswith("workbench: error: ") and err.count("\n") == 1


def write_dense(folder):
    import models

    from workbench.config import ModelConfig
    from workbench.model import CausalLM

    config = ModelConfig.from_hf(models.mini_dense())
    with torch.no_grad():
        write_checkpoint(folder, config, dict(CausalLM(config).init_weights(3).state_dict()))


def test_other_tokens_are_not_compared(run, checkpoint, tmp_path):
    run(checkpoint, "--prompt", "Fear no more", "--save", tmp_path / "saved")
    code, _, err = run(checkpoint, "--prompt", "Fear now more", "--against", tmp_path / "saved")
    assert code == 2 and "prompt 0: expected the same tokens, found others from position" in err


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [("backends", 7, "backends: expected"), ("policy", 5, "policy: expected"), ("versions", 3, "versions: expected"),
     ("content", {"num_experts": "8"}, "content.num_experts: expected 1 to 32767, found"), ("files", [], "files: exp")],
)  # fmt: skip
def test_a_record_with_a_manifest_of_other_types_is_one_line(run, checkpoint, tmp_path, field, value, expected):
    run(checkpoint, "--prompt", "Fear", "--save", tmp_path / "saved")
    file = tmp_path / "saved" / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest[field] = manifest[field] | value if isinstance(value, dict) else value
    file.write_text(json.dumps(manifest))
    code, out, err = run(checkpoint, "--prompt", "Fear", "--against", tmp_path / "saved", "--json", "-")
    assert (code, out) == (2, "") and err.startswith("workbench: error: bundle") and err.count("\n") == 1
    assert expected in err and "Error" not in err


def test_what_has_no_number_is_a_dash(run, checkpoint, monkeypatch):
    from workbench.analysis.routing import recorder

    measure = recorder.measure
    monkeypatch.setattr(recorder, "measure", lambda logits, *rest, **kw: measure(logits * float("nan"), *rest, **kw))
    code, out, err = run(checkpoint, "--prompt", "Fear no more", "--against-dtype", "float32")
    assert (code, err) == (1, "") and "nan" not in out and "<NA>" not in out
    assert "model: other experts in 0 of 0 choices (-), another order in 0 (-); 0 of 0 tokens (-) have" in out
    row = next(line for line in out.splitlines() if line.startswith("model")).split()
    assert row[:11] == ["model", "0", *9 * ["-"]]  # neither dead experts nor a hottest one


def test_one_of_each_is_in_the_singular(run, tmp_path, checkpoint):
    (tmp_path / "ids.json").write_text("[5]")
    code, out, _ = run(checkpoint, "--file", tmp_path / "ids.json")
    assert code == 0 and out.startswith("1 token of 1 prompt, 4 layers, top 2 of 8 experts")


def test_progress_is_told_within_a_prompt_of_a_file(run, checkpoint, tmp_path, monkeypatch):
    now = iter(range(0, 1000, 3))
    monkeypatch.setattr("workbench.cli.routing.time.monotonic", lambda: float(next(now)))
    (tmp_path / "text.txt").write_text(PROMPT)
    code, out, err = run(checkpoint, "--file", tmp_path / "text.txt", "--json", "-")
    assert code == 0 and json.loads(out)
    assert err.splitlines() == ["routing: 20% done, about 12 s left", "routing: 60% done, about 6 s left"]


def test_progress_is_silent_while_it_is_fast_and_tells_what_is_left(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("workbench.cli.routing.time.monotonic", lambda: now[0])
    progress = Progress("routing")
    for done, second in enumerate([0.5, 1.9, 2.5, 4.0, 7.6, 9.0], start=1):
        now[0] = second
        progress(done, 6)
    assert capsys.readouterr().err.splitlines() == [
        "routing: 50% done, about 2 s left", "routing: 83% done, about 2 s left",
    ]  # fmt: skip
