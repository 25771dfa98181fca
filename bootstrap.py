#!/usr/bin/env python3
"""Set up the project's environment and run it. Needs Python 3.11 or later and nothing else.

    python3 bootstrap.py report [options]   run the notebooks on the miniature model, write HTML reports
    python3 bootstrap.py test [options]     run the tests
    python3 bootstrap.py setup              only set up the environment

The environment is the folder .venv beside this file. It is made when it is missing and brought up to date
when pyproject.toml, constraints.txt, the Python version or the folder's place has changed; otherwise nothing
is installed. What pip said is kept in .venv/install.log. Your own pip settings (index, proxy, ...) apply.

Options after the command are handed on:
    report   to `workbench report` (paths are relative to where you are), e.g.  report --notebook 01
    test     to pytest (paths are relative to this folder), e.g.                test -k checkpoint -x

OMP_NUM_THREADS and MKL_NUM_THREADS are 1 unless you set them: with more threads than free cores torch becomes
many times slower.
"""

import sys

MINIMUM_PYTHON = (3, 11)
NEWEST_TESTED_PYTHON = (3, 13)

# Before any other statement, since a Python that is too old may fail at the next one. The grammar of this
# file must stay readable for such a Python (3.6), or it would say "syntax error" in place of this sentence.
if sys.version_info < MINIMUM_PYTHON:
    sys.exit(
        "bootstrap: Python %d.%d or later is needed, this is %d.%d (%s); install one and start it by name, "
        "e.g. `python3.11 bootstrap.py test`"
        % (MINIMUM_PYTHON + tuple(sys.version_info[:2]) + (sys.executable,))
    )

import hashlib
import os
import queue
import re
import shutil
import subprocess
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent
ENVIRONMENT = ROOT / ".venv"
EXTRAS = "notebook,dev,gpu"
COMMANDS = ("report", "test", "setup")
STAMP_NAME = "bootstrap-stamp"
LOG_NAME = "install.log"
HEARTBEAT_SECONDS = 15.0


class SetupError(Exception):
    """The environment cannot be built; the message says what failed, why, and what to do."""


def environment_python(environment: Path) -> Path:
    """The interpreter inside a virtual environment; Windows has its own folder name."""
    if os.name == "nt":
        return environment / "Scripts" / "python.exe"
    return environment / "bin" / "python"


def current_stamp(root: Path) -> str:
    """Hash of all that decides the environment: the two files, the Python version and its folder."""
    digest = hashlib.sha256()
    for name in ("pyproject.toml", "constraints.txt"):
        digest.update((root / name).read_bytes())
        digest.update(b"\0")
    # The editable install and the scripts hold absolute paths: a moved folder needs a new install.
    digest.update(f"{sys.version_info[0]}.{sys.version_info[1]} {sys.platform} {root} {EXTRAS}".encode())
    return digest.hexdigest()


def read_stamp(environment: Path) -> "str | None":
    """The stamp of the last install that finished, or None."""
    path = environment / STAMP_NAME
    return path.read_text(encoding="ascii").strip() if path.is_file() else None


def refusal_to_reuse(environment: Path) -> "str | None":
    """Why an existing environment cannot be the base of an install, or None when it can."""
    if not environment.exists():
        return "it is missing"
    wanted = f"{sys.version_info[0]}.{sys.version_info[1]}"
    question = "import sys, pip; print('%d.%d' % sys.version_info[:2])"
    try:
        python = str(environment_python(environment))
        answer = subprocess.run([python, "-I", "-c", question], capture_output=True, text=True, timeout=120)
    except OSError:
        return "its Python does not start"
    if answer.returncode != 0:
        return "its Python or pip is damaged"
    if answer.stdout.strip() != wanted:
        return f"it holds Python {answer.stdout.strip()} and this is {wanted}"
    return None


def create_environment(environment: Path) -> None:
    """Make an empty virtual environment, in place of whatever broken one is there."""
    if environment.exists():
        if not (environment / "pyvenv.cfg").is_file() and any(environment.iterdir()):
            raise SetupError(
                f"{environment} exists and is not a virtual environment; expected none or one made by this "
                "script; move it away"
            )
        shutil.rmtree(environment)
    made = subprocess.run([sys.executable, "-m", "venv", str(environment)], capture_output=True, text=True)
    if made.returncode != 0:
        shutil.rmtree(environment, ignore_errors=True)
        said = (made.stdout + made.stderr).strip()
        if "ensurepip" in said:
            raise SetupError(
                f"{sys.executable} cannot make a virtual environment: its ensurepip module is missing; on "
                "Debian and Ubuntu run `apt-get install python3-venv`, then repeat this command"
            )
        reason = said.splitlines()[-1] if said else f"exit code {made.returncode}"
        raise SetupError(f"{sys.executable} -m venv failed: {reason}")


