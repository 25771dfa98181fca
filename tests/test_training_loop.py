"""The training loop: its loss terms written out again, and a resumed run against an uninterrupted one.

That a step captured as a CUDA graph equals the plain one is tested in test_cuda.py; here, on the meta device, that it
reads nothing on the host, without which there is no capture.
"""

import dataclasses
import itertools
import json
import math

import models
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from workbench.checkpoint import write_checkpoint
from workbench.config import ModelConfig
from workbench.errors import InputError
from workbench.kernels import Kernels
from workbench.model import CausalLM
from workbench.training.train import (
    MINIATURE,
    TOKENIZER_FILES,
    Batch,
    DialogueStream,
    Run,
    Settings,
    dialogue_fit,
    draw_batch,
    learning_rate,
    load_balance,
    losses,
    main,
    padded_dialogues,
    parameter_groups,
    preserved,
)

SETTINGS = Settings(steps=4, batch=3, length=24, dialogue_rows=1, warmup=2, learning_rate=1e-2)
TEXT_ONLY = dataclasses.replace(SETTINGS, dialogue_rows=0)


@pytest.fixture()
def tokens(tmp_path):
    """Token files with a rule that can be learnt: each token is the one before plus one."""
    folder = tmp_path / "tokens"
    folder.mkdir()
    counting = (np.arange(3000) % 90).astype("<u2")
    counting.tofile(folder / "train.u16")
    counting[:200].tofile(folder / "heldout.u16")
    write_dialogues(folder, "train_dialogues", 60, seed=1)
    write_dialogues(folder, "validation_dialogues", 5, seed=2)
    return folder


def write_dialogues(folder, name: str, count: int, seed: int) -> DialogueStream:
    """Dialogues of 4 to 9 tokens of context and their first three repeated, which are to learn; then a zero."""
    draws = np.random.default_rng(seed)
    tokens, learned, starts = [], [], []
    for _ in range(count):
        context = draws.integers(1, 97, size=draws.integers(4, 10)).tolist()
        starts.append(len(tokens))
        tokens += [*context, *context[:3], 0]
        learned += [0] * len(context) + [1] * 3 + [0]
    np.array(tokens, "<u2").tofile(folder / f"{name}.u16")
    np.array(learned, "u1").tofile(folder / f"{name}.u8")
    np.array(starts, "<u4").tofile(folder / f"{name}.starts.u32")
    return DialogueStream(np.array(tokens), np.array(learned), np.array(starts))


def random_batch(rows: int, tokens: int, dialogue_rows: int = 0, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 97, (rows, tokens), generator=generator)
    return Batch(ids, torch.rand(dialogue_rows, tokens, generator=generator) < 0.3)


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
    batch = random_batch(2, 12)
    terms = losses(model, batch, TEXT_ONLY)
    with torch.no_grad():
        out = model(batch.tokens[:, :-2], use_cache=False)
        following, after_next = batch.tokens[:, 1:-1], batch.tokens[:, 2:]
        next_loss = -out.logits.log_softmax(-1).gather(-1, following[..., None]).mean()
        drafts = model.mtp_logits(out.hidden, following)
        draft_loss = -drafts.log_softmax(-1).gather(-1, after_next[..., None]).mean()
    assert terms["next"].item() == pytest.approx(next_loss.item(), rel=1e-6)
    assert terms["draft"].item() == pytest.approx(draft_loss.item(), rel=1e-6)
    expected = terms["next"] + 0.3 * terms["draft"] + 0.01 * terms["balance"]
    assert terms["total"].item() == pytest.approx(expected.item(), rel=1e-6)
    assert "dialogue_next" not in terms


