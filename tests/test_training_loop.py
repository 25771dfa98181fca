"""The training loop: its loss terms written out again, and a resumed run against an uninterrupted one."""

import dataclasses
import itertools
import json
import math

import models
import numpy as np
import pytest
import torch

from workbench.config import ModelConfig
from workbench.errors import InputError
from workbench.model import CausalLM
from workbench.training.train import (
    MINIATURE,
    Run,
    Settings,
    draw_batch,
    learning_rate,
    load_balance,
    losses,
    main,
    parameter_groups,
)

SETTINGS = Settings(steps=4, batch=2, length=24, warmup=2, learning_rate=1e-2)


@pytest.fixture()
def tokens(tmp_path):
    """Token files with a rule that can be learnt: each token is the one before plus one."""
    folder = tmp_path / "tokens"
    folder.mkdir()
    counting = (np.arange(3000) % 90).astype("<u2")
    counting.tofile(folder / "train.u16")
    counting[:200].tofile(folder / "heldout.u16")
    return folder


def small_config() -> ModelConfig:
    return dataclasses.replace(ModelConfig.from_hf(models.mini()), router_aux_loss_coef=0.01)


def run_in(tmp_path, tokens, name: str, settings: Settings = SETTINGS) -> Run:
    return Run(tokens, tmp_path / name, settings, "cpu", small_config())


def test_miniature_has_the_shapes_that_serving_engines_take():
    assert MINIATURE.linear_key_head_dim == MINIATURE.linear_value_head_dim == MINIATURE.head_dim == 64
    sizes = (MINIATURE.hidden_size, MINIATURE.moe_intermediate_size, MINIATURE.shared_expert_intermediate_size)
    assert all(size % 64 == 0 for size in sizes)
    assert MINIATURE.layer_types == (("linear_attention",) * 3 + ("full_attention",)) * 2


def test_load_balance_is_top_k_when_even_and_more_when_not():
    even = torch.eye(8).repeat(10, 1)  # each expert preferred equally often
    assert load_balance([even], 2).item() == pytest.approx(2.0, rel=0.05)
    skewed = torch.zeros(80, 8)
    skewed[:, 0] = 5.0
    assert load_balance([skewed], 2).item() > 4.0


def test_loss_terms_are_the_cross_entropies_of_the_next_and_the_token_after():
    model = CausalLM(small_config()).init_weights(0)
    batch = torch.randint(0, 97, (2, 12), generator=torch.Generator().manual_seed(0))
    terms = losses(model, batch, 0.3)
    with torch.no_grad():
        out = model(batch[:, :-2], use_cache=False)
        following = out.logits.log_softmax(-1).gather(-1, batch[:, 1:-1, None]).mean()
        drafts = model.mtp_logits(out.hidden, batch[:, 1:-1]).log_softmax(-1).gather(-1, batch[:, 2:, None]).mean()
    assert terms["next"].item() == pytest.approx(-following.item(), rel=1e-6)
    assert terms["draft"].item() == pytest.approx(-drafts.item(), rel=1e-6)
    expected = terms["next"] + 0.3 * terms["draft"] + 0.01 * terms["balance"]
    assert terms["total"].item() == pytest.approx(expected.item(), rel=1e-6)


def test_every_parameter_gets_a_gradient_and_one_group():
    model = CausalLM(small_config()).init_weights(0)
    losses(model, torch.randint(0, 97, (2, 66)), 0.3)["total"].backward()
    without = [name for name, p in model.named_parameters() if p.grad is None or not bool(p.grad.abs().sum() > 0)]
    assert without == []
    groups = parameter_groups(model, 0.1)
    grouped = [id(p) for group in groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())
    still = {id(p) for p in groups[1]["params"]}
    decaying = [n for n, p in model.named_parameters() if id(p) not in still]
    assert not any(name.endswith(("A_log", "dt_bias", "norm.weight", "conv1d.weight")) for name in decaying)


