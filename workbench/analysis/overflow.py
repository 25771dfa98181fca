"""Findings of notebook 01: how far gates reach, what the unsafe exponent form does with them, what the safe
one does."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import pandas as pd
import torch
from torch import Tensor

from workbench import taps
from workbench.analysis import nans, parity, policies
from workbench.analysis.runs import Continuation, Run, run_prompt
from workbench.analysis.verdict import Where
from workbench.kernels.agreement import logit_difference
from workbench.model import CausalLM
from workbench.numerics import EXP_OVERFLOW, NumericsPolicy


def overflow_findings(
    *,
    gates: pd.DataFrame,
    safe: Run,
    unsafe: Run,
    safe_text: Continuation,
    unsafe_text: Continuation,
    errors: pd.DataFrame,
) -> dict[str, object]:
    """The findings as plain JSON values: a verdict of three lines, four numbers, and what they were taken
    from.

    gates  `gates.gate_table` of the safe run, which kept its KEEP_DELTA_RULE_INPUTS;  errors
    `parity.delta_rule_errors` on these. `fault_found` says whether the safe run itself is not finite: then the model
    or its input is at fault, not a form. `finite_because` of an unsafe run with finite logits: see `finite_because`.
    """
    strongest = gates.loc[gates["span_max"].idxmax()]
    reach = {
        "heads": len(gates),
        "heads_over_float16": int((gates["over_float16"] > 0).sum()),
        "heads_over_float32": int((gates["over_float32"] > 0).sum()),
        "span_max": float(strongest["span_max"]),
        "layer": int(strongest["layer"]),
        "head": int(strongest["head"]),
        "log_decay_min": float(gates["log_decay_min"].min()),
        "half_life_max": float(gates["half_life"].max()),
    }
    worst = parity.worst_errors(errors)
    runs = {
        "safe": _run_findings(safe, safe_text),
        "unsafe": _run_findings(unsafe, unsafe_text),
    }
    is_finite = runs["unsafe"]["logits_bad_share"] == 0.0
    runs["unsafe"]["finite_because"] = finite_because(unsafe.policy, safe.trace.tensors) if is_finite else None
    return {
        "title": "Gate overflow",
        "verdict": [
            _gate_line(reach),
            _unsafe_line(unsafe, runs["unsafe"], safe, worst),
            _safe_line(safe, runs["safe"], worst),
        ],
        "numbers": _four_numbers(reach, unsafe, runs["unsafe"], safe, worst),
        "fault_found": nans.first_bad(safe.trace.table) is not None,
        "conditions": conditions(safe),
        "tokens": safe.logits.shape[1],
        "gates": reach,
        **runs,
        "errors": worst.to_dict("records"),
    }


def answer_reading(texts: Sequence[Continuation]) -> str:
    """What policies do to the text, the first of `texts` being the safe one's, as a caption."""
    safe, *others = texts
    sentences = ["What the model writes after the prompt, most likely token first, under each policy."]
    for text in others:
        if text.error is not None:
            sentences.append(f"Under {text.label} it refuses to draw a token.")
            continue
        same = next(
            (i for i, (a, b) in enumerate(zip(safe.tokens, text.tokens, strict=False)) if a != b),
            min(len(safe.tokens), len(text.tokens)),
        )
        if text.tokens == safe.tokens:
            sentences.append(f"Under {text.label} it writes the same.")
        else:
            sentences.append(
                f"Under {text.label} it goes on without a warning, and leaves the text of {safe.label} after {same} of "
                f"{len(safe.tokens)} tokens."
            )
    return " ".join(sentences)


#: Stages of the gated delta rule that have a row for each token, in the order of computation.
ROW_STAGES = (
    taps.GDN_DECAY, taps.GDN_KKT, taps.GDN_INVERSE, taps.GDN_U, taps.GDN_W, taps.GDN_INTRA, taps.GDN_INTER,
    taps.GDN_OUT,
)  # fmt: skip

#: What is said where `row_spread` has nothing to show.
NO_SPREAD = "No head of a gated delta rule is at fault on this prompt: there is no row to follow."


