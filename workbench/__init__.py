"""Hybrid MoE workbench: run, trace and question hybrid linear-attention mixture-of-experts language models.

>>> import workbench
>>> model = workbench.load("data/miniature")
>>> with workbench.trace(model) as trace:
...     model(input_ids)
>>> trace.table

Importing this package loads neither torch nor any other heavy dependency: public names are resolved on first
use, so that `workbench --help` answers at once and works on a machine where torch is broken.
"""

from importlib import import_module

__version__ = "0.1.0"

# Public name -> module that defines it. The module is imported when the name is first read.
_PUBLIC_NAMES = {
    "WorkbenchError": "workbench.errors",
    "ModelConfig": "workbench.config",
    "NumericsPolicy": "workbench.numerics",
    "CausalLM": "workbench.model",
    "load": "workbench.loading",
    "read_checkpoint": "workbench.checkpoint",
    "write_checkpoint": "workbench.checkpoint",
    "trace": "workbench.tracing",
    "compare": "workbench.analysis.compare",
    "intervene": "workbench.tracing",
    "sweep": "workbench.sweeps",
    "notebook_defaults": "workbench.report",
}

__all__ = ["__version__", *_PUBLIC_NAMES]


def __getattr__(name: str):
    if name not in _PUBLIC_NAMES:
        raise AttributeError(f"workbench has no public name {name!r}; it has: {', '.join(__all__)}")
    value = getattr(import_module(_PUBLIC_NAMES[name]), name)
    globals()[name] = value  # later reads skip this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC_NAMES})
