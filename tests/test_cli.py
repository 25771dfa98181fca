"""Tests of the command line: what is printed, what is written, and which code each outcome ends with."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
import torch
from fake_chat_server import chat_server, completion
from safetensors.torch import save_file
from small_checkpoint import PROMPT, write_small_checkpoint

from workbench import cli
from workbench.analysis import inventory
from workbench.checkpoint import read_checkpoint, write_checkpoint
from workbench.cli.output import text_table
from workbench.cli.sweep import Bar
from workbench.dialogue import Dialogue, ExpectedAnswer
from workbench.kernels.gated_delta_rule import spec
from workbench.numerics import LARGEST, PRESETS
from workbench.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return write_small_checkpoint(tmp_path_factory.mktemp("cli") / "checkpoint")


@pytest.fixture
def run(capsys):
    """Run a command in this process: (exit code, stdout, stderr)."""

    def call(*arguments) -> tuple[int, str, str]:
        code = cli.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def process(*arguments, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "workbench", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, **options)


# ============================================================================================================
# All commands
# ============================================================================================================


def test_help_needs_no_heavy_package_and_answers_at_once():
    heavy = "torch numpy pandas matplotlib safetensors tokenizers nbconvert".split()
    check = (
        "import sys; from workbench.cli import main\n"
        "codes = [main(['--help']), main(['--version']), main(['trace', '--help'])]\n"
        f"print(codes, [name for name in {heavy} if name in sys.modules])"
    )
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[0, 0, 0] []", done.stdout + done.stderr
    assert time.monotonic() - started < 5.0  # half a second on a free machine


@pytest.mark.parametrize("command", ["report", "trace", "generate", "score", "sweep", "inspect"])
def test_every_command_explains_itself_with_an_example_that_parses(run, command):
    code, out, _ = run(command, "--help")
    assert code == 0
    example = out.partition("example:\n")[2].strip()
    words = [word.strip('"') for word in re.findall(r'"[^"]*"|\S+', example)]
    assert words[:2] == ["workbench", command]
    options = cli.build_parser().parse_args(words[1:])
    assert callable(options.run)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["trace"], "required: CHECKPOINT"),
        (["trace", "x"], "one of the arguments --prompt --prompt-file --ids --chat --messages is required"),
        (["trace", "x", "--prompt", "a", "--ids", "1"], "not allowed with"),
        (["generate", "x", "--prompt", "a", "--seed", "one"], "invalid int value: 'one'"),
        (["unknown"], "invalid choice: 'unknown'"),
        (["inspect", "x", "--dtpe", "float32"], "unrecognized arguments: --dtpe float32"),
    ],
)
def test_a_wrong_command_line_is_one_line(run, arguments, expected):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "") and expected in err
    assert err.startswith("workbench: error: ") and err.count("\n") == 1


BAD_INPUTS = [
    (["trace", "{none}", "--ids", "1"], "{none}: expected a directory, found nothing there"),
    (["generate", "{none}", "--ids", "1"], "{none}: expected a directory, found nothing there"),
    (["inspect", "{none}"], "{none}: expected a directory, found nothing there"),
    (["inspect", "{empty}"], "config.json"),
    (["trace", "{none}", "--prompt", "x"], "nothing there"),
    (["trace", "{checkpoint}", "--prompt", ""], "--prompt: expected some text, found none"),
    (["trace", "{checkpoint}", "--ids", "1,4096"], "expected token ids from 0 to 4095, found 4096"),
    (
        ["trace", "{checkpoint}", "--ids", "1,-2"],
        "--ids: expected whole numbers separated by commas, found '1,-2'",
    ),
    (["trace", "{checkpoint}", "--ids", ","], "--ids: expected whole numbers"),
    (["trace", "{checkpoint}", "--ids", "9" * 400], "--ids: expected whole numbers"),
    (["trace", "{checkpoint}", "--ids", "1", "--top", "0"], "--top: expected at least 1, found 0"),
    (
        ["trace", "{checkpoint}", "--prompt-file", "{binary}"],
        "expected UTF-8 text, found byte 0xff at position 2",
    ),
    (["trace", "{checkpoint}", "--prompt-file", "{zero}"], "found a zero byte at position 1"),
    (["trace", "{checkpoint}", "--prompt-file", "{blank}"], "expected some text, found none"),
    (["trace", "{checkpoint}", "--prompt-file", "{none}"], "cannot be read: No such file or directory"),
    (["trace", "{checkpoint}", "--ids", "1", "--backend", "fast"], "no op has a backend of that name"),
    (["trace", "{checkpoint}", "--ids", "1", "--backend", "attention=fast"], "unknown backend 'fast'"),
    (["trace", "{checkpoint}", "--ids", "1", "--policy", "unsafe"], "neither a preset (safe, "),
    (["trace", "{checkpoint}", "--ids", "1", "--policy", "{blank}"], "not JSON"),
    (
        ["trace", "{checkpoint}", "--ids", "1", "--policy", "safe", "--backend", "torch_chunk:factored"],
        "expected one policy, found factored and safe",
    ),
    (["trace", "{checkpoint}", "--ids", "1", "--dtype", "float8"], "dtype: expected one of float64, float32"),
    (["inspect", "{checkpoint}", "--dtype", "int8"], "dtype: expected one of"),
    (["trace", "{checkpoint}", "--ids", "1", "--device", "tpu"], "device: expected cpu, cuda or cuda:N"),
    (["trace", "{checkpoint}", "--ids", "1", "--device", "cuda:77"], "device cuda:77: expected a CUDA"),
    (["trace", "{checkpoint}", "--ids", "1", "--device", "cpu:99999999999"], "device: expected cpu, cuda"),
    (["trace", "{checkpoint}", "--ids", "1", "--policy", "{wrong}"], "field exponent: expected one of"),
    (["trace", "{checkpoint}", "--ids", "1", "--policy", "{deep}"], "not JSON"),
    (["trace", "{checkpoint}", "--ids", "1", "--json", ""], "--json: expected the name of a file or -"),
    (["trace", "{checkpoint}", "--ids", "1", "--json", "x" * 300], "x: cannot be written: File name"),
    (["generate", "{checkpoint}", "--ids", "1", "--seed", str(2**70)], "seed: expected a whole number"),
    (["trace", "{checkpoint}", "--ids", "1", "--json", "{none}/verdict.json"], "cannot be written"),
    (["trace", "{checkpoint}", "--ids", "1", "--json", "{empty}"], "cannot be written"),
    (
        ["generate", "{checkpoint}", "--ids", "1", "--max-new-tokens", "0"],
        "max_new_tokens: expected a whole number of at least 1",
    ),
    (
        ["generate", "{checkpoint}", "--ids", "1", "--temperature", "-1"],
        "temperature: expected a finite number",
    ),
    (["generate", "{checkpoint}", "--ids", "1", "--top-p", "0"], "top_p: expected a number above 0"),
    (["generate", "{checkpoint}", "--ids", "1", "--max-new-tokens", "9999"], "max_position_embeddings"),
    (["score"], "score: expected either a CHECKPOINT or --url, found none"),
    (["score", "{none}", "--url", "http://127.0.0.1:9"], "expected either a CHECKPOINT or --url, found both"),
    (["score", "{none}", "--dialogues", "30"], "expected one of the fixed subsets of 20 or 200, found 30"),
    (["score", "{none}", "--only", "recall", "--recall", "200"], "expected one of the fixed subsets of 20 or 100"),
    (["score", "{none}", "--only", "drafts"], "{none}: expected a directory, found nothing there"),
    (["score", "{none}", "--minimum", "perplexity=1"], "expected NAME=SHARE with a name of dialogue, recall, drafts"),
    (["score", "{none}", "--only", "recall", "--minimum", "dialogue=1"], "with a name of recall, found 'dialogue'"),
    (["score", "{none}", "--minimum", "dialogue=95"], "expected a share from 0 to 1, found '95'"),
    (["score", "{none}", "--minimum", "dialogue=nan"], "expected a share from 0 to 1, found 'nan'"),
    (["score", "{none}", "--only", "drafts", "--model", "m"], "--model: expected only with --url"),
    (["score", "--url", "127.0.0.1:9"], "url: expected http://host:port, without /v1, found '127.0.0.1:9'"),
    (["score", "--url", "http://127.0.0.1:9", "--dtype", "float16"], "--dtype: expected only with a checkpoint"),
    (["score", "--url", "http://127.0.0.1:9", "--expert-layout", "stacked"], "--expert-layout: expected only with a"),
    (["score", "--url", "http://127.0.0.1:9", "--device", "cuda"], "--device: expected only with a checkpoint"),
    (["score", "--url", "http://[::1"], "url: expected http://host:port, without /v1, found 'http://[::1'"),
    (["score", "--url", "http://127.0.0.1:9", "--only", "drafts"], "--only drafts: expected one of dialogue, recall"),
    (["sweep", "{none}"], "{none}: expected a checkpoint or a file of tensors, found nothing there"),
    (["sweep", "{checkpoint}", "--policy", "unsafe"], "neither a preset (safe, "),
    (["sweep", "{checkpoint}", "--chunk", "0"], "policy field chunk: expected a whole number from 1 to 1024, found 0"),
    (["sweep", "{checkpoint}", "--length", "8,x"], "argument --length: expected whole numbers separated by commas"),
    (["sweep", "{checkpoint}", "--dtype", "float8"], "dtype: expected one of float64, float32"),
    (["sweep", "{checkpoint}", "--metric", "speed"], "metrics: expected some of finite, first_bad"),
    (["sweep", "{checkpoint}", "--metric", "finite,"], "argument --metric: expected names separated by commas"),
    (["sweep", "{checkpoint}", "--out", "table.xlsx"], "expected a name that ends in one of .csv, .json, .parquet"),
    (["sweep", "{checkpoint}", "--out", "{none}/table.csv"], "table.csv: cannot be written: there is no folder"),
    (["sweep", "{checkpoint}", "--jobs", "0"], "jobs: expected a whole number of at least 1, found 0"),
    (["sweep", "{checkpoint}", "--resume", "{blank}"], "line 1: expected a finished cell of a sweep"),
    (["sweep", "{checkpoint}", "--backend", "torch_chunk:factored"], "policies are an axis of the grid"),
    (["report", "--card", "b200"], "card 'b200': expected one of a100, bi-v100, cpu"),
    (["rehearse", "{checkpoint}", "--ids", "1"], "--card: expected the card to rehearse, found none"),
    (["rehearse", "{checkpoint}", "--ids", "1", "--card", "b200"], "card 'b200': expected one of a100, bi-v100, cpu"),
    (["rehearse", "{checkpoint}", "--card", "t4"], "--prompt: expected a prompt to run, found none"),
    (["rehearse", "{none}", "--ids", "1", "--card", "t4"], "{none}: expected a directory, found nothing there"),
    (["rehearse", "{checkpoint}", "--ids", "1", "--card", "t4", "--length", "0"], "length: expected at least 1"),
    (["report", "--notebook", "99"], "--notebook 99: no such notebook"),
    (["report", "--checkpoint", "{none}"], "{none}: expected a directory"),
    (["report", "--prompt-file", "{binary}"], "expected UTF-8 text"),
    (["report", "--set", "policy"], "expected KEY=VALUE"),
    (["report", "--set", "polcy=safe"], "no such parameter in 01_gate_overflow"),
    (["report", "--set", "max_tokens=many"], "parameter max_tokens: expected int"),
    (["report", "--out", "{zero}"], "expected a folder that can be written"),
]


@pytest.mark.parametrize(("arguments", "expected"), BAD_INPUTS)
def test_unusable_input_is_one_line_and_no_traceback(run, checkpoint, tmp_path, arguments, expected):
    (tmp_path / "empty").mkdir()
    (tmp_path / "binary").write_bytes(b"ab\xff")
    (tmp_path / "zero").write_bytes(b"a\0b")
    (tmp_path / "blank").write_text(" \n")
    (tmp_path / "wrong").write_text('{"exponent": ["factored"]}')
    (tmp_path / "deep").write_text("[" * 100_000)
    files = ("none", "empty", "binary", "zero", "blank", "wrong", "deep")
    names = {name: str(tmp_path / name) for name in files}
    names["checkpoint"] = str(checkpoint)
    code, out, err = run(*(argument.format(**names) for argument in arguments))
    assert (code, out) == (2, "")
    assert expected.format(**names) in err
    assert err.startswith("workbench: error: ") and err.count("\n") == 1


def test_prompt_longer_than_the_model_reads_is_refused(run, tmp_path):
    short = write_small_checkpoint(tmp_path / "short", max_position_embeddings=16)
    code, _, err = run("trace", short, "--ids", ",".join("1" * 17))
    assert code == 2 and "expected at most 16 tokens (max_position_embeddings), found 17" in err


def test_a_prompt_without_a_tokenizer_says_which_file_is_missing(run, tmp_path):
    bare = write_small_checkpoint(tmp_path / "bare", tokenizer=False)
    code, _, err = run("generate", bare, "--prompt", "x")
    assert code == 2 and "tokenizer.json" in err and err.count("\n") == 1


def test_debug_shows_the_traceback(tmp_path):
    done = process("inspect", tmp_path / "none", "--debug")
    assert done.returncode == 2 and "defect" not in done.stderr
    assert "Traceback" in done.stderr and "InputError" in done.stderr


@pytest.mark.parametrize(
    ("raised", "code", "last"),
    [
        ("ValueError('odd')", 70, "please report it"),
        ("MemoryError()", 70, "please report it"),
        ("BaseExceptionGroup('two', [KeyboardInterrupt()])", 70, "please report it"),
        ("NonFiniteError('bad')", 1, "workbench: error: bad"),
    ],
)
def test_a_defect_is_told_apart_from_a_fault_that_was_found(raised, code, last):
    program = (
        "import sys; from workbench import cli; from workbench.errors import NonFiniteError\n"
        f"def lost(options): raise {raised}\n"
        "cli.inspect.run = lost; sys.argv = ['workbench', 'inspect', 'x']; sys.exit(cli.run_process())"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == code and last in done.stderr.splitlines()[-1]
    assert ("Traceback" in done.stderr) == (code == 70)


def test_messages_cannot_steer_a_terminal(run, tmp_path):
    code, _, err = run("inspect", tmp_path / "red\x1b[31m\u202eline\nbreak")
    assert code == 2 and err.count("\n") == 1 and err[:-1].isprintable()
    assert "red\\x1b[31m\\u202eline break" in err


@pytest.mark.parametrize("closed", [True, False])
def test_output_that_cannot_show_a_character_or_is_closed_ends_no_command(checkpoint, closed):
    # at this temperature every id is drawn, among them bytes that are no character and become U+FFFD
    words = f"-m workbench generate {checkpoint} --ids 1 --temperature 90 --seed 2 --max-new-tokens 100"
    command = f"{sys.executable} {words}" + (" >&-" if closed else "")
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, shell=True, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert closed or "\\ufffd" in done.stdout


def test_json_replaces_regular_files_only(run, checkpoint, tmp_path):
    target, link, pipe = tmp_path / "verdict.json", tmp_path / "link", tmp_path / "pipe"
    target.write_text("old")
    link.symlink_to(target)
    os.mkfifo(pipe)
    assert run("trace", checkpoint, "--ids", "1", "--json", link)[0] == 0
    assert link.is_symlink() and "verdict" in json.loads(target.read_text())
    with subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE) as reader:
        assert run("trace", checkpoint, "--ids", "1", "--json", pipe)[0] == 0
        assert json.loads(reader.communicate(timeout=60)[0]) == json.loads(target.read_text())
    assert pipe.is_fifo() and len(list(tmp_path.iterdir())) == 3


def test_a_checkpoint_may_be_its_weight_file(run, checkpoint):
    (file,) = checkpoint.glob("*.safetensors")
    code, out, _ = run("generate", file, "--prompt", "Fear no more", "--max-new-tokens", "4")
    assert (code, out) == run("generate", checkpoint, "--prompt", "Fear no more", "--max-new-tokens", "4")[:2]


def test_a_byte_order_mark_is_no_part_of_a_prompt(run, checkpoint, tmp_path):
    file = tmp_path / "notepad.txt"
    file.write_bytes(b"\xef\xbb\xbfFear no more")
    command = ("generate", checkpoint, "--max-new-tokens", "2", "--json")
    marked = run(*command, "--prompt-file", file)
    assert marked[0] == 0 and marked == run(*command, "--prompt", "Fear no more")


def test_a_tiny_temperature_is_the_likeliest_token(run, checkpoint):
    command = ("generate", checkpoint, "--ids", "1,2", "--max-new-tokens", "5")
    greedy = run(*command)
    assert greedy[0] == 0
    for tiny in ("1e-40", "1e-300"):
        assert run(*command, "--temperature", tiny) == greedy


def test_a_missing_package_is_named(run, monkeypatch, checkpoint):
    def lost(options):
        raise ModuleNotFoundError("No module named 'safetensors'", name="safetensors")

    monkeypatch.setattr(cli.inspect, "run", lost)
    code, _, err = run("inspect", checkpoint)
    assert code == 2 and "package safetensors is needed" in err and "bootstrap.py setup" in err


def test_the_keyboard_stops_a_command_with_130(checkpoint):
    command = [
        sys.executable,
        "-m",
        "workbench",
        "generate",
        str(checkpoint),
        "--ids",
        "1",
        "--max-new-tokens",
        "4000",
    ]
    # A pipe too small for all of it: the command cannot have come to its end when it is stopped.
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, pipesize=4096
    ) as running:
        running.stdout.read(100)  # it is well under way
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=60)
    assert (running.returncode, err) == (130, "workbench: stopped\n")


def test_the_keyboard_stops_a_report_and_leaves_nothing_half_done(tmp_path):
    command = [sys.executable, "-m", "workbench", "report", "--notebook", "01", "--out", str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert "starting a kernel" in running.stderr.readline()
        running.stderr.readline()  # a cell has ended: the next one runs
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=60)
    assert (running.returncode, out, err.splitlines()[-1]) == (130, "", "workbench: stopped")
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_goes_away_is_no_error(checkpoint):
    command = [
        sys.executable,
        "-m",
        "workbench",
        "generate",
        str(checkpoint),
        "--ids",
        "1",
        "--max-new-tokens",
        "500",
    ]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        running.stdout.read(1)
        running.stdout.close()
        err = running.stderr.read()
    assert (running.returncode, err) == (141, "")


def test_every_command_of_the_readme_is_one(run):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = [line.strip() for line in text.splitlines() if line.startswith("    workbench ")]
    assert len(commands) >= 4
    for command in commands:
        options = cli.build_parser().parse_args(shlex.split(command, comments=True)[1:])
        assert callable(options.run)


def test_the_python_of_the_readme_runs():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "frac_nan" in done.stdout, done.stderr


def test_dtypes_of_the_help_are_those_that_can_be_loaded():
    from workbench.loading import DTYPES

    assert list(LARGEST) == list(DTYPES)


# ============================================================================================================
# trace
# ============================================================================================================


def test_trace_of_a_safe_run_is_fine(run, checkpoint):
    code, out, err = run("trace", checkpoint, "--prompt", PROMPT, "--top", 3)
    assert (code, err) == (0, "")
    assert out.startswith("All values are finite in ") and "3 of 106 tensors, nearest to the limit" in out
    assert len(out.splitlines()) == 2 + 1 + 2 + 3


@pytest.mark.parametrize("choice", [["--policy", "factored"], ["--backend", "torch_chunk:factored"]])
def test_trace_of_an_overflow_names_op_and_cause_and_ends_with_1(run, checkpoint, tmp_path, choice):
    target = tmp_path / "verdict.json"
    code, out, _ = run("trace", checkpoint, "--prompt", PROMPT, *choice, "--json", target)
    assert code == 1
    assert out.startswith("First value that is not finite: layers.00.gdn.decay, op gated_delta_rule\n")
    assert "cause      exponent_overflow" in out and "12 of 106 tensors, not finite" in out
    found = json.loads(target.read_text())
    shared = ["verdict", "where", "cause_id", "evidence", "ruled_out", "fix", "confidence"]
    assert list(found)[:7] == shared and list(found["where"]) == ["layer", "op", "tap", "token", "head"]
    assert found["where"]["tap"] == "layers.00.gdn.decay" and found["cause_id"] == "exponent_overflow"
    assert found["logits_bad_share"] == 1.0 and found["policy"]["exponent"] == "factored"
    assert found["dtype"] == "bfloat16" and len(found["table"]) == 106
    assert found["table"][0]["tap"] == "embed" and found["table"][0]["layer"] is None
    assert found["table"][-1]["absmax"] is None and found["table"][-1]["first_bad"] == [0, 0, 0]
    rows = {(row["op"], row["backend"], row["calls"]): row for row in found["backends"]}
    reason = rows["gated_delta_rule", "torch_chunk", 3]["reason"]
    assert reason == "named by the user" if "--backend" in choice else "automatic order" in reason
    assert [path.name for path in tmp_path.iterdir()] == ["verdict.json"]


def test_trace_as_json_on_stdout_is_nothing_but_json(run, checkpoint):
    code, out, _ = run("trace", checkpoint, "--ids", "5 6,7", "--json", "-", "--dtype", "float32")
    found = json.loads(out)
    assert code == 0 and (found["tokens"], found["dtype"], found["cause_id"]) == (3, "float32", None)


def test_trace_with_a_check_names_the_place_without_ranges(run, checkpoint):
    code, out, _ = run("trace", checkpoint, "--prompt", PROMPT, "--policy", "factored", "--check", "exact")
    assert code == 1 and out.startswith("First value that is not finite: layers.00.gdn.decay, op gated_delta_rule\n")
    assert "cause      not_established" in out and "absmax" not in out and "first bad" in out
    code, out, _ = run("trace", checkpoint, "--prompt", PROMPT, "--check", "exact")
    assert (code, out) == (0, "All values are finite in 106 tensors of 1 forward pass\n")


def test_trace_with_a_sample_does_not_claim_what_it_has_not_seen(run, checkpoint, tmp_path):
    target = tmp_path / "verdict.json"
    arguments = ["trace", checkpoint, "--prompt", PROMPT, "--check", "sampled", "--json", target]
    code, out, _ = run(*arguments)
    unseen = "the first and last 64 values of each tensor were read, a fault elsewhere is not seen"
    assert code == 0 and out == f"All sampled values are finite in 106 tensors of 1 forward pass; {unseen}\n"
    code, out, _ = run(*arguments, "--policy", "factored")
    found = json.loads(target.read_text())
    assert code == 1 and unseen in found["verdict"] and found["check"] == "sampled"
    assert found["ruled_out"] == [] and "sampled values are not finite" in found["evidence"][0]
    exact = json.loads(run(*arguments[:-1], "-", "--policy", "factored", "--check", "exact")[1])
    bad = [sum(row["first_bad"] is not None for row in result["table"]) for result in (exact, found)]
    assert bad[0] > bad[1] > 0


def test_trace_counts_what_narrowing_casts_lose(run, checkpoint, tmp_path):
    target = tmp_path / "verdict.json"
    arguments = ["trace", checkpoint, "--prompt", PROMPT, "--casts", "--json", target, "--top", 2, "--dtype"]
    code, out, _ = run(*arguments, "float16")
    rows = json.loads(target.read_text())["casts"]
    assert code == 0 and list(rows[0]) == ["tap", "from", "to", "values", "overflowed", "flushed", "halved"]
    assert {row["to"] for row in rows} == {"float16", "float32"}  # differences of gates are taken in float64
    assert ("layers.00.gdn.out", "float32", "float16") in {(row["tap"], row["from"], row["to"]) for row in rows}
    values, flushed = (sum(row[name] for row in rows) for name in ("values", "flushed"))
    taps = len({row["tap"] for row in rows})
    assert f"Narrowing casts before {taps} tap points: of {values} values 0 overflowed, {flushed} became zero" in out
    assert "2 of" in out.split("Narrowing casts")[1] and "lost most:" in out
    run(*arguments, "float32")
    assert {row["to"] for row in json.loads(target.read_text())["casts"]} == {"float32"}
    code, out, _ = run(*arguments, "float64")
    assert "Narrowing casts: none in this pass." in out and json.loads(target.read_text())["casts"] == []
    assert "casts" not in json.loads(run("trace", checkpoint, "--ids", "1", "--json", "-")[1])


def test_trace_with_flags_names_the_op_from_outside(run, checkpoint, tmp_path):
    target = tmp_path / "verdict.json"
    arguments = ["trace", checkpoint, "--prompt", PROMPT, "--check", "flags", "--json", target, "--policy"]
    code, out, _ = run(*arguments, "factored")
    found = json.loads(target.read_text())
    assert code == 1 and out.startswith("First value that is not finite: layers.00.gdn.state, op gated_delta_rule\n")
    assert "at least one of its values is not finite; check exact says how many" in out
    assert found["where"]["token"] is None and found["cause_id"] == "not_established" and found["ruled_out"]
    code, out, _ = run(*arguments, "safe", "--decode", 2)
    assert (code, out) == (0, "All values are finite in 243 tensors of 3 forward passes\n")


def test_trace_saves_what_is_selected(run, checkpoint, tmp_path):
    from workbench.provenance import checkpoint_hash
    from workbench.tracing.dump import read_trace

    prompt = ",".join(map(str, range(1, 80)))
    arguments = ["trace", checkpoint, "--ids", prompt, "--tap", "*.gdn.out", "--tap", "logits"]
    arguments += ["--layers", "0,2-3", "--tokens", "70:75", "--decode", 2, "--steps", "0:2"]
    code, out, err = run(*arguments, "--dump", tmp_path / "run", "--json", tmp_path / "verdict.json")
    assert (code, err) == (0, "")
    found = read_trace(tmp_path / "run")
    assert [(tap, step) for tap, step, _ in found.tensors] == [("layers.00.gdn.out", 0), ("layers.02.gdn.out", 0)]
    assert found.tensor("layers.02.gdn.out").shape[:2] == (1, 5)
    assert found.origin.model_hash == checkpoint_hash(checkpoint)
    assert f"{tmp_path / 'run'}: 2 tensors of 1 pass, {found.content['written_bytes']} bytes" in out
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert verdict["dump"]["tensors"] == 2 == len(verdict["table"])
    code, out, _ = run(*arguments, "--dump", tmp_path / "run", "--cap", "1k")
    assert code == 0 and "more did not fit and are listed in it" in out
    assert len(read_trace(tmp_path / "run").content["left_out"]) > 0


def test_trace_writes_the_ring_only_where_a_flag_trips(run, checkpoint, tmp_path):
    from workbench.tracing.dump import read_trace

    arguments = ["trace", checkpoint, "--prompt", PROMPT, "--check", "flags", "--dump", tmp_path / "run", "--ring", 2]
    code, out, _ = run(*arguments, "--decode", 3)
    assert code == 0 and "No flag tripped: nothing was written." in out and not (tmp_path / "run").exists()
    code, out, _ = run(*arguments, "--policy", "factored")
    assert code == 1 and read_trace(tmp_path / "run").content["tripped"][0]["tap"] == "layers.00.gdn.state"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--layers", "x"], "--layers: expected numbers and ranges such as 0-3,7, found 'x'"),
        (["--layers", "9"], "layers: expected 0 to 3, found 9"),
        (["--tap", "nothing"], "pattern 'nothing' matches no tap point"),
        (["--tokens", "5:2"], "--tokens: expected A:B with A below B"),
        (["--steps", "1"], "--steps: expected A:B with A below B"),
        (["--cap", "0"], "--cap: expected a number of bytes such as 500M, found '0'"),
        (["--ring", "2"], "--ring 2: expected at least 1, with --dump DIR"),
        (["--ring", "0", "--dump", "x"], "--ring 0: expected at least 1"),
        (["--decode", "2"], "--decode 2: expected a number of tokens, with --check float64, --check flags or --dump"),
        (["--check", "float64", "--tap", "logits"], "expected neither a selection nor --dump"),
        (["--check", "flags", "--steps", "0:1"], "check flags: expected neither"),
        (["--dump", "README.md"], "expected a directory or nothing, found a file"),
    ],
)
def test_an_unusable_selection_is_one_line(run, checkpoint, monkeypatch, options, message):
    monkeypatch.chdir(ROOT)
    code, out, err = run("trace", checkpoint, "--ids", "1,2", *options)
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1


# ============================================================================================================
# generate
# ============================================================================================================


def test_generate_writes_what_the_model_continues_with(run, checkpoint):
    code, out, err = run("generate", checkpoint, "--prompt", "To be", "--max-new-tokens", 6, "--json")
    found = json.loads(out)
    assert (code, err, found["reason"], len(found["tokens"])) == (0, "", "length", 6)
    code, text, _ = run("generate", checkpoint, "--prompt", "To be", "--max-new-tokens", 6)
    assert code == 0 and text == found["text"] + "\n"


def test_generate_is_the_same_for_the_same_seed_only(run, checkpoint):
    arguments = ["generate", checkpoint, "--ids", "5,6", "--temperature", "1.5", "--max-new-tokens", 12]
    first, again, other = (run(*arguments, "--seed", seed)[1] for seed in (1, 1, 2))
    assert first == again != other


def test_generate_ends_where_it_is_told_to(run, checkpoint, tmp_path):
    """At a token named by --stop, and at those that generation_config.json lists."""
    plain = json.loads(run("generate", checkpoint, "--prompt", "To be", "--max-new-tokens", 6, "--json")[1])
    token = plain["tokens"][2]
    expected = plain["tokens"][: plain["tokens"].index(token) + 1]
    text = Tokenizer.from_directory(checkpoint).decode([token])
    for option in (["--stop", text], []):
        folder = shutil.copytree(checkpoint, tmp_path / f"copy{len(option)}")
        if not option:
            (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [token, 4]}))
        code, out, _ = run("generate", folder, "--prompt", "To be", "--max-new-tokens", 6, "--json", *option)
        found = json.loads(out)
        assert (code, found["reason"], found["tokens"]) == (0, "stop", expected)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": "end"}))
    code, _, err = run("generate", folder, "--prompt", "To be")
    assert code == 2 and "eos_token_id: expected a token id or a list of them, found ['end']" in err
    code, _, err = run("generate", checkpoint, "--prompt", "To be", "--stop", "no such token")
    assert code == 2 and "--stop 'no such token': expected the text of one token, found that of" in err


@pytest.fixture(scope="module")
def chat_checkpoint(checkpoint, tmp_path_factory) -> Path:
    folder = shutil.copytree(checkpoint, tmp_path_factory.mktemp("chat") / "checkpoint")
    (folder / "chat_template.jinja").write_text(
        "{{ tools | length if tools else 0 }}{{ 'off' if enable_thinking is false else 'on' }}"
        "{% for m in messages %}[{{ m.role }} {{ m.content }}]{% endfor %}"
    )
    return folder


@pytest.mark.parametrize("command", ["generate", "trace"])
def test_a_conversation_is_a_prompt(run, chat_checkpoint, tmp_path, command):
    """A message, a list of them, and a dialogue with its own tools and thinking; options go before the dialogue's."""
    encode = Tokenizer.from_directory(chat_checkpoint).encode
    messages = [{"role": "user", "content": "Who?"}, {"role": "user", "content": "I"}]
    tool = {"type": "function", "function": {"name": "f"}}
    tools = (tool, tool | {"function": {"name": "g"}})
    dialogue = Dialogue("d", "answer", False, tools, tuple(messages), ExpectedAnswer("x"))
    files = {"m": messages, "d": dialogue.to_json(), "t": [tool]}
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    cases = {
        ("--chat", "Who?"): "0on[user Who?]",
        ("--chat", "Who?", "--tools", tmp_path / "t", "--thinking", "off"): "1off[user Who?]",
        ("--messages", tmp_path / "m"): "0on[user Who?][user I]",
        ("--messages", tmp_path / "d"): "2off[user Who?][user I]",
        ("--messages", tmp_path / "d", "--thinking", "on", "--tools", tmp_path / "t"): "1on[user Who?][user I]",
    }
    for options, prompt in cases.items():
        extra = ["--max-new-tokens", 1, "--json"] if command == "generate" else ["--json", "-"]
        code, out, err = run(command, chat_checkpoint, *options, *extra)
        found = json.loads(out)
        assert code == 0, err
        assert found["prompt_tokens" if command == "generate" else "tokens"] == len(encode(prompt)), prompt


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt", "x", "--thinking", "off"], "--thinking: expected with --chat or --messages, found neither"),
        (["--ids", "1", "--tools", "x"], "--tools: expected with --chat or --messages, found neither"),
        (["--chat", " "], "--chat: expected some text, found none"),
        (["--messages", "absent.json"], "absent.json: cannot be read"),
        (["--messages", "README.md"], "README.md: expected JSON, found"),
        (["--messages", "data/dialogues.jsonl"], "Extra data: line 2 column 1"),
        (["--messages", "data/dialogues.jsonl"], "; give one line of a file that has a value on each"),
        (["--messages", "data/miniature/config.json"], "config.json: not a list of messages, and as a dialogue: "),
        (["--chat", "x", "--tools", "data/miniature/config.json"], "config.json: expected a JSON list of objects"),
    ],
)  # fmt: skip
def test_an_unusable_conversation_is_one_line(run, chat_checkpoint, monkeypatch, options, message):
    monkeypatch.chdir(ROOT)
    code, out, err = run("generate", chat_checkpoint, *options)
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1


