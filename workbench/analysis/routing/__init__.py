"""Which experts serve which tokens: a recorder of every router's choices, and what can be read from its record.

>>> seen = record(model, [tokenizer.encode(text) for text in texts])
>>> summarise(seen)                                        # a row for each layer
>>> flips_by_layer(compare(seen, record(other, seen.prompts)))
>>> seen.save("run"), load_record("run")
"""

from workbench.analysis.routing.coactivation import Coactivation, coactivation
from workbench.analysis.routing.flips import (
    PartFlips,
    RoutingFlips,
    compare,
    flip_totals,
    flips_by_layer,
    flips_by_token,
)
from workbench.analysis.routing.load import (
    HOT,
    LOAD_COLUMNS,
    NEAR_TIE,
    bad_table,
    confidence_table,
    dead_experts,
    expert_load,
    hot_experts,
    largest_share,
    load_by_kind,
    load_summary,
    load_table,
    summarise,
)
from workbench.analysis.routing.positions import position_drift, position_edges
from workbench.analysis.routing.prompts import KINDS, RoutingText, read_prompts, read_routing_texts, text_prompt
from workbench.analysis.routing.record import RoutingPart, RoutingPrompt, RoutingRecord, load_record
from workbench.analysis.routing.recorder import record, record_of_logits, rerouted

__all__ = [
    "HOT",
    "KINDS",
    "LOAD_COLUMNS",
    "NEAR_TIE",
    "Coactivation",
    "PartFlips",
    "RoutingFlips",
    "RoutingPart",
    "RoutingPrompt",
    "RoutingRecord",
    "RoutingText",
    "bad_table",
    "coactivation",
    "compare",
    "confidence_table",
    "dead_experts",
    "expert_load",
    "flip_totals",
    "flips_by_layer",
    "flips_by_token",
    "hot_experts",
    "largest_share",
    "load_by_kind",
    "load_record",
    "load_summary",
    "load_table",
    "position_drift",
    "position_edges",
    "read_prompts",
    "read_routing_texts",
    "record",
    "record_of_logits",
    "rerouted",
    "summarise",
    "text_prompt",
]
