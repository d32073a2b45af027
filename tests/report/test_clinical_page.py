"""The clinical reading on the page, against the histograms in the files, read without our functions."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.support.pages import Page, lines, values

from tightframe.report.pages.clinical import TITLE, Wanted, reading
from tightframe.report.pages.results import recall
from tightframe.report.writing import write
from tightframe.results.files import ResultsError
from tightframe.results.parts.evaluation import Finding, FoldMetrics
from tightframe.rounds.riders import noisy_evaluation

Copied = Callable[[str], Path]


def _remade(folder: Path, **wanted: object) -> Page:
    write(folder, None, Wanted(**wanted))  # type: ignore[arg-type]
    return Page.of(folder)


@pytest.mark.whole
def test_operating_points_are_those_of_the_histograms(copied: Copied) -> None:
    folder = copied("server")
    page = _remade(folder, specificity=0.8, sensitivity=0.7, prevalence={None: 0.2, "mel": 0.02})
    scores = values(folder / "outcome.json")["evaluation"]["test"]["scores"]
    calibration, at_specificity, at_sensitivity = page.tables(TITLE)
    assert [row["class"] for row in calibration] == [
        name for name, kinds in scores.items() if all(map(sum, kinds))
    ]
    assert len(at_specificity) > 3
    for row in at_specificity:
        own, other = map(np.array, scores[row["class"]])
        cut = next(k for k in range(len(own) + 1) if other[:k].sum() >= 0.8 * other.sum() - 1e-9)
        se, sp = own[cut:].sum() / own.sum(), other[:cut].sum() / other.sum()
        assert row["sensitivity"].startswith(f"{se:.3f} [") and row["specificity"].startswith(f"{sp:.3f} [")
        pi = 0.02 if row["class"] == "MEL" else 0.2
        assert row["prevalence"] == f"{pi:g}"
        said = se * pi + (1 - sp) * (1 - pi)
        assert row["PPV"] == "-" if said == 0 else row["PPV"].startswith(f"{se * pi / said:.3f} [")
    for row in at_sensitivity:
        own, other = map(np.array, scores[row["class"]])
        cut = max(k for k in range(len(own) + 1) if own[k:].sum() >= 0.7 * own.sum() - 1e-9)
        assert row["specificity"].startswith(f"{other[:cut].sum() / other.sum():.3f} [")


def test_the_files_have_the_histograms_and_the_last_line_the_reading(run: Path) -> None:
    outcome = values(run / "server" / "outcome.json")
    test = outcome["evaluation"]["test"]
    for name, counts in test["scores"].items():
        assert [sum(of) for of in counts] == [
            test["class_records"][name],
            test["records"] - test["class_records"][name],
        ], "every test record is once in each histogram"
    evaluated = [
        row["evaluation"]["test"] for row in lines(run / "server" / "metrics.jsonl") if row["evaluation"]
    ]
    assert all("scores" not in item for item in evaluated)
    assert ["reading" in item for item in evaluated] == [False] * (len(evaluated) - 1) + [True]
    assert evaluated[-1]["reading"] == test["reading"] and test["read_at"] == 0.9
    for read in test["reading"].values():
        assert read["brier"][0] <= read["brier"][1] and read["at_specificity"]["specificity"] >= 0.9


def test_a_silo_s_page_reads_its_own_scores(run: Path) -> None:
    page = Page.of(run / "site-1")
    assert TITLE in page.titles() and "this silo's own test records" in page.text


def test_shared_test_records_count_once_in_intervals(copied: Copied) -> None:
    folder = copied("server")
    once = _remade(folder).tables(TITLE)[1][0]
    outcome = values(folder / "outcome.json")
    copies = len(outcome["evaluated_by"])
    test = outcome["evaluation"]["test"]
    for kinds in test["scores"].values():
        kinds[:] = [[copies * count for count in of] for of in kinds]
    test["records"] *= copies
    outcome["test_shared"] = True
    (folder / "outcome.json").write_text(json.dumps(outcome))
    assert _remade(folder).tables(TITLE)[1][0] == once


def test_noisy_scores_are_told_with_the_noise_or_not_at_all(copied: Copied) -> None:
    folder = copied("server")
    outcome = values(folder / "outcome.json")
    rng = np.random.default_rng(1)
    scores = rng.normal(60.0, 3.0, (2, 2, 8))
    fold = noisy_evaluation._fold(np.full((2, 2), 240.0), scores, ["a", "b"], 1.0, 3.0)
    outcome["evaluation"]["test"] = fold.as_json()
    (folder / "outcome.json").write_text(json.dumps(outcome))
    page = _remade(folder)
    assert "for the noise alone" in page.text and "as exact as the noise leaves them" in page.text
    assert len(page.tables(TITLE)[0]) == 2
    drowned = noisy_evaluation._fold(np.full((2, 2), 240.0), scores, ["a", "b"], 1.0, 200.0)
    outcome["evaluation"]["test"] = drowned.as_json()
    (folder / "outcome.json").write_text(json.dumps(outcome))
    assert "No class has enough records" in _remade(folder).text
    assert drowned.reading == {}


def test_results_without_histograms_have_no_such_section_and_unknown_classes_are_named(
    copied: Copied,
) -> None:
    folder = copied("server")
    with pytest.raises(ResultsError, match=r"^TF-804: .*prevalence of a class"):
        _remade(folder, prevalence={"nobody": 0.5})
    outcome = values(folder / "outcome.json")
    for name in ("scores", "reading", "read_at"):
        del outcome["evaluation"]["test"][name]
    (folder / "outcome.json").write_text(json.dumps(outcome))
    assert TITLE not in _remade(folder).titles()
    assert not re.search(r"\bnan\b", _remade(folder).text)


@pytest.mark.parametrize(("findings", "folded"), [(False, 1), (True, 2)])
def test_of_two_findings_neither_is_the_other_mirrored(findings: bool, folded: int) -> None:
    """Of two classes one picture says all, and the other one's is folded."""
    counts = ([0, 5, 20], [15, 5, 2])
    found = {"findings": {name: Finding(confusion=((9, 1), (2, 8))) for name in "ab"}} if findings else {}
    fold = FoldMetrics(records=47, scores={name: counts for name in "ab"}, read_at=0.9, **found)
    page = str(reading(fold, "the test records"))
    assert page.split("Calibration and decision curves")[1].count("<details") == folded
    assert ("each finding by itself" in page) == findings
    shares = FoldMetrics(records=47, recall={"a": 0.8, "b": 0.8}, class_records={"a": 20, "b": 20}, **found)
    assert ("Sensitivity by finding" in str(recall(shares, "of all"))) == findings