HELLO = {"role": "user", "content": "Hello"}


@pytest.mark.parametrize(
    ("option", "content", "message"),
    [
        ("--messages", "null", "expected a JSON list of objects, at least one, found 'None'"),
        ("--messages", "[]", "expected a JSON list of objects, at least one, found '[]'"),
        ("--messages", "5", "expected a JSON list of objects, at least one, found '5'"),
        ("--messages", '["Hello"]', "expected a JSON list of objects, at least one"),
        ("--messages", "[" * 100_000, "expected JSON, found: maximum recursion depth"),
        ("--messages", "[" + "1" * 6000 + "]", "expected JSON, found: Exceeds the limit"),
        ("--messages", json.dumps([HELLO])[:-4], "expected JSON, found: Unterminated string"),
        ("--messages", '[{"content": "Hello"}]', 'messages[0]: expected an object with a "role"'),
        ("--messages", json.dumps([HELLO | {"content": "\ud800"}]), "expected Unicode text, found a lone surrogate"),
        ("--tools", "null", "expected a JSON list of objects, found 'None'"),
        ("--tools", '{"type": "function"}', "expected a JSON list of objects, found"),
        ("--tools", '[{"name": "f"}]', '[0]: expected {"type": "function", "function": {"name", ...}}, found'),
        ("--tools", '[{"function": {"name": 5}}]', "[0]: expected"),
        ("--tools", "[" * 100_000, "expected JSON, found: maximum recursion depth"),
    ],
)
def test_a_file_that_is_no_conversation_and_no_tools_is_one_line(
    run, chat_checkpoint, tmp_path, option, content, message
):
    file = tmp_path / "file.json"
    file.write_text(content)
    code, out, err = run("generate", chat_checkpoint, *(["--chat", "x"] if option == "--tools" else []), option, file)
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1
    assert "file.json" in err or "surrogate" in err


