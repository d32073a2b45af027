"""Exact rounds of dense layers are equations on training records, and those of several jobs add up.

Two jobs of 50 rounds over the same 339 records, which differ in the seed, gave 311 of them. Here 171 of three
hospitals' records are surely honest ones'. Under a rule of 20 these allow four rounds of a layer of two units
on 13 inputs, over all jobs.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.attacks.kits import accept_release
from tests.support.attacks.malicious_server import STANDARD, Federation, Records, hearts, identity

from tightframe.errors import TightframeError
from tightframe.learning.few_records.products import Sizes, Units
from tightframe.rounds.sums.vault import read_journal
from tightframe.securesum.site.journal import History, Trained

POLICY = STANDARD.model_copy(update={"max_evaluations": None, "records_per_feature": 20})
NAME = "hospital-1"


@pytest.fixture(scope="module")
def hospitals() -> dict[str, Records]:
    return hearts(3)


def federation(data: Mapping[str, Records], state: Path, job_id: str, **changes: Any) -> Federation:
    policy, previous = changes.pop("policy", POLICY), changes.pop("previous", None)
    values = {
        "model_options": {"widths": [2], "last_activation": False},
        "training": {"learning_rate": 1e-6},
        **changes,
    }
    return Federation(values, data, state=state, job_id=job_id, policy=policy, previous=previous)


def run(found: Federation) -> None:
    for exchange in found.enroll().setup.plan:
        found.sum(*exchange.place)


def refused(found: Federation) -> str:
    with pytest.raises(TightframeError) as caught:
        found.enroll()
    assert caught.value.code == "TF-625"
    return str(caught.value)


def journal(found: Federation, name: str = NAME) -> list[Trained]:
    entries = read_journal(found.sessions[name].context.ledger_paths, check=None)
    return list(History(entries).trained("hearts"))


def test_rounds_of_jobs_that_are_allowed_one_by_one_span_the_records() -> None:
    """A record lies in the span of enough totals of a head's gradients; which rows do is then a search."""
    draw, records, classes, features, times = np.random.default_rng(0), 60, 3, 100, 10
    rows = np.hstack([draw.normal(size=(records, features - 1)), np.ones((records, 1))])
    labels = np.eye(classes)[draw.integers(0, classes, records)]

    def totals(seed: int) -> np.ndarray:
        drawn, found = np.random.default_rng(seed), []
        head = drawn.normal(size=(classes, features)) / 10
        for _ in range(times):
            batch = drawn.random(records) < 0.5
            scores = np.exp(rows @ head.T)
            errors = (scores / scores.sum(1, keepdims=True) - labels) * batch[:, None]
            found.append(errors.T @ rows)
            head = head - 0.05 * found[-1]
        return np.concatenate(found)

    def told(sums: np.ndarray) -> int:
        _, sizes, span = np.linalg.svd(sums, full_matrices=False)
        span = span[sizes > 1e-9 * sizes[0]]
        return int((np.linalg.norm(rows - rows @ span.T @ span, axis=1) < 1e-6).sum())

    assert Units(classes, classes, features, classes * features, times).allowed(records, 2)
    assert told(totals(1)) == 0
    assert told(np.concatenate([totals(seed) for seed in (1, 2, 3)])) == records


@pytest.mark.whole
def test_jobs_that_differ_in_the_seed_add_up_and_a_new_process_remembers(
    hospitals: dict[str, Records], tmp_path: Path
) -> None:
    first = federation(hospitals, tmp_path, "job-a", rounds=3)
    run(first)
    assert [(each.round, each.widest, each.units, each.inputs, each.records) for each in journal(first)] == [
        (number, 2, 2, 13, 171) for number in (1, 2, 3)
    ]
    # Each federation has hospitals of its own processes, over the same folders.
    said = refused(federation(hospitals, tmp_path, "job-b", rounds=3, seed=1))
    assert "3 more sums of layers of up to 2 units, the first on 13 numbers" in said
    assert "took 70.2% of what records_per_feature 20 allows, 1 such sums over 171 records would fit" in said
    run(federation(hospitals, tmp_path, "job-c", seed=1))
    assert "0 such sums" in refused(federation(hospitals, tmp_path, "job-d", seed=2))
    lax = POLICY.model_copy(update={"records_per_feature": 10})
    federation(hospitals, tmp_path, "job-e", seed=2, policy=lax).enroll()


