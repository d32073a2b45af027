"""A site loses what it remembers, by a restored disk or by a person: nothing is forgotten silently.

The ledger holds for which silos counts were opened and in which way sums were formed, beside what privacy
budget was spent. Every loss that leaves a trace stops the site until a person has decided.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import Encoding
from tests.support.attacks.kits import configuration
from tests.support.attacks.malicious_server import (
    ROOT,
    Federation,
    Records,
    identity,
)
from tests.support.ledgers import CAP, charge, charges_in
from typer.testing import CliRunner

from tightframe.data.base import FOLDS
from tightframe.data.heart import HeartOptions
from tightframe.data.heart.twin import open_twin
from tightframe.errors import TightframeError
from tightframe.privacy.ledger.entries import DatasetError, LostError
from tightframe.privacy.ledger.ledger import Ledger
from tightframe.rounds.site_ledger import LedgerPaths
from tightframe.rounds.site_ledger.keys import signature_check
from tightframe_app.cli import app

SITE = "hospital-1"


class Known(Records):
    """Records that say what they are, all but the first ones."""

    def __init__(self, data: Any, without: int = 0) -> None:
        super().__init__(data)
        self._without = without

    def contents(self) -> list[bytes]:
        rows = [row.tobytes() for fold in FOLDS for row in self.raw(fold)]
        return rows[self._without :]


def opened(data: dict[str, Records], state: Path, job_id: str = "job-a") -> Federation:
    """A job in which counts are opened."""
    federation = federated(data, state, job_id).enroll()
    federation.sum("train", 1)
    return federation


def federated(data: dict[str, Records], state: Path, job_id: str) -> Federation:
    """As the executor gives it: each hospital's kit is a folder of its own."""
    kits = state.parent / "kits"
    for name in data:
        (kits / name).mkdir(parents=True, exist_ok=True)
    return Federation({}, data, state=state, job_id=job_id, kits=kits)


def places(state: Path) -> LedgerPaths:
    return LedgerPaths.of_site(state / SITE, SITE, state.parent / "kits" / SITE)


def another_cohort(data: dict[str, Records], state: Path) -> str:
    """The code with which a job over three of the four is refused."""
    three = {name: data[name] for name in sorted(data)[:3]}
    federation = federated(three, state, "job-b")
    with pytest.raises(TightframeError) as caught:
        federation.ask_to_enroll(SITE, federation.params())
    return str(caught.value.code)


def no_ledger(kept: LedgerPaths) -> None:
    shutil.rmtree(kept.ledger.parent)


def only_the_head(kept: LedgerPaths) -> None:
    kept.ledger.unlink()


def no_state(kept: LedgerPaths) -> None:
    assert kept.jobs is not None
    shutil.rmtree(kept.jobs)


def no_state_but_transcripts(kept: LedgerPaths) -> None:
    assert kept.witness is not None
    kept.witness.unlink()
    shutil.rmtree(kept.ledger.parent)
    shutil.rmtree(kept.journal)


def no_head(kept: LedgerPaths) -> None:
    kept.ledger.with_name("ledger.sqlite.head").unlink()


def last_entry_cut(kept: LedgerPaths) -> None:
    with sqlite3.connect(kept.ledger) as database:
        database.execute("DELETE FROM entries WHERE sequence = (SELECT max(sequence) FROM entries)")
    database.close()


def altered(kept: LedgerPaths) -> None:
    with sqlite3.connect(kept.ledger) as database:
        database.execute("UPDATE entries SET content = replace(content, 'hospital-4', 'hospital-5')")
    database.close()


@pytest.mark.whole
@pytest.mark.parametrize(
    ("lose", "code"),
    [
        (no_ledger, "TF-620"),
        (only_the_head, "TF-620"),
        (no_state, "TF-620"),
        (no_state_but_transcripts, "TF-620"),
        (no_head, "TF-702"),
        (last_entry_cut, "TF-702"),
        (altered, "TF-702"),
    ],
)
def test_what_is_lost_is_told_at_the_next_use_and_by_both_checks(
    hospitals: dict[str, Records], tmp_path: Path, lose: Callable[[LedgerPaths], None], code: str
) -> None:
    state = tmp_path / "state"
    opened(hospitals, state)
    assert another_cohort(hospitals, state) == "TF-612"
    lose(places(state))
    assert another_cohort(hospitals, state) == code
    assert another_cohort(hospitals, state) == code, "asking twice makes nothing anew"
    checked, verified = commands(tmp_path, state)
    assert checked.exit_code == 1 and code in checked.output
    if lose is not no_state:  # which leaves nothing to verify
        assert verified.exit_code == 1 or code in str(verified.exception)


def commands(folder: Path, state: Path) -> tuple[Any, Any]:
    """``site check`` and ``ledger verify`` at the hospital."""
    (state / SITE).mkdir(parents=True, exist_ok=True)
    config = configuration(folder / "kits", SITE, state / SITE, identity)
    root = folder / "root.pem"
    root.write_bytes(ROOT.x509.public_bytes(Encoding.PEM))
    check = ["site", "check", "-c", str(config), "--site", SITE]
    verify = ["ledger", "verify", "--state-dir", str(state / SITE), "--root", str(root)]
    verify += ["--kit", str(config.parent.parent / "startup")]
    wide = {"COLUMNS": "400"}
    return CliRunner().invoke(app, check, env=wide), CliRunner().invoke(app, verify, env=wide)