def progress_of(line: str) -> "str | None":
    """The few lines of pip's output that tell a waiting person something, shortened; None for the rest."""
    found = re.match(r"\s*Downloading (\S+?)-(\d\S*?)-\S+ \((.+)\)", line)
    if found and re.search(r"\d{2,}(\.\d+)? MB|GB", found.group(3)):
        return f"downloading {found.group(1)} {found.group(2)} ({found.group(3)})"
    if line.startswith("Installing collected packages:"):
        return f"unpacking {line.count(',') + 1} packages"
    if line.startswith("Building wheel") or line.startswith("Building editable"):
        return line.strip().rstrip(".").lower()
    return None


def explain_failure(output: "list[str]", exit_code: int) -> "tuple[str, str]":
    """(package, reason) from pip's output. The package: the one pip blames, else the last one touched."""
    text = "\n".join(output)
    steps = r"^\s*(?:Collecting|Building \w+ for|Processing|Obtaining) ([^\s(]+)"
    touched = re.findall(steps, text, re.MULTILINE)
    last_touched = touched[-1] if touched else "the environment"

    missing = re.search(r"No matching distribution found for (.+)", text)
    if missing:
        return missing.group(1).strip(), reason_for_missing(text)
    conflict = re.search(r"Cannot install (.+?) because these package versions have conflicting", text)
    if conflict:
        causes = re.findall(r"^ {4}(\S.*(?: depends on | requested ).*)$", text, re.MULTILINE)
        # pip names the package that asks, most often this project; the pin that does not fit says more.
        pin = re.search(r"\(constraint\) (\S+)", text)
        reason = "conflicting requirements: " + ("; ".join(causes) or "none named")
        return pin.group(1) if pin else conflict.group(1), reason
    wrong_python = re.search(r"Package '(.+?)' requires a different Python: (.+)", text)
    if wrong_python:
        return wrong_python.group(1), f"it requires a different Python: {wrong_python.group(2)}"
    build_output = re.search(r"lines of output\]\n(.*?)\[end of output\]", text, re.DOTALL)
    if build_output:
        wheel = re.search(r"Failed building \w+ for (\S+)", text)
        said = [line.strip() for line in build_output.group(1).splitlines() if line.strip()]
        blamed = [line for line in said if "error" in line.lower()] or said[-1:] or ["its build said nothing"]
        return wheel.group(1) if wheel else last_touched, f"its build failed: {blamed[0]}"
    if re.search(r"^ERROR: Exception:", text, re.MULTILINE):
        # pip itself raised: its traceback ends in the reason
        raised = re.findall(r"^(?!ERROR: )[\w.]*(?:Error|Exception|Timeout)\w*: .*$", text, re.MULTILINE)
        return last_touched, raised[-1] if raised else "pip itself failed"
    if exit_code < 0:
        return last_touched, f"pip was ended by signal {-exit_code}, often a sign of too little memory"
    errors = re.findall(r"^\s*error: (.+)$", text, re.MULTILINE | re.IGNORECASE)
    reason = errors[-1] if errors else f"pip ended with exit code {exit_code} and no error line"
    return last_touched, reason


def reason_for_missing(text: str) -> str:
    """pip says the same of an index that lacks a version and of one out of reach; its warnings differ."""
    broken = re.findall(r"connection broken by (.+)", text)
    if broken:
        cause = re.search(r"\[Errno [^\]]+\] ([^'\")]+)", broken[-1])
        return f"the package index could not be reached ({cause.group(1) if cause else broken[-1]})"
    versions = re.search(r"\(from versions: (.*)\)", text)
    offered = versions.group(1).split(", ")[-5:] if versions else ["none"]
    return (
        f"the index has no such version for Python {sys.version_info[0]}.{sys.version_info[1]} on "
        f"{sys.platform}; the newest it offers: {', '.join(offered)}"
    )


def run_pip(command: "list[str]", log_path: Path, say) -> "tuple[int, list[str]]":
    """Run pip, keep its whole output in log_path, call say(text) for what a waiting person wants to know."""
    lines = queue.Queue()
    output = []
    with open(log_path, "w", encoding="utf-8", buffering=1) as log:
        log.write("$ " + " ".join(command) + "\n")
        process = subprocess.Popen(
            command,
            cwd=str(ROOT),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
        )

        def read() -> None:
            for line in process.stdout:
                lines.put(line)
            lines.put(None)

        threading.Thread(target=read, daemon=True).start()
        doing, said_at = "reading what is required", time.monotonic()
        say(doing)
        try:
            while True:
                try:
                    line = lines.get(timeout=1.0)
                except queue.Empty:
                    line = ""
                if line is None:
                    break
                if line:
                    log.write(line)
                    output.append(line.rstrip("\n"))
                news = progress_of(line)
                if news:
                    doing, said_at = news, time.monotonic()
                    say(doing)
                elif time.monotonic() - said_at > HEARTBEAT_SECONDS:
                    said_at = time.monotonic()
                    say(f"still {doing}")
        except KeyboardInterrupt:
            process.terminate()  # else pip goes on writing into an environment that the next run repairs
            process.wait()
            raise
        exit_code = process.wait()
    return exit_code, output