def test_noise_takes_nothing_of_it(hospitals: dict[str, Records], tmp_path: Path) -> None:
    private = {"weights": "uniform", "privacy": {"epsilon": 8.0, "delta": 1e-5}}
    found = federation(hospitals, tmp_path, "job-a", rounds=9, **private)
    found.ask_to_enroll(NAME, found.params())
    assert found.sessions[NAME]._rounds(Sizes(1000, 0)) is None and journal(found) == []


def test_with_uniform_weights_a_hospital_counts_by_its_own_records(
    hospitals: dict[str, Records], tmp_path: Path
) -> None:
    sizes = {name: len(records.labels("train")) for name, records in hospitals.items()}
    least, rule = min(sizes, key=sizes.__getitem__), POLICY.model_copy(update={"records_per_feature": 5})
    jobs = [
        federation(hospitals, tmp_path, job, policy=rule, rounds=3, weights="uniform", seed=seed)
        for seed, job in enumerate(("job-a", "job-b"))
    ]
    run(jobs[0])
    assert {each.records for each in journal(jobs[0], least)} == {2 * sizes[least]}
    assert f"over {2 * sizes[least]} records" in refused(jobs[1])


@pytest.mark.whole
def test_a_person_accepts_the_rounds_of_one_run(hospitals: dict[str, Records], tmp_path: Path) -> None:
    run(federation(hospitals, tmp_path, "job-a", rounds=3))
    again = federation(hospitals, tmp_path, "job-b", rounds=3)
    refused(again)
    for name in hospitals:
        done = accept_release(again, name, tmp_path, identity, "--rounds")
        assert done.exit_code == 0, done.output
        assert "3 in 1 job," in done.output and "as many equations as records" in done.output
    run(again)
    refused(federation(hospitals, tmp_path, "job-c", rounds=3))
    assert len(journal(again)) == 6


def test_two_jobs_set_up_at_once_tell_no_more_than_one_after_the_other(
    hospitals: dict[str, Records], tmp_path: Path
) -> None:
    one, other = (federation(hospitals, tmp_path, job, rounds=3).enroll() for job in ("job-a", "job-b"))
    for found, number in itertools.product((one, other), (1, 2)):
        found.sum("train", number)
    for found in (one, other):
        with pytest.raises(TightframeError, match=r"^TF-625: "):
            found.sum("train", 3)
    assert len(journal(one)) == 4


def test_a_resumed_job_takes_its_own_rounds_and_what_it_repeats(
    hospitals: dict[str, Records], tmp_path: Path
) -> None:
    first = federation(hospitals, tmp_path, "job-a", rounds=4).enroll()
    for number in (1, 2):
        first.sum("train", number)
    resume = {"lineage": "job-a", "previous": "job-a", "checkpoint_sha256": "0" * 64}
    repeats, goes_on = (
        federation(hospitals, tmp_path, f"job-b{after}", rounds=4, resume={**resume, "after_round": after})
        for after in (1, 2)
    )
    assert "3 more sums" in refused(repeats)
    goes_on.enroll()


@pytest.mark.parametrize("previous", ["job-a", "no-job"])
def test_a_job_with_other_values_passes_for_no_part_of_a_chain(
    hospitals: dict[str, Records], tmp_path: Path, previous: str
) -> None:
    """A chain's layers count once. Its state was looked for by the job's own word for the one before."""
    federation(hospitals, tmp_path, "job-a", rounds=2).enroll().sum("train", 1)
    resume = {"lineage": "job-a", "previous": previous, "after_round": 1, "checkpoint_sha256": "0" * 64}
    for changes, code in ((dict[str, Any](), None), ({"seed": 1}, "TF-521")):
        job_id = f"job-{previous}-{code}"
        found = federation(hospitals, tmp_path, job_id, rounds=2, resume=resume, previous=previous, **changes)
        if code is None:
            found.enroll()
            continue
        with pytest.raises(TightframeError) as caught:
            found.enroll()
        assert caught.value.code == code


def test_a_round_is_on_record_before_its_term_leaves(
    hospitals: dict[str, Records], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A term that others can open counts even if the hospital's answer was its process's last act."""
    found = federation(hospitals, tmp_path, "job-a").enroll()
    vault, written = found.sessions[NAME]._secure._vault, list[int]()  # type: ignore[union-attr]
    commit = vault.commit

    def noted(entries: Any, *rest: Any) -> None:
        written.append(sum(isinstance(entry, Trained) for entry in entries))
        commit(entries, *rest)

    monkeypatch.setattr(vault, "commit", noted)
    found.sum("train", 1)
    assert written == [1, 0], "with the masked term, not with the shares"
