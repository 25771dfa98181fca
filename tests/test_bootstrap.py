"""bootstrap.py with a pip that is made up: when it installs, what it says while it does, and how it fails."""

import ast
import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "bootstrap.py"


@pytest.fixture
def bootstrap():
    spec = importlib.util.spec_from_file_location("bootstrap_under_test", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def project(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    (tmp_path / "constraints.txt").write_text("torch==2.13.0\n")
    return tmp_path


class FakePip:
    """Stands in for the creation of the environment and for pip; counts both."""

    def __init__(self, bootstrap, monkeypatch, output=("Collecting torch",), exit_code=0):
        self.output, self.exit_code = list(output), exit_code
        self.created, self.commands = 0, []
        self.stamp_during_install = []
        self.bootstrap = bootstrap
        monkeypatch.setattr(bootstrap, "create_environment", self.create)
        monkeypatch.setattr(bootstrap, "run_pip", self.run)
        monkeypatch.setattr(
            bootstrap,
            "refusal_to_reuse",
            lambda environment: None if environment.exists() else "it is missing",
        )

    def create(self, environment):
        self.created += 1
        python = self.bootstrap.environment_python(environment)
        python.parent.mkdir(parents=True)
        python.write_text("")

    def run(self, command, log_path, say):
        self.commands.append(command)
        self.stamp_during_install.append(self.bootstrap.read_stamp(log_path.parent))
        return self.exit_code, self.output


def ensure(bootstrap, project):
    said = []
    installed = bootstrap.ensure_environment(project, project / ".venv", said.append)
    return installed, "\n".join(said)


# ---- when it installs


def test_missing_environment_is_built_once(bootstrap, project, monkeypatch):
    pip = FakePip(bootstrap, monkeypatch)
    installed, said = ensure(bootstrap, project)
    assert installed and pip.created == 1 and "it is missing" in said and "environment ready after" in said
    (command,) = pip.commands
    assert command[1:4] == ["-m", "pip", "install"] and "--upgrade" not in command
    assert command[command.index("-c") + 1] == str(project / "constraints.txt")
    assert command[command.index("-e") + 1] == f"{project}[notebook,dev,gpu]"
    assert ensure(bootstrap, project) == (False, "")
    assert pip.created == 1 and len(pip.commands) == 1


@pytest.mark.parametrize("changed", ["pyproject.toml", "constraints.txt"])
def test_changed_requirements_update_the_same_environment(bootstrap, project, monkeypatch, changed):
    pip = FakePip(bootstrap, monkeypatch)
    ensure(bootstrap, project)
    with open(project / changed, "a") as file:
        file.write("# changed\n")
    installed, said = ensure(bootstrap, project)
    assert installed and pip.created == 1 and len(pip.commands) == 2 and "requirements changed" in said


def test_other_python_or_place_is_another_stamp(bootstrap, project, tmp_path_factory, monkeypatch):
    here = bootstrap.current_stamp(project)
    copy = tmp_path_factory.mktemp("moved")
    for name in ("pyproject.toml", "constraints.txt"):
        (copy / name).write_bytes((project / name).read_bytes())
    assert bootstrap.current_stamp(copy) != here
    monkeypatch.setattr(sys, "version_info", (3, 14, 0, "final", 0))
    assert bootstrap.current_stamp(project) != here


def test_lost_interpreter_is_noticed(bootstrap, project, monkeypatch):
    pip = FakePip(bootstrap, monkeypatch)
    ensure(bootstrap, project)
    bootstrap.environment_python(project / ".venv").unlink()
    installed, _ = ensure(bootstrap, project)
    assert installed and len(pip.commands) == 2


def test_failed_install_is_repaired_by_the_next_run(bootstrap, project, monkeypatch):
    pip = FakePip(bootstrap, monkeypatch)
    ensure(bootstrap, project)
    (project / "constraints.txt").write_text("torch==999\n")
    pip.output, pip.exit_code = (
        ["Collecting torch", "ERROR: No matching distribution found for torch==999"],
        1,
    )
    with pytest.raises(bootstrap.SetupError, match=r"installing torch==999 failed: .*\n.*install\.log"):
        ensure(bootstrap, project)
    # An install that does not finish must look unfinished while it runs, and still after it failed.
    assert pip.stamp_during_install == [None, None]
    assert bootstrap.read_stamp(project / ".venv") is None
    pip.exit_code = 0
    installed, said = ensure(bootstrap, project)
    assert installed and "last install did not finish" in said
    assert bootstrap.read_stamp(project / ".venv") == bootstrap.current_stamp(project)


def test_interrupted_install_leaves_no_stamp(bootstrap, project, monkeypatch):
    FakePip(bootstrap, monkeypatch)
    ensure(bootstrap, project)
    (project / "pyproject.toml").write_text("[project]\n# changed\n")

    def interrupted(command, log_path, say):
        raise KeyboardInterrupt

    monkeypatch.setattr(bootstrap, "run_pip", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ensure(bootstrap, project)
    assert bootstrap.read_stamp(project / ".venv") is None


# ---- the environment folder


def test_half_made_environment_is_not_reused(bootstrap, tmp_path):
    environment = tmp_path / ".venv"
    assert bootstrap.refusal_to_reuse(environment) == "it is missing"
    environment.mkdir()
    assert bootstrap.refusal_to_reuse(environment) == "its Python does not start"


@pytest.mark.skipif(os.name == "nt", reason="needs a shell script as interpreter")
@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo 3.10", "it holds Python 3.10 and this is"),
        ("exit 1", "its Python or pip is damaged"),
        (f"echo {sys.version_info[0]}.{sys.version_info[1]}", None),
    ],
)
def test_interpreter_inside_is_asked(bootstrap, tmp_path, script, expected):
    python = bootstrap.environment_python(tmp_path)
    python.parent.mkdir()
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    answer = bootstrap.refusal_to_reuse(tmp_path)
    assert answer is None if expected is None else answer.startswith(expected)


def test_folder_that_is_no_environment_is_never_deleted(bootstrap, tmp_path):
    keep = tmp_path / "thesis.txt"
    keep.write_text("years of work")
    with pytest.raises(bootstrap.SetupError, match="not a virtual environment"):
        bootstrap.create_environment(tmp_path)
    assert keep.exists()


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (
            "The virtual environment was not created because ensurepip is not\navailable.",
            "apt-get install python3-venv",
        ),
        ("Error: [Errno 28] No space left on device", "No space left on device"),
    ],
)
def test_environment_that_cannot_be_made(bootstrap, tmp_path, monkeypatch, said, expected):
    answer = subprocess.CompletedProcess([], 1, stdout=said, stderr="")
    monkeypatch.setattr(bootstrap.subprocess, "run", lambda *args, **kwargs: answer)
    with pytest.raises(bootstrap.SetupError, match=expected.replace("[", r"\[")):
        bootstrap.create_environment(tmp_path / ".venv")


