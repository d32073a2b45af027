"""Two withdrawals, or one that takes nothing out, whose totals differ by a single record."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.attacks import test_withdrawals
from tests.attacks.test_own_states import open_a_seal
from tests.support.attacks.liar import lies
from tests.support.attacks.malicious_server import Federation, Records, hearts
from torch.utils.data import TensorDataset

from tightframe.config.policy import PolicyBlock
from tightframe.errors import JobError, TightframeError
from tightframe.learning.one_sum.temperature import LOSSES
from tightframe.learning.one_sum.withdrawal import CLASSES, NAMED, SILOS, withheld
from tightframe.rounds.server.collecting import SharedState
from tightframe.rounds.sums.vault import read_journal
from tightframe.securesum.site.journal import History

VALUES: dict[str, Any] = {
    "method": "fedncm",
    "weights": "uniform",
    "model": "random_features",
    "model_options": {"width": 4},
}
NAMED_SITE = "hospital-2"


class Ended:
    """Hospitals with an ended run, out of which they withdraw records."""

    def __init__(self, state: Path, policy: PolicyBlock | None = None) -> None:
        self.state, self.data, self.policy = state, hearts(4), policy
        run = Federation(VALUES, self.data, state=state, policy=policy).enroll()
        self.totals = [run.sum(*exchange.place) for exchange in run.setup.plan]
        open_a_seal(run)
        self.final = run.shared

    def withdraws(self, job_id: str, names: Mapping[str, Sequence[str]]) -> Federation:
        """Enrol the hospitals in a withdrawal from it."""
        values = {**VALUES, "withdraw": {**continued("job-a"), "state_sha256": self.final.sha256}}
        return self.goes_on(job_id, "job-a", values, names)

    def resumes(self, job_id: str, stopped: Federation, names: Mapping[str, Sequence[str]]) -> Federation:
        """Enrol the hospitals in a job that resumes a withdrawal."""
        withdraw = stopped.job.withdraw
        assert withdraw is not None
        values = {
            **VALUES,
            "withdraw": withdraw.model_dump(mode="json"),
            "resume": {**continued(stopped.job_id), "after_round": 1},
        }
        return self.goes_on(job_id, stopped.job_id, values, names)

    def goes_on(
        self, job_id: str, previous: str, values: dict[str, Any], names: Mapping[str, Sequence[str]]
    ) -> Federation:
        """Enrol the hospitals in a job that continues another one, from the run's final state."""
        made = Federation(
            values,
            self.data,
            state=self.state,
            job_id=job_id,
            previous=previous,
            withdrawn=names,
            policy=self.policy,
        ).enroll()
        made.shared = SharedState(self.final.state)
        return made

    def enough(self) -> dict[str, list[str]]:
        """Names of five records of each class at each hospital."""
        labels = {name: np.asarray(item.labels("train")) for name, item in self.data.items()}
        return {
            name: [
                f"record,train-{place}" for label in (0, 1) for place in np.flatnonzero(found == label)[:5]
            ]
            for name, found in labels.items()
        }


class Visits(Records):
    """Each of a hospital's patients, at so many times: numbers differ a little."""

    def __init__(self, of: Records, times: int) -> None:
        super().__init__(of)
        self._times = times

    def labels(self, fold: str) -> Any:
        return np.repeat(np.asarray(self._data.labels(fold)), self._times)

    def groups(self, fold: str) -> Any:
        return np.repeat(np.arange(len(self._data.labels(fold))), self._times)

    def records(self, fold: str, *, augment_seed: int | None = None) -> Any:
        rows = np.repeat(self._data.raw(fold), self._times, 0)
        rows = rows * np.random.default_rng(0).normal(1, 1e-3, rows.shape)
        return TensorDataset(torch.from_numpy(rows).float(), torch.from_numpy(self.labels(fold)))


def continued(job_id: str) -> dict[str, Any]:
    return {"lineage": "job-a", "previous": job_id, "checkpoint_sha256": "0" * 64}