@pytest.mark.parametrize("context_weight", [0.0, 0.1, 1.0])
def test_dialogue_rows_weigh_the_predicted_token_by_its_mask(context_weight):
    model = CausalLM(small_config()).init_weights(0)
    batch = random_batch(3, 12, dialogue_rows=2)
    settings = dataclasses.replace(SETTINGS, dialogue_rows=2, context_weight=context_weight, dialogue_weight=0.7)
    terms = losses(model, batch, settings)
    text = losses(model, Batch(batch.tokens[:1], batch.learned[:0]), TEXT_ONLY)
    assert terms["next"].item() == pytest.approx(text["next"].item(), rel=1e-5)
    assert terms["draft"].item() == pytest.approx(text["draft"].item(), rel=1e-5)
    with torch.no_grad():
        rows = batch.tokens[1:]
        out = model(rows[:, :-2], use_cache=False)
        logits = {1: out.logits, 2: model.mtp_logits(out.hidden, rows[:, 1:-1])}
    for ahead, name in ((1, "dialogue_next"), (2, "dialogue_draft")):
        total = weights = 0.0
        for row, t in itertools.product(range(2), range(10)):
            weight = 1.0 if batch.learned[row, t + ahead] else context_weight
            total -= weight * logits[ahead].log_softmax(-1)[row, t, rows[row, t + ahead]].item()
            weights += weight
        assert terms[name].item() == pytest.approx(total / weights, rel=1e-5), name
    dialogue = terms["dialogue_next"] + 0.3 * terms["dialogue_draft"]
    expected = terms["next"] + 0.3 * terms["draft"] + 0.01 * terms["balance"] + 0.7 * dialogue
    assert terms["total"].item() == pytest.approx(expected.item(), rel=1e-6)