def test_narrowing_that_loses_weights_is_told(run, checkpoint, tmp_path):
    stored = read_checkpoint(checkpoint)
    tensors = dict(stored.tensors)
    name = "layers.0.mlp.shared_expert.up_proj.weight"
    tensors[name] = tensors[name].clone()
    tensors[name][0, 0] = 1e-9
    folder = shutil.copytree(checkpoint, tmp_path / "small", ignore=shutil.ignore_patterns("*.safetensors"))
    write_checkpoint(folder, stored.config, tensors)
    code, _, err = run("trace", folder, "--prompt", "To be", "--dtype", "float16")
    flushed = int(re.search(r"narrowing to float16: 0 weights overflow, (\d+) become zero", err).group(1))
    assert code == 0 and flushed >= 1
    assert "narrowing" not in run("trace", folder, "--prompt", "To be")[2]


def test_generate_without_a_tokenizer_prints_ids(run, tmp_path):
    bare = write_small_checkpoint(tmp_path / "bare", tokenizer=False)
    code, out, _ = run("generate", bare, "--ids", "5,6", "--max-new-tokens", 3)
    assert code == 0 and len([int(token) for token in out.split()]) == 3
    assert json.loads(run("generate", bare, "--ids", "5,6", "--json")[1])["text"] is None


