"""The benchmark of differential privacy at toy size: what it computes, and controls that could fail."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from scipy.stats import mannwhitneyu, norm
from sklearn.metrics import accuracy_score, balanced_accuracy_score, roc_auc_score

from tightframe import federation
from tightframe.data.image_sets import open_silos
from tightframe.privacy.accounting import epsilons
from tightframe.privacy.events import Gaussian
from tightframe.privacy.training import portions
from tightframe.results.parts.evaluation import FoldMetrics

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    # As found again afterwards, whatever --engine says.
    monkeypatch.setattr(portions, "CHOSEN_ON_CPU", portions.CHOSEN_ON_CPU)
    import privacy

    return privacy


@pytest.fixture
def attacks(benchmark: ModuleType) -> ModuleType:
    import privacy_attacks

    return privacy_attacks


def _pool(attacks: ModuleType, width: int = 32, each: int = 60) -> object:
    """Three classes of unit vectors around a direction each, so that nothing needs training."""
    rng = np.random.default_rng(7)
    labels = np.repeat(np.arange(3), each)
    features = np.eye(3, width)[labels] + 0.2 * np.abs(rng.normal(size=(3 * each, width)))
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    known = {label: features[labels == label].mean(0) for label in range(3)}
    return attacks.Pool(features, labels, known)


def test_without_noise_the_sum_of_one_record_is_that_record(attacks: ModuleType) -> None:
    found = attacks.invert(_pool(attacks), None, 1, seed=1, trials=100)
    for kind in ("cosine", "centred"):
        assert found[kind]["score"] == pytest.approx(1.0, abs=1e-9)
        assert found[kind]["top"] == found[kind]["beyond"] == 1.0
    low, middle, high = found["cosine"]["null"]
    assert low < middle < high < 0.999
    assert found["noise_multiplier"] is None


def test_under_strong_noise_the_nearest_record_is_inside_the_null(attacks: ModuleType) -> None:
    found = attacks.invert(_pool(attacks), 1.0, 1, seed=1, trials=400)
    for kind in ("cosine", "centred"):
        low, _, high = found[kind]["null"]
        assert low < found[kind]["score"] < high
        # 0.05 is expected, of which this is five standard deviations; without noise it is 1.
        assert found[kind]["beyond"] < 0.11
        assert found[kind]["top"] < 0.1
    assert epsilons([Gaussian(found["noise_multiplier"])], 1e-5).exact == pytest.approx(1.0, rel=1e-3)


def test_many_records_hide_each_other_even_without_noise(attacks: ModuleType) -> None:
    one, many = (attacks.invert(_pool(attacks), None, n, seed=2, trials=60)["cosine"] for n in (1, 20))
    assert many["beyond"] < 0.5 < one["beyond"]


@pytest.mark.parametrize("epsilon", [8.0, 1.0])
def test_the_strongest_attack_on_sums_has_the_auc_of_the_closed_form(
    attacks: ModuleType, epsilon: float
) -> None:
    best, weak = attacks.infer_from_sums(_pool(attacks), epsilon, seed=3, trials=4000)
    noise = best["noise_multiplier"]
    expected = norm.cdf(1 / (noise * math.sqrt(2)))
    # The deviation of an AUC of 2000 against 2000 is below 0.0092; half of the noise would be 0.96 and 0.65.
    assert best["auc"] == pytest.approx(expected, abs=0.05)
    assert best["at_most"] == pytest.approx(expected)
    assert best["p"] <= 0.001 and best["auc"] > best["null"][2]
    assert weak["auc"] < expected + 0.05
    # Any release of this epsilon is bounded by the general curve as well.
    assert expected <= attacks.auc_bound(epsilon, 1e-5) + 1e-6


def test_without_noise_the_strongest_attack_is_always_right(attacks: ModuleType) -> None:
    best, _ = attacks.infer_from_sums(_pool(attacks), None, seed=3, trials=100)
    assert best["auc"] == best["at_most"] == 1.0


@pytest.mark.parametrize(("epsilon", "found"), [(None, True), (8.0, True), (0.002, False)])
def test_whether_a_site_took_part_is_told_as_far_as_the_noise_lets_it(
    attacks: ModuleType, epsilon: float | None, found: bool
) -> None:
    """A promise for a record is a weaker one for ten of them."""
    pool, each = _pool(attacks), 10
    best, weak = attacks.infer_from_sums(pool, epsilon, seed=5, trials=2000, together=each)
    assert weak["attacker"] == "knows the site alone" and best["auc"] <= best["at_most"] + 0.065
    noise = best["noise_multiplier"]
    # Five standard deviations of an AUC of 1000 against 1000 are 0.065.
    if noise is None:
        assert best["auc"] == best["at_most"] == 1.0
    else:
        assert best["at_most"] == pytest.approx(norm.cdf(each / (noise * math.sqrt(2))))
        # Ten vectors of a class point nearly the same way, so that the bound is nearly reached.
        assert best["auc"] == pytest.approx(best["at_most"], abs=0.065)
    if found:
        assert best["p"] <= 0.001 and best["auc"] > best["null"][2]
    else:  # five standard deviations of an AUC of 1000 against 1000, which the null's are, too
        assert best["auc"] < 0.5 + 5 * 0.0129 and best["null"][2] - best["null"][0] < 4 * 0.0129


def test_area_and_null_are_those_of_others(attacks: ModuleType) -> None:
    rng = np.random.default_rng(0)
    coins = rng.permutation(60) < 30
    scores = np.round(rng.normal(size=60) + 0.8 * coins, 1)  # with ties
    assert attacks.auc(scores, coins) == pytest.approx(roc_auc_score(coins, scores))
    told = attacks.judge([(scores, coins)], permutations=999, seed=0)
    assert told["auc"] == pytest.approx(roc_auc_score(coins, scores))
    other = mannwhitneyu(scores[coins], scores[~coins], alternative="greater").pvalue
    assert told["p"] == pytest.approx(other, abs=0.02)
    # The null of an AUC of 30 against 30 has a standard deviation of sqrt(61 / 12) / 30.
    low, middle, high = told["null"]
    assert (high - low) / 2 == pytest.approx(1.645 * math.sqrt(61 / 12) / 30, rel=0.15)
    assert middle == pytest.approx(0.5, abs=0.02)
    silent = attacks.judge([(rng.normal(size=60), coins) for _ in range(3)], permutations=999, seed=0)
    assert 0.01 < silent["p"] < 0.99
    assert attacks.p_value(2.0, np.zeros(99)) == 0.01


def test_the_bound_of_pure_privacy_is_the_closed_form(attacks: ModuleType) -> None:
    for epsilon in (0.1, 1.0, 4.0):
        # The two lines meet at x = 1 / (1 + e^eps).
        corner = 1 / (1 + math.exp(epsilon))
        area = math.exp(epsilon) * corner**2 / 2 + (1 - corner) - math.exp(-epsilon) * (1 - corner) ** 2 / 2
        assert attacks.auc_bound(epsilon, 0.0) == pytest.approx(area, abs=1e-5)
        assert attacks.auc_bound(epsilon, 1e-3) > attacks.auc_bound(epsilon, 0.0)


def test_canaries_are_in_or_out_by_their_coins_and_mislabelled(attacks: ModuleType) -> None:
    silos = open_silos("digits", partition="iid", silos=3, partition_seed=0, test="own")
    changed, (inputs, wrong, coins) = attacks.with_canaries(silos, 10, seed=4)
    assert len(inputs) == len(wrong) == len(coins) == 30 and coins.sum() == 15
    for place, (name, silo) in enumerate(silos.items()):
        before, labels = attacks.stacked(silo)
        after, own = attacks.stacked(changed[name])
        assert len(own) == len(labels) - 5
        known = {row.tobytes(): label for row, label in zip(after, own, strict=True)}
        truth = {row.tobytes(): label for row, label in zip(before, labels, strict=True)}
        for row, label, there in zip(
            *(item[10 * place :][:10] for item in (inputs, wrong, coins)), strict=True
        ):
            assert truth[row.tobytes()] != label
            assert known.get(row.tobytes()) == (label if there else None)


def test_pooled_hits_of_the_silos_are_the_servers_metrics(benchmark: ModuleType, tmp_path: Path) -> None:
    import privacy_utility

    study = privacy_utility.study_of("digits", "IIDx3", None, rounds=1, epochs=1, model_options=TINY_MODEL)
    records = study.silos(0)
    assert {len(silo.labels("train")) for silo in records.values()} == {400}
    assert all(len(set(silo.labels("train"))) == 10 for silo in records.values())
    job = study.job("fedavg", None, list(records), 0)
    found = study.run(job, records)
    final = federation.run_job(job, data=records).outcome.final()
    assert final is not None and final.evaluation is not None
    for fold in ("validation", "test"):
        for kind in ("records", "accuracy", "balanced_accuracy"):
            assert found[fold][kind] == pytest.approx(getattr(getattr(final.evaluation, fold), kind))
    assert found["spent"] is None and found["epsilon"] is None


def test_hits_are_pooled_over_silos_that_lack_classes(benchmark: ModuleType) -> None:
    truth, guess = [0, 0, 0, 1, 1, 2], [0, 1, 0, 1, 1, 0]
    parts = [
        FoldMetrics(
            records=3, recall={"a": 0.5, "b": 1.0, "c": None}, class_records={"a": 2, "b": 1, "c": 0}
        ),
        FoldMetrics(records=3, recall={"a": 1.0, "b": 1.0, "c": 0.0}, class_records={"a": 1, "b": 1, "c": 1}),
        FoldMetrics(records=0),
    ]
    import privacy_utility

    found = privacy_utility.pooled(parts)
    assert found["accuracy"] == pytest.approx(accuracy_score(truth, guess))
    assert found["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(truth, guess))


TINY_MODEL = {"widths": [8, 8]}
TINY = ["--rounds", "1", "--epochs", "1", "--model-options", '{"widths": [8]}', "--seeds", "1"]
TINY += ["--partition", "IIDx3", "--engine", "vmap"]


def test_utility_writes_every_run_and_the_grid(
    benchmark: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [*TINY, "--methods", "fedavg", "--epsilons", "inf", "8", "--learning-rates", "0.1", "0.3"]
    assert benchmark.main(["--utility", *asked, "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "privacy-utility.json").read_text())
    assert [(run["epsilon"], run["seed"]) for run in report["runs"]] == [(None, 0), (8.0, 0)]
    assert report["grid_seeds"] == [1000]
    for run, row in zip(report["runs"], report["grid"], strict=True):
        best = max(row["points"], key=lambda point: point["scores"][0])
        assert run["learning_rate"] == row["chosen"] == best["learning_rate"]
        assert run["test"]["records"] == 359
    # A spare round is planned for and not needed.
    assert 3.0 < report["runs"][1]["spent"] <= 8.0
    shown = capsys.readouterr().out
    assert "0.1" in shown and "0.3" in shown and "accounts for the search" in shown


def test_inference_from_a_model_is_judged_by_the_coins(benchmark: ModuleType, tmp_path: Path) -> None:
    asked = [*TINY, "--epsilons", "inf", "--trials", "50", "--canaries", "10", "--out", str(tmp_path)]
    assert benchmark.main(["--inference", *asked]) == 0
    rows = json.loads((tmp_path / "privacy-inference.json").read_text())["rows"]
    sums = ["class sums", "class sums, a site's 10"]
    assert [row["from"] for row in rows] == [sums[0], sums[0], sums[1], sums[1], "global model"]
    assert rows[-1]["canaries"] == 30 and 0 <= rows[-1]["auc"] <= 1


def test_the_attack_on_a_model_sees_what_was_learned_by_heart_and_nothing_else(attacks: ModuleType) -> None:
    import privacy_utility

    def found(**training: float) -> dict[str, float]:
        # Thirty records a silo, five of them canaries, and a network that can hold them all.
        study = privacy_utility.study_of(
            "digits", "IIDx3", None, model="mlp", model_options={"widths": [128]}, batch_size=8, **training
        )
        told: dict[str, float] = attacks.infer_from_models(
            lambda seed, epsilon, names: study.job("fedavg", epsilon, names, seed),
            lambda seed: {name: privacy_utility.cut(silo, 30) for name, silo in study.silos(seed).items()},
            None,
            seeds=range(2),
            canaries=10,
        )
        assert told["canaries"] == 60
        return told

    learned = found(rounds=3, epochs=10, learning_rate=0.05)
    assert learned["auc"] > 0.85 and learned["p"] <= 0.001
    untrained = found(rounds=1, epochs=1, learning_rate=1e-6)
    assert abs(untrained["auc"] - 0.5) < 0.25 and untrained["p"] > 0.01


def test_cost_compares_every_engine_with_a_plain_step(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import privacy_cost

    monkeypatch.setattr(privacy_cost, "CASES", (privacy_cost.Case("small_cnn", 16, 4, 2),))
    assert benchmark.main(["--cost", "--turns", "1", "--out", str(tmp_path)]) == 0
    (case,) = json.loads((tmp_path / "privacy-cost.json").read_text())["cases"]
    assert [row["step"] for row in case["rows"]] == ["plain", "loop", "vmap", "hooks"]
    assert case["rows"][0]["ratio"] == 1.0
    assert all(len(row["seconds"]) == 1 and row["ratio"] > 0 for row in case["rows"])
    assert "times plain" in capsys.readouterr().out


def test_an_engine_that_cannot_is_shown_as_such(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    import privacy_cost

    def broken() -> None:
        raise NotImplementedError

    original = privacy_cost.step_of
    monkeypatch.setattr(
        privacy_cost,
        "step_of",
        lambda case, engine, device: broken if engine == "hooks" else original(case, engine, device),
    )
    found = privacy_cost.measure([privacy_cost.Case("small_cnn", 16, 4, 1)])
    rows = {row["step"]: row for row in found["cases"][0]["rows"]}
    assert rows["hooks"] == {"step": "hooks", "failed": "NotImplementedError"}
    assert rows["loop"]["ratio"] > 0


@pytest.mark.parametrize("asked", [[], ["--cost", "--seeds", "0"], ["--inversion", "--first-seed", "999"]])
def test_what_makes_no_sense_is_refused(benchmark: ModuleType, asked: list[str], tmp_path: Path) -> None:
    wrong = [*asked, *(["--seeds", "2"] if "999" in asked else []), "--out", str(tmp_path)]
    assert benchmark.main(wrong) == 2
    assert list(tmp_path.iterdir()) == []
