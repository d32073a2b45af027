"""Folds with too few records are left out of exact evaluations, and the outcome says whose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.pages import Page, said

from tightframe import federation
from tightframe.config.job import parse_job
from tightframe.config.policy import PolicyBlock
from tightframe.config.refusals import BelowPolicyError
from tightframe.config.site import SiteEntry, open_data
from tightframe.rounds.riders import evaluation


@pytest.mark.whole
@pytest.mark.parametrize("summation", ["secure", "plain"])
def test_a_silo_with_few_test_records_is_not_counted(
    small: dict[str, Any], tmp_path: Path, summation: str
) -> None:
    """By a rule of the third silo alone; its validation fold is smaller still."""
    sites = [f"site-{number}" for number in range(1, 5)]
    job = parse_job({**small, "summation": summation, "sites": sites, "min_sites": 3})
    folds = {
        site: {fold: open_data(job, site, None).labels(fold) for fold in ("validation", "test")}
        for site in sites
    }
    least = len(folds["site-3"]["test"]) + 1
    others = [site for site in sites if site != "site-3"]
    entries = {
        site: SiteEntry(
            policy=PolicyBlock(profile="research", min_test_count=least if site == "site-3" else 1)
        )
        for site in sites
    }
    data = {site: open_data(job, site, None) for site in sites}
    result = federation.run_job(job, entries=entries, data=data, folder=tmp_path)
    final = result.outcome.final()
    assert final is not None and final.evaluation is not None
    told = np.concatenate([folds[site]["test"] for site in others])
    test = final.evaluation.test
    assert list(test.class_records.values()) == np.bincount(told, minlength=8).tolist()
    assert final.evaluated_by == others
    assert len(folds["site-3"]["validation"]) < least
    validation = sum(len(folds[site]["validation"]) for site in others)
    assert final.evaluation.validation.records == validation
    rules = json.loads((tmp_path / "server" / "outcome.json").read_text())["rules"]
    assert "too few test records to be counted (min_test_count): site-3" in rules
    # The silo itself sees how the model does on them.
    report = json.loads((tmp_path / "site-3" / "local_report.json").read_text())
    assert report["global"]["test"]["records"] == len(folds["site-3"]["test"])


@pytest.mark.whole
@pytest.mark.parametrize("class_rules", ["on", "off"])
def test_what_others_leave_out_does_not_open_one_silos_own_counts(
    small: dict[str, Any], tmp_path: Path, class_rules: str
) -> None:
    """Where two of three silos leave out a fold, the secure sum's total would be the third's alone."""
    job = parse_job({**small, "min_sites": 3, "class_rules": class_rules, "personalise": True})
    data = {site: open_data(job, site, None) for site in job.sites}
    entries = {
        site: SiteEntry(
            policy=PolicyBlock(profile="research", min_test_count=1 if site == "site-1" else 10_000)
        )
        for site in job.sites
    }
    result = federation.run_job(job, entries=entries, data=data, folder=tmp_path)
    final, alone = result.outcome.final(), len(data["site-1"].labels("test"))
    assert final is not None and final.evaluation is not None
    outcome = json.loads((tmp_path / "server" / "outcome.json").read_text())
    none = "test records of fewer than 3 silos could be counted: none are"
    assert (none in outcome["rules"]) == (class_rules == "on")
    assert final.evaluation.test.records == (0 if class_rules == "on" else alone)
    assert final.evaluated_by == ([] if class_rules == "on" else ["site-1"])
    report = json.loads((tmp_path / "site-1" / "local_report.json").read_text())
    assert report["global"]["test"]["records"] == alone and 0 < report["personal"]["accuracy"] <= 1


@pytest.mark.whole
def test_neither_is_its_personal_model(small: dict[str, Any], tmp_path: Path) -> None:
    """A personal model is judged by the same few test records; the silo alone sees how it does on them."""
    sites = [f"site-{number}" for number in range(1, 5)]
    job = parse_job({**small, "summation": "plain", "sites": sites, "min_sites": 4, "personalise": True})
    data = {site: open_data(job, site, None) for site in sites}
    least = {"site-3": len(data["site-3"].labels("test")) + 1}
    entries = {
        site: SiteEntry(policy=PolicyBlock(profile="research", min_test_count=least.get(site, 1)))
        for site in sites
    }
    federation.run_job(job, entries=entries, data=data, folder=tmp_path)
    own = {
        site: json.loads((tmp_path / site / "local_report.json").read_text())["personal"]["accuracy"]
        for site in sites
    }
    told = json.loads((tmp_path / "server" / "outcome.json").read_text())["personal"]
    assert told["silos"] == 3
    summed = [np.rint(own[site] * 32) / 32 for site in sites if site != "site-3"]  # on the grid of sums
    assert told["accuracy"] == pytest.approx(np.mean(summed))
    assert 0 < own["site-3"] <= 1


def test_only_the_named_folds_become_zero() -> None:
    counted = {
        f"evaluation/{fold}/{name}": torch.ones(2) for fold in evaluation.FOLDS for name in ("scores", "loss")
    }
    left = evaluation.told({**counted, "update/x": torch.ones(1)}, ["test"])
    assert {name for name, value in left.items() if not value.any()} == {
        "evaluation/test/scores",
        "evaluation/test/loss",
    }
    assert all(torch.equal(value, counted[name]) for name, value in evaluation.told(counted, []).items())


def test_finer_score_bins_than_the_policy_allows_are_refused(small: dict[str, Any]) -> None:
    standard = PolicyBlock(profile="standard").resolve(production=True)
    standard.check(parse_job({**small, "min_sites": 3, "evaluation": {"score_bins": 32}}))
    job = parse_job({**small, "min_sites": 3, "evaluation": {"score_bins": 33}})
    with pytest.raises(BelowPolicyError, match="max_score_bins") as caught:
        standard.check(job)
    assert "33 score bins" in str(caught.value) and "at most 32" in str(caught.value)
    private = {**small, "min_sites": 3, "weights": "uniform", "privacy": {}, "evaluation": {"score_bins": 33}}
    standard.check(parse_job(private))  # nothing exact leaves
    PolicyBlock(profile="research").resolve(production=False).check(job)


@pytest.mark.usefixtures("pages")
def test_silos_own_models_are_told_by_mean_accuracies_alone(small: dict[str, Any], tmp_path: Path) -> None:
    own = {"method": "local_only", "method_options": {}, "rounds": 1, "min_sites": 3, "personalise": True}
    job = parse_job({**small, **own})
    policy = PolicyBlock(profile="research", class_rules_off=False)
    entries = {site: SiteEntry(policy=policy) for site in job.sites}
    data = {site: open_data(job, site, None) for site in job.sites}
    outcome = federation.run_job(job, entries=entries, data=data, folder=tmp_path).outcome
    assert not outcome.measured and outcome.evaluated_by == []
    assert outcome.personal is not None and outcome.personal.silos == 3
    accuracy = f"{outcome.personal.accuracy:.3f}"
    line = "exact evaluations of silos' own models stay at silos (class_rules_off): site-1, site-2, site-3"
    assert line in outcome.rules
    screen, page = outcome.screen(), Page.of(tmp_path / "server")
    assert "Test metrics: at each silo, in its own local_report.json" in screen
    assert f"Personal models, mean of 3 silos on their own test records: accuracy {accuracy}" in screen
    assert "as above" not in screen and "first table" not in said(page.section("Personal models"))
    assert "test metrics are missing: they stay at the silos, each in its own report" in page.text
    assert "The silos' own models" not in page.titles() and "Hollow" not in page.text
