"""Runs held against each other; the oracles are SciPy's tests, and the result files themselves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scipy import stats
from tests.support.pages import SVG, Page
from typer.testing import CliRunner

from tightframe.errors import TightframeError
from tightframe.report import comparing
from tightframe_app import cli

JOB = {"dataset": "skin", "method": "fedavg", "seed": 1, "rounds": 2}
Made = Callable[..., Path]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """Results of a run with two classes of 40 and 60 test records, of which so many are found."""

    def make(name: str, hits: tuple[int, int] = (30, 45), **changes: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        records, classes = changes.pop("records", (40, 60)), changes.pop("classes", ("a", "b"))
        recall = [hit / of for hit, of in zip(hits, records, strict=True)]
        test = {
            "records": sum(records),
            "accuracy": sum(hits) / sum(records),
            "balanced_accuracy": sum(recall) / 2,
            "recall": dict(zip(classes, recall, strict=True)),
            "class_records": dict(zip(classes, records, strict=True)),
            "auroc": 0.8,
        }
        evaluation = {"validation": {"records": 0}, "test": test}
        outcome = {
            "trained": True,
            "reason": None,
            "job_name": name,
            "method": "fedavg",
            "rounds_done": 2,
            "rounds": 2,
            "roster": ["x", "y"],
            "synthetic": changes.pop("synthetic", False),
            "summation": "secure",
            "sums": "secure",
            "rules": [],
            "seconds": 1.0,
            "evaluation": evaluation,
            "evaluated_by": ["x", "y"],
            "job": JOB | {"job_name": name} | changes,
        }
        rows = [
            {"round": number, "kind": kind, "silos": ["x", "y"], "dropped": {}, "evaluation": evaluation}
            for number, kind in ((0, "start"), (1, "train"), (2, "train"))
        ]
        (folder / "outcome.json").write_text(json.dumps(outcome))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return folder

    return make


def call(*arguments: str | Path) -> Any:
    return CliRunner().invoke(cli.app, ["compare", *map(str, arguments)], env={"COLUMNS": "120"})


def test_one_seed_is_said_to_say_little_on_the_console_too(made: Made) -> None:
    told = "one seed says little"
    runs = [
        made(f"{method}-{seed}", (30, 45), seed=seed, method=method)
        for method in ("fedavg", "fedprox")
        for seed in (0, 1)
    ]
    assert told in call(runs[0], runs[2]).stdout and told not in call(*runs).stdout


def test_results_that_privacy_left_at_the_silos_are_not_silently_missing(made: Made) -> None:
    exact, private = made("exact"), made("private", privacy={"epsilon": 2.0, "evaluation": "local"})
    assert "test results of" not in call(exact, private).stdout
    outcome = json.loads((private / "outcome.json").read_text()) | {"evaluation": None}
    (private / "outcome.json").write_text(json.dumps(outcome))
    assert "test results of private: in each silo's" in call(exact, private).stdout


def test_a_run_whose_model_gives_one_answer_is_said_to(made: Made, tmp_path: Path) -> None:
    runs = [made("sound"), made("one")]
    outcome = json.loads((runs[1] / "outcome.json").read_text())
    outcome["evaluation"]["test"]["one_answer"] = {"class": "b", "share": 1.0}
    (runs[1] / "outcome.json").write_text(json.dumps(outcome))
    told = "one: the model gives one answer: b, for all records"
    assert told in call(*runs, "--out", tmp_path / "report.html").stdout
    assert told in Page.of(tmp_path).text and "sound: the model" not in Page.of(tmp_path).text


def test_paired_differences_are_those_of_a_t_test_over_the_seeds_in_common(made: Made) -> None:
    base = [made(f"base-{seed}", hits, seed=seed) for seed, hits in enumerate([(30, 45), (28, 50), (33, 41)])]
    other = [
        made(f"prox-{seed}", hits, seed=seed, method="fedprox")
        for seed, hits in enumerate([(31, 47), (32, 49), (34, 46), (40, 60)])
    ]
    done = call(*base, *other, "--format", "json")
    found = json.loads(done.stdout)
    scores = {run["name"]: run["balanced_accuracy"] for run in found["runs"]}
    (paired,) = found["paired_differences"]
    assert paired["seeds"] == [0, 1, 2], "the fourth has no partner"
    differences = [scores[f"prox-{seed}"] - scores[f"base-{seed}"] for seed in range(3)]
    test = stats.ttest_rel([scores[f"prox-{i}"] for i in range(3)], [scores[f"base-{i}"] for i in range(3)])
    expected = test.confidence_interval(0.95)
    assert paired["differences"] == pytest.approx(differences)
    assert paired["interval"] == pytest.approx([expected.low, expected.high])
    assert set(found["differing"]) == {"job_name", "seed", "method"}


@pytest.mark.parametrize("freedom", [1, 2, 3, 8, 31, 200])
def test_the_quantile_of_student_s_t_is_scipy_s(freedom: int) -> None:
    assert comparing.t_quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-9)


def test_limits_of_exact_runs_are_wilson_s_and_repeated_records_count_once(made: Made) -> None:
    (run, *_) = comparing.read_runs([made("one")])
    expected = stats.binomtest(75, 100).proportion_ci(method="wilson")
    assert run.interval("accuracy") == pytest.approx((expected.low, expected.high))
    low, high = run.interval("balanced_accuracy") or (0.0, 0.0)
    each = [stats.binomtest(hit, of).proportion_ci(method="wilson") for hit, of in ((30, 40), (45, 60))]
    down = sum((0.75 - item.low) ** 2 for item in each) ** 0.5 / 2
    up = sum((item.high - 0.75) ** 2 for item in each) ** 0.5 / 2
    assert (low, high) == pytest.approx((0.75 - down, 0.75 + up))
    assert run.interval("auroc") is None
    path = run.folder / "outcome.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"test_shared": True}))
    (run, *_) = comparing.read_runs([run.folder])
    assert run.interval("accuracy") != pytest.approx((expected.low, expected.high))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dataset": "heart"}, "same data set"),
        ({"classes": ("a", "c")}, "same classes"),
        ({"records": (50, 60)}, "same test records by class"),
        ({"synthetic": True}, "same kind of records"),
    ],
)
def test_runs_of_other_data_are_refused(made: Made, changes: dict[str, Any], words: str) -> None:
    one, two = made("one"), made("two", **changes)
    done = call(one, two, "--out", one.parent / "page.html")
    assert isinstance(done.exception, TightframeError) and done.exception.code == "TF-804"
    assert words in str(done.exception) and not (one.parent / "page.html").exists()


@pytest.mark.whole
def test_a_silo_s_results_one_run_alone_and_one_twice_are_refused(made: Made, run: Path) -> None:
    one = made("one")
    for folders, words in (((one, one), "named twice"), ((one, run / "site-1"), "a silo's own")):
        assert words in str(call(*folders).exception)
    assert call(one).exit_code == 2


def test_the_page_has_curves_values_and_only_what_differs(made: Made, tmp_path: Path) -> None:
    runs = [made(f"r{i}", (30 + i, 45), seed=i % 2, method=f"m{i // 2}") for i in range(6)]
    done = call(*runs, "--out", tmp_path / "report.html")
    assert done.exit_code == 0 and str(tmp_path / "report.html") in done.stdout.replace("\n", "")
    assert "seed: 0 | 1 | 0 | 1 | 0 | 1" in done.stdout and "rounds: " not in done.stdout
    page = Page.of(tmp_path)
    (last,) = page.tables("Last models, on the test records")
    assert [row["run"] for row in last] == [f"r{i}" for i in range(6)]
    assert last[0]["balanced accuracy"].startswith("0.750 [") and last[0]["epsilon"] == "none"
    (paired,) = page.tables("Paired differences")
    assert [row["setting"] for row in paired] == ["m1", "m2"]
    assert [*paired[0]][:2] == ["setting", "mean [95 %]"] and paired[0]["against"] == "m0"
    (differing,) = page.tables("What the jobs differ in")
    assert [row["value"] for row in differing] == ["job_name", "method", "seed"]
    titles = [item.findtext(f"{SVG}title") for item in page.pictures()]
    assert titles == [
        "Balanced accuracy by round",
        "Paired differences",
    ]
    assert "<script" not in page.source
    curves = page.picture("Balanced accuracy by round")
    legend = [item.text for item in curves.iter(f"{SVG}text") if "seeds" in (item.text or "")]
    assert legend == [f"m{i} (2 seeds)" for i in range(3)], "seeds of one setting share a colour and a name"
    kinds = [item.get("class", "").split()[-1] for item in curves.iter(f"{SVG}polyline")]
    assert kinds == ["s0", "s0", "s1", "s1", "s2", "s2"]


def test_findings_are_told_one_by_one_defaults_of_other_methods_not_and_folders_of_one_name(
    made: Made,
) -> None:
    runs = [made("one"), made("two", method="fedprox")]
    options = ({"method_options": {"focal_gamma": 2.0}}, {"method_options": {"mu": 0.5}})
    for folder, own in zip(runs, options, strict=True):
        path = folder / "outcome.json"
        outcome = json.loads(path.read_text())
        asked = {"method_options": {"mu": 0.5}} if "mu" in own["method_options"] else {}
        outcome |= {"job_name": "same", "job": outcome["job"] | asked, "effective": outcome["job"] | own}
        finding = {"confusion": [[50, 5], [1, 4]], "sensitivity": 0.8, "auroc": 0.9}
        test = outcome["evaluation"]["test"]
        told = dict.fromkeys(finding)  # a withheld finding has no numbers
        test |= {"findings": {"a": finding, "b": finding, "c": told}, "class_records": {"a": 40, "b": 5}}
        path.write_text(json.dumps(outcome))
    said = call(*runs).stdout
    assert "focal_gamma" not in said and "method_options.mu: - | 0.5" in said
    assert f"same (2): {runs[1]}" in said.replace("\n", "")
    assert said.count("0.800, 0.900") == 4
    words = " ".join(said.split())
    assert "some of few positive records: b 5" in words and "b 5, c" not in words
    lines = [line.split() for line in said.splitlines()]
    assert ["c", "-", "-,", "-", "-,", "-"] in lines


def test_real_runs_and_a_workspace(run: Path, tmp_path: Path, made: Made) -> None:
    done = call(run, made("other"))
    assert "same data set" in str(done.exception), "the workspace's only run was read"