def test_generate_stops_with_1_when_logits_are_not_finite(run, checkpoint, tmp_path):
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(PROMPT)
    code, out, err = run("generate", checkpoint, "--prompt-file", prompt, "--policy", "factored")
    assert (code, out) == (1, "") and "expected finite values" in err and "workbench trace" in err


# ============================================================================================================
# inspect
# ============================================================================================================


def test_inspect_accounts_for_every_parameter_and_byte(run, checkpoint):
    code, out, _ = run("inspect", checkpoint)
    assert code == 0
    assert "qwen3_5_moe: 4 layers (3 linear, 1 full attention), hidden 64, vocabulary 4,096" in out
    assert "experts: 8 of width 32, 2 per token, shared expert of width 48" in out
    found = json.loads(run("inspect", checkpoint, "--json")[1])
    from workbench.checkpoint import expected_tensors
    from workbench.config import ModelConfig

    config = ModelConfig.from_hf(found["config"])
    total = sum(torch.Size(shape).numel() for shape in expected_tensors(config).values())
    assert sum(row["parameters"] for row in found["groups"]) == total
    assert f"{total:,}" in out
    accounting = found["accounting"]
    held = sum(entry["bytes"] for entry in accounting["totals"].values())
    assert held + accounting["header_bytes"] == accounting["file_bytes"]
    assert accounting["file_bytes"] == (checkpoint / "model.safetensors").stat().st_size
    assert len(accounting["tensors"]) == accounting["totals"]["loaded"]["tensors"]


