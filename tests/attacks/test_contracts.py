"""An author asks one hospital about its records by contracts, with jobs that never sum anything.

A contract says which rows count: by limits, codes and folds. Whether all rows keep it shows in the code with
which a site refuses the job, and how many are in its training fold in the weight that it declares. Within one
contract a job's units set the border at which it is refused.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from tests.support.attacks.malicious_server import HEART, identity
from tests.support.tables import FOUR, WARD, contract, options, site, ward_rows, write

from tightframe import __version__
from tightframe.config.job import parse_job
from tightframe.config.policy import PolicyBlock
from tightframe.config.site import SiteEntry
from tightframe.data.contract import Contract
from tightframe.data.table.silo import open_site as open_table
from tightframe.errors import TightframeError
from tightframe.rounds.context import SiloContext
from tightframe.rounds.declaration import Declaration
from tightframe.rounds.setup import prepare
from tightframe.rounds.silo.checks import evaluations
from tightframe.rounds.silo.session import SiloSession
from tightframe.rounds.site_ledger import journal_folder
from tightframe.rounds.sums.parameters import epoch_params
from tightframe.securesum.messages import Advertisement

SITE = FOUR[0]
PLAIN = contract()
ANY = PolicyBlock(
    profile="standard", class_rules_off=True, min_row_bits=0, evaluated_share=None, min_class_count=1
)
ONE = PolicyBlock(profile="standard", min_row_bits=0, evaluated_share=None)


class Hospital:
    """A hospital with a table, which each job asks to enrol, and never for a term."""

    def __init__(self, folder: Path, policy: PolicyBlock, file: Path) -> None:
        self._folder, self._policy, self.asked = folder, policy, 0
        self._table = {"file": str(file), "contract": Contract.model_validate(PLAIN).sha256()}
        if policy.class_rules_off:
            del self._table["contract"]

    def enrol(self, given: dict[str, Any], units: int = 2) -> float | str:
        """Return the declared weight, or the code, which a server sees.

        Args:
            units: of the job's only layer.
        """
        self.asked += 1
        values = {"dataset": "table", "dataset_options": {"contract": given}, "sites": FOUR, "min_sites": 3}
        values["model_options"] = {"widths": [units], "standardise": True}
        job = parse_job({**HEART, **values})
        setup, name, own = prepare(job), f"job-{self.asked}", self._folder
        entry = SiteEntry(state_dir=str(own), data={"table": self._table}, policy=self._policy)
        session = SiloSession(
            SiloContext(
                SITE,
                job,
                entry,
                run_dir=own / "run" / name,
                state_dir=own / name,
                job_id=name,
                production=True,
                journal_dir=journal_folder(own, SITE),
                ledger_dir=own,
                identity=lambda: identity(SITE),
            )
        )
        params = epoch_params(setup, name, FOUR, epoch=0, static_open=True)
        message = {"job_sha256": job.sha256(), "version": __version__, "roster": FOUR}
        try:
            answer = session.handle("enroll", {**message, "secure": params.to_bytes()})["secure"]
        except TightframeError as error:
            return error.code
        told = Advertisement.from_bytes(answer, slots=params.slots).application
        return Declaration.from_bytes(told, SITE).weight


def up_to(age: float) -> dict[str, Any]:
    columns = [{**item, "high": age} if item["column"] == "age" else item for item in WARD["columns"]]
    return contract(columns=columns)


def split_at(name: str) -> list[dict[str, Any]]:
    """Two contracts, by which a record of this name is in the test fold, or trained on."""
    digest = hashlib.sha256(f"tightframe-fold-v1/{name}".encode()).digest()
    place = int.from_bytes(digest[:8], "big") / 2**64
    return [contract(shares=[at, 1e-6, 1 - 1e-6 - at]) for at in (place - 1e-9, place + 1e-9)]


def test_contracts_of_an_authors_choice_tell_single_records(tmp_path: Path) -> None:
    rows = ward_rows()
    hospital = Hospital(tmp_path, ANY, write(tmp_path / "ward.csv", rows))
    least, most = 20, 100
    while most - least > 1:
        middle = (least + most) // 2
        told = hospital.enrol(up_to(middle))
        least, most = (middle, most) if told == "TF-215" else (least, middle)
    assert (most, hospital.asked) == (max(int(row[1]) for row in rows), 7)
    for name, there in [("r3", 1), ("r7", 1), ("nobody", 0), ("r60", 0)]:
        before, after = (hospital.enrol(given) for given in split_at(name))
        assert isinstance(before, float) and isinstance(after, float) and after - before == there


@pytest.mark.parametrize("other", [up_to(60), *split_at("r3")], ids=["limits", "without", "with"])
def test_a_site_takes_the_contract_alone_that_its_entry_names(tmp_path: Path, other: dict[str, Any]) -> None:
    assert Hospital(tmp_path / "unread", ONE, tmp_path / "no.csv").enrol(other) == "TF-614"
    hospital = Hospital(tmp_path, ONE, write(tmp_path / "ward.csv", ward_rows()))
    assert [hospital.enrol(given) for given in (other, PLAIN)] == ["TF-614", 40.0]


def test_units_at_which_a_job_is_refused_do_not_tell_how_many_patients_stand_out(tmp_path: Path) -> None:
    """17 of the patients trained on are of the rarer sex: columns that fewer have than units hide no rows."""
    hospital = Hospital(
        tmp_path,
        ONE.model_copy(update={"min_row_bits": 10}),
        write(tmp_path / "ward.csv", ward_rows()),
    )
    assert [hospital.enrol(PLAIN, units) for units in (16, 17, 18, 32)] == [40.0, *["TF-628"] * 3]


@pytest.mark.parametrize("given", [PLAIN, contract(columns=WARD["columns"][1:4])], ids=["all", "short"])
def test_models_and_bins_at_which_a_job_is_refused_do_not_tell_of_one_record(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    """An author has hundreds of evaluations to ask for, of which some take just half of what folds hold."""
    values = {"dataset": "table", "dataset_options": {"contract": given}, "sites": FOUR, "min_sites": 3}
    job, rows = parse_job({**HEART, **values}), ward_rows(500)
    setup = prepare(job)
    entry = SiteEntry(policy=ONE.model_copy(update={"evaluated_share": 0.5}))

    def asked(kept: list[list[str]]) -> tuple[int, int, int]:
        data = open_table(site(write(tmp_path / "ward.csv", kept)), options(given))
        context = SiloContext(SITE, job, entry, run_dir=tmp_path / "run", records=data, production=True)
        return evaluations.of_silo(context, setup, entries=()).wanted

    told = {asked([*rows[:place], *rows[place + 1 :]]) for place in range(0, 40, 4)}
    assert told == {asked(rows)} and told != {asked(rows[:300])}
