"""The fixed dialogues and recall questions on vLLM, beside the workbench's own score of the same checkpoint.

    python benchmarks/dialogues_on_vllm.py --python VLLM_ENVIRONMENT/bin/python [--checkpoint data/miniature]

Starts vLLM's OpenAI-compatible server with the given interpreter on the checkpoint in bfloat16, with its parsers of
calls and reasoning on; asks all 200 dialogues and 100 recall questions; stops the server. The gate: the share of right
dialogues differs from the workbench's own, in bfloat16 too, by at most 0.05. Near ties fall either way in bfloat16, so
single replies may differ. Writes benchmarks/results/dialogues_on_vllm.<hardware>.json, with shares where other results
have times. The server's output is kept in LOG (default: beside the result as .log, deleted when all went well).
"""

import argparse
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import workbench
from workbench import bench
from workbench.dialogue import DialogueScore, fixed_dialogues, fixed_recalls
from workbench.errors import ServerError, WorkbenchError
from workbench.provenance import checkpoint_hash
from workbench.quality import dialogue_score
from workbench.serving.chat import ChatServer, served_score
from workbench.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
NAME = "dialogues_on_vllm"
LIMIT = 0.05
SERVER = ("-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--dtype", "bfloat16", "--enforce-eager",
          "--language-model-only", "--max-model-len", "4096", "--max-num-seqs", "8", "--enable-auto-tool-choice",
          "--tool-call-parser", "qwen3_coder", "--reasoning-parser", "qwen3")  # fmt: skip
#: No look-ups on the network, and 1 GiB for the cache of a server on a CPU.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def saying(what: str) -> Callable[[str], None]:
    return lambda line: say(f"{what}: {line}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", type=Path, required=True, help="interpreter of an environment that has vLLM")
    parser.add_argument("--checkpoint", type=Path, default=ROOT / "data" / "miniature")
    parser.add_argument("--dialogues", type=int, default=200, help="200 (default) or 20")
    parser.add_argument("--recall", type=int, default=100, help="100 (default) or 20")
    parser.add_argument("--device", default="cpu", help="of the workbench's own score, and named in the result")
    parser.add_argument("--server-option", action="append", default=[], help="one more argument of the server")
    parser.add_argument("--start-limit", type=float, default=600.0, help="seconds that the server may take to start")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--log", type=Path)
    return parser.parse_args()


@contextmanager
def vllm_server(python: Path, checkpoint: Path, log: Path, options: list[str], start_limit_s: float) -> Iterator[str]:
    """The address of a server that answers; it is stopped at the end, its children with it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(python), *SERVER, "--port", str(port), "--model", str(checkpoint), *options]
    say(shlex.join(command))
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "wb") as output:
        environment = os.environ | ENVIRONMENT
        try:
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        except OSError as error:
            raise ServerError(f"--python {python}: cannot be started: {error.strerror}") from None
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for(url, process, log, start_limit_s)
        yield url
    finally:
        stop(process)


def wait_for(url: str, process: subprocess.Popen, log: Path, limit_s: float) -> None:
    """Return as soon as the server is healthy. Raises ServerError when it ends or takes longer."""
    started = said = time.monotonic()
    while True:
        if process.poll() is not None:
            last = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if "Error" in line]
            reason = last[-1].strip() if last else "no error in its output"
            raise ServerError(f"vLLM: expected a server, it ended with code {process.returncode}: {reason}; see {log}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                say(f"vLLM answers after {time.monotonic() - started:.0f} s")
                return
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            pass  # not listening yet
        now = time.monotonic()
        if now - started > limit_s:
            raise ServerError(f"vLLM: expected an answer within {limit_s:g} s of its start, found none; see {log}")
        if now - said > 10:
            said = now
            say(f"vLLM starts, {now - started:.0f} s so far")
        time.sleep(0.2)


def stop(process: subprocess.Popen) -> None:
    """End the server as its user would; what is left of its session after 30 s is killed."""
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # it leads a session of its own
        process.wait()


def server_versions(python: Path) -> dict[str, str]:
    """Versions in the server's environment; vLLM's build for a CPU is a distribution of another name."""
    code = (
        "import json; from importlib.metadata import distributions as d; "
        "names = ('vllm', 'vllm-cpu', 'torch', 'transformers', 'triton'); "
        "print(json.dumps({x.name.lower(): x.version for x in d() if x.name.lower() in names}))"
    )
    try:
        done = subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True)
    except OSError as error:
        raise ServerError(f"--python {python}: cannot be started: {error.strerror}") from None
    except subprocess.CalledProcessError as error:
        raise ServerError(f"--python {python}: expected a Python interpreter, found: {error.stderr[-200:]}") from None
    found = json.loads(done.stdout)
    if not {"vllm", "vllm-cpu"} & set(found):
        raise ServerError(f"--python {python}: expected an environment with vllm, found {found}")
    return found


def rows_of(what: str, backend: str, score: DialogueScore, attested: list[str]) -> list[bench.Row]:
    """The whole score, and each kind and thinking mode where there are several."""
    parts = {what: (score.right, score.asked)}
    if len(score.by_kind) > 1:
        parts |= {f"{what}, {kind}": pair for kind, pair in score.by_kind.items()}
    parts |= {f"{what}, thinking {'on' if on else 'off'}": pair for on, pair in score.by_thinking.items()}
    return [
        bench.Row(case, backend, "share", right / asked, 0.0, asked, attested=attested)
        for case, (right, asked) in parts.items()
    ]


def main() -> int:
    arguments = parse_arguments()
    log = arguments.log or arguments.out / f"{NAME}.log"
    versions = server_versions(arguments.python)
    sets = {"dialogue": fixed_dialogues(arguments.dialogues), "recall": fixed_recalls(arguments.recall)}

    options = arguments.server_option
    served = {}
    with vllm_server(arguments.python, arguments.checkpoint, log, options, arguments.start_limit) as url:
        server = ChatServer(url, timeout_s=600)
        for what, dialogues in sets.items():
            served[what] = served_score(server, dialogues, progress=saying(f"vLLM, {what}"))

    model = workbench.load(arguments.checkpoint, dtype="bfloat16", device=arguments.device)
    tokenizer = Tokenizer.from_directory(arguments.checkpoint)
    own = {
        what: dialogue_score(model, tokenizer, dialogues, progress=saying(f"workbench, {what}"))
        for what, dialogues in sets.items()
    }
    attested = {
        "vllm": [*(f"{name} {version}" for name, version in sorted(versions.items())), "bfloat16", *options],
        "workbench": [*(row.in_words() for row in model.kernels.attestation()), "bfloat16"],
    }
    rows = []
    for what in sets:
        for backend, score in (("vllm", served[what]), ("workbench", own[what])):
            rows += rows_of(what, backend, score, attested[backend])
            print(f"{what} on {backend}: {score.share:.1%}, {score.right} of {score.asked}")
    difference = abs(served["dialogue"].share - own["dialogue"].share)
    correctness = bench.Correctness("|share of right dialogues on vLLM - by the workbench|", difference, LIMIT)
    conditions = {"checkpoint": checkpoint_hash(arguments.checkpoint)}
    path = bench.write_result(
        arguments.out, NAME, correctness, rows, project=ROOT, device=arguments.device, conditions=conditions
    )
    if arguments.log is None:
        log.unlink()
    print(path)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except WorkbenchError as error:
        print(f"{NAME}: error: {error}", file=sys.stderr)
        sys.exit(2)
