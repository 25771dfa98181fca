"""Notebooks as reports: executed with parameters, normalised, exported to HTML files that need no network.

Two sides. Inside a notebook: `notebook_defaults`, `write_findings` and what `display` offers. Outside:
`build`, which the command `workbench report` calls.
"""

from workbench.report.attestation import attested
from workbench.report.display import Html, folded, if_any, note, passages, recorded, stack, table, verdict_card
from workbench.report.kernels import kernel_figures, variant_times
from workbench.report.recording import frames
from workbench.report.session import notebook_defaults, write_findings

__all__ = [
    "Html", "attested", "folded", "frames", "if_any", "kernel_figures", "note", "notebook_defaults", "passages",
    "recorded", "stack", "table", "variant_times", "verdict_card", "write_findings",
]  # fmt: skip
