"""Which experts serve which text: load of every expert, unused ones, and the strongest.

>>> load = expert_load(model, [tokenizer.encode(text) for text in texts])
>>> dead_experts(load), largest_share(load)
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from workbench import taps
from workbench.errors import InputError
from workbench.kernels import Kernels
from workbench.model import CausalLM
from workbench.taps import Tap

#: What stands before the names of the prediction head's tap points.
MTP_LAYER = "mtp.layers.00."

#: Columns of `expert_load`.
LOAD_COLUMNS = ("part", "layer", "expert", "tokens", "share", "token_share")

#: Kinds of text in the routing corpus.
KINDS = ("prose", "code", "chat", "repeated")


@dataclass(frozen=True, slots=True)
class RoutingText:
    """One text of the routing corpus; `kind` is one of `KINDS`."""

    kind: str
    title: str
    text: str


def read_routing_texts(path: str | Path) -> list[RoutingText]:
    """The routing corpus, one {"kind", "title", "text"} a line. Raises InputError naming the line that is not one."""
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: expected a JSONL file in UTF-8, found {error}") from None
    found = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            text = RoutingText(**json.loads(line))
            if not isinstance(text.title, str) or not isinstance(text.text, str):
                raise TypeError
        except (ValueError, RecursionError, TypeError):
            raise InputError(
                f"{path} line {number}: expected {{kind, title, text}} as JSON, found {line[:40]!r}"
            ) from None
        if text.kind not in KINDS:
            raise InputError(f"{path} line {number}: kind: expected one of {', '.join(KINDS)}, found {text.kind!r}")
        found.append(text)
    return found


class RouterLogits:
    """Hands every router's logits to `seen` by full name, after the tap that the model had; layers without pass by."""

    def __init__(self, seen: dict[str, list[Tensor]], outer: Tap | None, prefix: str = ""):
        self.seen, self.outer, self.prefix = seen, outer, prefix

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        if self.outer is not None:
            tensor = self.outer(name, tensor)
        if name == taps.MOE_LOGITS:
            self.seen[self.prefix].append(tensor)
        return tensor

    def scope(self, prefix: str) -> RouterLogits:
        outer = None if self.outer is None else self.outer.scope(prefix)
        return RouterLogits(self.seen, outer, self.prefix + prefix)


@torch.inference_mode()
def expert_load(model: CausalLM, rows: Iterable[Sequence[int]]) -> pd.DataFrame:
    """How many tokens each expert of each layer serves: a row for every expert, also for one that serves none.

    Each of `rows` is a text's token ids, at least two, and is read by itself. The choice is the one that the model's
    own router takes from the same logits.

    part          `model`, or `mtp` for the multi-token-prediction head, which reads every pair of a token's hidden row
                  and the token after it
    layer, expert numbers inside the part
    tokens        tokens that the expert served
    share         tokens / (tokens read by the layer * experts per token): the shares of a layer sum to 1, and none
                  exceeds 1 / experts per token
    token_share   tokens / tokens read by the layer: 1 for an expert that serves every token

    Raises InputError for a model without experts and for a row too short or too long.
    """
    config = model.config
    if not config.is_moe:
        raise InputError("expert_load: expected a model with experts, found a dense one")
    sparse = [layer for layer, kind in enumerate(config.mlp_types) if kind == "sparse"]
    places = {taps.full_name(layer, ""): ("model", layer) for layer in sparse}
    if config.mtp_num_hidden_layers:
        places[MTP_LAYER] = ("mtp", 0)
    counts = {prefix: torch.zeros(config.num_experts, dtype=torch.int64) for prefix in places}
    read = dict.fromkeys(places, 0)
    routing = Kernels(model.kernels.requested, model.kernels.policy).routing  # counted apart from the model's own calls
    outer = model.tap
    for number, row in enumerate(rows):
        if not 2 <= len(row) <= config.max_position_embeddings:
            raise InputError(
                f"expert_load: row {number}: expected 2 to {config.max_position_embeddings} tokens, found {len(row)}"
            )
        ids = torch.as_tensor(row, dtype=torch.int64, device=model.device)[None]
        seen: dict[str, list[Tensor]] = {prefix: [] for prefix in places}
        model.tap = RouterLogits(seen, outer)
        try:
            hidden = model(ids, use_cache=False, last_only=True).hidden
            if config.mtp_num_hidden_layers:
                model.mtp_logits(hidden[:, :-1], ids[:, 1:])
        finally:
            model.tap = outer
        for prefix, (logits,) in seen.items():
            _, experts = routing(logits, top_k=config.num_experts_per_tok, normalise=config.norm_topk_prob)
            counts[prefix] += torch.bincount(experts.flatten().cpu(), minlength=config.num_experts)
            read[prefix] += logits.shape[0]
    if not all(read.values()):
        raise InputError("expert_load: expected at least one row of tokens, found none")
    table = [
        (*places[prefix], expert, count, count / (read[prefix] * config.num_experts_per_tok), count / read[prefix])
        for prefix, per_expert in counts.items()
        for expert, count in enumerate(per_expert.tolist())
    ]
    return pd.DataFrame(table, columns=list(LOAD_COLUMNS))


def load_by_kind(model: CausalLM, rows_by_kind: Mapping[str, Iterable[Sequence[int]]]) -> pd.DataFrame:
    """`expert_load` of the texts of each kind, one below the other, with the kind as first column."""
    if not rows_by_kind:
        raise InputError("load_by_kind: expected at least one kind of text, found none")
    return pd.concat(
        [expert_load(model, rows).assign(kind=kind) for kind, rows in rows_by_kind.items()], ignore_index=True
    )[["kind", *LOAD_COLUMNS]]


def dead_experts(load: pd.DataFrame) -> pd.DataFrame:
    """The rows of experts that served no token."""
    return load[load["tokens"] == 0].reset_index(drop=True)


def largest_share(load: pd.DataFrame) -> pd.DataFrame:
    """The row of the strongest expert of every layer; of equals the lowest number."""
    return load.loc[load.groupby(_layers(load), sort=False)["tokens"].idxmax()].reset_index(drop=True)


def _layers(load: pd.DataFrame) -> list[str]:
    """The columns that tell the layers of a load table apart."""
    return [name for name in ("kind", "part", "layer") if name in load.columns]


def load_summary(load: pd.DataFrame) -> pd.DataFrame:
    """A row for each kind (where there is one) and layer: how evenly its experts share the work.

    dead               experts that served no token
    largest_share, largest_token_share
                       of the strongest expert
    effective_experts  exp of the entropy of the shares: E for an even load, 1 where one expert did all
    """
    rows = []
    for place, layer in load.groupby(_layers(load), sort=False):
        used = layer["share"][layer["share"] > 0]
        dead = int((layer["tokens"] == 0).sum())
        effective = math.exp(-(used * np.log(used)).sum())
        rows.append((*place, dead, layer["share"].max(), layer["token_share"].max(), effective))
    columns = [*_layers(load), "dead", "largest_share", "largest_token_share", "effective_experts"]
    return pd.DataFrame(rows, columns=columns)
