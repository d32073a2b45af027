"""A site's own caps, held at every charge: what its policy says is what its ledger is asked."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.audit import gaussian_epsilon
from tests.support.ledgers import charges_in

from tightframe.config.site import SiteEntry
from tightframe.data.arrays import ArrayData
from tightframe.errors import SiteConfigError, TightframeError
from tightframe.phases import Fold
from tightframe.privacy.events import Event, Gaussian, SubsampledGaussian
from tightframe.privacy.ledger.entries import Charge, DatasetError
from tightframe.rounds.context import SiloContext
from tightframe.rounds.setup import JobSetup, prepare
from tightframe.rounds.silo import private_view
from tightframe.rounds.silo.budget import Budget
from tightframe.rounds.silo.view import RequestedSum
from tightframe.rounds.sums.simulated_identity import simulated_identity

SITES = ["site-1", "site-2", "site-3"]
JOB: dict[str, Any] = {
    "job_name": "capped",
    "method": "fedetf",
    "dataset": "fed_heart_disease",
    "model": "mlp",
    "model_options": {"widths": [8]},
    "sites": SITES,
    "min_sites": 3,
    "rounds": 3,
    "weights": "uniform",
    "training": {"epochs": 1, "batch_size": 1024, "learning_rate": 0.1},
    "privacy": {"epsilon": 60.0, "noise_multiplier": 2.0, "spare_rounds": 2},
}


def records() -> ArrayData:
    stream = np.random.default_rng(0)
    fold = (stream.normal(size=(30, 13)), np.arange(30) % 2)
    folds: dict[Fold, Any] = dict.fromkeys(("train", "validation", "test"), fold)
    return ArrayData(folds, source="some", num_classes=2)


def context(setup: JobSetup, folder: Path, **entry: Any) -> SiloContext:
    identity = partial(simulated_identity, "run", "site-1", production=False)
    values = SiteEntry.model_validate(entry)
    return SiloContext(
        "site-1", setup.job, values, run_dir=folder, records=records(), job_id="run", identity=identity
    )


def budget(folder: Path, **entry: Any) -> Budget:
    setup = prepare(JOB)
    assert setup.privacy is not None
    return Budget(context(setup, folder, **entry), setup.privacy, SITES)


def charges(path: Path) -> list[Charge]:
    return charges_in(path) if path.is_file() else []


TRAINING, RELEASE = SubsampledGaussian(2.0, 1.0, 1), Gaussian(2.0)
COST = gaussian_epsilon(0.5, 1e-5)
"""Epsilon of one of either: about 1.99, and 2.95 at delta 1e-9."""


@pytest.mark.parametrize(
    ("rules", "asked", "fit", "code"),
    [
        ({"charged_retries": 1}, [("round 1 training", TRAINING)] * 3, 2, "TF-705"),
        ({"charged_retries": 0}, [("round 1 training", TRAINING)] * 2, 1, "TF-705"),
        ({"max_releases": 1}, [(f"round {n} class sums", RELEASE) for n in (1, 2)], 1, "TF-701"),
        ({"epsilon_cap": COST + 0.1}, [(f"round {n} training", TRAINING) for n in (1, 2)], 1, "TF-701"),
        ({"epsilon_cap": COST + 0.1, "delta_cap": 1e-9}, [("round 1 training", TRAINING)], 0, "TF-701"),
    ],
)
def test_a_charge_over_a_rule_of_the_policy_is_refused_and_not_made(
    tmp_path: Path, rules: dict[str, Any], asked: list[tuple[str, Event]], fit: int, code: str
) -> None:
    """By charges that a research policy, which has no caps, takes all of."""
    free, capped = budget(tmp_path / "free"), budget(tmp_path / "capped", policy=rules)
    for purpose, event in asked:
        free.charge(purpose, (event,))
    for purpose, event in asked[:fit]:
        capped.charge(purpose, (event,))
    with pytest.raises(TightframeError, match=code):
        capped.charge(*asked[fit][:1], (asked[fit][1],))
    assert len(charges(free.path)) == len(asked) and len(charges(capped.path)) == fit


def test_where_a_server_leaves_the_enrolment_out_a_charge_knows_the_records_all_the_same(
    tmp_path: Path,
) -> None:
    made = budget(tmp_path, dataset_id="ward-7")
    made.charge("round 1 training", (TRAINING,))
    with pytest.raises(DatasetError, match="TF-703"):
        budget(tmp_path, dataset_id="ward-9").charge("round 2 training", (TRAINING,))
    nameless = budget(tmp_path / "production")
    nameless._context = replace(nameless._context, production=True)
    with pytest.raises(SiteConfigError, match=r"TF-201: .*dataset_id"):
        nameless.charge("round 1 training", (TRAINING,))
    assert len(charges(made.path)) == 1 and not charges(nameless.path)


def test_class_counts_are_charged_as_they_are_drawn_and_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = prepare(JOB)
    view = private_view.PrivateSilo(
        context(setup, tmp_path), setup, torch.device("cpu"), 1, RequestedSum(SITES, 1)
    )
    real, seen = private_view.class_sums.noisy_counts, []

    def noting(labels: Any, classes: int, noise: float, **others: Any) -> torch.Tensor:
        seen.append((noise, [(item.purpose, item.event) for item in charges(view._budget.path)]))
        return real(labels, classes, noise, **others)

    monkeypatch.setattr(private_view.class_sums, "noisy_counts", noting)
    first = view.class_counts("train")
    assert torch.equal(view.class_counts("train"), first) and len(seen) == 1, "drawn once"
    ((noise, charged),) = seen
    assert charged == [("class counts", Gaussian(noise))]
