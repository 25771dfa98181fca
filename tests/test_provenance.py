"""The first op at fault, its evidence, and the path to the logits; from Python and from the command line."""

import itertools
import json

import models
import pytest
import torch

from workbench.analysis.provenance import diagnose_stages, path_to_logits, unsafe_traits
from workbench.analysis.stages import stage_watch
from workbench.cli import main
from workbench.config import ModelConfig
from workbench.errors import InputError
from workbench.kernels import Kernels
from workbench.model import CausalLM
from workbench.numerics import PRESETS
from workbench.tracing import intervene


def watched(policy: str = "safe", changes: dict | None = None, decay: str = "class_default"):
    model = CausalLM(ModelConfig.from_hf(models.mini()), Kernels(policy=policy)).init_weights(3, decay).eval()
    ids = torch.randint(0, 97, (1, 70), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode(), intervene(model, changes or {}), stage_watch(model) as watch:
        model(ids)
    return watch


def test_a_sound_pass_is_no_fault_and_says_how_near_it_came():
    verdict = diagnose_stages(watched())
    assert not verdict.is_fault and verdict.exit_code == 0
    assert "% of what the dtype's roundings explain" in verdict.evidence[0]


def test_the_producer_is_named_and_the_path_ends_at_the_logits():
    watch = watched("factored")
    verdict = diagnose_stages(watch)
    assert (verdict.where.op, verdict.where.tap) == ("gated_delta_rule", "layers.00.gdn.decay")
    path = path_to_logits(watch.table, watch.first_fault)
    assert path[0] == "layers.00.gdn.decay" and path[-1] == "logits" and path[-2] == "final_norm"
    reads = dict(zip(watch.table["tap"], watch.table["reads"], strict=True))
    assert all(before in reads[after] for before, after in itertools.pairwise(path))
    text = " ".join(verdict.evidence)
    assert "is not finite; its inputs are (gdn.cumsum)" in text and "factored exponent" in text
    assert any("tensors before it follow from their inputs" in line for line in verdict.ruled_out)


def test_nan_to_num_does_not_hide_the_op():
    """The logits are finite: only the stages inside the op, and its output beside its inputs, tell."""
    watch = watched("nan_to_num")
    verdict = diagnose_stages(watch)
    assert verdict.where.tap == "layers.00.gdn.decay"
    assert watch.table[watch.table["tap"] == "logits"]["output_finite"].all()
    assert path_to_logits(watch.table, watch.first_fault)[-1] == "layers.00.gdn.inter"
    faults = watch.table[watch.table["is_fault"]]
    assert "layers.00.gdn.out" in set(faults["tap"]) and bool(faults["output_finite"].any())


def test_a_silent_fault_names_token_and_head_and_how_far_it_is_off():
    def one_head(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[:, 41, 2] *= 1.5
        return x

    verdict = diagnose_stages(watched(changes={"layers.01.gdn.out": one_head}))
    assert (verdict.where.layer, verdict.where.token, verdict.where.head) == (1, 41, 2)
    assert "times what its roundings explain" in verdict.evidence[0]
    assert any("one token alone, the first at token 41; some heads alone (2)" in line for line in verdict.evidence)


def test_the_command_line(tmp_path, capsys):
    command = ["trace", "data/miniature", "--prompt", "Shall I compare thee to a summer's day?", "--check", "float64"]
    assert main([*command, "--decode", "2"]) == 0
    assert "Every op gives what float64 makes of its inputs" in capsys.readouterr().out
    out = tmp_path / "judged.json"
    assert main([*command, "--policy", "clamp_cumsum_20", "--json", str(out)]) in (0, 1)
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["check"] == "float64" and len(found["table"]) > 100
    capsys.readouterr()
    assert main([*command[:-2], "--decode", "2"]) == 2
    assert "--decode 2: expected a number of tokens, with --check float64" in capsys.readouterr().err
    assert main([*command, "--casts"]) == 2


@pytest.mark.parametrize(
    ("policy", "trait"),
    [("clamp_cumsum_20", "clamp of cumsum to [-20, 20] in prefill"), ("factored", "exponent factored"),
     ("bf16_cumsum", "cumsum in bfloat16"), ("nan_to_num", "nan_to_num")],
)  # fmt: skip
def test_a_policy_that_is_not_safe_is_named_as_the_likely_cause(policy, trait):
    verdict = diagnose_stages(watched(policy))
    assert (verdict.cause_id, verdict.confidence) == ("numerics_policy", "likely")
    assert trait in verdict.evidence[1] and "policy `safe`" in verdict.fix
    assert unsafe_traits(PRESETS["safe"]) == unsafe_traits(PRESETS["segsum"]) == []


def test_a_watch_that_saw_nothing_is_no_verdict():
    model = CausalLM(ModelConfig.from_hf(models.mini())).eval()
    with stage_watch(model) as watch:
        pass
    with pytest.raises(InputError, match="expected at least one watched pass"):
        diagnose_stages(watch)


def test_flags_of_what_flags_do_not_see_are_refused(capsys):
    command = ["trace", "data/miniature", "--prompt", "Shall I compare thee"]
    assert main([*command, "--check", "flags", "--tap", "*.gdn.decay"]) == 2
    assert "expected some tensor to watch" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("options", [["--layers", "3-1"], ["--tokens", "500:600"], ["--steps", "5:9"]])
def test_a_selection_that_leaves_nothing_is_refused_and_keeps_what_was_there(tmp_path, capsys, options):
    command = ["trace", "data/miniature", "--prompt", "Shall I compare thee"]
    target = tmp_path / "run"
    assert main([*command, "--dump", str(target), "--tap", "embed"]) == 0
    before = sorted((path.name, path.read_bytes()) for path in target.iterdir())
    assert main([*command, *options, "--dump", str(target)]) == 2
    error = capsys.readouterr().err.splitlines()
    assert "expected" in error[-1] and sorted((path.name, path.read_bytes()) for path in target.iterdir()) == before


def test_flags_claim_no_share_and_no_kind(capsys):
    prompt = "Shall I compare thee to a summer's day? " * 8
    assert main(["trace", "data/miniature", "--prompt", prompt, "--policy", "factored", "--check", "flags"]) == 1
    out = capsys.readouterr().out
    assert "tensors that are not finite, in the order of computation" in out and "NaN" not in out.splitlines()[-3]


@pytest.mark.parametrize("tokens", [1, 2, 65])
def test_short_prompts(tokens):
    model = CausalLM(ModelConfig.from_hf(models.mini())).init_weights(3).eval()
    with torch.inference_mode(), stage_watch(model) as watch:
        model(torch.arange(tokens)[None])
    assert not diagnose_stages(watch).is_fault
