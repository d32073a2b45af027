"""The benchmark of one sum at toy size: its rows, what it repeats, what it refuses. No time is looked at."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import balanced_accuracy_score
from sklearn.neighbors import NearestCentroid

from tightframe.errors import JobError

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType]:
    """(one_sum, one_sum_cases), with digits as they are and a network of a few weights."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import one_sum
    import one_sum_cases

    case = one_sum_cases.digits(Path())
    small = replace(case.scale, model_options={"widths": [8]}, rounds=1, epochs=1, batch_size=64)
    tiny = replace(case, encoder=one_sum_cases.Encoder("identity"), scale=small, private_scale=small)
    monkeypatch.setitem(one_sum_cases.CASES, "digits", lambda root: tiny)
    return one_sum, one_sum_cases


TINY = ["--data", "digits", "--partition", "even4", "--summation", "plain"]


def test_rows_are_those_of_the_pooled_records_and_no_run_is_repeated(
    modules: tuple[ModuleType, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_sum, cases = modules
    out = tmp_path / "rows.json"
    asked = [*TINY, "--methods", "fedncm", "fedavg", "--out", str(out)]
    assert one_sum.main([*asked, "--seeds", "2"]) == 0
    report = json.loads(out.read_text())
    assert (report["data"], report["partition"], report["summation"]) == ("digits", "even4", "plain")
    trained, row = report["rows"]
    assert (trained["method"], row["method"]) == ("fedavg", "fedncm"), "the baseline of differences is first"
    assert (row["noise"], row["epsilon"], row["seeds"], row["failed"]) == (None, None, 2, [])

    case = cases.digits(Path())
    known: dict[str, list[float]] = {"accuracy": [], "balanced_accuracy": []}
    for seed in (0, 1):
        silos = case.silos("even4", seed)
        assert [len(silo.labels("train")) for silo in silos.values()] == [300] * 4
        (inputs, labels), (tests, truth) = (_pooled(silos, fold) for fold in ("train", "test"))
        guess = NearestCentroid().fit(inputs, labels).predict(tests)
        known["accuracy"].append(float(np.mean(guess == truth)))
        known["balanced_accuracy"].append(float(balanced_accuracy_score(truth, guess)))
    for name, values in known.items():
        assert [item[name] for item in row["runs"]] == pytest.approx(values)
        assert row[f"{name}_mean"] == pytest.approx(np.mean(values))
        assert row[f"{name}_sd"] == pytest.approx(np.std(values, ddof=1))
    assert 0.9 < row["auroc_mean"] <= 1

    monkeypatch.setattr(one_sum.federation, "run_job", lambda *_, **__: pytest.fail("ran again"))
    assert one_sum.main([*asked, "--seeds", "2"]) == 0
    again = json.loads(out.read_text())["rows"]
    assert {item["method"]: item for item in again} == {item["method"]: item for item in report["rows"]}
    with pytest.raises(SystemExit, match="choose another file"):
        one_sum.main(["--data", "digits", "--partition", "P10C2", "--out", str(out)])


def test_a_call_that_is_killed_leaves_one_seed_of_each_row(
    modules: tuple[ModuleType, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_sum, _ = modules
    out = tmp_path / "rows.json"
    ended = iter([_run(0, 0.5), _run(0, 0.9)])

    def run(*_: Any) -> dict[str, Any]:
        if (found := next(ended, None)) is None:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(one_sum, "run", run)
    with pytest.raises(KeyboardInterrupt):
        one_sum.main([*TINY, "--methods", "fedncm", "fedavg", "--seeds", "2", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [(row["method"], row["seeds"], row["accuracy_mean"]) for row in rows] == [
        ("fedavg", 1, 0.5),
        ("fedncm", 1, 0.9),
    ]


def test_differences_are_paired_and_failed_runs_counted(modules: tuple[ModuleType, ModuleType]) -> None:
    one_sum, _ = modules
    own, base = [0.9, 0.92, 0.95], [0.80, 0.86, 0.84]
    runs = [_run(seed, value) for seed, value in enumerate(own)] + [{"seed": 3, "error": "TF-501"}]
    others = [_run(seed, value) for seed, value in enumerate(base)] + [_run(3, 0.5)]
    row = one_sum.row_of("fed3r", {}, None, None, runs, others)
    expected = stats.ttest_rel(own, base).confidence_interval(0.95)
    assert row["less_fedavg"] == pytest.approx([np.mean(own) - np.mean(base), expected.low, expected.high])
    assert (row["seeds"], row["failed"]) == (3, ["TF-501"])
    alone = one_sum.row_of("fedavg", {}, None, None, others, others)
    assert alone["less_fedavg"] is None and alone["auroc_mean"] is None


def test_privacy_names_whose_noise_a_row_has(modules: tuple[ModuleType, ModuleType]) -> None:
    _, cases = modules
    case = cases.digits(Path())
    assert case.noises("fedsgd", 8.0) == ("own", "shared")
    assert [case.noises(name, 8.0) for name in ("fed3r", "fedavg")] == [("shared",), ("own",)]
    assert case.noises("fedsgd", None) == (None,)
    job = case.job("fedavg", {}, ["a", "b", "c"], "even4", 3, 2.0, "own", "secure")
    assert job.privacy is not None and (job.privacy.epsilon, job.privacy.delta) == (2.0, 1e-5)
    assert (job.weights, job.summation, job.training.learning_rate) == ("uniform", "secure", 0.2)


@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        (["--methods", "fed4r"], JobError, "fed4r"),
        (["--methods", "fedcgs:shrink=2"], JobError, "shrink"),
        (["--partition", "natural"], SystemExit, "even4"),
    ],
)
def test_what_does_not_exist_is_refused_before_anything_runs(
    modules: tuple[ModuleType, ModuleType],
    wrong: list[str],
    error: type[BaseException],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one_sum, _ = modules
    monkeypatch.setattr(one_sum.federation, "run_job", lambda *_, **__: pytest.fail("ran"))
    with pytest.raises(error, match=said):
        one_sum.main([*TINY, *wrong, "--out", str(tmp_path / "rows.json")])


def test_mnists_test_images_are_divided_once(modules: tuple[ModuleType, ModuleType], real_data: Path) -> None:
    _, cases = modules
    case = cases.mnist(real_data)
    silos = case.silos("even4", 0)
    assert [len(silo.labels("train")) for silo in silos.values()] == [300] * 4
    assert sum(len(silo.labels("test")) for silo in silos.values()) == 2000


def test_natural_silos_are_divided_anew_without_losing_a_record(
    modules: tuple[ModuleType, ModuleType], real_data: Path
) -> None:
    _, cases = modules
    case = cases.heart(real_data)
    whole, parts = case.silos("natural", 0), case.silos("P10C1", 0)
    assert len(parts) == 10 and all(len(set(silo.labels("train"))) == 1 for silo in parts.values())
    for fold in ("train", "validation", "test"):
        before, after = (_pooled(silos, fold) for silos in (whole, parts))
        rows = [sorted(np.c_[inputs, labels].tolist()) for inputs, labels in (before, after)]
        assert rows[0] == rows[1]
    with pytest.raises(SystemExit, match="does not divide these records"):
        case.silos("dirichlet0.05", 0)


def test_the_figure_has_a_line_for_each_method_and_noise(
    modules: tuple[ModuleType, ModuleType], tmp_path: Path
) -> None:
    one_sum, _ = modules
    rows = [
        one_sum.row_of("fedsgd", {}, noise, epsilon, [_run(0, 0.5)])
        for noise, epsilon in (("own", 2.0), ("shared", 2.0), ("shared", 8.0))
    ]
    rows.append(one_sum.row_of("fed3r", {}, None, None, [_run(0, 0.9)]))
    file = tmp_path / "rows.json"
    file.write_text(json.dumps({"data": "digits", "partition": "even4", "rows": rows}))
    import one_sum_figure

    places, lines = one_sum_figure.series([json.loads(file.read_text())])
    assert places == ["none", "8", "2"]
    assert set(lines) == {"fedsgd, own noise", "fedsgd, shared noise", "fed3r"}
    assert [row and row["epsilon"] for row in lines["fedsgd, shared noise"]] == [None, 8.0, 2.0]
    assert one_sum.main(["--figure", str(tmp_path / "one.svg"), str(file)]) == 0
    assert "fedsgd, shared noise" in (tmp_path / "one.svg").read_text()


def _pooled(silos: Any, fold: str) -> tuple[Any, Any]:
    """Inputs on the unit sphere, as the method sees them (all are longer than 1), and labels."""
    from privacy_attacks import stacked

    parts = [stacked(silo, fold) for silo in silos.values()]
    inputs = np.concatenate([part.reshape(len(part), -1) for part, _ in parts]).astype(np.float64)
    lengths = np.linalg.norm(inputs, axis=1, keepdims=True)
    assert lengths.min() > 1
    return inputs / lengths, np.concatenate([labels for _, labels in parts])


def _run(seed: int, accuracy: float) -> dict[str, Any]:
    return {"seed": seed, "accuracy": accuracy, "seconds": 1.0}
