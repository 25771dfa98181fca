"""`--card`, `--out` and `--json` of the commands that rehearse a card: told in time, in one line, and repeatable."""

import json
import os
import shlex
import shutil
from pathlib import Path

import pytest

from workbench import cli
from workbench.cli import compare as compare_command
from workbench.cli import inputs
from workbench.cli import rehearse as rehearse_command
from workbench.cli.output import check_file, write_file
from workbench.errors import InputError

ROOT = Path(__file__).resolve().parent.parent
MINIATURE = ROOT / "data" / "miniature"
IDS = ("--ids", "300,301,302")

#: A run of each command that takes a card; what a rehearsed card leaves of it is the same everywhere.
COMMANDS = {
    "trace": IDS, "compare": ("--a", "torch_chunk", "--b", "torch_recurrent", *IDS),
    "routing": ("--prompt", "hello"),
    "generate": (*IDS, "--max-new-tokens", "1"), "score": ("--only", "perplexity", "--windows", "1"),
    "sweep": ("--length", "8"), "readiness": IDS, "inspect": (), "rehearse": (*IDS, "--no-readiness"),
}  # fmt: skip


@pytest.fixture
def run(capsys):
    def call(*arguments) -> tuple[int, str, str]:
        code = cli.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_plans_the_memory_of_the_card_in_its_dtype(run, command):
    code, out, err = run(command, MINIATURE, "--card", "v100", *COMMANDS[command])
    assert code == 0
    assert "weights 10.6 MiB" in out + err and "of 26.8 GiB (90% of the card)" in out + err, (out, err)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_refuses_a_card_that_is_not_there(run, command):
    code, out, err = run(command, MINIATURE, "--card", "b200", *COMMANDS[command])
    assert (code, out) == (2, "") and err.startswith("workbench: error: card 'b200': expected one of a100")
    assert err.count("\n") == 1


WITH_JSON = ("trace", "compare", "routing", "score", "readiness", "rehearse", "backends", "port", "conformance")


def test_every_option_for_json_is_covered():
    """`--json FILE|-`; the commands that print it alone have a flag."""
    parser = cli.build_parser()
    (commands,) = (action for action in parser._actions if hasattr(action, "choices") and action.choices)
    has = {
        name for name, command in commands.choices.items()
        for action in command._actions if "--json" in action.option_strings and action.metavar == "FILE|-"
    }  # fmt: skip
    assert has == {*WITH_JSON, "probe", "bench"}


@pytest.mark.parametrize("command", WITH_JSON)
@pytest.mark.parametrize(
    ("target", "expected"),
    [("", "expected the name of a file or -, found an empty one"), ("{folder}", "cannot be written: Is a directory"),
     ("{folder}/none/x.json", "cannot be written: No such file")],
)  # fmt: skip
def test_json_that_cannot_be_written_is_told_before_the_run(run, tmp_path, command, target, expected):
    needed = {"backends": (), "port": ("--card", "t4"), "conformance": ("linear",)}
    words = needed[command] if command in needed else (MINIATURE, *COMMANDS[command])
    words = (*words, "--card", "t4") if command == "rehearse" else words
    code, out, err = run(command, *words, "--json", target.format(folder=tmp_path))
    assert (code, out) == (2, "") and expected in err and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["rehearse", "compare"])
@pytest.mark.parametrize(
    ("target", "expected"), [("{file}/x.html", "Not a directory"), ("{folder}/" + "x" * 300 + ".html", "too long")]
)
def test_a_page_that_cannot_be_written_is_told_before_the_run(run, tmp_path, command, target, expected):
    (tmp_path / "file").write_text("kept")
    target = target.format(folder=tmp_path, file=tmp_path / "file")
    code, out, err = run(command, MINIATURE, "--card", "t4", *COMMANDS[command], "--out", target)
    assert (code, out) == (2, "") and "cannot be written: " in err and expected in err and err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (("--out", ""), "--out: expected the name of a file, found an empty one"),
        (("--out", str(ROOT)), "cannot be written: Is a directory"),
        (("--dtype", "float8"), "dtype: expected one of float64, float32, bfloat16, float16, found 'float8'"),
        (("--device", "mps"), "device: expected cpu, cuda or cuda:N, found 'mps'"),
        (("--device", "cuda:99"), "device cuda:99: expected a CUDA device of this machine"),
        (("--bridge", "{none}.toml"), "No such file or directory"),
        (("--prefill", "0"), "prompt: expected at least 1, found 0"),
        (("--utilisation", "nan"), "utilisation: expected above 0 and at most 1, found nan"),
    ],
)
def test_a_setting_of_a_rehearsal_that_cannot_be_is_one_line(run, tmp_path, setting, expected):
    setting = tuple(word.format(none=tmp_path / "none") for word in setting)
    code, out, err = run("rehearse", MINIATURE, "--card", "bi-v100", *IDS, *setting)
    assert (code, out) == (2, "") and expected in err
    assert err.startswith("workbench: error: ") and err.count("\n") == 1, err


def test_a_file_that_cannot_be_replaced_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(InputError, match=r"^--out .*page.html: cannot be written: No space left on device$"):
        write_file("text", tmp_path / "page.html", "--out")
    assert list(tmp_path.iterdir()) == []


def test_the_check_leaves_what_is_there_and_makes_no_folder(tmp_path):
    kept = tmp_path / "page.html"
    kept.write_text("kept")
    check_file(kept, "--out")
    check_file(tmp_path / "new" / "deep" / "page.html", "--out", makes_folders=True)
    check_file(os.devnull, "--json")
    assert kept.read_text() == "kept" and [path.name for path in tmp_path.iterdir()] == ["page.html"]