class HostTensors(TorchDispatchMode):
    """Notes every operation that touches a tensor in the host's memory or brings a number there."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls += 1
        devices = {x.device.type for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)}
        if "cpu" in devices or "_local_scalar_dense" in str(func):
            self.found.append(str(func))
        return out


def test_a_step_on_a_device_reads_and_writes_nothing_on_the_host():
    model = CausalLM(small_config(), Kernels("experts=torch_dense")).to("meta")
    on_host = random_batch(4, 130, dialogue_rows=2)
    batch = on_host.to(torch.device("meta"))

    def step():
        losses(model, batch, SETTINGS)["total"].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=False)

    step()  # constants are made by the first step and kept
    with HostTensors() as seen:
        step()
    assert seen.found == [] and seen.calls > 1000
    with HostTensors() as seen, pytest.raises(RuntimeError):
        batch.tokens.sum().item()
    with HostTensors() as seen:
        on_host.tokens.sum()
    assert seen.found == ["aten.sum.default"]


def test_steps_in_a_preserved_block_leave_no_trace_but_keep_their_tensors():
    model = CausalLM(small_config()).init_weights(0)
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.1), lr=0.1)

    def step(seed: int) -> None:
        optimizer.zero_grad()
        losses(model, random_batch(2, 12, seed=seed), TEXT_ONLY)["total"].backward()
        optimizer.step()

    def state() -> dict[str, torch.Tensor]:
        named = {name: p.detach() for name, p in model.named_parameters()}
        return named | {f"{n}.{k}": v for n, p in model.named_parameters() for k, v in optimizer.state[p].items()}

    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    with preserved(optimizer):
        step(1)
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
    assert not any(bool(value.any()) for p in model.parameters() for value in optimizer.state[p].values())
    addresses = {name: value.data_ptr() for name, value in state().items()}
    step(2)
    before = {name: value.clone() for name, value in state().items()}
    with preserved(optimizer):
        step(3)
    assert {name: value.data_ptr() for name, value in state().items()} == addresses
    assert all(torch.equal(value, before[name]) for name, value in state().items())


def test_every_parameter_gets_a_gradient_and_one_group():
    model = CausalLM(small_config()).init_weights(0)
    losses(model, random_batch(2, 66), TEXT_ONLY)["total"].backward()
    without = [name for name, p in model.named_parameters() if p.grad is None or not bool(p.grad.abs().sum() > 0)]
    assert without == []
    groups = parameter_groups(model, 0.1)
    grouped = [id(p) for group in groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())
    still = {id(p) for p in groups[1]["params"]}
    decaying = [n for n, p in model.named_parameters() if id(p) not in still]
    assert not any(name.endswith(("A_log", "dt_bias", "norm.weight", "conv1d.weight")) for name in decaying)


@pytest.mark.parametrize("final_rate", [0.1, 0.01, 0.0])
def test_learning_rate_rises_then_falls_to_its_final_share(final_rate):
    settings = Settings(steps=1000, warmup=100, learning_rate=1.0, final_rate=final_rate)
    rates = [learning_rate(step, settings) for step in range(1000)]
    assert rates[0] == 0.01 and rates[99] == 1.0 and max(rates) == 1.0
    assert all(a >= b for a, b in itertools.pairwise(rates[99:]))
    assert rates[-1] == pytest.approx(final_rate, abs=1e-4)


def test_draws_depend_on_seed_and_step_alone(tmp_path):
    text = np.arange(1000, dtype=np.uint16)
    dialogues = write_dialogues(tmp_path, "train_dialogues", 60, seed=1)
    beginnings = dialogues.beginnings(SETTINGS.length)

    def draw(step: int, **changes) -> Batch:
        return draw_batch(text, dialogues, beginnings, step, dataclasses.replace(SETTINGS, **changes))

    first, again = draw(3), draw(3)
    assert torch.equal(first.tokens, again.tokens) and torch.equal(first.learned, again.learned)
    assert not torch.equal(first.tokens, draw(4).tokens)
    assert not torch.equal(first.tokens, draw(3, seed=2).tokens)
    assert first.tokens.shape == (3, 26) and first.learned.shape == (1, 26)
    assert bool((first.tokens[:2].diff(dim=1) == 1).all())


def test_dialogue_rows_begin_where_a_dialogue_does_and_stay_inside(tmp_path):
    dialogues = write_dialogues(tmp_path, "train_dialogues", 12, seed=1)
    beginnings = dialogues.beginnings(24)
    assert 1 < len(beginnings) < 12  # from the last ones no whole row can be read
    settings = dataclasses.replace(SETTINGS, batch=64, dialogue_rows=63)
    batch = draw_batch(np.arange(100), dialogues, beginnings, 0, settings)
    begun = set()
    for tokens, learned in zip(batch.tokens[1:], batch.learned, strict=True):
        (start,) = [s for s in dialogues.starts if np.array_equal(dialogues.tokens[s : s + 26], tokens)]
        assert np.array_equal(dialogues.learned[start : start + 26], learned)
        begun.add(int(start))
    assert begun == set(beginnings.tolist())


def test_validation_figures_are_those_of_each_dialogue_by_itself(tmp_path):
    model = CausalLM(small_config()).init_weights(0).eval()
    written = write_dialogues(tmp_path, "validation_dialogues", 7, seed=3)
    ends = np.append(written.starts[1:], len(written.tokens))

    def likely(start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.from_numpy(written.tokens[start:end].astype(np.int64))[None]
        with torch.no_grad():
            return ids[0, 1:], model(ids[:, :-1], use_cache=False).logits[0].log_softmax(-1)

    for start, end in list(zip(written.starts, ends, strict=True))[:2]:  # two get the model's own choice as their reply
        for t in np.flatnonzero(written.learned[start:end]):
            written.tokens[start + t] = int(likely(start, end)[1][t - 1].argmax())
    exact, loss = 0, []
    for start, end in list(zip(written.starts, ends, strict=True))[:6]:
        targets, chances = likely(start, end)
        learned = torch.from_numpy(written.learned[start + 1 : end]).bool()
        exact += bool((chances.argmax(-1) == targets)[learned].all())
        loss += (-chances.gather(-1, targets[:, None])[:, 0][learned]).tolist()
    found = dialogue_fit(model, padded_dialogues(written, 6, batch=4))
    assert exact == 2 and found.exact == pytest.approx(2 / 6)
    assert found.loss == pytest.approx(sum(loss) / len(loss), rel=1e-5)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("train_dialogues.u8", np.ones(5, "u1"), "one byte per token"),
        ("train_dialogues.u8", None, "0 and 1, found 2"),
        ("train_dialogues.starts.u32", np.array([0, 9, 9], "<u4"), "rising"),
        ("train_dialogues.starts.u32", np.array([0, 1 << 30], "<u4"), "rising"),
        ("train_dialogues.starts.u32", np.array([0, 1], "<u4"), "dialogue 0: expected tokens to learn"),
        ("train_dialogues.u16", np.zeros(0, "<u2"), "tokenize"),
        ("train.u16", np.zeros(26, "<u2"), "at least 27 tokens"),
    ],
)
def test_token_files_that_do_not_fit_are_named(tmp_path, tokens, file, content, message):
    if content is None:
        content = np.fromfile(tokens / file, "u1") * 2
    content.tofile(tokens / file)
    with pytest.raises(InputError, match=message) as caught:
        run_in(tmp_path, tokens, "run")
    assert str(tokens) in str(caught.value)


def test_a_row_too_short_for_a_reply_is_refused(tmp_path, tokens):
    with pytest.raises(InputError, match="raise --length"):
        run_in(tmp_path, tokens, "run", dataclasses.replace(SETTINGS, length=4))


@pytest.mark.parametrize(
    "changes", [{"dialogue_rows": 3}, {"dialogue_rows": -1}, {"context_weight": -0.1}, {"steps": 0}, {"length": 0}]
)
def test_impossible_settings_are_refused(changes):
    with pytest.raises(InputError, match=next(iter(changes))):
        dataclasses.replace(SETTINGS, **changes)


def test_a_run_learns(tmp_path, tokens, capsys):
    run = run_in(tmp_path, tokens, "learns", dataclasses.replace(SETTINGS, steps=30))
    run.train(evaluate_every=15)
    first, last = run.curve
    assert last["heldout"] < 0.7 * math.log(97)
    assert last["validation"] < first["validation"]
    assert run.best == (last["heldout"] + 1.0 - last["validation_exact"], 30)
    assert (last["text_tokens"], last["dialogue_tokens"]) == (30 * 2 * 24, 30 * 24)
    lines = capsys.readouterr().out.splitlines()
    assert "step 15/30" in lines[0] and "tokens/s" in lines[0] and lines[1].endswith("0 s to go")


@pytest.mark.parametrize("settings", [SETTINGS, TEXT_ONLY], ids=["dialogues", "text"])
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path, tokens, settings):
    if not settings.dialogue_rows:
        for path in tokens.glob("*dialogues*"):
            path.unlink()
    whole = run_in(tmp_path, tokens, "whole", settings)
    assert whole.train(evaluate_every=2)
    first = run_in(tmp_path, tokens, "parts", settings)
    assert not first.train(evaluate_every=2, seconds_limit=0.0)
    second = run_in(tmp_path, tokens, "parts", settings)
    second.resume()
    assert second.step == 1
    assert second.train(evaluate_every=2)
    for (name, a), (_, b) in zip(whole.model.named_parameters(), second.model.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    without_time = [[{k: v for k, v in row.items() if k != "seconds"} for row in run.curve] for run in (whole, second)]
    assert without_time[0] == without_time[1] and whole.best == second.best


def test_resume_refuses_other_settings_and_an_empty_folder(tmp_path, tokens):
    run = run_in(tmp_path, tokens, "settings")
    with pytest.raises(InputError, match="nothing to resume"):
        run.resume()
    run.train(evaluate_every=4)
    with pytest.raises(InputError, match="other settings"):
        run_in(tmp_path, tokens, "settings", dataclasses.replace(SETTINGS, steps=9)).resume()


def test_the_command_trains_exports_and_states_its_figures(tmp_path, tokens, capsys, monkeypatch):
    monkeypatch.setattr("workbench.training.train.Run", lambda *args, **options: Run(*args, small_config(), **options))
    monkeypatch.setattr("workbench.training.train.perplexity", small_windows("perplexity"))
    monkeypatch.setattr("workbench.training.train.draft_acceptance", small_windows("draft_acceptance"))
    out, tokenizer = tmp_path / "run", tmp_path / "tokenizer"
    tokenizer.mkdir()
    arguments = ["--tokens", str(tokens), "--out", str(out), "--device", "cpu", "--steps", "3", "--batch", "2"]
    arguments += ["--dialogue-rows", "1", "--length", "24", "--evaluate-every", "1", "--tokenizer", str(tokenizer)]
    assert main(arguments) == 2  # before any training
    assert "tokenizer.json" in capsys.readouterr().err and not out.exists()
    for name in TOKENIZER_FILES:
        (tokenizer / name).write_text(f"content of {name}")
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "device cpu: no CUDA graph" in printed and "step 3/3" in printed
    figures = json.loads((out / "checkpoint" / "training.json").read_text())
    assert figures["step"] in (1, 2, 3) and figures["versions"]["torch"] == torch.__version__
    assert figures["text_tokens_seen"] == figures["dialogue_tokens_seen"] == figures["step"] * 24
    assert figures["train_dialogues"] == 60 and figures["validation_dialogues"] == 5
    assert figures["validation_loss"] > 0 and 0 <= figures["validation_exact"] <= 1
    assert (out / "curve.csv").read_text().count("\n") == 4
    for name in TOKENIZER_FILES:
        assert (out / "checkpoint" / name).read_text() == f"content of {name}"
    from workbench.checkpoint import read_checkpoint

    assert read_checkpoint(out / "checkpoint").config == dataclasses.replace(small_config(), dtype="bfloat16")


def small_windows(name: str):
    """The measure of `workbench.quality` with windows that fit the short held-out tokens of these tests."""
    import workbench.quality

    measure = getattr(workbench.quality, name)
    return lambda model, tokens, **options: measure(model, tokens, **{"length": 24, **options})


def test_a_run_starts_from_the_weights_of_another(tmp_path, tokens):
    first = run_in(tmp_path, tokens, "first")
    first.train(evaluate_every=4)
    with torch.no_grad():
        for parameter in first.model.parameters():
            parameter.copy_(parameter.bfloat16())  # what the checkpoint keeps
    folder = tmp_path / "start"
    tensors = {name: p.detach() for name, p in first.model.named_parameters()}
    write_checkpoint(folder, small_config(), tensors, dtype=torch.bfloat16)
    settings = dataclasses.replace(SETTINGS, learning_rate=1e-3)
    run = Run(tokens, tmp_path / "second", settings, "cpu", small_config(), start_from=folder)
    for name, parameter in run.model.named_parameters():
        assert torch.equal(parameter, tensors[name]), name
    assert run.started_from == {"checkpoint": str(folder)}
    (folder / "training.json").write_text(json.dumps({"step": 4}))
    run = Run(tokens, tmp_path / "second", settings, "cpu", small_config(), start_from=folder)
    run.train(evaluate_every=4)
    again = run_in(tmp_path, tokens, "second", settings)
    again.resume()
    assert again.started_from == run.started_from == {"step": 4}
    with pytest.raises(InputError, match="expected the configuration of this run, found another"):
        Run(tokens, tmp_path / "third", settings, "cpu", start_from=folder)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--device", "foo", "device: expected cpu, cuda or cuda:N, found 'foo'"),
        ("--device", "cuda:99", "device cuda:99: expected a CUDA device of this machine"),
        ("--evaluate-every", "0", "evaluate_every: expected at least one step, found 0"),
        ("--save-every", "-1", "save_every: expected at least one step, found -1"),
        ("--out", "taken", "taken"),
    ],
)
def test_unusable_options_are_one_line_and_exit_code_2(tmp_path, tokens, monkeypatch, capsys, option, value, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("")
    options = {"--tokens": tokens, "--out": "run", "--device": "cpu", "--dialogue-rows": "0", "--length": "16"}
    assert main([str(part) for pair in (options | {option: value}).items() for part in pair]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


def test_missing_token_files_are_one_line_and_exit_code_2(tmp_path, capsys):
    assert main(["--tokens", str(tmp_path), "--out", str(tmp_path / "run"), "--device", "cpu"]) == 2
    assert "train.u16" in capsys.readouterr().err
