"""Routers of real width without a model: logits of a stated construction, so that what a view shows can be checked.

Layer l of L, token t of kind k, expert e in group g(e), which has `GROUP` experts:

    hidden_lt = sqrt(1 - s_l) noise_t + sqrt(s_l) mean_k         unit normals in R^DIRECTIONS, s_l from 0 to 0.4
    expert_le = sqrt(1 - TIE) own_le + sqrt(TIE) common_lg       unit normals in R^DIRECTIONS, expert_le scaled to 1
    logit_lte = (1 + l / (L - 1)) expert_le . hidden_lt + bias_le,     bias_le ~ 0.15 N(0, 1)

and the logit of the `DEAD` planted experts of a layer is DEAD_LOGIT. So deeper layers choose more clearly and more by
kind, experts of a group are chosen together, and the planted dead serve nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from workbench.analysis.routing.record import RoutingPrompt, RoutingRecord
from workbench.analysis.routing.recorder import record_of_logits
from workbench.errors import InputError

DIRECTIONS, GROUP, TIE = 16, 8, 0.5
DEAD, DEAD_LOGIT = 3, -30.0


@dataclass(frozen=True, slots=True, eq=False)
class Planted:
    """The record of a synthetic router, and what was put into it.

    group  [L, E] number of the group of each expert
    dead   [L, DEAD] experts that can serve nothing
    """

    record: RoutingRecord
    group: np.ndarray
    dead: np.ndarray


def planted(
    layers: int = 40, experts: int = 256, top_k: int = 8, *, kinds: int = 4, tokens: int = 256, seed: int = 0
) -> Planted:
    """A record of `layers` synthetic routers over `tokens` tokens of each kind, logits left out.

    The defaults are the width of Qwen3.6-35B-A3B. Raises InputError for fewer experts than groups and dead need.
    """
    if experts % GROUP or experts < 2 * GROUP or experts - DEAD <= top_k or min(layers, kinds, tokens) < 1:
        raise InputError(
            f"synthetic router: expected a multiple of {GROUP} experts, at least {2 * GROUP} and more than top_k + "
            f"{DEAD}, and at least one layer, kind and token, found {experts} experts, top_k {top_k}, {layers} layers, "
            f"{kinds} kinds, {tokens} tokens"
        )
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    means, noise = normal(kinds, DIRECTIONS).repeat_interleave(tokens, 0), normal(kinds * tokens, DIRECTIONS)
    logits, group, dead = [], [], []
    for layer in range(layers):
        depth = layer / max(layers - 1, 1)
        share = 0.4 * depth
        hidden = (1 - share) ** 0.5 * noise + share**0.5 * means
        places = torch.randperm(experts, generator=generator) // GROUP
        common = normal(experts // GROUP, DIRECTIONS)
        own = (1 - TIE) ** 0.5 * normal(experts, DIRECTIONS) + TIE**0.5 * common[places]
        bias = 0.15 * normal(experts)
        gone = torch.randperm(experts, generator=generator)[:DEAD]
        row = (1 + depth) * (hidden @ (own / own.norm(dim=-1, keepdim=True)).T) + bias
        row[:, gone] = DEAD_LOGIT
        logits.append(row)
        group.append(places)
        dead.append(gone.sort().values)
    prompts = [
        RoutingPrompt(tuple(range(tokens)), f"kind {chr(ord('A') + kind)}", "synthetic") for kind in range(kinds)
    ]
    record = record_of_logits(torch.stack(logits).numpy(), top_k=top_k, prompts=prompts, keep_logits=False)
    return Planted(record, torch.stack(group).numpy(), torch.stack(dead).numpy())