def test_an_older_copy_of_everything_is_told_by_the_kits_head(
    hospitals: dict[str, Records], tmp_path: Path
) -> None:
    """Ledger and head file set back together, as a restored backup does; the whole state folder."""
    state = tmp_path / "state"
    opened(hospitals, state)
    shutil.copytree(state, tmp_path / "backup")
    opened(hospitals, state, "job-b")
    shutil.rmtree(state)
    shutil.copytree(tmp_path / "backup", state)
    assert another_cohort(hospitals, state) == "TF-702"
    checked, verified = commands(tmp_path, state)
    assert checked.exit_code == verified.exit_code == 1 and "TF-702" in checked.output


def test_the_ledger_of_another_site_is_not_this_ones(hospitals: dict[str, Records], tmp_path: Path) -> None:
    state = tmp_path / "state"
    opened(hospitals, state)
    mine, others = (
        places(state).ledger.parent,
        LedgerPaths.of_site(state / "hospital-2", "hospital-2", None).ledger,
    )
    shutil.rmtree(mine)
    shutil.copytree(others.parent, mine)
    assert another_cohort(hospitals, state) == "TF-702"


def test_a_fresh_site_begins_without_ceremony(hospitals: dict[str, Records], tmp_path: Path) -> None:
    """Nothing tells of an earlier run: no kit's head, no lock, no transcript."""
    opened(hospitals, tmp_path / "state")
    checked, verified = commands(tmp_path, tmp_path / "state")
    assert "TF-6" not in checked.output and verified.exit_code == 0


def test_only_a_person_begins_a_lost_ledger_anew(hospitals: dict[str, Records], tmp_path: Path) -> None:
    state = tmp_path / "state"
    opened(hospitals, state)
    no_ledger(places(state))
    config = configuration(tmp_path / "kits", SITE, state / SITE, identity)
    begin = ["ledger", "begin", "-c", str(config), "-s", SITE]
    done = CliRunner().invoke(app, begin, input="n\n")
    assert done.exit_code == 1 and "this site forgets" in done.output and "TF-620" in done.output
    assert another_cohort(hospitals, state) == "TF-620"
    assert CliRunner().invoke(app, [*begin, "--yes"]).exit_code == 0
    three = {name: hospitals[name] for name in sorted(hospitals)[:3]}
    federation = federated(three, state, "job-c")
    federation.ask_to_enroll(SITE, federation.params())
    output = " ".join(CliRunner().invoke(app, [*begin, "--yes"]).output.split())  # lines break anywhere
    assert "no new ledger was begun" in output


@pytest.mark.parametrize("without", [0, 60])
def test_the_same_records_under_another_name_are_not_without_a_past(tmp_path: Path, without: int) -> None:
    """Of exact sums as of budgets, whether all are registered anew or most; other records are."""
    first, other = (
        {f"hospital-{i + 1}": open_twin((i + turn) % 4, HeartOptions()) for i in range(4)} for turn in (0, 1)
    )
    state = tmp_path / "state"
    opened({name: Known(data) for name, data in first.items()}, state)

    def renamed(data: dict[str, Any], job_id: str) -> Federation:
        three = {name: Known(data[name], without) for name in sorted(data)[:3]}
        return Federation({}, three, state=state, job_id=job_id, dataset_id="ward-9")

    again = renamed(first, "job-b")
    with pytest.raises(DatasetError, match=r"TF-703: .*'hearts'"):
        again.ask_to_enroll(SITE, again.params())
    new = renamed(other, "job-c")
    new.ask_to_enroll(SITE, new.params())


def test_a_site_of_a_build_before_ledgers_is_not_taken_for_a_fresh_one(
    hospitals: dict[str, Records], tmp_path: Path
) -> None:
    path = places(tmp_path / "state").journal / "journal.jsonl"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"")
    assert another_cohort(hospitals, tmp_path / "state") == "TF-620"


def test_what_a_build_that_kept_sums_elsewhere_has_spent_stays_as_a_person_begins_again(
    hospitals: dict[str, Records], tmp_path: Path
) -> None:
    """Its ledger has charges alone, its journal is a file of its own."""
    state = tmp_path / "state"
    kept = places(state)
    signer, anchor = identity(SITE)
    with Ledger(kept.ledger, signer, check=signature_check([anchor]), create=True) as ledger:
        ledger.charge(charge(dataset_id="hearts"), cap=CAP)
    kept.journal.mkdir(parents=True, exist_ok=True)
    (kept.journal / "journal.jsonl").write_bytes(b"")
    federation = federated(hospitals, state, "job-b")
    with pytest.raises(LostError, match="an earlier build's, which this one does not read"):
        federation.ask_to_enroll(SITE, federation.params())
    config = configuration(tmp_path / "kits", SITE, state / SITE, identity)
    done = CliRunner().invoke(app, ["ledger", "begin", "-c", str(config), "-s", SITE, "--yes"])
    said = " ".join(done.output.split())
    assert done.exit_code == 0 and "stays, charges too" in said and "goes on; it records" in said
    assert "forgets\n- how much" in done.output
    assert [item.dataset_id for item in charges_in(kept.ledger)] == ["hearts"]
    federation.ask_to_enroll(SITE, federation.params())