@pytest.mark.parametrize(("system", "tail"), [("posix", "bin/python"), ("nt", "Scripts/python.exe")])
def test_place_of_the_interpreter(bootstrap, tmp_path, monkeypatch, system, tail):
    monkeypatch.setattr(bootstrap.os, "name", system)
    try:
        path = bootstrap.environment_python(tmp_path).as_posix()
    finally:
        monkeypatch.undo()
    assert path.endswith(tail)


# ---- what a failed install says

FAILURES = {
    "no such version": (
        """
        Collecting tqdm==999
        ERROR: Could not find a version that satisfies the requirement tqdm==999 (from versions: 4.0, 4.70.1)
        ERROR: No matching distribution found for tqdm==999
        """,
        1,
        "tqdm==999",
        "the newest it offers: 4.0, 4.70.1",
    ),
    "index out of reach": (
        """
        Looking in indexes: http://127.0.0.1:9/simple
        WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError('<pip \
object>: Failed to establish a new connection: [Errno 111] Connection refused')': /simple/tqdm/
        ERROR: Could not find a version that satisfies the requirement tqdm (from versions: none)
        ERROR: No matching distribution found for tqdm
        """,
        1,
        "tqdm",
        "the package index could not be reached (Connection refused)",
    ),
    "conflict": (
        """
        ERROR: Cannot install pandas==3.1.1 because these package versions have conflicting dependencies.

        The conflict is caused by:
            pandas 3.1.1 depends on numpy>=1.26
            The user requested (constraint) numpy==1.20

        To fix this you could try to:
        1. loosen the range of package versions you've specified
        """,
        1,
        "numpy==1.20",
        "conflicting requirements: pandas 3.1.1 depends on numpy>=1.26; "
        "The user requested (constraint) numpy==1.20",
    ),
    "other python": (
        "ERROR: Package 'hybrid-moe-workbench' requires a different Python: 3.10.1 not in '>=3.11'",
        1,
        "hybrid-moe-workbench",
        "it requires a different Python: 3.10.1 not in '>=3.11'",
    ),
    "compiler": (
        """
        Collecting debugpy==1.8.22
        Building wheels for collected packages: debugpy
          Building wheel for debugpy (pyproject.toml): started
          error: subprocess-exited-with-error

          × Building wheel for debugpy (pyproject.toml) did not run successfully.
          │ exit code: 1
          ╰─> [3 lines of output]
              building 'x' extension
              cc1: fatal error: Python.h: No such file or directory
              error: command '/usr/bin/gcc' failed with exit code 1
              [end of output]

          ERROR: Failed building wheel for debugpy
        ERROR: Could not build wheels for debugpy, which is required to install pyproject.toml-based projects
        """,
        1,
        "debugpy",
        "its build failed: cc1: fatal error: Python.h: No such file or directory",
    ),
    "metadata": (
        """
        Collecting tqdm
        Processing ./badpkg
          error: subprocess-exited-with-error

          × Preparing metadata (pyproject.toml) did not run successfully.
          ╰─> [1 lines of output]
              cannot find the frobnicator
              [end of output]

        error: metadata-generation-failed
        """,
        1,
        "./badpkg",
        "its build failed: cannot find the frobnicator",
    ),
    "disk full": (
        """
        Collecting torch==2.13.0
        Installing collected packages: torch
        ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device
        """,
        1,
        "torch==2.13.0",
        "Could not install packages due to an OSError: [Errno 28] No space left on device",
    ),
    "connection lost": (
        """
        Collecting torch==2.13.0
        ERROR: Exception:
        Traceback (most recent call last):
          File "pip/_vendor/urllib3/response.py", line 438, in _error_catcher
        TimeoutError: The read operation timed out

        During handling of the above exception, another exception occurred:

        pip._vendor.urllib3.exceptions.ReadTimeoutError: HTTPSConnectionPool(host='x'): Read timed out.
        """,
        2,
        "torch==2.13.0",
        "pip._vendor.urllib3.exceptions.ReadTimeoutError: HTTPSConnectionPool(host='x'): Read timed out.",
    ),
    "killed": ("Collecting torch==2.13.0", -9, "torch==2.13.0", "pip was ended by signal 9"),
    "silent": ("", 3, "the environment", "pip ended with exit code 3 and no error line"),
    "warnings only": (
        "Collecting torch\nWARNING: Location 'x' is ignored: it is either a non-existing path or a file.",
        3,
        "torch",
        "pip ended with exit code 3 and no error line",
    ),
}


