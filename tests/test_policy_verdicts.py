"""benchmarks/policy_verdicts.py: every figure under its policy, what is not finite left out, and it resumes."""

import importlib.util
from pathlib import Path

import pandas as pd
import pytest

from workbench import bench
from workbench.analysis import policies

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "policy_verdicts.py"
NAMES = ["safe", "clamp_cumsum_20", "factored"]


@pytest.fixture
def script(monkeypatch):
    spec = importlib.util.spec_from_file_location("policy_verdicts", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for owner in (module, bench.result):  # a copy without a clone must be testable too
        monkeypatch.setattr(owner, "commit", lambda folder: ("0" * 40, False))
    monkeypatch.setattr(module, "WINDOWS", 1)
    monkeypatch.setattr(module, "PROMPT_TOKENS", 128)
    return module


@pytest.fixture
def held(monkeypatch) -> list[str]:
    """The policies whose dialogues were asked for; none is held."""
    seen: list[str] = []

    def answers(model, tokenizer, names):
        seen.extend(names)
        divergence = {"safe": 1e-6, "factored": float("nan")}
        return pd.DataFrame([(name, 0.5, 0.25, divergence.get(name, 0.7)) for name in names],
                            columns=["policy", *policies.ANSWERS])  # fmt: skip

    monkeypatch.setattr(policies, "answers", answers)
    return seen


def test_what_is_not_finite_has_no_row_and_the_notebook_reads_it_back(script, held, tmp_path):
    assert script.main(["--out", str(tmp_path), "--policies", *NAMES]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["policy_verdicts.cpu.json"]
    result = bench.recorded_result("policy_verdicts", folder=tmp_path)
    found = {(row["backend"], row["case"]): row["median"] for row in result["rows"]}
    assert found["safe", "error of the output"] < 3e-6 and found["safe", "output not finite"] == 0
    assert found["clamp_cumsum_20", "a clamp binds"] == 1 and ("safe", "a clamp binds") not in found
    assert found["clamp_cumsum_20", "error of the output"] > 0.01
    assert found["clamp_cumsum_20", "perplexity"] > found["safe", "perplexity"]
    assert found["factored", "output not finite"] > 0 and ("factored", "error of the output") not in found
    assert ("factored", "prefill against decode") not in found
    read = policies.recorded_answers(result).set_index("policy").loc[NAMES]
    assert read["dialogues"].tolist() == [0.5] * 3 and read["divergence"].isna().tolist() == [False, False, True]
    assert bench.recorded_result("no_such_benchmark", folder=tmp_path) is None


def test_an_interrupted_run_goes_on_where_it_was(script, held, tmp_path, monkeypatch, capsys):
    measure = script.measure

    def interrupted(*arguments):
        if len(held) == 2:
            raise KeyboardInterrupt
        return measure(*arguments)

    monkeypatch.setattr(script, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        script.main(["--out", str(tmp_path), "--policies", *NAMES])
    monkeypatch.setattr(script, "measure", measure)
    assert script.main(["--out", str(tmp_path), "--policies", *NAMES]) == 0
    assert held == NAMES and "going on after 2 cases" in capsys.readouterr().err



def test_the_committed_result_names_every_preset():
    result = bench.recorded_result("policy_verdicts")
    read = policies.recorded_answers(result).set_index("policy")
    assert set(read.index) == set(policies.CATALOGUE) and read["dialogues"].notna().all()
    assert read.loc["safe", "dialogues"] == read.loc["safe", "recall"] == 1.0
    assert read.loc["safe", "divergence"] < 1e-5 < read.loc["clamp_cumsum_20_prefill", "divergence"]
