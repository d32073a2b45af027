"""Counts opened for two cohorts give the difference away exactly, so that a silo's are opened for one.

It is a masked term that t others can open, whether or not its silo is asked for its own shares.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.attacks.malicious_server import Federation, Records, hearts

from tightframe.errors import SecureSumError
from tightframe.rounds.sums.vault import read_journal
from tightframe.securesum.site.journal import StaticMasked, StaticOpened


@pytest.fixture(scope="module")
def hospitals() -> dict[str, Records]:
    return hearts(10)


def run(federation: Federation, **how: object) -> dict[str, object]:
    return dict(federation.sum("train", 1, **how))  # type: ignore[arg-type]


def another_cohort_is_refused(data: dict[str, Records], state: Path, job_id: str) -> None:
    federation = Federation({}, data, state=state, job_id=job_id)
    for name in data:
        with pytest.raises(SecureSumError) as caught:
            federation.ask_to_enroll(name, federation.params())
        assert caught.value.code == "TF-612"


@pytest.mark.whole
def test_a_silo_that_was_not_asked_to_reveal_does_not_open_its_counts_again(
    hospitals: dict[str, Records], tmp_path: Path
) -> None:
    left = ["hospital-7", "hospital-8", "hospital-9"]
    first = Federation({}, hospitals, state=tmp_path).enroll()
    assert "evaluation/test/confusion" in run(first, mute=left)
    for name in left:
        entries = read_journal(first.sessions[name].context.ledger_paths, check=None)
        kinds = [type(entry) for entry in entries]
        assert StaticMasked in kinds and StaticOpened not in kinds
    another_cohort_is_refused({name: hospitals[name] for name in left}, tmp_path, "job-b")


@pytest.mark.whole
def test_nor_does_one_whose_sum_a_drop_out_kept_shut(hospitals: dict[str, Records], tmp_path: Path) -> None:
    """The conservative side: nobody can say what the others have opened. Its own cohort opens later."""
    four = {name: hospitals[name] for name in sorted(hospitals)[:4]}
    first = Federation({"rounds": 2}, four, state=tmp_path).enroll()
    gone = sorted(four)[-1]
    assert "evaluation/test/confusion" not in run(first, dead=[gone])
    another_cohort_is_refused({name: four[name] for name in sorted(four)[:3]}, tmp_path, "job-b")
    opened = first.sum("train", 2)
    assert opened["evaluation/test/confusion"].sum() == sum(
        len(item.labels("test")) for item in four.values()
    )
    again = Federation({}, four, state=tmp_path, job_id="job-c").enroll()
    assert "evaluation/test/confusion" in run(again)