def ensure_environment(root: Path = ROOT, environment: Path = ENVIRONMENT, out=print) -> bool:
    """Build or update the environment if its stamp is out of date. True when something was installed."""
    stamp = current_stamp(root)
    python = environment_python(environment)
    if read_stamp(environment) == stamp and python.exists():
        return False
    started = time.monotonic()

    def say(text: str) -> None:
        out(f"  [{time.monotonic() - started:4.0f} s] {text}")

    version = ".".join(str(part) for part in sys.version_info[:3])
    if sys.version_info[:2] > NEWEST_TESTED_PYTHON:
        out(f"bootstrap: Python {version} is newer than the tested 3.11 to 3.13; pinned packages may lack it")
    refusal = refusal_to_reuse(environment)
    if refusal is None:
        out(f"bootstrap: updating {environment}: its requirements changed or the last install did not finish")
        # Gone before pip starts: an install that stops half-way must not look finished to the next run.
        if (environment / STAMP_NAME).exists():
            (environment / STAMP_NAME).unlink()
    else:
        out(f"bootstrap: building {environment} with Python {version} ({refusal}); a few minutes, once")
        say("creating the virtual environment")
        create_environment(environment)
    log_path = environment / LOG_NAME
    command = [str(python), "-m", "pip", "install"]
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
    command += ["-c", str(root / "constraints.txt"), "-e", f"{root}[{EXTRAS}]"]
    exit_code, output = run_pip(command, log_path, say)
    if exit_code != 0:
        package, reason = explain_failure(output, exit_code)
        raise SetupError(
            f"installing {package} failed: {reason}\n"
            f"bootstrap: the whole log is in {log_path}; mend the cause and repeat the command"
        )
    (environment / STAMP_NAME).write_text(stamp + "\n", encoding="ascii")
    out(f"bootstrap: environment ready after {time.monotonic() - started:.0f} s")
    return True


def child_environment(environment: Path, inherited) -> "dict[str, str]":
    """Variables for the program: threads pinned, and settings of notebook tools kept inside the environment.

    The latter makes a report independent of a person's own IPython, Jupyter and Matplotlib settings, and lets
    it run where the home folder is empty or read-only. What the caller has set stays.
    """
    variables = dict(inherited)
    settings = environment / "settings"
    for name, value in (
        ("OMP_NUM_THREADS", "1"),
        ("MKL_NUM_THREADS", "1"),
        ("MPLCONFIGDIR", str(settings / "matplotlib")),
        ("IPYTHONDIR", str(settings / "ipython")),
        ("JUPYTER_CONFIG_DIR", str(settings / "jupyter")),
        ("JUPYTER_DATA_DIR", str(settings / "jupyter-data")),
        ("JUPYTER_RUNTIME_DIR", str(settings / "jupyter-runtime")),
    ):
        variables.setdefault(name, value)
    return variables


def command_line(command: str, rest: "list[str]", environment: Path) -> "list[str]":
    """What `report` and `test` stand for."""
    python = str(environment_python(environment))
    if command == "report":
        return [python, "-m", "workbench", "report", *rest]
    return [python, "-m", "pytest", *rest]


def hand_over(command: str, rest: "list[str]") -> int:
    """Run the program in place of this one, so that signals and the exit code are its own."""
    arguments = command_line(command, rest, ENVIRONMENT)
    variables = child_environment(ENVIRONMENT, os.environ)
    if command == "test":
        os.chdir(ROOT)
    sys.stdout.flush()
    if os.name == "nt":  # exec on Windows returns to the shell at once
        return subprocess.call(arguments, env=variables)
    os.execve(arguments[0], arguments, variables)


def main(arguments: "list[str]") -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(__doc__)
        return 0 if arguments else 2
    if os.environ.get("HOME") == "":
        del os.environ["HOME"]  # pip and others would take the root folder for it; unset, they look it up
    command, rest = arguments[0], arguments[1:]
    if command not in COMMANDS:
        print(
            f"bootstrap: unknown command {command!r}; expected one of {', '.join(COMMANDS)}; "
            "see `python3 bootstrap.py --help`",
            file=sys.stderr,
        )
        return 2
    try:
        ensure_environment(out=lambda text: print(text, flush=True))
    except SetupError as error:
        print(f"bootstrap: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("bootstrap: stopped; the next run goes on with the install", file=sys.stderr)
        return 130
    if command == "setup":
        print(f"bootstrap: {ENVIRONMENT} is up to date")
        return 0
    return hand_over(command, rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