def row_spread(model: CausalLM, input_ids: Tensor, policy: str, where: Where) -> pd.DataFrame:
    """How a fault spreads over the rows of the chunks of the head that it was born in: stages down, tokens across.

    Each value is the share of the row that is not finite. `input_ids` [1, T] are run again under `policy`, and the
    stages of the layer at `where` kept. Empty where no head of a gated delta rule is at fault.
    """
    if where.layer is None or where.head is None or where.op != "gated_delta_rule":
        return pd.DataFrame()
    names = {taps.full_name(where.layer, stage): stage for stage in ROW_STAGES}
    kept = run_prompt(model, input_ids, policy, keep=list(names), check="exact").trace.tensors
    rows = {}
    for name, stage in names.items():
        if name not in kept:
            continue
        x = kept[name]
        x = x[0, :, where.head] if stage == taps.GDN_OUT else x[:, where.head].flatten(0, 1)  # [N, V, C, ...] -> [T, .]
        rows[stage] = (~torch.isfinite(x)).double().mean(-1)[: input_ids.shape[1]].tolist()
    return pd.DataFrame.from_dict(rows, orient="index")


#: Presets that differ in the exponent and its sum alone, the accurate ones first.
COMPARED = ("safe", "fp32_cumsum", "segsum", "factored", "factored_mask_after", "mask_after", "multiply_mask")


def policies_to_compare(unsafe: str, full: bool) -> list[str]:
    """The safe policy, its two near relatives and the unsafe one; with `full` every one of COMPARED."""
    chosen = COMPARED if full else COMPARED[:3]
    return list(dict.fromkeys([*chosen, unsafe]))


def conditions(run: Run) -> dict[str, object]:
    """Under what a run was made: dtype, device, threads, seed, policy, and the backend of each op."""
    served = {f"{row.op} ({row.dtype}, {row.tokens} tokens)": row.backend for row in run.attestation}
    return {
        "dtype": str(run.logits.dtype).removeprefix("torch."),
        "device": str(run.logits.device),
        "threads": torch.get_num_threads(),
        "seed": torch.initial_seed(),
        "policy": run.policy.to_json(),
        "backends": served,
    }


def _run_findings(run: Run, text: Continuation) -> dict[str, object]:
    shares = nans.share_map(run.trace.table)
    return {
        "policy": run.label,
        "logits_bad_share": nans.output_share(run.trace.table),
        "layers_bad": int((shares.max(axis=1) > 0).sum()),
        "layers": len(shares),
        "fault": nans.diagnose(run.trace.table, run.policy).to_json(),
        "tokens_written": list(text.tokens),
        "error": text.error,
    }


def _gate_line(reach: dict) -> str:
    limit32, limit16 = EXP_OVERFLOW["float32"], EXP_OVERFLOW["float16"]
    return (
        f"Gates: in one chunk the strongest head (layer {reach['layer']}, head {reach['head']}) decays by "
        f"{reach['span_max']:.4g} nats; {reach['heads_over_float32']} of {reach['heads']} heads pass the "
        f"float32 limit of {limit32:.1f}, {reach['heads_over_float16']} the float16 limit of {limit16:.1f}."
    )


def finite_because(policy: NumericsPolicy, tensors: Mapping[str, Tensor]) -> tuple[str, str]:
    """Why a run under `policy` is finite, as (key, clause); `tensors` are the inputs that the safe run kept.

    Keys: `one_token` (the recurrence read it, no form took part), `nan_to_num` and `clamp` (not finite without it),
    `form` (it cannot overflow), `below_limit` (no chunk reaches the limit of this form), `not_predicted` (some do).
    """
    if next(iter(parity.kept_inputs(tensors).values()))["q"].shape[1] == 1:
        return "one_token", "since the recurrence reads a single token, and no form of exponent takes part"
    for key, part, without in (
        ("nan_to_num", "nan_to_num", {"nan_to_num": False}),
        ("clamp", "a clamp", {"clamps": ()}),
    ):
        free = dataclasses.replace(policy, **without)
        found = policies.trigger_reading(policies.triggers(tensors, free)) if free != policy else {"observed": 0}
        if found["observed"]:
            share = f"{found['observed']} of {found['chunks']} chunks"
            return key, f"but only because of {part}: without it {share} are not finite"
    policy = dataclasses.replace(policy, nan_to_num=False)
    chunks, limit = policies.triggers(tensors, policy), policies.overflow_limit(policy)
    if limit is None:
        return "form", "since this form cannot overflow"
    if not chunks["predicted"].any():
        after = "" if policy.exponent not in policies.DIFFERENCE_FORMS else " after its first token"
        decay = f"the strongest of this prompt decays by {chunks['span'].max():.4g}{after}"
        return "below_limit", f"since no chunk reaches this form's own limit of {limit:.1f} nats; {decay}"
    passed = int(chunks["predicted"].sum())
    return "not_predicted", f"although {passed} chunks pass this form's limit of {limit:.1f} nats"


#: A result is called off where its error exceeds that of the safe policy this many times, and this much.
OFF_TIMES, OFF_LEAST = 10.0, 1e-5


