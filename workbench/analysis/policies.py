"""What each policy does to one model: whether it binds, stays finite, how far it is off, and what the text costs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from workbench import quality
from workbench.analysis import parity
from workbench.analysis.runs import using_policy
from workbench.dialogue import fixed_dialogues, fixed_recalls
from workbench.kernels import gated_delta_rule
from workbench.kernels.agreement import logit_difference
from workbench.kernels.gated_delta_rule.spec import limited
from workbench.model import CausalLM
from workbench.numerics import CATALOGUE, EXP_OVERFLOW, LARGEST, NumericsPolicy, resolve_policy
from workbench.provenance import checkpoint_hash
from workbench.tokenizer import Tokenizer

#: Headings of `verdicts` where people read them.
VERDICT_HEADINGS = {
    "origin": "whose it is",
    "binds": "clamp binds here",
    "error_out": "error of the output",
    "bad_out": "share not finite",
    "perplexity": "held-out perplexity",
    "dialogues": "dialogues right",
    "recall": "facts recalled",
    "divergence": "prefill against decode",
}

#: Columns of `answers`: what a policy does to whole conversations, and to a prompt read at once or token by token.
ANSWERS = ("dialogues", "recall", "divergence")

#: The benchmark that measures `answers` of every preset, and how its rows are named.
RECORDED = "policy_verdicts"
RECORDED_CASES = {
    "dialogues": "dialogues right",
    "recall": "facts recalled",
    "divergence": "prefill against decode",
}
#: Tokens of the prompt that prefill and decode both read.
DIVERGENCE_TOKENS = 200


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
            name, binds(policy, tensors), errors.loc[name, "error_out"], errors.loc[name, "bad_out"],
            perplexity if math.isfinite(perplexity) else math.nan, CATALOGUE[name].origin,
        ))  # fmt: skip
        if progress is not None:
            progress(f"{len(rows)} of {len(names)} policies")
    columns = ["policy", "binds", "error_out", "bad_out", "perplexity", "origin"]
    return pd.DataFrame(rows, columns=columns).astype({"binds": "boolean"})


@torch.inference_mode()
def prefill_decode_divergence(model: CausalLM, input_ids: Tensor) -> float:
    """How far the logits of one pass over `input_ids` [1, T] are from those of T decode steps, by the model's policy.

    max |prefill - decode| / max |decode| over all tokens; missing (NaN) where either is not finite.
    """
    at_once = model(input_ids, use_cache=False).logits
    cache, steps = None, []
    for t in range(input_ids.shape[1]):
        out = model(input_ids[:, t : t + 1], cache=cache)
        cache = out.cache
        steps.append(out.logits)
    stepwise = torch.cat(steps, dim=1)
    if not torch.isfinite(stepwise).all():
        return math.nan
    difference = logit_difference(at_once, stepwise)
    return difference if math.isfinite(difference) else math.nan


def answers(
    model: CausalLM,
    tokenizer: Tokenizer,
    names: Collection[str] = tuple(CATALOGUE),
    *,
    data: Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> pd.DataFrame:
    """One row for each preset of `names`, what it makes of conversations. Takes minutes for all of them.

    Columns: policy; `dialogues`, the share of the 20 fixed dialogues with the right reply; `recall`, the same of the 20
    fixed questions for a fact far back; `divergence`, see `prefill_decode_divergence`, on the first DIVERGENCE_TOKENS
    of the held-out text. `data` None is the project's folder.
    """
    ids = torch.tensor(quality.heldout_tokens(tokenizer, windows=1, length=DIVERGENCE_TOKENS, data=data)[None, :-1])
    asked = fixed_dialogues(20, data), fixed_recalls(20, data)
    rows = []
    for name in names:
        with using_policy(model, CATALOGUE[name].policy):
            right, recalled = (quality.dialogue_score(model, tokenizer, dialogues).share for dialogues in asked)
            rows.append((name, right, recalled, prefill_decode_divergence(model, ids.to(model.device))))
        if progress is not None:
            progress(f"{len(rows)} of {len(names)} policies: conversations")
    return pd.DataFrame(rows, columns=["policy", *ANSWERS])


def origins(names: Collection[str] = tuple(CATALOGUE)) -> pd.DataFrame:
    """policy, origin: whose each preset is and why it was tried."""
    return pd.DataFrame([(name, CATALOGUE[name].origin) for name in names], columns=["policy", "origin"])


def recorded_answers(recorded: Mapping[str, object]) -> pd.DataFrame:
    """`answers` as the benchmark RECORDED wrote them: a figure that was not finite has no row there and is missing."""
    frame = pd.DataFrame(recorded["rows"]).pivot(index="backend", columns="case", values="median")
    found = pd.DataFrame({name: frame.get(case) for name, case in RECORDED_CASES.items()}, index=frame.index)
    return found.astype("float64").rename_axis("policy").reset_index()


def verdict_table(
    model: CausalLM,
    tokenizer: Tokenizer,
    tensors: Mapping[str, Tensor],
    *,
    checkpoint: str | Path,
    recorded: Mapping[str, object] | None,
    full: bool = False,
    names: Collection[str] = tuple(CATALOGUE),
) -> tuple[pd.DataFrame, str, dict[str, str]]:
    """`verdicts` without the origins and `answers` side by side: (table, caption, headings), for `report.table`.

    `checkpoint` is the folder that the model is from, `recorded` the result of the benchmark RECORDED or None. With
    `full` the answers are computed now. Otherwise they are the recorded ones where those are of this checkpoint and
    dtype, and missing where not; the caption says which, and the headings too.
    """
    table = verdicts(model, tokenizer, tensors, names)
    headings = dict(VERDICT_HEADINGS)
    found, said = pd.DataFrame({"policy": list(names)}), ""
    script = f"benchmarks/{RECORDED}.py"
    if full and tokenizer.chat_template is not None:
        found, said = answers(model, tokenizer, names), "20 dialogues and 20 facts, computed here"
    elif full:
        said = "This checkpoint has no chat template, so no dialogue can be held with it"
    elif recorded is None:
        said = f"No result of {script} is installed here: full = True holds the dialogues"
    else:
        own, dtype = checkpoint_hash(Path(checkpoint)), str(model.dtype).removeprefix("torch.")
        of = recorded["hardware"]["checkpoint"]
        if (of, recorded["hardware"]["dtype"]) == (own, dtype):
            found = recorded_answers(recorded)
            headings |= {name: f"recorded: {headings[name]}" for name in ANSWERS}
            said = (
                f"What is headed recorded is not of this run: {script} measured it on this very checkpoint, with "
                f"20 dialogues and 20 facts ({recorded['hardware']['model']}, commit {str(recorded['commit'])[:10]})"
            )
        else:
            said = (
                f"{script} measured another checkpoint or dtype ({of[:15]}..., {recorded['hardware']['dtype']}; "
                f"here {own[:15]}..., {dtype}): full = True holds the dialogues with this one"
            )
    table = table.drop(columns="origin").merge(found, on="policy", how="left")
    table = table.reindex(columns=[*dict.fromkeys([*table.columns, *ANSWERS])])
    caption = (
        "Every policy on this prompt (error, share not finite, does a clamp bind), on one window of held-out text "
        "(perplexity), in conversations (shares), and its logits in one prefill against decode steps (largest "
        f"difference, of the largest logit). {said}. A dash: not finite, or not measured."
    )
    return table, caption, headings


def binds(policy: NumericsPolicy, tensors: Mapping[str, Tensor]) -> bool | None:
    """Whether the clamps of `policy` change the output of any layer on these inputs; None without clamps.

    Clamps of A_log and of the decode gate act elsewhere and are not seen.
    """
    if not policy.clamps:
        return None
    free = dataclasses.replace(policy, clamps=())
    for inputs in parity.kept_inputs(tensors).values():
        clamped, plain = (gated_delta_rule(**inputs, policy=p, backend="torch_chunk")[0] for p in (policy, free))
        if not torch.equal(clamped.nan_to_num(), plain.nan_to_num()):
            return True
    return False


#: Exponent form -> what it takes exp of, as a number of the limits of exp that a chunk may decay by.
FORM_LIMITS = {"factored": 1.0, "factored_mask_after": 1.0, "midpoint": 2.0, "multiply_mask": 1.0}


#: Forms that take exp of differences of G alone, so that the first token of a chunk does not count.
DIFFERENCE_FORMS = ("midpoint", "multiply_mask")


def overflow_limit(policy: NumericsPolicy | str, dtype: str = "float32") -> float | None:
    """Nats of decay in a chunk beyond which the form of `policy` is not finite; None for a form that cannot overflow.

    88.72 where one factor is exp of the whole decay in float32 (or bfloat16), 177.4 around the midpoint, 11.09 and
    22.18 in float16. No limit: differences that are masked before exp or replaced after it, every window summed by
    itself and then masked, and any form whose NaN are replaced. A sum held in float16 is itself infinite beyond 65504.
    `dtype` of the inputs counts only if it is float64: then so is the arithmetic.
    """
    chosen = resolve_policy(policy)
    if chosen.nan_to_num:
        return None
    factor = FORM_LIMITS.get(chosen.exponent)
    if factor is None or (chosen.exponent == "multiply_mask" and chosen.cumsum == "segsum"):
        return LARGEST["float16"] if chosen.cumsum == "float16" else None
    narrow = chosen.cumsum if chosen.cumsum in ("float16", "bfloat16") else None
    return factor * EXP_OVERFLOW[narrow or ("float64" if dtype == "float64" else "float32")]


def limit_note(policy: NumericsPolicy | str) -> str:
    """Why the form of `policy` has its limit, or none, and whether its clamps are part of the decay, in sentences."""
    chosen = resolve_policy(policy)
    gates = [chosen.clamp(site, "prefill") for site in ("raw_gate", "cumsum")]
    return _why_limited(chosen) + (" The decay is the one that the policy's clamps leave." if any(gates) else "")


def _why_limited(chosen: NumericsPolicy) -> str:
    if chosen.nan_to_num:
        under = overflow_limit(dataclasses.replace(chosen, nan_to_num=False))
        form = "cannot overflow" if under is None else f"overflows beyond {under:.1f} nats"
        return f"nan_to_num writes numbers over what is not finite, so that none shows; the form under it {form}."
    limit = overflow_limit(chosen)
    if limit is None:
        how = {
            "difference_then_mask": "differences are masked before exp, which is never above 1",
            "mask_after": "what overflows above the diagonal is set to zero, in a forward pass",
        }.get(chosen.exponent, "every window is summed by itself, none above the diagonal")
        return f"This form has no limit: {how}."
    if limit == LARGEST["float16"]:
        return f"This form has no limit of exp, but its sum is held in float16, which ends at {limit:.0f}."
    of = {
        "midpoint": "half of the decay of a chunk after its first token",
        "multiply_mask": "all of the decay of a chunk after its first token",
    }.get(chosen.exponent, "all of the decay of a chunk")
    return f"The limit is this form's own: it takes exp of {of}."


def chunk_spans(log_decay: Tensor, policy: NumericsPolicy) -> Tensor:
    """Nats that the form of `policy` takes exp of, [N, V], for the gates [N, C, V] of N chunks; float64.

    The largest |G| of the chunk, after the clamps of gate and sum; for the forms of differences and the one around the
    midpoint, which take no exp of G itself but of its course inside the chunk, the largest G less the smallest.
    """
    total = limited(log_decay.double(), policy.clamp("raw_gate", "prefill")).cumsum(1)
    total = limited(total, policy.clamp("cumsum", "prefill"))
    if policy.exponent in DIFFERENCE_FORMS:
        return total.amax(1) - total.amin(1)
    return total.abs().amax(1)


def triggers(tensors: Mapping[str, Tensor], policy: NumericsPolicy | str = "factored") -> pd.DataFrame:
    """Whether a chunk of a head is not finite under `policy`, beside the decay that predicts it.

    The predicate: `chunk_spans` above `overflow_limit`, never for a form without a limit. Each chunk is computed by
    itself, from a zero state, so that none inherits another's fault; the last one is filled up as the model does it.
    One row for each layer, head and chunk: layer, head, chunk, span (nats), predicted, observed.
    """
    chosen = resolve_policy(policy)
    rows = []
    for layer, inputs in parity.kept_inputs(tensors).items():
        limit = overflow_limit(chosen, str(inputs["q"].dtype).removeprefix("torch."))
        tokens = inputs["q"].shape[1]
        missing = -tokens % chosen.chunk
        chunks = {}  # a chunk as a sequence of its own
        for name, x in inputs.items():
            filled = torch.cat([x[0], x.new_zeros(missing, *x.shape[2:])])
            chunks[name] = filled.unflatten(0, (-1, chosen.chunk))
        out, _ = gated_delta_rule(**chunks, policy=chosen, backend="torch_chunk")
        bad = (~torch.isfinite(out)).any(-1)  # [chunks, C, V]
        bad.flatten(0, 1)[tokens:] = False
        observed = bad.any(1)
        spans = chunk_spans(chunks["log_decay"], chosen)
        for chunk, head in np.ndindex(*observed.shape):
            span = float(spans[chunk, head])
            predicted = limit is not None and span > limit
            rows.append((layer, head, chunk, span, predicted, bool(observed[chunk, head])))
    return pd.DataFrame(rows, columns=["layer", "head", "chunk", "span", "predicted", "observed"])


def trigger_reading(table: pd.DataFrame) -> dict[str, int]:
    """How often the predicate was right: chunks, predicted, observed, false alarms (finite all the same) and misses."""
    predicted, observed = table["predicted"], table["observed"]
    return {
        "chunks": len(table),
        "predicted": int(predicted.sum()),
        "observed": int(observed.sum()),
        "false_alarms": int((predicted & ~observed).sum()),
        "misses": int((observed & ~predicted).sum()),
    }
