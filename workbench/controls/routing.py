"""Live controls of notebook 02: what a router does with a text, and how long the ways to compute experts take here."""

from __future__ import annotations

import html
import itertools
import time
from collections.abc import Sequence

import ipywidgets as widgets
import torch

from workbench import plots
from workbench.analysis import expert_paths
from workbench.analysis.routing import RoutingPrompt
from workbench.analysis.routing.lab import RoutingLab, RoutingProbe
from workbench.analysis.routing.views import text_view
from workbench.analysis.wording import counted
from workbench.controls.recorded import LIVE_STYLE, RecordedControls
from workbench.errors import InputError, WorkbenchError
from workbench.model import CausalLM
from workbench.report.display import Html, note, stack, table
from workbench.report.recording import frames
from workbench.report.tokens import routed_text
from workbench.tokenizer import Tokenizer

#: What a page shows of the controls: these temperatures, and at most so many layers.
RECORDED_TEMPERATURES = (0.25, 0.5, 1.0, 2.0, 4.0)
RECORDED_LAYERS = 6
RECORDED_TOKENS = 80

OWN_TEXT = "the text below"


class RoutingControls(RecordedControls):
    """Layer, prompt, top-k and temperature of the logits.

    `prompts` are offered beside `prompt`, a text to edit. `figure` and `text` hold what the setting shows, `status` the
    time it took or the reason of a refusal. Raises InputError for a `layer` that has no experts.
    """

    def __init__(
        self, model: CausalLM, tokenizer: Tokenizer, prompt: str, prompts: Sequence[RoutingPrompt] = (),
        layer: int | None = None,
    ):  # fmt: skip
        self.lab = RoutingLab(model, tokenizer)
        self.texts = {OWN_TEXT: prompt} | {
            f"{given.kind}: {given.title}": tokenizer.decode(given.ids[: self.lab.tokens]) for given in prompts
        }
        experts, chosen = model.config.num_experts, model.config.num_experts_per_tok
        layers = self.lab.layers
        if layer is not None and layer not in layers:
            raise InputError(f"routing controls: layer: expected one with experts, of {layers}, found {layer!r}")
        self.layer = widgets.SelectionSlider(
            description="layer", options=layers, value=layers[-1] if layer is None else layer, continuous_update=False
        )
        self.top_k = widgets.IntSlider(
            description="top-k", min=1, max=min(experts, 4 * chosen), value=chosen, continuous_update=False
        )
        self.temperature = widgets.FloatLogSlider(
            description="temperature", value=1.0, base=10, min=-1, max=1, step=0.05, continuous_update=False,
            style={"description_width": "initial"},
        )  # fmt: skip
        self.choice = widgets.Dropdown(
            description="prompt", options=list(self.texts), layout=widgets.Layout(width="95%")
        )
        self.prompt = widgets.Textarea(
            value=prompt, continuous_update=False, rows=4, layout=widgets.Layout(width="95%")
        )
        self.figure, self.text, self.status = widgets.HTML(), widgets.HTML(), widgets.HTML()
        style = widgets.HTML(LIVE_STYLE, layout=widgets.Layout(display="none"))
        self.inputs = (self.layer, self.top_k, self.temperature, self.choice, self.prompt)
        for control in self.inputs:
            control.observe(self._changed, names="value")
        rows = [widgets.HBox(self.inputs[:3]), self.choice, self.prompt, self.status, self.figure, self.text]
        super().__init__([style, *rows])
        self.add_class("workbench-controls")
        self.draw()

    @property
    def shown_text(self) -> str:
        return self.prompt.value if self.choice.value == OWN_TEXT else self.texts[self.choice.value]

    def draw(self) -> None:
        """Route and show the setting; a refusal takes the place of the figure."""
        self.prompt.disabled = self.choice.value != OWN_TEXT
        started = time.perf_counter()
        try:
            probe = self.lab.probe(
                self.shown_text, layer=self.layer.value, top_k=self.top_k.value, temperature=self.temperature.value
            )
        except WorkbenchError as error:
            self.figure.value = self.text.value = ""
            self.status.value = f"<p><strong>refused:</strong> {html.escape(str(error))}</p>"
            return
        self.figure.value = self._plate(probe)._repr_html_()
        self.text.value = routed_text(probe.text, len(probe.load))._repr_html_()
        self.status.value = f"<p>Routed and drawn in {time.perf_counter() - started:.2f} s.</p>"

    def recorded(self) -> Html:
        """Two sweeps: temperature and top-k at the layer and text of the controls; layers and kinds of text."""
        layer, text = self.layer.value, self.shown_text
        chosen, experts = self.lab.model.config.num_experts_per_tok, self.lab.model.config.num_experts
        numbers = list(dict.fromkeys([chosen, 1, min(2 * chosen, experts)]))
        plates = [
            self._plate(self.lab.probe(text, layer=layer, top_k=top_k, temperature=temperature))
            for temperature, top_k in itertools.product(RECORDED_TEMPERATURES, numbers)
        ]
        sharp = frames(
            f"Recorded for this page, layer {layer}; in the notebook every control is live",
            {"temperature": [f"{t:g}" for t in RECORDED_TEMPERATURES], "top-k": [str(n) for n in numbers]},
            plates,
        )
        of_kind = {name.partition(": ")[0]: words for name, words in reversed(self.texts.items()) if name != OWN_TEXT}
        kinds = dict(reversed(of_kind.items())) or {OWN_TEXT: text}
        layers = self.lab.layers
        some = sorted({layers[round(i * (len(layers) - 1) / (RECORDED_LAYERS - 1))] for i in range(RECORDED_LAYERS)})
        lab = RoutingLab(self.lab.model, self.lab.tokenizer, tokens=RECORDED_TOKENS)
        pages = [
            routed_text(text_view(lab.recorded(words), lab.tokenizer, number), experts)
            for number, words in itertools.product(some, kinds.values())
        ]
        tokens = frames(
            "The strongest expert of each token, by layer and kind of text",
            {"layer": [str(number) for number in some], "text": list(kinds)},
            pages,
        )
        return stack(sharp, tokens)

    def _plate(self, probe: RoutingProbe) -> plots.Plate:
        return plots.routing_probe(probe.load, probe.depth, probe.text.layer, len(probe.load), probe.caption)

    def _changed(self, change: dict) -> None:
        self.draw()


