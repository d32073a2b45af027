"""The noise in a secure sum as the server opens it, with the full cohort and after a drop-out.

Whole runs: the silos' sums are set to zero, so that what is opened is their noise and nothing else.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from tests.support.runs import heart

from tightframe import federation
from tightframe.config.job import parse_job
from tightframe.data.base import SiloData
from tightframe.errors import RunError
from tightframe.privacy import accounting
from tightframe.privacy.releases import class_sums, evaluation_totals
from tightframe.privacy.releases.class_sums_plan import ClassSumsConfig
from tightframe.privacy.training import portions
from tightframe.rounds.riders.noisy_sums import RELEASES
from tightframe.rounds.setup import prepare
from tightframe.rounds.silo.session import SiloSession
from tightframe.rounds.sums.common import RefusedError
from tightframe.rounds.sums.secure_server import SecureSums
from tightframe.securesum.rules import threshold

JOB: dict[str, Any] = {
    "job_name": "opened",
    "method": "fedmr",
    "method_options": {"mu_intra": 0.0},
    "dataset": "fed_heart_disease",
    "model": "mlp",
    "model_options": {"widths": [600]},
    "sites": ["site-1", "site-2", "site-3", "site-4"],
    "min_sites": 3,
    "rounds": 1,
    "seed": 5,
    "weights": "uniform",
    "training": {"epochs": 1, "batch_size": 1024, "learning_rate": 0.01, "augment": False},
    "privacy": {"epsilon": 60.0, "noise_multiplier": 2.0, "spare_rounds": 0},
}
HONEST = 2
"""t - c of four silos, t = 3 and c = 1, by the protocol's own table."""


@pytest.fixture(autouse=True)
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but noise in the class sums; and without what is tested elsewhere."""

    def nothing(found: torch.Tensor, labels: Any, classes: int, *_: Any, **__: Any) -> torch.Tensor:
        return torch.zeros(classes, found.shape[1] + 1, dtype=torch.int64)

    monkeypatch.setattr(class_sums, "class_sums", nothing)
    monkeypatch.setattr(accounting, "_prv", lambda *_: None)
    monkeypatch.setattr(portions, "check_per_record", lambda *_, **__: None)


def hearts() -> dict[str, SiloData]:
    return {site: heart(site) for site in JOB["sites"]}


def _carried(folder: Path) -> tuple[float, int]:
    """The squared noise in the opened class sums over the promised variance, and of how many numbers."""
    job = parse_job(JOB)
    plan = prepare(job).privacy
    assert plan is not None and plan.releases == (1,)
    total = federation.run_job(job, data=hearts(), folder=folder).state.extra[RELEASES + "total"]
    config = plan.class_sums
    promised = config.noise_multiplier**2 * config.squared_sensitivity
    return float((total**2).sum()) / promised, total.numel()


@pytest.mark.parametrize("lost", [0, 1])
def test_the_opened_total_has_the_promised_variance_and_half_the_noise_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    handle = SiloSession.handle

    def dropping(self: SiloSession, task: str, message: Any) -> Any:
        answer = handle(self, task, message)
        if lost and self.context.name == "site-4" and task == "contribute" and message["kind"] == "train":
            raise RunError("gone", code="TF-502")
        return answer

    monkeypatch.setattr(SiloSession, "handle", dropping)
    found, numbers = _carried(tmp_path / "kept")
    low, high = stats.chi2.ppf([1e-7, 1 - 1e-7], numbers)
    assert low < found / ((4 - lost) / HONEST) < high
    assert found > high, "at least what was promised: three silos are more than two"
    share = ClassSumsConfig.share_variance
    monkeypatch.setattr(ClassSumsConfig, "share_variance", lambda config, honest: share(config, honest) // 4)
    halved, _ = _carried(tmp_path / "halved")
    assert halved < low


def test_a_server_that_names_fewer_colluders_gets_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job says two; by the server's one, three silos' shares would carry what two have to."""
    params, shared = SecureSums._params, []

    def lying(self: SecureSums, roster: Any) -> Any:
        return replace(params(self, roster), colluders=1)

    def noting(draw: Any) -> Any:
        def drawing(shape: tuple[int, ...], config: Any, honest: int) -> Any:
            shared.append((draw.__module__.rpartition(".")[2], honest))
            return draw(shape, config, honest)

        return drawing

    for module in (class_sums, evaluation_totals):
        monkeypatch.setattr(module, "noise_for", noting(module.noise_for))
    privacy = {**JOB["privacy"], "evaluation": "noisy"}
    job = {**JOB, "colluders": 2, "model_options": {"widths": [8]}, "privacy": privacy}
    federation.run_job(parse_job(job), data=hearts(), folder=tmp_path / "honest")
    assert threshold(4, 2) == 4
    # Confusion and scores of two folds are a draw each.
    assert Counter(shared) == {("class_sums", 4 - 2): 4, ("evaluation_totals", 4 - 2): 4 * 4}
    monkeypatch.setattr(SecureSums, "_params", lying)
    shared.clear()
    with pytest.raises(RefusedError, match="site-1, site-2, site-3 and site-4 refused: TF-601"):
        federation.run_job(parse_job(job), data=hearts(), folder=tmp_path / "lying")
    assert not shared
