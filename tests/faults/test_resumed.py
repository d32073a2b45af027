"""A private job that is stopped twice, goes on twice, and loses a hospital at its end.

The first job ends because a hospital's job process is killed, the second because the server's machine goes;
in the third a hospital's own process is killed. Ledgers hold the whole chain.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from tests.support.faults.federation import (
    KILLED,
    ORPHANED,
    SITES,
    WRONG_CLOCK,
    Done,
    Six,
    assert_whole,
    over,
    wait,
)
from tests.support.processes import ended
from tests.support.production.federation import FAULTS, LEAD, SERVER

from tightframe.privacy.ledger.chain import read_ledger
from tightframe.privacy.ledger.ledger import ledger_path
from tightframe.rounds.server import resume

pytestmark = pytest.mark.faults

ROUNDS = 3
YEARS = 4 * 366 * 24 * 3600
# Every record in every step, with noise that need not be solved: sampled steps cost seconds in six processes.
# Ten steps a round, so that there is time to kill somebody in it.
PRIVATE = {
    "privacy.noise_multiplier": 8.0,
    "privacy.spare_rounds": 2,
    "training.batch_size": 512,
    "training.epochs": 10,
}


@dataclass
class Chain:
    """Three jobs of one lineage; ``said`` by the server before it was killed."""

    said: str
    killed: Done
    crashed: Done
    last: Done


@pytest.fixture(scope="module")
def chain(six: Six) -> Chain:
    job = six.submit(six.export("fedmr_isic_dp", "private", ROUNDS, **PRIVATE))
    job.wait_round(0)
    process = six.job_process(KILLED)
    job.wait_round(1)
    process.kill()
    killed, said = over(job), six.said(SERVER)

    job = six.go_on(killed.results.parent, "second", slice(1))
    job.wait_round(0)
    processes = [six.job_process(name) for name in (SERVER, *SITES)]
    job.wait_round(2)
    six.kill(SERVER)  # its machine goes, and comes back
    processes[0].kill()
    crashed = Done(job, "", job.run)
    six.restart(SERVER)
    wait(lambda: all(ended(one) for one in processes), "job processes outlive the server's")
    crashed.status = job.status()

    job = six.go_on(crashed.results, "third", slice(1, 2))
    job.wait_round(0)
    six.kill(ORPHANED)
    job.wait_round(ROUNDS)
    six.restart(ORPHANED)
    return Chain(said, killed, crashed, over(job))


def test_a_killed_job_process_ends_the_engines_job_and_the_operator_reads_whose_it_was(
    six: Six, chain: Chain
) -> None:
    assert chain.killed.status.startswith("FINISHED") and chain.killed.status != "FINISHED:COMPLETED"
    assert chain.killed.outcome["reason"].startswith("TF-504") and chain.killed.outcome["rounds_done"] == 1
    assert f"Failing job {chain.killed.job.job_id} due to reported failure from {KILLED}" in chain.said


def test_the_checkpoint_of_a_server_that_was_killed_lies_whole_in_its_kit(six: Six, chain: Chain) -> None:
    assert chain.crashed.results.parent == six.kit(SERVER)
    assert not (chain.crashed.results / "outcome.json").exists(), "nobody could write one"
    found, kept = resume.read(chain.crashed.results / "checkpoint.safetensors")
    assert found.described["after_round"] == 2 and kept.job_id == chain.crashed.job.job_id
    assert assert_whole(chain.crashed.results) >= 3
    assert chain.crashed.status == "RUNNING", "the engine does not look back"


def test_the_chain_is_one_run(chain: Chain) -> None:
    """In production each job draws new streams, so that no round is another's bit for bit: the past is."""
    first, second, last = chain.killed, chain.crashed, chain.last
    assert second.rounds[1] == first.rounds[1]
    assert {number: last.rounds[number] for number in (1, 2)} == second.rounds
    assert all(second.rounds[number]["silos"] == list(SITES) for number in (1, 2))
    outcome = last.outcome
    assert outcome["trained"] is True and outcome["rounds_done"] == ROUNDS
    assert outcome["resumed"]["previous"] == second.job.job_id and outcome["resumed"]["after_round"] == 2
    assert outcome["resumed"]["lineage"] == first.job.job_id


def test_a_killed_hospital_is_left_out_of_the_rest(chain: Chain) -> None:
    row = chain.last.rounds[ROUNDS]
    assert row["silos"] == [site for site in SITES if site != ORPHANED]
    assert row["dropped"] == {ORPHANED: "TF-502"}
    assert row["static_opened"] is True, "with privacy nothing is for the whole cohort only"


def test_no_budget_is_lost_and_none_is_charged_for_what_was_not_repeated(six: Six, chain: Chain) -> None:
    root = str(six.kit(LEAD) / "startup" / "rootCA.pem")
    for site in SITES:
        entries = read_ledger(ledger_path(six.state(site), site), check=None).entries
        charges = [entry.charge for entry in entries if entry.charge is not None]
        assert {charge.job_id for charge in charges} == {chain.killed.job.job_id}, "of the chain's first job"
        spent = Counter(charge.purpose for charge in charges)
        assert spent["round 1 training"] == 1, "done before the first stop"
        # What was stopped may have been charged already; it is drawn anew and charged as a repeat.
        assert 1 <= spent["round 2 training"] <= 2
        assert (site != ORPHANED) <= spent["round 3 training"] <= 2
        told = six.run("tightframe", "ledger", "verify", "--state-dir", str(six.state(site)), "--root", root)
        assert "whole" in told or "valid" in told
    told = chain.last.rounds[ROUNDS]["privacy"]
    assert told["range"][1] <= chain.last.outcome["privacy"]["epsilon"], "the promise holds for the chain"


def test_no_file_is_torn_after_three_kills(six: Six, chain: Chain) -> None:
    assert assert_whole(chain.killed.results) >= 4 and assert_whole(chain.last.results) >= 5
    for site in SITES:
        assert assert_whole(six.state(site)) >= 3


def test_a_site_whose_clock_is_years_ahead_is_told_so_by_its_check(six: Six, chain: Chain) -> None:
    six.skew[WRONG_CLOCK] = YEARS
    config = str(six.kit(WRONG_CLOCK) / "local" / "tightframe.json")
    with six.clock_of(WRONG_CLOCK):
        told = six.run("tightframe", "site", "check", "--production", "--no-records", "-c", config, code=1)
    six.skew[WRONG_CLOCK] = 600
    assert "TF-615" in told and "check this machine's clock first" in " ".join(told.split())


def test_every_command_of_the_guide_about_this_was_run(six: Six, chain: Chain) -> None:
    assert six.operations.not_run_under(FAULTS) == set()