#: Numbers of tokens that the timing offers, as far as the prompt reaches.
TIMED_TOKENS = (1, 4, 16, 64, 256)


class ExpertTimings(RecordedControls):
    """Times of every way to compute the experts of one layer of the model, measured when a control changes.

    A page says instead that they are not kept: it is the same at every run, and times are not.
    """

    def __init__(self, given: expert_paths.LayerInput):
        self.given = given
        lengths = sorted({min(tokens, len(given.x)) for tokens in TIMED_TOKENS})
        self.tokens = widgets.SelectionSlider(
            description="tokens", options=lengths, value=lengths[-1], continuous_update=False
        )
        self.load = widgets.Dropdown(description="load", options=(expert_paths.OWN, expert_paths.ONE_SET))
        self.table = widgets.HTML()
        for control in (self.tokens, self.load):
            control.observe(self._changed, names="value")
        style = widgets.HTML(LIVE_STYLE, layout=widgets.Layout(display="none"))
        super().__init__([style, widgets.HBox([self.tokens, self.load]), self.table])
        self.add_class("workbench-controls")
        self._is_measured = False

    def measure(self) -> None:
        """Time the setting and show it, fastest first."""
        tokens = self.tokens.value
        found = expert_paths.time_paths(self.given, self.load.value, tokens)
        automatic, threads = expert_paths.automatic_path(self.given, tokens), torch.get_num_threads()
        caption = (
            f"Layer {self.given.layer}, {counted(tokens, 'token')}, {self.load.value}, "
            f"{counted(threads, 'thread')}, this machine, now. Taken where none is named: {automatic}."
        )
        self.table.value = table(found, caption, {"path": "backend", "ms": "ms, median"})._repr_html_()
        self._is_measured = True

    def recorded(self) -> Html:
        return note("Times of this checkpoint's own layer are measured live in the notebook. A page holds none: it is "
                    "the same at every run, and they are not.")  # fmt: skip

    def _repr_mimebundle_(self, **options: object) -> dict:
        bundle = super()._repr_mimebundle_(**options)
        if "text/html" not in bundle and not self._is_measured:
            self.measure()
        return bundle

    def _changed(self, change: dict) -> None:
        self.measure()