def test_inspect_counts_what_narrowing_costs_and_ends_with_1_on_overflow(run, tmp_path):
    from workbench.checkpoint import read_checkpoint, write_checkpoint

    plain = write_small_checkpoint(tmp_path / "plain")
    checkpoint = read_checkpoint(plain)
    tensors = dict(checkpoint.tensors)
    tensors["norm.weight"] = tensors["norm.weight"].clone()
    tensors["norm.weight"][:2] = torch.tensor([70000.0, 1e-9])
    write_checkpoint(tmp_path / "wide", checkpoint.config, tensors)
    code, out, _ = run("inspect", tmp_path / "wide", "--dtype", "float16")
    assert code == 1 and "1 overflow and" in out
    (row,) = [line for line in out.splitlines() if line.startswith("norm.weight")]
    assert row.split()[4:6] == ["1", "1"]
    code, out, _ = run("inspect", plain, "--dtype", "float32")
    assert code == 0 and "no tensor can change its values" in out


def test_every_tensor_name_has_a_group_that_fits():
    expected = {
        "embed_tokens.weight": "embedding",
        "lm_head.weight": "output head",
        "norm.weight": "norms",
        "layers.0.input_layernorm.weight": "norms",
        "layers.0.linear_attn.norm.weight": "gated delta net",
        "layers.3.self_attn.q_norm.weight": "attention",
        "layers.3.mlp.gate.weight": "router",
        "layers.3.mlp.experts.down_proj": "routed experts",
        "layers.3.mlp.shared_expert_gate.weight": "shared expert",
        "layers.3.mlp.gate_proj.weight": "dense MLP",
        "mtp.layers.0.mlp.gate.weight": "multi-token prediction",
    }
    assert {name: inventory.group_of(name) for name in expected} == expected


