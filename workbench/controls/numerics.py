"""Live controls of notebook 01: ipywidgets over `analysis.lab`, redrawn at every change."""

from __future__ import annotations

import html
import itertools
import time
from dataclasses import replace

import ipywidgets as widgets

from workbench import plots
from workbench.analysis.lab import Lab, Probe
from workbench.controls.recorded import LIVE_STYLE, RecordedControls
from workbench.errors import WorkbenchError
from workbench.model import CausalLM
from workbench.numerics import (
    CHUNK_SITES,
    CLAMP_SITES,
    CUMSUM_KINDS,
    DECODE_SITES,
    EXPONENT_FORMS,
    PRESETS,
    SAFE,
    SOLVERS,
    Clamp,
    NumericsPolicy,
)
from workbench.report.display import Html
from workbench.report.recording import frames
from workbench.tokenizer import Tokenizer

NO_CLAMP = "no clamp"
CHUNKS = (8, 16, 32, 64, 128)
DTYPES = ("float32", "bfloat16", "float16")


#: What a page shows of the controls: these limits on the cumulative sum under these policies.
RECORDED_LIMITS = (None, 200.0, 80.0, 20.0, 5.0)
RECORDED_POLICIES = ("factored", "safe")


class NumericsControls(RecordedControls):
    """Exponent form, cumulative sum, solver, chunk, clamp and its limit, dtype, layer, head and prompt of one model.

    `figure` and `text` hold what the setting shows, `status` the time it took or the reason of a refusal.
    """

    def __init__(self, model: CausalLM, tokenizer: Tokenizer, prompt: str):
        self.lab = Lab(model, tokenizer)
        for dtype in DTYPES:
            self.lab.prepare(prompt, dtype)
        layer, head = self.lab.strongest(prompt, DTYPES[0])

        def choice(name: str, options, value=None) -> widgets.Dropdown:
            options = list(options)
            return widgets.Dropdown(description=name, options=options, value=options[0] if value is None else value)

        self.exponent = choice("exponent", EXPONENT_FORMS, SAFE.exponent)
        self.cumsum = choice("cumsum", CUMSUM_KINDS, SAFE.cumsum)
        self.solver = choice("solver", SOLVERS, SAFE.solver)
        self.chunk = widgets.SelectionSlider(
            description="chunk", options=CHUNKS, value=SAFE.chunk, continuous_update=False
        )
        self.site = choice("clamp", (NO_CLAMP, *CLAMP_SITES))
        self.limit = widgets.FloatLogSlider(
            description="limit ±", value=12.0, base=10, min=-1, max=5, step=0.1, continuous_update=False, disabled=True
        )
        self.dtype = choice("dtype", DTYPES)
        self.layer = choice("layer", self.lab.linear_layers, layer)
        self.head = choice("head", range(model.config.linear_num_value_heads), head)
        self.prompt = widgets.Textarea(
            description="prompt", value=prompt, continuous_update=False, rows=4, layout=widgets.Layout(width="95%")
        )
        self.figure, self.text, self.status = widgets.HTML(), widgets.HTML(), widgets.HTML()
        style = widgets.HTML(LIVE_STYLE, layout=widgets.Layout(display="none"))
        self.inputs = (
            self.exponent, self.cumsum, self.solver, self.chunk, self.site, self.limit, self.dtype, self.layer,
            self.head, self.prompt,
        )  # fmt: skip
        for control in self.inputs:
            control.observe(self._changed, names="value")
        rows = [widgets.HBox(self.inputs[i : i + 3]) for i in range(0, 9, 3)]
        super().__init__([style, *rows, self.prompt, self.status, self.figure, self.text])
        self.add_class("workbench-controls")
        self.draw()

    @property
    def policy(self) -> NumericsPolicy:
        """The policy that the controls stand for. Raises PolicyError where they cannot go together."""
        clamps = ()
        if self.site.value != NO_CLAMP:
            site, limit = self.site.value, self.limit.value
            phase = "prefill" if site in CHUNK_SITES else "decode" if site in DECODE_SITES else "both"
            clamps = (Clamp(site=site, phase=phase, lo=-limit, hi=limit),)
        return NumericsPolicy(
            exponent=self.exponent.value, cumsum=self.cumsum.value, solver=self.solver.value, chunk=self.chunk.value,
            clamps=clamps,
        )  # fmt: skip

    def draw(self) -> None:
        """Compute and show the setting; a refusal takes the place of the figure."""
        started = time.perf_counter()
        try:
            probe = self.lab.probe(
                self.prompt.value, self.policy, dtype=self.dtype.value, layer=self.layer.value, head=self.head.value
            )
        except WorkbenchError as error:
            self.figure.value = self.text.value = ""
            self.status.value = f"<p><strong>refused:</strong> {html.escape(str(error))}</p>"
            return
        self.figure.value = plots.numerics_probe(probe, self.layer.value, self.head.value)._repr_html_()
        self.text.value = _written(probe)
        self.status.value = f"<p>Computed and drawn in {time.perf_counter() - started:.2f} s.</p>"

    def recorded(self) -> Html:
        """The clamp of the cumulative sum, from none to one that binds everywhere, in an unsafe and a safe form."""
        setting = {"dtype": self.dtype.value, "layer": self.layer.value, "head": self.head.value}
        shown = []
        for limit, name in itertools.product(RECORDED_LIMITS, RECORDED_POLICIES):
            clamps = () if limit is None else (Clamp(site="cumsum", phase="prefill", lo=-limit, hi=limit),)
            probe = self.lab.probe(self.prompt.value, replace(PRESETS[name], clamps=clamps), **setting)
            plate = plots.numerics_probe(probe, setting["layer"], setting["head"])
            shown.append(Html(plate._repr_html_() + _written(probe), plate.caption))
        limits = ["none" if limit is None else f"±{limit:g} nats" for limit in RECORDED_LIMITS]
        return frames(
            "Settings recorded for this page; in the notebook every control is live",
            {"clamp of the cumulative sum": limits, "policy": RECORDED_POLICIES},
            shown,
        )

    def _changed(self, change: dict) -> None:
        self.limit.disabled = self.site.value == NO_CLAMP
        self.draw()


def _written(probe: Probe) -> str:
    return f"<p>The model writes:</p><pre>{html.escape(probe.text)}</pre>"
