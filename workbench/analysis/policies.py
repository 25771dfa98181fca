"""What each policy does to one model: whether it binds, stays finite, how far it is off, and what the text costs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from workbench import quality
from workbench.analysis import parity
from workbench.analysis.runs import using_policy
from workbench.kernels import gated_delta_rule
from workbench.model import CausalLM
from workbench.numerics import CATALOGUE, EXP_OVERFLOW, NumericsPolicy, resolve_policy
from workbench.tokenizer import Tokenizer

#: Headings of `verdicts` where people read them.
VERDICT_HEADINGS = {
    "origin": "whose it is",
    "binds": "clamp binds here",
    "error_out": "error of the output",
    "bad_out": "share not finite",
    "perplexity": "held-out perplexity",
}


def verdicts(
    model: CausalLM,
    tokenizer: Tokenizer,
    tensors: Mapping[str, Tensor],
    names: Collection[str] = tuple(CATALOGUE),
    *,
    windows: int = 1,
    progress: Callable[[str], None] | None = None,
) -> pd.DataFrame:
    """One row for each preset of `names`.

    `tensors` are the inputs of every delta rule under the safe policy (`parity.KEEP_DELTA_RULE_INPUTS`). Columns:
    policy; `binds`, whether its clamps change the output of any layer on these inputs (missing without clamps);
    `error_out`, the worst layer's relative error against the fp64 oracle (missing where it is not finite) and
    `bad_out`, the largest share of a layer's output that is not finite; `perplexity` of the whole model over `windows`
    held-out windows of 512 tokens (missing where it is not finite); origin.
    """
    text = quality.heldout_tokens(tokenizer, windows=windows)
    errors = parity.worst_errors(parity.delta_rule_errors(tensors, names)).set_index("policy")
    rows = []
    for name in names:
        policy = CATALOGUE[name].policy
        with using_policy(model, policy):
            perplexity = quality.perplexity(model, text).perplexity
        rows.append((
            name, _binds(policy, tensors), errors.loc[name, "error_out"], errors.loc[name, "bad_out"],
            perplexity if math.isfinite(perplexity) else math.nan, CATALOGUE[name].origin,
        ))  # fmt: skip
        if progress is not None:
            progress(f"{len(rows)} of {len(names)} policies")
    columns = ["policy", "binds", "error_out", "bad_out", "perplexity", "origin"]
    return pd.DataFrame(rows, columns=columns).astype({"binds": "boolean"})


def _binds(policy: NumericsPolicy, tensors: Mapping[str, Tensor]) -> bool | None:
    if not policy.clamps:
        return None
    free = dataclasses.replace(policy, clamps=())
    for inputs in parity.kept_inputs(tensors).values():
        clamped, plain = (gated_delta_rule(**inputs, policy=p, backend="torch_chunk")[0] for p in (policy, free))
        if not torch.equal(clamped.nan_to_num(), plain.nan_to_num()):
            return True
    return False


def overflow_limit(policy: str) -> float:
    """Nats that exp can undo in the format of the policy's sum: 88.72 in float32 and bfloat16, 11.09 in float16."""
    return EXP_OVERFLOW["float16" if resolve_policy(policy).cumsum == "float16" else "float32"]


def triggers(tensors: Mapping[str, Tensor], policy: str = "factored") -> pd.DataFrame:
    """Whether a chunk of a head is not finite under `policy`, beside the decay that predicts it.

    The predicate: |G| of the chunk, the sum of |g| over it, above `overflow_limit`. Each chunk is computed by itself,
    from a zero state, so that none inherits another's fault. One row for each layer, head and chunk: layer, head,
    chunk, span (nats), predicted, observed.
    """
    limit = overflow_limit(policy)
    chosen = resolve_policy(policy)
    rows = []
    for layer, inputs in parity.kept_inputs(tensors).items():
        tokens = inputs["q"].shape[1] // chosen.chunk * chosen.chunk
        if not tokens:
            continue
        chunks = {  # a chunk as a sequence of its own
            name: x[:1, :tokens].unflatten(1, (-1, chosen.chunk)).squeeze(0) for name, x in inputs.items()
        }
        out, _ = gated_delta_rule(**chunks, policy=chosen, backend="torch_chunk")
        observed = (~torch.isfinite(out)).any(-1).any(1)  # [chunks, V]
        spans = chunks["log_decay"].double().sum(1).abs()
        for chunk, head in np.ndindex(*observed.shape):
            span = float(spans[chunk, head])
            rows.append((layer, head, chunk, span, span > limit, bool(observed[chunk, head])))
    return pd.DataFrame(rows, columns=["layer", "head", "chunk", "span", "predicted", "observed"])


def trigger_reading(table: pd.DataFrame) -> dict[str, int]:
    """How often the predicate was right: chunks, predicted, observed, and those in which the two differ."""
    return {
        "chunks": len(table),
        "predicted": int(table["predicted"].sum()),
        "observed": int(table["observed"].sum()),
        "differ": int((table["predicted"] != table["observed"]).sum()),
    }
