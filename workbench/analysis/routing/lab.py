"""One setting of the routing lab: a text through the routers of a model, with another top-k or temperature."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from workbench.analysis.routing.record import RoutingRecord
from workbench.analysis.routing.recorder import rerouted
from workbench.analysis.routing.views import (
    ALL,
    TextView,
    depth_table,
    load_grid,
    main_load,
    prompt_record,
    text_view,
)
from workbench.model import CausalLM
from workbench.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, eq=False)
class RoutingProbe:
    """What a setting shows.

    load     [E] tokens that each expert of the layer served over the even number
    depth    kind, layer, effective, entropy, mass, margin (`views.depth_table`)
    text     the tokens with their experts in the layer
    caption  the reading
    """

    load: np.ndarray
    depth: pd.DataFrame
    text: TextView
    caption: str


@dataclass(slots=True)
class RoutingLab:
    """A model and the logits of its routers for each text, kept: a setting of top-k or temperature needs no pass."""

    model: CausalLM
    tokenizer: Tokenizer
    tokens: int = 160
    _records: dict[str, RoutingRecord] = field(default_factory=dict)

    @property
    def layers(self) -> list[int]:
        return [layer for layer, kind in enumerate(self.model.config.mlp_types) if kind == "sparse"]

    def recorded(self, prompt: str) -> RoutingRecord:
        """The routing of a text's first `tokens` tokens. Raises InputError for a text without tokens."""
        if prompt not in self._records:
            self._records[prompt] = prompt_record(self.model, self.tokenizer, prompt, self.tokens)
        return self._records[prompt]

    def probe(self, prompt: str, *, layer: int, top_k: int, temperature: float) -> RoutingProbe:
        """Route the text anew with logits / `temperature` and `top_k` experts, each layer by itself.

        Raises InputError for a layer, top-k or temperature that there is not.
        """
        seen = rerouted(self.recorded(prompt), top_k=top_k, temperature=temperature)
        text = text_view(seen, self.tokenizer, layer, most=self.tokens)
        depth = depth_table(seen)
        depth = depth[depth["kind"] == ALL]
        load = load_grid(main_load(seen)).loc[layer].to_numpy()
        here = depth[depth["layer"] == layer].iloc[0]
        caption = (
            f"Layer {layer}, top-{top_k}, temperature {temperature:g}: {here['effective']:.3g} of {len(load)} experts "
            f"in use, {int((load == 0).sum())} without a token; a token's entropy is {here['entropy']:.2f} nats, its "
            f"chosen experts hold {100 * here['mass']:.0f} % of the probability. Temperature moves the weights, not "
            "the choice."
        )
        return RoutingProbe(load, depth, text, caption)