def take_out(federation: Federation) -> None:
    """Ask numbers, classes and sums as an honest server does."""
    for index in (0, 1):
        federation.sum("before", 0, index)
        open_a_seal(federation, index)
        federation._slot += 1
    federation.sum("before", 0, 2)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Whose run is made once."""
    return Ended(tmp_path_factory.mktemp("ended"))


@pytest.fixture
def ended(made: Ended, tmp_path: Path) -> Ended:
    """The same hospitals with a folder of their own."""
    own = copy.copy(made)
    own.state = Path(shutil.copytree(made.state, tmp_path / "ended"))
    return own


@pytest.mark.whole
def test_of_two_withdrawals_that_were_enrolled_together_one_goes_on(ended: Ended) -> None:
    """A hospital adds a name to its file between the two: their difference would be this record."""
    names = ended.enough()
    more = {**names, NAMED_SITE: [*names[NAMED_SITE], "record,train-50"]}
    assert "record,train-50" not in names[NAMED_SITE]
    one, other = ended.withdraws("job-b", names), ended.withdraws("job-c", more)
    take_out(other)
    with pytest.raises(TightframeError, match=r"^TF-524: .*names 0 others, and 1 of those not"):
        take_out(one)


@pytest.mark.whole
def test_a_withdrawal_that_took_nothing_out_is_not_resumed(ended: Ended) -> None:
    """The server says that it stopped; its closing would count one test record fewer on the run's model.

    Nor is one that did from the state before, on which no fold is withheld.
    """
    names = {NAMED_SITE: ["record,test-5"]}
    stopped = ended.withdraws("job-b", names)
    with pytest.raises(TightframeError, match=r"^TF-523: .*did not verify"):
        ended.resumes("job-c", stopped, names).sum("closing", 1)
    enough = ended.enough()
    whole = ended.withdraws("job-d", {**enough, NAMED_SITE: [*enough[NAMED_SITE], "record,test-5"]})
    take_out(whole)
    whole.sum("train", 1)
    first = whole.shared
    whole.sum("closing", 1)
    again = ended.resumes("job-e", whole, {})
    with pytest.raises(TightframeError, match="did not verify"):
        again.sum("closing", 1)
    again.shared = SharedState(first.state)
    again.sum("closing", 1)


@pytest.mark.whole
def test_a_withdrawal_is_not_refused_for_what_evaluations_told_but_evaluates_no_more(tmp_path: Path) -> None:
    """Where a second job over the same records is: the duty to take records out waits for no consent."""
    ended = Ended(tmp_path, PolicyBlock(profile="standard", min_row_bits=0))

    (losses,) = (each[LOSSES] for each in ended.totals if LOSSES in each)
    assert np.any(losses) and np.array_equal(losses, np.round(losses)), "no margin of a record"

    def told() -> tuple[int, int, int]:
        paths = withdrawal.sessions["hospital-3"].context.ledger_paths
        return History(read_journal(paths, check=None)).evaluated("hearts")

    second = Federation(
        {**VALUES, "seed": 1}, ended.data, state=tmp_path, job_id="job-x", policy=ended.policy
    )
    with pytest.raises(TightframeError) as caught:
        second.enroll()
    assert caught.value.code == "TF-627"
    withdrawal = ended.withdraws("job-b", ended.enough())
    before = told()
    take_out(withdrawal)
    totals = [withdrawal.sum(*place) for place in (("train", 1), ("closing", 1))]
    assert withheld(withdrawal.shared.state) == ("validation", "test") and told() == before
    assert not any(np.any(total) for each in totals for name, total in each.items() if "evaluation" in name)


@pytest.mark.whole
@pytest.mark.parametrize("patients", [1, 5], ids=str)
def test_no_patient_leaves_alone(
    patients: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A liar says that others leave, too: the difference was one patient's values, to 0.01 deviations."""
    visits = {name: Visits(item, 10) for name, item in hearts(4).items()}
    monkeypatch.setattr(test_withdrawals, "hearts", lambda sites: visits)
    told = {NAMED: 10.0, SILOS: 3.0}
    lies(monkeypatch, "hospital-4", {NAMED: told, CLASSES: {CLASSES: np.array([3.0, 0.0])}})
    ended = Ended(tmp_path)
    own = np.flatnonzero(visits[NAMED_SITE].labels("train") == 0)[: 10 * patients]
    withdrawal = ended.withdraws("job-b", {NAMED_SITE: [f"record,train-{place}" for place in own]})
    if patients == 1:
        with pytest.raises(TightframeError, match="1 silo of 4 could not add its own"):
            withdrawal.sum("before", 0, 0)
        assert "training records (`min_class_count`), and patients, to leave" in caplog.text
    else:
        take_out(withdrawal)


def test_no_lead_resumes_a_withdrawal_from_the_run_itself() -> None:
    withdraw = {**continued("job-a"), "state_sha256": "0" * 64}
    resume = {**continued("job-a"), "after_round": 1}
    with pytest.raises(JobError, match="leave `resume` out"):
        Federation.job_of({**VALUES, "withdraw": withdraw, "resume": resume}, ["a", "b", "c"])
    resume["previous"] = "job-b"
    assert Federation.job_of({**VALUES, "withdraw": withdraw, "resume": resume}, ["a", "b", "c"]).resume