def test_text_table_aligns_numbers_right_and_marks_what_is_missing():
    import pandas as pd

    frame = pd.DataFrame({"name": ["a", "bb"], "n": [1000, 2], "x": [0.5, float("nan")], "at": [(1, 2), None]})
    lines = text_table(frame, {"n": ","}).splitlines()
    assert lines == ["name      n    x  at", "a     1,000  0.5  (1, 2)", "bb        2    -  -"]


# ============================================================================================================
# report
# ============================================================================================================


def test_report_prints_its_files_and_three_lines(run, monkeypatch, tmp_path):
    from workbench.report import build

    seen = {}

    def pretend(request, say):
        seen["request"] = request
        say("working")
        findings = {"verdict": ["one", "two", "three"], "fault_found": seen.get("fault", False)}
        return [build.Report("01_x", tmp_path / "01_x.html", tmp_path / "01_x.findings.json", findings)]

    monkeypatch.setattr(build, "build", pretend)
    prompt = tmp_path / "a prompt.txt"
    prompt.write_text("words")
    code, out, err = run("report", "--notebook", "01", "--prompt-file", prompt, "--set", "full=True", "--out", tmp_path)
    assert (code, err) == (0, "working\n")
    assert out.splitlines() == [
        str(tmp_path / "01_x.html"),
        "  one",
        "  two",
        "  three",
        str(tmp_path / "index.html"),
    ]
    request = seen["request"]
    assert (request.prompt, request.settings, request.notebook) == ("words", ("full=True",), "01")
    assert request.command == f"workbench report --notebook 01 --prompt-file '{prompt}' --set full=True"
    seen["fault"] = True
    assert run("report", "--out", tmp_path)[0] == 1


