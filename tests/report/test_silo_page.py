"""A silo's own page: private, and every number in it against the silo's own file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tests.support.pages import SVG, Page, said, values

from tightframe.report.writing import write

Copied = Callable[[str], Path]


@pytest.mark.parametrize("silo", ["site-1", "site-2", "site-3", "site-4"])
def test_every_silo_has_its_page_and_only_its_owner_can_read_it(run: Path, silo: str, tmp_path: Path) -> None:
    made = run / silo / "report.html"
    assert made.stat().st_mode & 0o777 == 0o600
    page = Page.of(run / silo)
    assert "Private to this silo." in page.text and f"{silo}: its own report" in page.text
    out = tmp_path / "again.html"
    out.write_text("an old page that all can read")
    out.chmod(0o644)
    assert write(run / silo, out).read_bytes() == made.read_bytes()
    assert out.stat().st_mode & 0o777 == 0o600


def test_models_side_by_side(run: Path) -> None:
    report, page = values(run / "site-1" / "local_report.json"), Page.of(run / "site-1")
    test, alone, own = report["global"]["test"], report["local_only"]["test"], report["personal"]
    (table,) = page.tables("Recall by class")
    for i, row in enumerate(table):
        name = row["class"]
        hits, records = own["confusion"][i][i], sum(own["confusion"][i])
        assert row["personal"] == (f"{hits / records:.3f}" if records else "missing")
        for column, found in (("global", test), ("local-only", alone)):
            recall = found["recall"][name]
            assert row[column] == ("missing" if recall is None else f"{recall:.3f}")
        assert row["test records"] == str(test["class_records"][name]) == str(report["records"]["test"][name])
    (table,) = page.tables("Global, local-only and personal model")
    by_model = {row["model and records"]: row for row in table}
    assert by_model["local-only, test"]["balanced accuracy"] == f"{alone['balanced_accuracy']:.3f}"
    assert by_model["global, validation"]["loss"] == f"{report['global']['validation']['loss']:.3f}"
    assert by_model["personal, test"]["accuracy"] == f"{own['accuracy']:.3f}"
    recalls = [row[i] / sum(row) for i, row in enumerate(own["confusion"]) if sum(row)]
    mean = sum(recalls) / len(recalls)
    assert by_model["personal, test"]["balanced accuracy"] == f"{mean:.3f}"
    assert f"The personal model has {mean:.3f} and {own['accuracy']:.3f}." in page.text


def test_records_and_hashes(run: Path) -> None:
    report, page = values(run / "site-2" / "local_report.json"), Page.of(run / "site-2")
    (table,) = page.tables("This silo's records")
    folds = (("training", "train"), ("validation", "validation"), ("test", "test"))
    for row in table[:-1]:
        for column, fold in folds:
            assert row[column] == str(report["records"][fold][row["class"]])
    assert {column: table[-1][column] for column, _ in folds} == {
        column: str(sum(report["records"][fold].values())) for column, fold in folds
    }
    server = values(run / "server" / "model.json")["model_sha256"]
    assert page.facts("Models") == {
        "architecture": "small_cnn (widths: [8, 8, 8])",
        "model.safetensors": server,
        "personal_model.safetensors": report["personal"]["model_sha256"],
    }
    tips = {said(item) for item in page.picture("Confusion matrix").iter(f"{SVG}title")}
    matrix, names = report["global"]["test"]["confusion"], list(report["global"]["test"]["recall"])
    for i, row in enumerate(matrix):
        assert (
            not any(row)
            or f"{names[i]} taken for {names[row.index(max(row))]}: {max(row)} of {sum(row)}" in tips
        )


def test_what_left_the_silo(run: Path) -> None:
    """Three rounds, the closing and the personal models: counted against model, classes and transcript."""
    disclosed = values(run / "site-1" / "local_report.json")["disclosed"]
    page = Page.of(run / "site-1")
    (table,) = page.tables("What left this silo")
    assert [(row["sums"], row["terms"]) for row in table] == [
        ("training rounds", "3"),
        ("closing, on the last model", "1"),
        ("personal models", "1"),
    ]
    train, closing, _ = disclosed["sent"]
    model = load_file(run / "server" / "model.safetensors")
    assert train["numbers"]["update"] == sum(item.numel() for item in model.values())
    classes = len(values(run / "site-1" / "local_report.json")["records"]["train"])
    assert train["numbers"]["classes"] == classes
    assert f"changes of the model ({train['numbers']['update']:,})" in table[0]["what (numbers in a term)"]
    assert set(closing["numbers"]) == {"evaluation", "failed"}
    # Every number has four or eight bytes.
    for item in disclosed["sent"]:
        most = item["times"] * sum(item["numbers"].values())
        assert 4 * most * (item["kind"] != "train") <= item["bytes"] <= 8 * most
    assert "Each term was masked" in page.text and "No noise was added" in page.text
    assert disclosed["silos"] == ["site-1", "site-2", "site-3", "site-4"]
    assert page.facts("What left this silo") == {"under the policy": disclosed["policy"]}
    assert disclosed["policy"].startswith("research (")


def test_what_left_in_a_plain_job_under_privacy_and_of_an_older_version(copied: Copied) -> None:
    folder = copied("site-1")
    report = values(folder / "local_report.json")
    privacy = {"epsilon": 5.0, "delta": 1e-5, "promised": 6.0}
    report |= {"privacy": privacy, "disclosed": report["disclosed"] | {"masked": False}}
    (folder / "local_report.json").write_text(json.dumps(report))
    write(folder)
    text = Page.of(folder).text
    assert "the server saw this silo's own numbers" in text and "Noise was added" in text
    del report["disclosed"]
    (folder / "local_report.json").write_text(json.dumps(report))
    write(folder)
    assert "Not recorded: the version that wrote this report did not count it." in Page.of(folder).text


def test_what_privacy_has_cost_and_what_was_not_asked_for(copied: Copied) -> None:
    folder = copied("site-1")
    privacy = {"epsilon": 5.81234, "rdp": 5.9, "prv": 5.81234, "exact": None, "delta": 1e-5, "promised": 6.0}
    privacy |= {"alone": 9.12301, "exact_jobs": 3}
    changed = {"privacy": privacy, "local_only": None, "personal": None}
    report = values(folder / "local_report.json") | changed
    (folder / "local_report.json").write_text(json.dumps(report))
    write(folder)
    page = Page.of(folder)
    assert "epsilon 5.813 of the 6 that it promised, at delta 1e-05" in page.text
    assert "The rest was for spare rounds" in page.text
    assert "Not counted: the exact totals of 3 jobs at this hospital." in page.text
    found = page.facts("Privacy spent")
    spent = found["epsilon if the others add their noise"]
    assert spent == found["by PRV (Opacus)"] == "5.813", "never less than it is"
    assert "5.813 epsilon spent of 6" in page.text
    assert "by the exact Gaussian curve" not in found
    assert "If none of them added any, it would be epsilon 9.124." in page.text
    assert found["epsilon if no other silo added noise"] == "9.124"
    assert "No model was trained on this silo's records alone" in page.text
    assert "No personal model was made" in page.text
    assert list(page.tables("Recall by class")[0][0]) == ["class", "global", "test records"]
    report["privacy"] |= {"epsilon": 5.98, "exact_jobs": 0}
    (folder / "local_report.json").write_text(json.dumps(report))
    write(folder)
    text = Page.of(folder).text
    assert "The rest was" not in text and "Not counted:" not in text


def test_what_exact_evaluations_have_used_is_said_beside_no_epsilon(copied: Copied) -> None:
    folder = copied("site-1")
    report = values(folder / "local_report.json")
    report["disclosed"]["evaluated"] = ["3 models (at most 30 over all jobs)"]
    (folder / "local_report.json").write_text(json.dumps(report))
    write(folder)
    said = (
        "no epsilon was spent. Its exact evaluations disclosed 3 models (at most 30 over all jobs). Rounds "
        "over all jobs, and what is left: tightframe site release show"
    )
    assert said in Page.of(folder).text


def test_a_silo_without_test_records(copied: Copied) -> None:
    folder = copied("site-1")
    report = values(folder / "local_report.json")
    empty = {"validation": {"records": 0}, "test": {"records": 0}}
    report |= {"global": empty, "local_only": None, "personal": None}
    report["records"]["test"] = dict.fromkeys(report["records"]["test"], 0)
    (folder / "local_report.json").write_text(json.dumps(report))
    write(folder)
    page = Page.of(folder)
    assert "Without test records there is nothing to compare." in page.text
    assert "Recall by class" not in page.titles()
