"""Checks of a vendor's Python module, for a process of their own: what its import does is the vendor's choice."""

from __future__ import annotations

import difflib
import importlib
from types import ModuleType

from workbench.probe.steps import Failed, Skipped


def imports(modules: list[str]) -> tuple[str, list[str]]:
    """The first of the modules that is there imports. Skipped where none is there; its own errors go through."""
    module = _imported(modules)
    version = getattr(module, "__version__", None)
    where = getattr(module, "__file__", None) or "built in"
    return f"{module.__name__}{f' {version}' if version else ''} imports, from {where}", []


def has_function(modules: list[str], name: str) -> tuple[str, list[str]]:
    """One of the modules has a callable of that name."""
    seen: list[str] = []
    for module in modules:
        try:
            found = _imported([module])
        except Skipped:  # the next one may be there; with none the import's own step says so
            continue
        if callable(getattr(found, name, None)):
            return f"{found.__name__}.{name} is callable", []
        if hasattr(found, name):
            seen.append(f"{found.__name__}.{name} is of type {type(getattr(found, name)).__name__}, no function")
            continue
        near = difflib.get_close_matches(name, dir(found), n=4, cutoff=0.5)
        seen.append(f"{found.__name__} has no {name}" + (f" (near: {', '.join(near)})" if near else ""))
    raise Failed("; ".join(seen) or f"none of {', '.join(modules)} is there", None, "binding_lacks_function")


def _imported(modules: list[str]) -> ModuleType:
    for name in modules:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            # Another module that it needs and lacks is a fault of the installation; itself is just not there.
            if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
                raise
    raise Skipped(f"no Python module {' or '.join(modules)}")