def test_presets_of_the_help_are_complete(run):
    _, out, _ = run("trace", "--help")
    assert all(name in out for name in PRESETS)
    assert os.environ["OMP_NUM_THREADS"] == "1"


# ============================================================================================================
# score
# ============================================================================================================

ONCE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"


@pytest.fixture
def fixed_data(tmp_path, monkeypatch) -> list[Dialogue]:
    """Twenty dialogues and facts in the place of the project's own, and a held-out text."""
    rows = [
        Dialogue(f"hello-{n}", "answer", n % 2 == 0, (), ({"role": "user", "content": f"Hello {n}"},),
                 ExpectedAnswer("Hello."))
        for n in range(20)
    ]  # fmt: skip
    lines = "".join(json.dumps(row.to_json()) + "\n" for row in rows)
    for name in ("dialogues.jsonl", "recall.jsonl"):
        (tmp_path / name).write_text(lines)
    (tmp_path / "heldout.jsonl").write_text(json.dumps({"text": PROMPT * 200}) + "\n")
    for module in ("dialogue", "quality"):
        monkeypatch.setattr(f"workbench.{module}.DATA", tmp_path)
    return rows


@pytest.fixture
def talking(tmp_path) -> Path:
    """A checkpoint with a chat template."""
    folder = write_small_checkpoint(tmp_path / "talking", mtp_num_hidden_layers=0)
    (folder / "chat_template.jinja").write_text(ONCE)
    return folder


