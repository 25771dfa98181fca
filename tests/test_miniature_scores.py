"""benchmarks/miniature_scores.py: every way of destruction is measured under its own policy, and it resumes."""

import importlib.util
import json
from pathlib import Path

import pytest

from workbench import bench, quality
from workbench.dialogue import DialogueScore, Outcome

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "miniature_scores.py"
CASES = ["intact", *(f"zero_linear_layer {layer}" for layer in (0, 1, 2, 4, 5, 6)), "replace_nan", "clamp_cumsum"]


@pytest.fixture
def script(monkeypatch):
    spec = importlib.util.spec_from_file_location("miniature_scores", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for owner in (module, bench.result):  # a copy without a clone must be testable too
        monkeypatch.setattr(owner, "commit", lambda folder: ("0" * 40, False))
    return module


@pytest.fixture
def asked(monkeypatch) -> list[str]:
    """Figures of few held-out tokens, and no dialogue is held; the policies under which dialogues were asked."""
    seen: list[str] = []

    def right(model, tokenizer, dialogues, **options):
        seen.append(model.kernels.policy.exponent)
        return DialogueScore.of([Outcome("a", "answer", False, "", True, None)])

    few, drafts = quality.heldout_tokens, quality.draft_acceptance
    perplexity = quality.perplexity
    monkeypatch.setattr(quality, "heldout_tokens", lambda *args, **o: few(*args, **{**o, "windows": 1, "length": 256}))
    monkeypatch.setattr(quality, "perplexity", lambda *args, **options: perplexity(*args, **options, length=256))
    monkeypatch.setattr(quality, "draft_acceptance", lambda *args: drafts(*args, length=256))
    monkeypatch.setattr(quality, "dialogue_score", right)
    return seen


def test_every_destruction_shows_in_the_perplexity_and_says_what_it_touched(script, asked, tmp_path):
    assert script.main(["--out", str(tmp_path)]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["miniature_scores.cpu.json"]
    result = bench.read_result(tmp_path / "miniature_scores.cpu.json")
    assert list(dict.fromkeys(row["backend"] for row in result["rows"])) == CASES
    assert asked[::2] == asked[1::2] == ["difference_then_mask"] * 7 + ["factored", "difference_then_mask"]
    found = {row["backend"]: row for row in result["rows"] if row["case"] == "perplexity"}
    intact = found.pop("intact")["median"]
    assert all(row["median"] > intact for row in found.values())
    attested = found["clamp_cumsum"]["attested"][1]
    assert attested.startswith("layers.*.gdn.cumsum: reached 6 of 6 tap points") and "changed 0 of" not in attested
    assert result["correctness"]["value"] == 0.0


def test_an_interrupted_run_goes_on_where_it_was(script, asked, tmp_path, monkeypatch, capsys):
    measure, count = script.measure, iter(range(99))

    def interrupted(*arguments):
        if next(count) == 3:
            raise KeyboardInterrupt
        return measure(*arguments)

    monkeypatch.setattr(script, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        script.main(["--out", str(tmp_path)])
    assert len(asked) == 2 * 3
    assert script.main(["--out", str(tmp_path)]) == 0
    assert len(asked) == 2 * 9 and "going on after 3 cases" in capsys.readouterr().err
    assert len(json.loads((tmp_path / "miniature_scores.cpu.json").read_text())["rows"]) == 9 * 9


def test_what_another_checkpoint_left_is_not_taken(script, asked, tmp_path, capsys):
    (tmp_path / "miniature_scores.unfinished.json").write_text(
        json.dumps({"measured": {"checkpoint": "another"}, "done": {"intact": []}})
    )
    assert script.main(["--out", str(tmp_path)]) == 0
    assert len(asked) == 2 * 9 and "starting anew" in capsys.readouterr().err