REPEATED = {
    "rehearse": (
        rehearse_command, ["--card", "t4", "--ids", "1,2", "--dtype", "float32", "--backend", "linear=torch_linear",
                           "--policy", "safe", "--bridge", "a b.toml", "--router-dtype", "float32", "--lenient",
                           "--device", "cuda:1", "--length", "9", "--sequences", "2", "--prefill", "8",
                           "--utilisation", "0.5", "--plan-only", "--no-readiness", "--expert-layout", "stacked"],
    ),
    "compare": (
        compare_command, ["--a", "torch_chunk", "--b", ":safe", "--chat", "a 'b'", "--thinking", "on", "--card", "t4",
                          "--card-b", "a100", "--dtype-a", "float16", "--map-a", "m.json", "--bridge", "b.toml",
                          "--device", "cuda", "--decode", "2", "--expert-layout", "stacked", "--tools", "t.json"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("command", REPEATED)
def test_the_command_on_a_page_repeats_the_run(command):
    module, words = REPEATED[command]
    options = cli.build_parser().parse_args([command, "some folder", *words])
    again = cli.build_parser().parse_args(shlex.split(module._command(options))[1:])
    assert vars(again) == vars(options)
    left_out = {"debug", "json", "out", "top", "run", "save_a", "save_b", "map_b", "dtype_b", "card_a", "prompt",
                "prompt_file", "messages", "ids", "chat", "thinking", "tools"}  # fmt: skip
    default = cli.build_parser().parse_args([command, "x", *words[: 4 if command == "compare" else 2]])
    same = {name for name, value in vars(options).items() if value == getattr(default, name)} - left_out
    assert same <= {"card", "a", "b"}, same  # every other option is tried above


def test_inspect_says_what_the_dtype_of_the_card_loses_and_whether_it_fits(run, tmp_path):
    code, out, _ = run("inspect", MINIATURE, "--card", "bi-v100")
    assert code == 0 and "narrowing to float16: of 5,538,048 values in 141 tensors 0 overflow and 4 become zero" in out
    assert "Iluvatar BI-V100 32 GB, rehearsed\n  products in float16: run there\n  memory: weights 10.6 MiB" in out
    code, out, _ = run("inspect", MINIATURE, "--card", "t4", "--dtype", "bfloat16", "--json")
    content = json.loads(out)
    assert code == 0 and (content["card"], content["dtype"], content["narrowing"]) == ("t4", "bfloat16", [])
    assert content["memory"]["weights"] == 11_077_824 and content["memory"]["fits"] is True
    text = (ROOT / "data" / "cards" / "t4.toml").read_text().replace("16_000_000_000", "20_000_000")
    small = tmp_path / "small.toml"
    small.write_text(text)
    code, out, _ = run("inspect", MINIATURE, "--card", small)
    assert code == 1 and "does not fit: a sequence of 8,192 tokens needs" in out
    code, out, _ = run("inspect", MINIATURE, "--card", "t4", "--dtype", "bfloat16")
    assert "products in bfloat16: routed to emulation in float32" in out


def test_a_sweep_takes_the_dtype_of_the_card(run):
    assert "float16" in run("sweep", MINIATURE, "--card", "v100", "--length", "8")[1]
    assert "float32" in run("sweep", MINIATURE, "--length", "8")[1]
    code, _, err = run("sweep", MINIATURE, "--length", "8", "--bridge", "b.toml", "--jobs", "2")
    assert code == 2 and "--bridge: expected with one process, found --jobs or --cluster" in err


def test_products_of_one_kind_are_one_figure(run):
    _, _, err = run("trace", MINIATURE, "--card", "bi-v100", *IDS)
    (line,) = (line for line in err.splitlines() if ": products " in line)
    assert line.count("of gated_delta_rule in float32 routed from ixformer to torch") == 1


def test_a_bridge_is_registered_by_every_command_that_runs_a_model(run, tmp_path, monkeypatch):
    asked = []
    for name in ("rehearse", "compare", "sweep"):
        monkeypatch.setattr(f"workbench.cli.{name}.register_bridges", lambda options: asked.append(options.bridge))
    monkeypatch.setattr(inputs, "register_bridges", lambda options: asked.append(options.bridge))
    file = tmp_path / "b.toml"
    running = [name for name in COMMANDS if name != "inspect"]
    for command in running:
        card = ("--card", "t4") if command == "rehearse" else ()
        assert run(command, MINIATURE, *COMMANDS[command], *card, "--bridge", file)[0] == 0
    assert asked == [[file]] * len(running)


def test_a_checkpoint_beside_no_tokenizer_is_rehearsed_by_ids(run, tmp_path):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(MINIATURE / name, tmp_path)
    assert run("rehearse", tmp_path, "--card", "t4", *IDS, "--no-readiness")[0] == 0
    code, _, err = run("rehearse", tmp_path, "--card", "t4", "--prompt", "x")
    assert code == 2 and "tokenizer" in err and err.count("\n") == 1


@pytest.mark.parametrize("command", ["trace", "trace --check float64", "routing", "score", "generate", "readiness"])
def test_json_names_the_card_that_was_rehearsed(run, command):
    name, *more = command.split()
    for card in ("t4", None):
        asked = () if card is None else ("--card", card)
        target = ("--json",) if name == "generate" else ("--json", "-")
        code, out, _ = run(name, MINIATURE, *COMMANDS[name], *more, *asked, *target)
        found = json.loads(out)
        assert code == 0 and found["card"] == card
        if name not in ("generate", "readiness"):
            assert found["backends"]  # what ran, in every form of the record