def test_score_of_a_checkpoint(run, talking, fixed_data, tmp_path):
    target = tmp_path / "score.json"
    code, out, err = run(
        "score", talking, "--only", "dialogue", "--only", "perplexity", "--show-wrong", "--json", target
    )
    assert code == 0
    assert out.startswith("dialogue       0.0%  0 of 20: answer 0/20; thinking off 0/10, on 0/10\nperplexity ")
    assert "hello-0, thinking on: expected an end, found none in 192 tokens\n  expected  'Hello.'\n  found " in out
    assert "dialogue: 20 of 20 dialogues, 0 right" in err
    content = json.loads(target.read_text())
    assert content["dtype"] == "bfloat16" and content["policy"] == PRESETS["safe"].to_json() and content["backends"]
    assert set(content["scores"]) == {"dialogue", "perplexity"}
    assert content["scores"]["perplexity"]["predicted"] == 20 * 512
    assert len(content["scores"]["dialogue"]["replies"]) == 20


def test_score_reads_as_many_windows_as_are_asked_for(run, talking, fixed_data):
    seen = {}
    for windows in ("1", "3", "all"):
        code, out, _ = run("score", talking, "--only", "perplexity", "--windows", windows, "--json", "-")
        seen[windows] = json.loads(out)["scores"]["perplexity"]["predicted"]
        assert code == 0
    assert seen["1"] == 512 and seen["3"] == 3 * 512 < seen["all"]
    code, _, err = run("score", talking, "--windows", "0")
    assert code == 2 and "argument --windows: expected a whole number of at least 1, or all, found '0'" in err


def test_score_of_a_model_that_computes_nan_is_zero_with_the_reason(run, talking, fixed_data):
    code, out, _ = run("score", talking, "--only", "dialogue", "--policy", "factored", "--json", "-")
    content = json.loads(out)
    assert code == 0 and content["scores"]["dialogue"]["share"] == 0.0
    replies = content["scores"]["dialogue"]["replies"]
    assert any("NaN or Inf" in (reply["problem"] or "") and not reply["is_finite"] for reply in replies), replies[0]


def test_drafts_are_left_out_for_a_model_without_the_head_unless_named(run, talking, fixed_data):
    code, _, err = run("score", talking, "--only", "drafts")
    assert code == 2 and "multi-token-prediction head" in err


def test_score_of_a_server_and_a_minimum(run, fixed_data):
    def answer(body):
        return completion("Hello." if body["messages"][0]["content"] != "Hello 7" else "Bye.")

    with chat_server(answer) as (url, _):
        code, out, _ = run("score", "--url", url, "--minimum", "dialogue=0.95", "--minimum", "recall=0.9")
        assert (code, out.splitlines()[0]) == (
            0,
            "dialogue      95.0%  19 of 20: answer 19/20; thinking off 9/10, on 10/10",
        )
        code, out, _ = run("score", "--url", url, "--only", "recall", "--minimum", "recall=0.96", "--show-wrong")
    assert code == 1
    assert "hello-7, thinking off: another reply" in out and "Bye." in out
    assert out.splitlines()[-1] == "recall: expected at least 0.96, found 0.95"


def test_score_of_a_server_that_fails_is_one_line(run, fixed_data):
    with chat_server(lambda body: (500, {"message": "engine died"})) as (url, _):
        code, out, err = run("score", "--url", url)
    assert (code, out) == (2, "") and err.splitlines()[-1].startswith("workbench: error: ") and "engine died" in err


# ============================================================================================================
# sweep
# ============================================================================================================


def test_sweep_of_a_checkpoint_is_a_table_and_files_and_goes_on(run, checkpoint, tmp_path):
    kept, table = tmp_path / "kept.jsonl", tmp_path / "table.csv"
    command = ["sweep", checkpoint, "--policy", "safe,factored", "--length", "64,9999", "--metric", "finite,first_bad",
               "--resume", kept, "--out", table, "--out", tmp_path / "table.parquet"]  # fmt: skip
    code, out, err = run(*command, "--ids", ",".join(map(str, range(70))))
    assert code == 0
    lines = [line.split() for line in out.splitlines()]
    assert lines[0] == ["policy", "chunk", "dtype", "length", "finite", "first_bad", "error"]
    assert lines[1][:6] == ["safe", "64", "float32", "64", "100.0%", "-"]
    assert lines[3][:4] == ["factored", "64", "float32", "64"] and lines[3][5] == "layers.00.gdn.decay"
    assert "found 9999" in out.splitlines()[2]
    assert err.splitlines()[0] == "sweep: 0 of 4 cells" and err.splitlines()[-1].startswith("sweep: 4 of 4 cells, 2 f")
    rows = pd.read_csv(table)
    assert rows["finite"][0] == 1.0 and rows["error"].notna().tolist() == [False, True, False, True]
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "table.parquet").astype(rows.dtypes), rows)
    code, again, err = run(*command, "--ids", ",".join(map(str, range(70))))
    assert (code, again) == (0, out) and err.splitlines()[0] == "sweep: 2 of 4 cells, kept from before"


def test_sweep_of_tensors_under_every_policy_and_one_that_measures_nothing(run, tmp_path):
    save_file(spec.example(tokens=64, log_decay=-1.5), tmp_path / "layer.safetensors")
    code, out, _ = run("sweep", tmp_path / "layer.safetensors", "--policy", "all", "--metric", "finite")
    finite = {line.split()[0]: line.split()[-1] for line in out.splitlines()[1:]}
    assert code == 0 and list(finite) == list(PRESETS)
    assert finite["safe"] == "100.0%" and finite["factored"] != "100.0%"
    code, out, err = run("sweep", tmp_path / "layer.safetensors", "--length", "65", "--metric", "finite")
    assert code == 2
    assert err.splitlines()[-1].startswith("workbench: error: sweep: expected cells that can be measured, found none")


def test_sweep_draws_a_bar_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    bar = Bar()
    bar(0, 2, None)
    bar(1, 2, {"error": "x"})
    bar(2, 2, {"error": None})
    drawn = capsys.readouterr().err.split("\r")
    assert drawn[1].startswith("[........................] 0 of 2 cells\x1b")
    assert drawn[2].startswith("[############............] 1 of 2 cells, 1 failed, about ")
    assert drawn[3] == "[########################] 2 of 2 cells, 1 failed\x1b[K\n"