@pytest.mark.parametrize("case", FAILURES)
def test_failure_names_package_and_reason(bootstrap, case):
    output, exit_code, package, reason = FAILURES[case]
    found = bootstrap.explain_failure(textwrap.dedent(output).strip("\n").split("\n"), exit_code)
    assert found[0] == package
    assert reason in found[1] and "\n" not in found[1]


def test_failed_setup_ends_with_code_2_and_no_traceback(bootstrap, monkeypatch, capsys):
    def fail(**kwargs):
        raise bootstrap.SetupError("installing torch failed: no space left")

    monkeypatch.setattr(bootstrap, "ensure_environment", fail)
    assert bootstrap.main(["test"]) == 2
    assert capsys.readouterr().err == "bootstrap: installing torch failed: no space left\n"


# ---- running pip


def test_pip_output_is_logged_whole_and_told_in_short(bootstrap, tmp_path):
    program = "\n".join(
        f"print({line!r})"
        for line in (
            "Collecting torch==2.13.0",
            "  Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (526.6 MB)",
            "  Downloading six-1.17.0-py3-none-any.whl (11 kB)",
            "Installing collected packages: six, torch",
        )
    )
    said = []
    command = [sys.executable, "-c", program + "\nraise SystemExit(7)"]
    exit_code, output = bootstrap.run_pip(command, tmp_path / "install.log", said.append)
    assert exit_code == 7
    assert said == ["reading what is required", "downloading torch 2.13.0 (526.6 MB)", "unpacking 2 packages"]
    log = (tmp_path / "install.log").read_text().splitlines()
    assert log[-len(output) :] == output and len(output) == 4


