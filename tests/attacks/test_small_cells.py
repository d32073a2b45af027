"""Statistics of a table leave out small cells; other sums of the same records' columns have them in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.attacks.test_products import totals
from tests.attacks.test_release_profile import enrolment_refused
from tests.support.attacks.kits import accept_release
from tests.support.attacks.malicious_server import Federation, identity
from tests.support.tables import contract, statistics_job, write

from tightframe.config.policy import PolicyBlock
from tightframe.data.table import TableOptions, TableSite
from tightframe.data.table.silo import TableData, open_site
from tightframe_app.site.checks.job import records_option

NAMES = ["hospital-1", "hospital-2", "hospital-4", "hospital-5"]
COLUMN = {"column": "smoker", "kind": "boolean"}
OPTIONS = {"contract": contract(columns=[COLUMN], record=None, fold={"column": "fold"})}
POLICY = PolicyBlock(profile="standard", min_row_bits=0)
JOB: dict[str, Any] = {"dataset": "table", "dataset_options": OPTIONS, "sites": NAMES}
SUMS = {**JOB, "method": "fedavg", "model": "identity", "model_options": {"standardise": True}}


def table(path: Path, few: int, others: int) -> TableData:
    """A hospital's 80 records: of the ill so few smoke; of either class so many are in each other fold."""
    folds = ["train"] * (40 - 2 * others) + ["validation"] * others + ["test"] * others
    rows = [
        ["yes" if row < smokers else "no", outcome, fold]
        for outcome, smokers in (("0", 20), ("1", few))
        for row, fold in enumerate(folds)
    ]
    write(path, rows, ("smoker", "outcome", "fold"))
    return open_site(TableSite(file=path), TableOptions.model_validate(OPTIONS))


def hospitals(folder: Path, others: int) -> dict[str, TableData]:
    return {name: table(folder / f"{name}.csv", 1 if name == NAMES[0] else 20, others) for name in NAMES}


def statistics(folder: Path, data: Any) -> dict[str, Any]:
    run = Federation({**statistics_job(), **JOB}, data, state=folder, policy=POLICY).enroll()
    return run.statistics()


@pytest.mark.whole
def test_a_cell_of_one_patient_is_not_the_difference_of_two_totals(tmp_path: Path) -> None:
    """Unless a person at that hospital says so; without the refusal nobody was asked."""
    data: Any = hospitals(tmp_path, 1)
    cells = statistics(tmp_path, data)["statistics/table/cells"]
    assert cells.tolist() == [[80, 80, 0], [60, 60, 0]], "one hospital withholds its one and its 39"
    second = Federation(SUMS, data, state=tmp_path, job_id="job-b", policy=POLICY)
    said = enrolment_refused(second, NAMES[0])
    assert "sums of columns" in said and " --columns" in records_option(said)
    for name in NAMES:
        done = accept_release(second, name, tmp_path, identity, "--columns")
        assert done.exit_code == 0 and "down to one patient's" in done.output, done.output
    smokers = totals(second.enroll(), "statistics/sums")["statistics/sums"][0]
    assert smokers - cells[:, 1].sum() == 1


def test_records_of_other_folds_hide_it(tmp_path: Path) -> None:
    data: Any = hospitals(tmp_path, 3)
    statistics(tmp_path, data)
    Federation(SUMS, data, state=tmp_path, job_id="job-b", policy=POLICY).enroll()
