"""Dependencies inside the package point one way: LAYERS is the order, a file imports earlier ones."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "workbench"

# From the ground up. Members of one line do not know each other; a package may import within itself.
LAYERS = (
    ("errors", "taps"),
    ("bundle", "cards", "config", "numerics", "provenance"),
    ("kernels",),
    ("cache",),
    ("generation", "memory_table"),
    ("model",),
    ("checkpoint", "dialogue", "recovery", "tokenizer"),
    ("loading",),
    ("tracing", "quality"),
    ("analysis", "killer_inputs"),
    ("plots", "sweeps"),
    ("report",),
    ("controls",),
    ("bench", "field_kit", "probe", "serving", "training"),
    ("cli",),
    ("__main__",),
)
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}

# Narrower than the order: what a part may import of ours, besides itself.
ONLY = {
    "errors": set(),
    "taps": set(),
    "kernels": {"cards", "errors", "numerics", "taps"},  # so that an op can be tested and timed without a model
    "dialogue": {"errors"},  # so that a client of a server needs no model
    "field_kit": set(),  # so that its one file runs where it was copied to, alone
}
# Wider parts of the program that nothing but the command line knows.
EDGE = {"bench", "field_kit", "probe", "serving", "training"}
# Peers that the project is compared with; the tests have them, the package must work without.
FORBIDDEN_PACKAGES = {"transformers", "fla", "pytest", "hypothesis"}
# Where a peer is run beside ours, when it is installed.
PEER_SIDES = {"workbench/analysis/compare/hf.py": "transformers"}


class Imports(ast.NodeVisitor):
    """Collects (line, dotted name) of every import in a file, the ones inside functions too.

    Imports under `if TYPE_CHECKING:` are left out: they name a type and load nothing.
    """

    def __init__(self, module: str, is_package: bool) -> None:
        self.parents = module.split(".") if is_package else module.split(".")[:-1]
        self.found: list[tuple[int, str]] = []

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) not in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        self.found += [(node.lineno, alias.name) for alias in node.names]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        start = ".".join(self.parents[: len(self.parents) - node.level + 1]) if node.level else ""
        base = ".".join(part for part in (start, node.module) if part)
        self.found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]

    def visit_Call(self, node: ast.Call) -> None:
        is_import = ast.unparse(node.func) in ("import_module", "importlib.import_module", "__import__")
        if is_import and node.args and isinstance(node.args[0], ast.Constant):
            self.found.append((node.lineno, str(node.args[0].value)))
        self.generic_visit(node)


def violations(path: str, source: str) -> list[str]:
    """Broken rules of one file; path is relative to the repository, with forward slashes."""
    is_package = path.endswith("/__init__.py")
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    part = module.split(".")[1] if "." in module else ""
    imports = Imports(module, is_package)
    imports.visit(ast.parse(source, path))
    broken = []
    if part and part not in LEVEL:
        broken.append(f"{path}: `{part}` is in no layer; give it a place in LAYERS of {Path(__file__).name}")
    for line, name in imports.found:
        where = f"{path}:{line}: import of `{name}`"
        names = name.split(".")
        if names[0] in FORBIDDEN_PACKAGES and PEER_SIDES.get(path) != names[0]:
            broken.append(f"{where}: the package must work without {names[0]}")
        if names[0] != "workbench" or name == "workbench.__version__":
            continue
        target = names[1] if len(names) > 1 else ""
        if not part:
            broken.append(
                f"{where}: workbench/__init__.py resolves its names lazily and imports nothing of ours"
            )
        elif target not in LEVEL:
            broken.append(f"{where}: import from the module that defines it, one of the LAYERS")
        elif part in LEVEL and target != part:
            if LEVEL[target] >= LEVEL[part]:
                broken.append(f"{where}: `{target}` is not below `{part}`")
            elif target not in ONLY.get(part, LEVEL):
                broken.append(f"{where}: `{part}` may import only {sorted(ONLY[part]) or 'nothing of ours'}")
            elif target in EDGE and part != "cli":
                broken.append(f"{where}: only `cli` may know `{target}`")
    return broken


def test_package_obeys_the_order():
    files = sorted(PACKAGE.rglob("*.py"))
    assert files
    broken = []
    for file in files:
        path = file.relative_to(PACKAGE.parent).as_posix()
        broken += violations(path, file.read_text(encoding="utf-8"))
    assert not broken, "\n" + "\n".join(broken)


@pytest.mark.parametrize(
    ("path", "source", "expected"),
    [
        ("workbench/cache.py", "from workbench.model import CausalLM", "`workbench.model.CausalLM`"),
        ("workbench/cache.py", "import workbench.model", "`workbench.model`"),
        ("workbench/cache.py", "from workbench import model", "`workbench.model`"),
        ("workbench/cache.py", "from .model import CausalLM", "`workbench.model.CausalLM`"),
        ("workbench/cache.py", "from . import model", "`workbench.model`"),
        ("workbench/cache.py", "def f():\n    import workbench.model", "workbench/cache.py:2"),
        ("workbench/cache.py", "import_module('workbench.model')", "`workbench.model`"),
        ("workbench/kernels/registry.py", "from ..model import CausalLM", "`workbench.model.CausalLM`"),
        ("workbench/kernels/__init__.py", "from ..model import CausalLM", "`workbench.model.CausalLM`"),
        ("workbench/kernels/op/reference.py", "from ...config import ModelConfig", "may import only"),
        ("workbench/taps.py", "from workbench.errors import InputError", "not below"),
        ("workbench/config.py", "from workbench.numerics import NumericsPolicy", "not below"),
        ("workbench/report/page.py", "from workbench.bench import harness", "not below"),
        ("workbench/__main__.py", "from workbench.serving import plugin", "only `cli` may know"),
        ("workbench/model.py", "from workbench import load", "module that defines it"),
        ("workbench/model.py", "import workbench", "module that defines it"),
        ("workbench/model.py", "from transformers import AutoModel", "without transformers"),
        ("workbench/analysis/compare/hf.py", "import fla", "without fla"),
        ("workbench/__init__.py", "from workbench.model import CausalLM", "lazily"),
        ("workbench/odds_and_ends.py", "import os", "`odds_and_ends` is in no layer"),
    ],
)
def test_checker_names_the_import(path, source, expected):
    (message,) = violations(path, source)
    assert expected in message and path in message


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (
            "workbench/model.py",
            "from workbench import taps\nfrom workbench.kernels import Kernels\nimport torch",
        ),
        ("workbench/kernels/__init__.py", "from .registry import register\nfrom . import norms"),
        ("workbench/kernels/norms/__init__.py", "from ..registry import register\nfrom . import reference"),
        ("workbench/cli.py", "from workbench import __version__\nfrom workbench.training import corpus"),
        ("workbench/generation.py", "if TYPE_CHECKING:\n    from workbench.model import CausalLM"),
    ],
)
def test_checker_lets_good_imports_pass(path, source):
    assert violations(path, source) == []
