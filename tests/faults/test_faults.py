"""What happens to six hospitals in a production run, and what it leaves behind.

t = 5 of six: each sum survives the loss of one. One job for all of it, with a fault in every other round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import psutil
import pytest
from tests.support.faults.federation import FULL, PAUSED, RELAYED, SITES, Done, Six, assert_whole, over
from tests.support.production.federation import LEAD

pytestmark = pytest.mark.faults

Undo = Callable[[], object]


def pause(six: Six) -> Undo:
    """SIGSTOP for everything of a hospital, as where its machine is suspended."""
    stopped = [psutil.Process(six.processes[PAUSED].pid), six.job_process(PAUSED)]
    for process in stopped:
        process.suspend()
    return lambda: [process.resume() for process in stopped]


def fill_state(six: Six) -> Undo:
    """The disk of what must outlive a job is full, where this machine lets the tests have one of its own."""
    ballast = six.state(FULL) / "ballast"
    if six.small_disk:
        with pytest.raises(OSError, match="No space left"), ballast.open("wb", buffering=0) as stream:
            while True:
                stream.write(bytes(4096))
    return lambda: ballast.unlink(missing_ok=True)


def fill_machine(six: Six) -> Undo:
    """No file of a hospital's job process can grow, its logs included: EFBIG stands for ENOSPC everywhere."""
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
    Fault(3, FULL, fill_state, "TF-512"),
    # The engine cannot write its own audit log, and does not even begin with the task.
    Fault(5, FULL, fill_machine, "TF-503"),
    Fault(7, RELAYED, corrupt, None),
    Fault(9, RELAYED, cut, "TF-502"),
)
ROUNDS = 10


@pytest.fixture(scope="module")
def faulted(six: Six) -> Done:
    """One job to whose silos something happens in every other round; SCAFFOLD's silos keep state on disk."""
    changes = {"method": "scaffold", "training.momentum": 0.0, "job_name": "faulted"}
    job = six.submit(six.export("fedmr_isic", "faulted", ROUNDS, **changes))
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
    if fault.happen is fill_state and not six.small_disk:
        pytest.skip("needs the right to mount a file system of its own (mount -t tmpfs)")
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
    missing = sum(fault.code is not None for fault in FAULTS) - (not six.small_disk)
    assert f"sums        {ROUNDS + 1} opened, 0 failed, {missing} with missing sites" in told
    assert "complete    yes" in told
    assert six.network is not None and six.network.corrupted == 1


def test_no_file_is_torn_after_all_these_faults(six: Six, faulted: Done) -> None:
    assert assert_whole(faulted.results) >= 5
    for site in SITES:
        assert assert_whole(six.state(site)) >= 2 and assert_whole(six.kit(site) / faulted.job.job_id) >= 1
        mine = six.state(site) / faulted.job.job_id / site / "transcript.jsonl"
        root = str(six.kit(site) / "startup" / "rootCA.pem")
        told = six.run("tightframe", "transcript", "verify", str(mine), "--root", root)
        assert "valid: " in told
