"""The benchmark of methods at toy size: what it runs, computes and writes. No time is looked at."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from scipy import stats

from tightframe.errors import JobError

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType]:
    """(methods, comparison)."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import comparison

    import methods

    return methods, comparison


@pytest.fixture
def benchmark(modules: tuple[ModuleType, ModuleType]) -> ModuleType:
    return modules[0]


@pytest.fixture
def comparison(modules: tuple[ModuleType, ModuleType]) -> ModuleType:
    return modules[1]


TINY = ["--data", "digits", "--partition", "P5C2", "--rounds", "2", "--subset", "200", "--epochs", "1"]
TINY += ["--model-options", '{"widths": [8, 8]}', "--summation", "plain"]


def test_a_tiny_run_writes_table_numbers_and_curves(
    benchmark: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = [{"mu_intra": value, "mu_inter": 1e-3} for value in (0.0, 1e-5)]
    monkeypatch.setitem(benchmark.GRIDS, "fedmr", grid)
    out = tmp_path / "found.json"
    asked = [*TINY, "--methods", "fedmr", "--seeds", "2", "--grid-seeds", "1", "--class-rules", "both"]
    assert benchmark.main([*asked, "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    shown = capsys.readouterr().out
    assert list(report["results"]) == ["off", "on"]
    titles = list(report["results"]["off"])
    assert titles[0] == "FedAvg"
    assert len(titles) == 2
    assert titles[1].startswith("FedMR (mu_intra=")
    # Every value of the grid is in the report and on the screen; its seeds are not the result's.
    points = report["grids"]["fedmr"]["points"]
    assert [point["options"] for point in points] == grid
    assert report["grids"]["fedmr"]["seeds"] == [1000]
    assert report["grids"]["fedmr"]["chosen"] == max(points, key=lambda point: point["mean"])["options"]
    assert all(f"mu_intra={value:g}, mu_inter=0.001" in shown for value in (0.0, 1e-5))
    for methods in report["results"].values():
        for runs in methods.values():
            assert [run["seed"] for run in runs] == [0, 1]
            assert all(len(run["course"]) == 3 for run in runs)  # round 0 and two rounds
            assert all(run["bytes_a_round"] > 0 for run in runs)
    off, on = (report["results"][rules]["FedAvg"][0] for rules in ("off", "on"))
    assert any("CLASS RULES OFF" in line for line in off["rules"])
    assert not any("CLASS RULES OFF" in line for line in on["rules"])
    assert off["course"] == on["course"], "FedAvg has no class sums"
    assert report["records"]["0"]["silo-0"]["train"] > 0
    assert sum(silo["test"] for silo in report["records"]["0"].values()) == 359
    assert "class rules on" in shown
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_all_methods_of_a_seed_share_partition_and_start(benchmark: ModuleType) -> None:
    arguments = benchmark.parser().parse_args(TINY)
    bench = benchmark.bench_of(arguments)
    first, again, other = (bench.silos(seed) for seed in (3, 3, 4))
    for name, silo in first.items():
        np.testing.assert_array_equal(silo.labels("train"), again[name].labels("train"))
    assert any(len(silo.labels("train")) != len(other[name].labels("train")) for name, silo in first.items())
    jobs = [bench.job(method, {}, list(first), 3, "off") for method in ("fedavg", "fedmr")]
    assert jobs[0].seed == jobs[1].seed == 3
    assert jobs[0].dataset_options["partition_seed"] == 3
    assert jobs[0].training == jobs[1].training
    courses = [bench.run(job, first)["course"] for job in jobs]
    assert courses[0][0] == courses[1][0], "the same untrained model"


def test_a_run_that_fails_is_counted_as_failed(benchmark: ModuleType, comparison: ModuleType) -> None:
    bench = benchmark.bench_of(benchmark.parser().parse_args([*TINY, "--learning-rate", "100"]))
    bench = replace(bench, scale=replace(bench.scale, batch_size=4))
    records = bench.silos(0)
    job = bench.job("fedavg", {}, list(records), 0, "off")
    job = job.model_copy(update={"update_bound": 1e-6})
    run = bench.run(job, records)
    assert run["error"].startswith("TF-")
    assert "course" not in run
    report = _report({"FedAvg": [_run(0, [0.1, 0.5])], "Other": [run]})
    row = comparison.summarise(report)[1]
    assert (row["mean"], row["failed"], row["difference"]) == (None, [run["error"]], None)


@pytest.mark.parametrize(
    ("method", "said"), [("fedmr:mu=1", "method_options.mu"), ("fedmagic", "'fedmagic'")]
)
def test_a_method_or_option_that_does_not_exist_is_refused_before_training(
    benchmark: ModuleType, method: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(benchmark.federation, "run_job", lambda *_, **__: pytest.fail("trained"))
    with pytest.raises(JobError, match=said.replace(".", r"\.")):
        benchmark.main([*TINY, "--methods", "fedavg", method, "--out", str(tmp_path / "x.json")])


def test_paired_differences_have_the_t_interval_of_scipy(comparison: ModuleType) -> None:
    base, own = [0.50, 0.52, 0.47, 0.55], [0.58, 0.57, 0.57, 0.60]
    report = _report(
        {
            "FedAvg": [_run(seed, [0.1, value]) for seed, value in enumerate(base)],
            "Other": [_run(seed, [0.1, value]) for seed, value in reversed(list(enumerate(own)))],
        }
    )
    row = comparison.summarise(report)[1]
    known = stats.ttest_rel(own, base).confidence_interval(0.95)
    assert row["difference"] == pytest.approx([np.mean(own) - np.mean(base), known.low, known.high])
    assert row["mean"] == pytest.approx(np.mean(own))
    assert row["spread"] == pytest.approx(np.std(own, ddof=1))
    single = comparison.summarise(_report({"FedAvg": [_run(0, [0, 0.5])], "Other": [_run(0, [0, 0.6])]}))[1]
    assert single["difference"] == pytest.approx([0.1, None, None])
    assert single["spread"] is None


def test_rounds_to_the_baselines_best_are_counted_seed_by_seed(comparison: ModuleType) -> None:
    report = _report(
        {
            "FedAvg": [_run(0, [0.1, 0.4, 0.6, 0.5]), _run(1, [0.9, 0.2, 0.3, 0.3])],
            # Round 0 is before any training: 0.9 there does not count, here or as the best.
            "Other": [_run(0, [0.1, 0.5, 0.55, 0.6]), _run(1, [0.9, 0.1, 0.1, 0.2])],
        }
    )
    base, other = comparison.summarise(report)
    assert base["rounds_to_baseline_best"] == {"mean": 2.0, "arrived": 2, "of": 2}
    assert other["rounds_to_baseline_best"] == {"mean": 3.0, "arrived": 1, "of": 2}


def test_silos_own_models_are_not_compared_with_a_global_one(comparison: ModuleType) -> None:
    own = {**_run(0, [0.1, 0.9]), "own_models": True}
    base, other = comparison.summarise(_report({"FedAvg": [_run(0, [0.1, 0.5])], "Other": [own]}))
    assert other["own_models"] and not base["own_models"]
    assert other["mean"] == 0.9 and other["difference"] is None
    assert other["rounds_to_baseline_best"]["of"] == 0
    assert comparison._mean(other) == "own models: 0.900"


def test_the_score_is_the_mean_of_the_last_rounds(comparison: ModuleType) -> None:
    assert comparison.score(_run(0, [0.0, 0.2, 0.4, 0.6]), 2) == pytest.approx(0.5)
    assert comparison.score({"seed": 0, "error": "TF-301"}, 2) is None
    calibrated = {**_run(0, [0.0, 0.2, 0.4, 0.6]), "last": comparison.rounds_that_count("ccvr", 2)}
    assert comparison.score(calibrated, 2) == 0.6, "a mean with models before it would not be the method's"


def test_partitions_and_methods_are_read_as_the_papers_write_them(benchmark: ModuleType) -> None:
    assert benchmark.parse_partition("P100C3") == {
        "partition": "class_disjoint",
        "silos": 100,
        "classes_per_silo": 3,
    }
    assert benchmark.parse_partition("Dir0.05x20") == {"partition": "dirichlet", "silos": 20, "alpha": 0.05}
    assert benchmark.parse_partition("C100-100-20")["classes_per_silo"] == 20
    assert benchmark.parse_partition("IIDx4") == {"partition": "iid", "silos": 4}
    assert benchmark.parse_partition("natural") == {}
    for wrong in ("P10", "Dirx20", "iid", "P10C2x"):
        with pytest.raises(argparse.ArgumentTypeError):
            benchmark.parse_partition(wrong)
    assert benchmark.parse_method("fedmr") == ("fedmr", None)
    assert benchmark.parse_method("fedmr:") == ("fedmr", {})
    assert benchmark.parse_method("a:b=1e-5,c=true,d=x") == ("a", {"b": 1e-5, "c": True, "d": "x"})
    with pytest.raises(argparse.ArgumentTypeError):
        benchmark.parse_method("a:b")


def test_scales_are_overruled_by_flags_and_refuse_other_silos(benchmark: ModuleType) -> None:
    parse = benchmark.parser().parse_args
    paper = benchmark.bench_of(parse(["--data", "cifar10", "--partition", "P10C3", "--scale", "paper"])).scale
    assert (paper.model, paper.rounds, paper.epochs, paper.batch_size) == ("resnet18", 100, 10, 128)
    assert (paper.learning_rate, paper.augment, paper.subset) == (0.01, True, None)
    small = benchmark.bench_of(parse(["--data", "mnist", "--rounds", "2", "--model", "resnet18"])).scale
    assert (small.rounds, small.last, small.model, small.model_options) == (2, 2, "resnet18", {})
    with pytest.raises(SystemExit, match="has its own silos: omit --partition"):
        benchmark.bench_of(parse(["--data", "color_mnist", "--partition", "P10C2"]))
    with pytest.raises(SystemExit, match="has no silos of its own"):
        benchmark.bench_of(parse(["--data", "digits", "--partition", "natural"]))


def test_the_small_color_mnist_and_the_ham_subset_open(benchmark: ModuleType, real_data: Path) -> None:
    parse = benchmark.parser().parse_args
    ham = benchmark.bench_of(parse(["--data", "ham", "--root", str(real_data)]))
    assert sorted(ham.silos(0)) == ["centre-1", "centre-2", "centre-3", "centre-5"]
    assert ham.job("fedavg", {}, sorted(ham.silos(0)), 0, "off").dataset == "fed_isic2019"
    assert ham.scale.measure == "balanced_accuracy"


def _run(seed: int, course: list[float]) -> dict[str, Any]:
    return {"seed": seed, "course": course, "seconds_a_round": 1.0, "bytes_a_round": 10, "personal": None}


def _report(methods: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    return {"settings": {"last": 1}, "results": {"off": methods}}


def test_results_go_into_a_folder_that_git_ignores_unless_told_otherwise(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: Path
) -> None:
    assert root / "benchmarks" / "results" == benchmark.RESULTS
    assert "benchmarks/results/" in (root / ".gitignore").read_text().splitlines()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(benchmark, "RESULTS", tmp_path / "results")
    asked = [*TINY, "--rounds", "1", "--seeds", "1", "--grid-seeds", "0", "--methods", "fedavg"]
    assert benchmark.main([*asked, "--no-curves"]) == 0
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["digits-class_disjoint-5-2.json"]
    assert list((tmp_path / "here").iterdir()) == []
