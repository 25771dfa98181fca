"""Curves of runs that follow one another, joined."""

import pandas as pd
import pytest

from workbench.training import curve


def write(path, steps):
    heldout = [4.0 - s / 100 for s in steps]
    pd.DataFrame({"step": steps, "next": 3.0, "heldout": heldout, "validation_exact": 0.5}).to_csv(path, index=False)
    return str(path)


def test_steps_of_runs_add_up(tmp_path, capsys):
    files = [write(tmp_path / "a.csv", [10, 20]), write(tmp_path / "b.csv", [5, 15])]
    assert curve.main([*files, "--out", str(tmp_path / "out")]) == 0
    table = pd.read_csv(tmp_path / "out/training_curve.csv")
    assert table["total_step"].tolist() == [10, 20, 25, 35] and table["run"].tolist() == [1, 1, 2, 2]
    assert table["step"].tolist() == [10, 20, 5, 15]
    assert (tmp_path / "out/training_curve.svg").read_text().startswith("<?xml")
    assert "after 35 steps in 2 runs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (None, "No such file"), ("", "No columns"), ("step,next\n1,2\n", "no column"),
        ("step,next,heldout\n", "no rows"), ("step,next,heldout\na,b,c\n", "column step: expected numbers, found 'a'"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_curve_is_one_line(tmp_path, capsys, content, found):
    if content is not None:
        (tmp_path / "c.csv").write_text(content)
    assert curve.main([str(tmp_path / "c.csv"), "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "c.csv: " in error and found in error and error.count("\n") == 1
    assert "expected the curve.csv of a training run" in error or "expected numbers" in error


def test_an_output_that_cannot_be_written_is_one_line(tmp_path, capsys):
    taken = write(tmp_path / "a.csv", [10])
    assert curve.main([taken, "--out", taken]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "a.csv" in error and error.count("\n") == 1