def _how_exact(policy: NumericsPolicy, tensors: Mapping[str, Tensor], error: float, safe: float, logits: float) -> str:
    """How far a finite result is off, and why, as a clause. `logits` is their difference from the safe ones."""
    figures = (
        f"error against the fp64 oracle {error:.2g}, logits off by {logits:.2g} of the largest"
        if math.isfinite(error)
        else f"its delta rule is not finite on the inputs of the safe run, logits off by {logits:.2g} of the largest"
    )
    is_off = not error <= max(OFF_TIMES * safe, OFF_LEAST)
    if policies.binds(policy, tensors):
        return f"a clamp binds here, and the result is wrong: {figures}" if is_off else f"a clamp binds here: {figures}"
    if any(clamp.site == "A_log" for clamp in policy.clamps) and logits > max(OFF_TIMES * safe, OFF_LEAST):
        return f"a clamp of A_log, before the rule, can be what is wrong: {figures}"
    if not is_off:
        return figures
    if policy.nan_to_num:
        return f"what it wrote is wrong: {figures}"
    causes = {"bfloat16": "a sum held in bfloat16", "float16": "a sum held in float16",
              "float32": "differences of a float32 sum, which cancel"}  # fmt: skip
    why = "a series for the inverse" if policy.solver == "doubling" else causes.get(policy.cumsum, "rounding")
    return f"off for another reason, {why}: {figures}"


def _unsafe_line(run: Run, found: dict, safe: Run, worst: pd.DataFrame) -> str:
    where, reason = found["fault"]["where"], ""
    if found["finite_because"] is not None:
        errors = worst.set_index("policy")[["error_out", "error_state"]].max(axis=1, skipna=False)
        exact = _how_exact(
            run.policy, safe.trace.tensors, errors.get(run.label, math.nan), errors.get(safe.label, math.nan),
            logit_difference(run.logits, safe.logits),
        )  # fmt: skip
        reason = f"{found['finite_because'][1]}; {exact}"
    if found["fault"]["cause_id"] is None:
        return f"Policy {run.label}: finite on this prompt, {reason}."
    place = ", ".join(f"{name} {where[name]}" for name in ("token", "head") if where[name] is not None)
    written = len(found["tokens_written"])
    answer = "generation is refused" if found["error"] else f"{written} tokens were written all the same"
    bad = f"{found['layers_bad']} of {found['layers']} layers and {100 * found['logits_bad_share']:.3g} % of the logits"
    return (
        f"Policy {run.label}: first bad op {where['op']} at {where['tap']}{f' ({place})' if place else ''}; {bad} are "
        f"not finite; {answer}" + (f"; the logits are finite, {reason}." if reason else ".")
    )


def _safe_line(run: Run, found: dict, worst: pd.DataFrame) -> str:
    fault = found["fault"]
    if fault["cause_id"] is not None:
        tap = fault["where"]["tap"]
        return f"Policy {run.label}: NOT finite either, first at {tap}: look at the model or its input first."
    errors = {row.policy: max(row.error_out, row.error_state) for row in worst.itertuples()}
    line = f"Policy {run.label}: finite everywhere"
    if run.label in errors:
        line += f", error against the fp64 oracle at most {errors[run.label]:.1e}"
    others = {name: error for name, error in errors.items() if name != run.label and not math.isnan(error)}
    return line + "".join(f"; {name} {error:.1e}" for name, error in others.items()) + "."


def _four_numbers(
    reach: dict, unsafe: Run, broken: dict, safe: Run, worst: pd.DataFrame
) -> list[dict[str, str]]:
    own = worst[worst["policy"] == safe.label]
    error = math.nan if own.empty else own[["error_out", "error_state"]].max(axis=None, skipna=False)
    limit32, limit16 = EXP_OVERFLOW["float32"], EXP_OVERFLOW["float16"]
    return [
        {
            "label": "Largest decay in one chunk",
            "value": f"{reach['span_max']:.4g} nats",
            "note": f"exp overflows beyond {limit32:.1f} in float32, {limit16:.1f} in float16",
        },
        {
            "label": "Heads beyond the float32 limit",
            "value": f"{reach['heads_over_float32']} of {reach['heads']}",
            "note": f"{reach['heads_over_float16']} beyond the float16 limit",
        },
        {
            "label": f"Logits not finite, policy {unsafe.label}",
            "value": f"{100 * broken['logits_bad_share']:.3g} %",
            "note": f"{broken['layers_bad']} of {broken['layers']} layers hold bad values",
        },
        {
            "label": f"Worst error, policy {safe.label}",
            "value": "not finite" if math.isnan(error) else f"{error:.1e}",
            "note": "Frobenius, against the float64 recurrence on the same inputs",
        },
    ]
