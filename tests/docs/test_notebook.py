"""The cells of ``docs/notebook.md``, run one after the other as a notebook would, only smaller."""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.runs import few_twins

ROUNDS = 2
SMALLER = {
    "5,  # rounds": f"{ROUNDS},",
    '"image_size": 32': '"image_size": 16',
    "image_size=32": "image_size=16",
    '"epochs": 2': '"epochs": 1',
}
PLOTTING = importlib.util.find_spec("matplotlib") is not None


@pytest.fixture(scope="module")
def cells(root: Path) -> list[str]:
    """The page's cells: training, curves, what is left, own records, arrays."""
    text = (root / "docs" / "notebook.md").read_text(encoding="utf-8")
    for long, short in SMALLER.items():
        assert long in text
        text = text.replace(long, short)
    found = re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    assert len(found) == 5
    return found


@pytest.fixture(scope="module")
def notebook(cells: list[str]) -> dict[str, Any]:
    """The names that a notebook has after its first cell, with every fifth record of the twins."""
    names: dict[str, Any] = {}
    with few_twins():
        exec(cells[0], names)  # noqa: S102 (the page's own code)
    return names


@pytest.fixture
def figures() -> Iterator[Any]:
    """matplotlib's pyplot, which draws into memory only."""
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    pyplot = pytest.importorskip("matplotlib.pyplot")
    yield pyplot
    pyplot.close("all")


@pytest.mark.whole
def test_both_methods_train(notebook: dict[str, Any]) -> None:
    results = notebook["results"]
    assert results.keys() == {"fedavg", "fedmr"}
    for name, result in results.items():
        assert result.outcome.trained and result.outcome.rounds_done == ROUNDS, name
        assert result.outcome.roster == ["clinic-a", "clinic-b", "clinic-c"]
        assert "secure" in result.outcome.sums


@pytest.mark.whole
@pytest.mark.skipif(not PLOTTING, reason="matplotlib is an optional extra")
def test_the_curves_are_the_rows_of_the_runs(
    cells: list[str], notebook: dict[str, Any], figures: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(cells[1], notebook)  # noqa: S102 (the page's own code)
    (left, right) = figures.gcf().axes
    assert [text.get_text() for text in left.get_legend().get_texts()] == ["fedavg", "fedmr"]
    for index, result in enumerate(notebook["results"].values()):
        rows = [row for row in result.outcome.rows if row.kind in ("start", "train")]
        assert list(left.lines[index].get_xdata()) == list(range(ROUNDS + 1))
        assert list(left.lines[index].get_ydata()) == [row.evaluation.test.balanced_accuracy for row in rows]
        assert list(right.lines[index].get_xdata()) == list(range(1, ROUNDS + 1))
        losses = list(right.lines[index].get_ydata())
        assert losses == [row.training["loss"] for row in rows[1:]]
        assert all(math.isfinite(loss) and loss > 0 for loss in losses)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.whole
def test_what_is_left(cells: list[str], notebook: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    exec(cells[2], notebook)  # noqa: S102 (the page's own code)
    said = capsys.readouterr().out
    assert "TRAINED: fedmr-in-process" in said
    # small_cnn of widths 32, 64, 128: convolutions without bias, group norms, the head of eight classes
    parameters = sum(9 * a * b + 2 * b for a, b in ((3, 32), (32, 64), (64, 128))) + 128 * 8 + 8
    assert f"{parameters} parameters, recall {{'MEL': " in said


@pytest.mark.whole
def test_real_records(
    cells: list[str], notebook: dict[str, Any], real_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = '"/data/fed_isic2019"'
    assert place in cells[3]
    exec(cells[3].replace(place, repr(str(real_data / "fed_isic_ham"))), notebook)  # noqa: S102
    outcome = notebook["real"].outcome
    assert outcome.trained
    assert outcome.final().evaluation.test.records == 63 + 101 + 33
    assert "synthetic" not in outcome.data


@pytest.mark.whole
def test_arrays_and_a_method_of_ones_own(cells: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"tightframe": __import__("tightframe")}
    exec(cells[4], names)  # noqa: S102 (the page's own code)
    outcome = names["wine"].outcome
    assert outcome.trained and outcome.job["method"].startswith("object:mine:")
    assert float(capsys.readouterr().out) == outcome.final().test.balanced_accuracy
    assert "SYNTHETIC" not in outcome.data
