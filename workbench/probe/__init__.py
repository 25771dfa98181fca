"""What a machine can do for the model: device, libraries, compilers, vendors' functions, and bridges to them.

`probe` answers one question per step, PASS, FAIL or SKIP, each with the next step to take. What may crash runs in a
process of its own. A vendor's function without a Python binding can become a backend by a bridge (`bridges`).
"""

from __future__ import annotations

from workbench.probe.probing import Probe, probe, register_bridges
from workbench.probe.steps import FAIL, PASS, SKIP, Step

__all__ = ["FAIL", "PASS", "SKIP", "Probe", "Step", "probe", "register_bridges"]
