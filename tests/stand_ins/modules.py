"""Put functions where an import finds them: under the name that a backend asks for."""

import sys
import types
from dataclasses import replace

from workbench.kernels.registry import OPERATIONS, Backend
from workbench.kernels.requirements import forget_symbols


def install(monkeypatch, symbols: dict[str, object]) -> None:
    """Modules that have these objects, by ``package.module:attribute``; real packages of those names are hidden."""
    tops = {symbol.partition(":")[0].partition(".")[0] for symbol in symbols}
    for name in [name for name in sys.modules if name.partition(".")[0] in tops]:
        monkeypatch.delitem(sys.modules, name)
    for symbol, found in symbols.items():
        path, _, attribute = symbol.partition(":")
        parts = path.split(".")
        for i in range(1, len(parts) + 1):
            name = ".".join(parts[:i])
            if name not in sys.modules:
                module = types.ModuleType(name)
                module.__path__ = []
                module.__version__ = "stand-in"
                monkeypatch.setitem(sys.modules, name, module)
        setattr(sys.modules[path], attribute, found)
    forget_symbols()


def runnable_here(op: str, name: str) -> Backend:
    """The backend without what it needs of a device, its name kept."""
    backend = OPERATIONS[op].backends[name]
    requires = replace(backend.requires, devices=(), capability=None, capability_below=None, free_bytes=0)
    return replace(backend, requires=requires)
