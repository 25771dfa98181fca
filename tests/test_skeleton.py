"""The project's own files agree with each other, and importing the package costs nothing."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import workbench

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

# The packages that the workbench is built around.
MAIN_PACKAGES = {"jupyterlab", "torch", "matplotlib", "pandas", "ipywidgets", "safetensors", "vllm"}


def direct_requirements() -> dict[str, Requirement]:
    """Everything pyproject.toml asks for, core and extras, by canonical name."""
    lines = list(PROJECT["dependencies"])
    for extra in PROJECT["optional-dependencies"].values():
        lines += extra
    found = {}
    for line in lines:
        requirement = Requirement(line)
        assert requirement.name not in found, f"pyproject.toml names {requirement.name} twice"
        found[canonicalize_name(requirement.name)] = requirement
    return found


def pins() -> dict[str, Requirement]:
    """The lines of constraints.txt by canonical name."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    requirements = [Requirement(line) for line in lines if line and not line.startswith("#")]
    by_name = {canonicalize_name(requirement.name): requirement for requirement in requirements}
    assert len(by_name) == len(requirements), "constraints.txt names a package twice"
    return by_name


def conda_sections() -> tuple[list[str], list[str], list[Requirement]]:
    """environment.yml: conda packages, pip options, pip packages."""
    dependencies = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))["dependencies"]
    (pip_section,) = [entry["pip"] for entry in dependencies if isinstance(entry, dict)]
    conda = [entry for entry in dependencies if isinstance(entry, str)]
    options = [entry for entry in pip_section if entry.startswith("-")]
    return conda, options, [Requirement(entry) for entry in pip_section if not entry.startswith("-")]


def test_constraints_are_exact_and_without_local_label():
    for requirement in pins().values():
        (specifier,) = requirement.specifier
        assert specifier.operator == "==" and not specifier.version.endswith("*"), requirement
        assert Version(specifier.version).local is None, (
            f"{requirement}: a build label such as +cpu fits one machine"
        )
        assert requirement.url is None and requirement.marker is None and not requirement.extras, requirement


def test_every_direct_requirement_is_pinned_inside_its_range():
    for name, requirement in direct_requirements().items():
        assert name in pins(), f"constraints.txt lacks {name}, which pyproject.toml asks for"
        (specifier,) = pins()[name].specifier
        assert requirement.specifier.contains(specifier.version), f"{pins()[name]} is outside {requirement}"


def test_pinned_versions_the_project_promises():
    assert str(pins()["torch"]) == "torch==2.13.0"
    assert str(pins()["transformers"]) == "transformers==5.19.0"
    assert str(direct_requirements()["transformers"].specifier) == "==5.19.0"
    for version in ("2.11.0", "2.12.0", "2.13.0", "2.14.1"):
        assert direct_requirements()["torch"].specifier.contains(version)


def test_environment_file_installs_the_project_under_the_constraints():
    conda, options, _ = conda_sections()
    assert "pip" in conda
    (python,) = [re.fullmatch(r"python=(3\.\d+)", entry) for entry in conda if entry.startswith("python")]
    assert Requirement("python" + PROJECT["requires-python"]).specifier.contains(python.group(1))
    assert "-c constraints.txt" in options
    (editable,) = [option for option in options if option.startswith("-e ")]
    extras = re.fullmatch(r"-e \.\[(.+)\]", editable).group(1).split(",")
    assert set(extras) <= set(PROJECT["optional-dependencies"])
    assert len(options) == 2


def test_environment_file_names_the_main_packages_and_adds_nothing():
    _, _, named = conda_sections()
    names = [canonicalize_name(requirement.name) for requirement in named]
    assert set(names) == MAIN_PACKAGES and len(names) == len(set(names))
    for requirement in named:
        declared = direct_requirements()[canonicalize_name(requirement.name)]
        assert not requirement.specifier, (
            f"environment.yml: {requirement} has a version; constraints.txt decides it"
        )
        assert str(requirement.marker) == str(declared.marker), (
            f"environment.yml: {requirement} is not {declared}"
        )


def test_extras_and_console_script():
    assert PROJECT["name"] == "hybrid-moe-workbench"
    assert set(PROJECT["optional-dependencies"]) == {"notebook", "serve", "gpu", "dev", "browser"}
    assert PROJECT["scripts"] == {"workbench": "workbench.cli:run_process"}


def test_version_has_one_source_and_a_change_log_entry():
    assert "version" not in PROJECT and PROJECT["dynamic"] == ["version"]
    assert str(Version(workbench.__version__)) == workbench.__version__
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## (\S+)", changes, re.MULTILINE).group(1)
    assert newest == workbench.__version__


def test_licence_is_the_whole_apache_text():
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text and "Version 2.0" in text and "END OF TERMS AND CONDITIONS" in text
    assert PROJECT["license"] == "Apache-2.0"


def test_readme_has_the_two_commands():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    for command in ("report", "test"):
        assert any(line.strip().startswith(f"python3 bootstrap.py {command}") for line in lines)


@pytest.mark.parametrize(
    "statement",
    [
        "import workbench",
        "import workbench; workbench.__version__; dir(workbench)",
        "from workbench import WorkbenchError",
        "import workbench; assert not hasattr(workbench, 'no_such_name')",
    ],
)
def test_import_is_light(statement):
    heavy = "torch numpy pandas matplotlib safetensors transformers vllm".split()
    check = f"{statement}\nimport sys\nprint([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_every_public_name_resolves():
    for name in workbench.__all__:
        assert getattr(workbench, name) is not None
        assert name in dir(workbench)


def test_unknown_public_name_lists_the_known_ones():
    with pytest.raises(AttributeError, match=r"no public name 'laod'; it has: .*\bload\b"):
        _ = workbench.laod


def test_errors_are_one_line():
    error = workbench.WorkbenchError("tensor x: expected [2, 3]\nfound [3, 2]")
    assert str(error) == "tensor x: expected [2, 3] found [3, 2]"