def test_learning_rate_rises_then_falls_to_a_tenth():
    settings = Settings(steps=1000, warmup=100, learning_rate=1.0)
    rates = [learning_rate(step, settings) for step in range(1000)]
    assert rates[0] == 0.01 and rates[99] == 1.0 and max(rates) == 1.0
    assert all(a >= b for a, b in itertools.pairwise(rates[99:]))
    assert rates[-1] == pytest.approx(0.1, abs=1e-4)


def test_draws_depend_on_seed_and_step_alone():
    tokens = np.arange(1000, dtype=np.uint16)
    same = draw_batch(tokens, 3, SETTINGS)
    assert torch.equal(same, draw_batch(tokens, 3, SETTINGS))
    assert not torch.equal(same, draw_batch(tokens, 4, SETTINGS))
    assert not torch.equal(same, draw_batch(tokens, 3, dataclasses.replace(SETTINGS, seed=2)))
    assert same.shape == (2, 26) and bool((same.diff(dim=1) == 1).all())


def test_a_run_learns(tmp_path, tokens):
    run = run_in(tmp_path, tokens, "learns", dataclasses.replace(SETTINGS, steps=30))
    run.train(evaluate_every=30)
    assert run.curve[-1]["heldout"] < 0.7 * math.log(97)


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path, tokens):
    whole = run_in(tmp_path, tokens, "whole")
    assert whole.train(evaluate_every=2)
    first = run_in(tmp_path, tokens, "parts")
    assert not first.train(evaluate_every=2, seconds_limit=0.0)
    second = run_in(tmp_path, tokens, "parts")
    second.resume()
    assert second.step == 1
    assert second.train(evaluate_every=2)
    for (name, a), (_, b) in zip(whole.model.named_parameters(), second.model.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert [row["heldout"] for row in whole.curve] == [row["heldout"] for row in second.curve]


def test_resume_refuses_other_settings_and_an_empty_folder(tmp_path, tokens):
    run = run_in(tmp_path, tokens, "settings")
    with pytest.raises(InputError, match="nothing to resume"):
        run.resume()
    run.train(evaluate_every=4)
    with pytest.raises(InputError, match="other settings"):
        run_in(tmp_path, tokens, "settings", dataclasses.replace(SETTINGS, steps=9)).resume()


def test_the_command_trains_exports_and_states_its_figures(tmp_path, tokens, capsys, monkeypatch):
    monkeypatch.setattr("workbench.training.train.Run", lambda *args: Run(*args, small_config()))
    monkeypatch.setattr("workbench.training.train.perplexity", small_windows("perplexity"))
    monkeypatch.setattr("workbench.training.train.draft_acceptance", small_windows("draft_acceptance"))
    out = tmp_path / "run"
    arguments = ["--tokens", str(tokens), "--out", str(out), "--device", "cpu", "--steps", "3", "--batch", "2"]
    assert main([*arguments, "--length", "24", "--evaluate-every", "1"]) == 0
    figures = json.loads((out / "checkpoint" / "training.json").read_text())
    assert figures["step"] in (1, 2, 3) and figures["versions"]["torch"] == torch.__version__
    assert (out / "curve.csv").read_text().count("\n") == 4
    from workbench.checkpoint import read_checkpoint

    assert read_checkpoint(out / "checkpoint").config == dataclasses.replace(small_config(), dtype="bfloat16")


def small_windows(name: str):
    """The measure of `workbench.quality` with windows that fit the short held-out tokens of these tests."""
    import workbench.quality

    measure = getattr(workbench.quality, name)
    return lambda model, tokens, **options: measure(model, tokens, **{"length": 24, **options})


def test_missing_token_files_are_one_line_and_exit_code_2(tmp_path, capsys):
    assert main(["--tokens", str(tmp_path), "--out", str(tmp_path / "run"), "--device", "cpu"]) == 2
    assert "train.u16" in capsys.readouterr().err