# ---- handing over


def test_threads_are_pinned_and_settings_kept_inside(bootstrap, tmp_path):
    variables = bootstrap.child_environment(tmp_path, {"PATH": "x", "MKL_NUM_THREADS": "4"})
    assert variables["OMP_NUM_THREADS"] == "1"
    assert variables["MKL_NUM_THREADS"] == "4", "what the user set must stay"
    for name in (
        "MPLCONFIGDIR",
        "IPYTHONDIR",
        "JUPYTER_CONFIG_DIR",
        "JUPYTER_DATA_DIR",
        "JUPYTER_RUNTIME_DIR",
    ):
        assert Path(variables[name]).is_relative_to(tmp_path)


def test_commands_and_their_options(bootstrap, tmp_path):
    python = str(bootstrap.environment_python(tmp_path))
    report = bootstrap.command_line("report", ["--notebook", "01"], tmp_path)
    assert report == [python, "-m", "workbench", "report", "--notebook", "01"]
    assert bootstrap.command_line("test", ["-k", "cli"], tmp_path) == [python, "-m", "pytest", "-k", "cli"]


@pytest.mark.parametrize(("arguments", "code"), [([], 2), (["--help"], 0), (["-h"], 0), (["reprot"], 2)])
def test_help_and_wrong_commands_install_nothing(bootstrap, monkeypatch, capsys, arguments, code):
    monkeypatch.setattr(bootstrap, "ensure_environment", lambda **kwargs: pytest.fail("must not install"))
    assert bootstrap.main(arguments) == code
    printed = capsys.readouterr()
    assert "report" in printed.out + printed.err


def test_old_python_gets_a_sentence(bootstrap):
    source = SCRIPT.read_text(encoding="utf-8")
    ast.parse(source, feature_version=(3, 6))  # a syntax error would hide the sentence
    pretend = "import sys; sys.version_info = (3, 6, 9); "
    run = f"{pretend}exec(compile(open({str(SCRIPT)!r}).read(), 'bootstrap.py', 'exec'))"
    done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("bootstrap: Python 3.11 or later is needed, this is 3.6")
    assert "Traceback" not in done.stderr


def test_only_the_standard_library_is_imported():
    for node in ast.walk(ast.parse(SCRIPT.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            assert all(alias.name.split(".")[0] in sys.stdlib_module_names for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.module.split(".")[0] in sys.stdlib_module_names
