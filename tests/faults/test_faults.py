"""What happens to six hospitals in a production run, and what it leaves behind.

t = 5 of six: each sum survives the loss of one. One job for all of it, with a fault in every other round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import psutil
import pytest
from tests.faults.federation import FULL, PAUSED, RELAYED, SITES, Done, Six, assert_whole, over
from tests.production.federation import LEAD

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.faults]

Undo = Callable[[], object]


def pause(six: Six) -> Undo:
    """SIGSTOP for everything of a hospital, as where its machine is suspended."""
    stopped = [psutil.Process(six.processes[PAUSED].pid), six.job_process(PAUSED)]
    for process in stopped:
        process.suspend()
    return lambda: [process.resume() for process in stopped]


def fill_disk(six: Six) -> Undo:
    """No file of a hospital's job process can grow: EFBIG stands for ENOSPC, which takes a disk of its own.

    Nor can one be written at all, so that this is the worst moment of a disk that fills up.
    """
    process = six.job_process(FULL)
    before = process.rlimit(psutil.RLIMIT_FSIZE)
    process.rlimit(psutil.RLIMIT_FSIZE, (0, before[1]))
    return lambda: process.rlimit(psutil.RLIMIT_FSIZE, before)


def cut(six: Six) -> Undo:
    """Nothing arrives between a hospital and the server, and nobody is told."""
    assert six.network is not None
    six.network.cut()
    return six.network.heal


def corrupt(six: Six) -> Undo:
    """One byte of a hospital's contribution is changed on its way."""
    assert six.network is not None
    six.network.corrupt()
    return lambda: None


@dataclass(frozen=True)
class Fault:
    round: int
    site: str
    happen: Callable[[Six], Undo]
    code: str | None


FAULTS = (
    Fault(1, PAUSED, pause, "TF-502"),
    Fault(3, FULL, fill_disk, "TF-512"),
    Fault(5, RELAYED, corrupt, None),
    Fault(7, RELAYED, cut, "TF-502"),
)
ROUNDS = 8


@pytest.fixture(scope="module")
def faulted(six: Six) -> Done:
    """One job to whose silos something happens in every other round."""
    job = six.submit(six.export("fedmr_isic", "faulted", ROUNDS))
    job.wait_round(0)
    for fault in FAULTS:
        job.wait_round(fault.round - 1)
        undo = fault.happen(six)
        try:
            job.wait_round(fault.round)
        finally:
            undo()
    return over(job)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.happen.__name__)
def test_the_round_goes_on_with_the_others_and_the_silo_is_back_in_the_next(
    six: Six, faulted: Done, fault: Fault
) -> None:
    row, after = faulted.rounds[fault.round], faulted.rounds[fault.round + 1]
    others = [site for site in SITES if site != fault.site]
    assert row["silos"] == (others if fault.code else list(SITES))
    assert row["dropped"] == ({fault.site: fault.code} if fault.code else {})
    assert row["static_opened"] is (fault.code is None), "counts are opened for all six, or for nobody"
    assert after["silos"] == list(SITES) and after["static_opened"] is True


def test_the_job_with_all_these_faults_has_trained_and_is_verified(six: Six, faulted: Done) -> None:
    assert faulted.status == "FINISHED:COMPLETED"
    assert faulted.outcome["trained"] is True and faulted.outcome["rounds_done"] == ROUNDS
    assert faulted.outcome["evaluation"]["test"]["records"] == 6 * 12
    root = str(six.kit(LEAD) / "startup" / "rootCA.pem")
    told = six.run(
        "tightframe", "transcript", "verify", str(faulted.results / "transcript.jsonl"), "--root", root
    )
    assert (
        f"sums        {ROUNDS + 1} opened, 0 failed, 3 with missing sites" in told
        and "complete    yes" in told
    )
    assert six.network is not None and six.network.corrupted == 1


def test_each_silo_says_in_its_own_log_what_happened_to_it(six: Six, faulted: Done) -> None:
    (error,) = [line for line in faulted.job.log(FULL).splitlines() if line.startswith("OSError: [Errno 27]")]
    assert str(six.state(FULL)) in error or str(six.kit(FULL)) in error, "with the file"
    for site in SITES:
        assert str(six.folder / "records") not in (faulted.results / "log.txt").read_text(), site


def test_no_file_is_torn_after_all_these_faults(six: Six, faulted: Done) -> None:
    assert assert_whole(faulted.results) >= 5
    for site in SITES:
        assert assert_whole(six.state(site)) >= 2 and assert_whole(six.kit(site) / faulted.job.job_id) >= 1
        mine = six.state(site) / faulted.job.job_id / site / "transcript.jsonl"
        root = str(six.kit(site) / "startup" / "rootCA.pem")
        told = six.run("tightframe", "transcript", "verify", str(mine), "--root", root)
        assert "valid: " in told
