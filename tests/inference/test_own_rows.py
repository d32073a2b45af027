"""A site's table with its own names, codes and units, as a trained model is given it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.tables import HEADER, contract, options, ward_rows, write

from tightframe.data.base import FOLDS
from tightframe.data.table import TableSite
from tightframe.data.table.silo import open_site
from tightframe.errors import DataError, ModelError
from tightframe.inference.inputs import OwnRows

ENTRY = {
    "columns": {"Alter": "age", "Geschlecht": "sex", "Gewicht": "weight"},
    "codes": {"sex": {"w": "female", "m": "male"}},
    "units": {"age": {"unit": "months", "factor": 1 / 12}},
    "delimiter": ";",
    "decimal": ",",
    "missing": ["", "k.A."],
}
OWN = ["id", "Alter", "Geschlecht", "smoker", "pain", "Gewicht"]


def own_rows() -> list[list[str]]:
    """The ward in another site's words, without the outcome."""
    rows = [row[:-1] for row in ward_rows()]
    for row in rows:
        row[1] = str(12 * int(row[1]))
        row[2] = {"female": "w", "male": "m"}[row[2]]
        row[5] = row[5].replace(".", ",")
    return rows


def test_records_are_those_of_training_without_a_label(tmp_path: Path) -> None:
    trained = open_site(TableSite(file=write(tmp_path / "ward.csv", ward_rows(), HEADER)), options())
    wanted = {
        name: values
        for fold in FOLDS
        for name, values in zip(trained.record_ids(fold), trained.features(fold), strict=True)
    }
    site = TableSite.model_validate({"file": "/elsewhere/table.parquet", "columns": ENTRY["columns"]})
    entry = TableSite.model_validate({**ENTRY, "file": str(tmp_path / "site.csv")})
    path = write(tmp_path / "new.csv", own_rows(), OWN, delimiter=";")
    made = OwnRows(path, options().contract, entry, "id")
    found = dict(made.records())
    assert len(made) == 60 and not made.problems and found.keys() == wanted.keys()
    for name, record in found.items():
        np.testing.assert_allclose(record, wanted[name], atol=1e-6)
    with pytest.raises(DataError, match="TF-204"):
        OwnRows(path, options().contract, site)
    with pytest.raises(ModelError, match="TF-823"):
        OwnRows(tmp_path, options().contract, entry)


def test_a_row_that_breaks_the_contract_is_a_problem_and_takes_no_other_with_it(tmp_path: Path) -> None:
    rows = own_rows()
    rows[3][1], rows[4][2], rows[5] = "-12", "x", rows[5][:-1]
    path = write(tmp_path / "new.csv", rows, OWN, delimiter=";")
    entry = TableSite.model_validate({**ENTRY, "file": str(path)})
    made = OwnRows(path, options(contract()).contract, entry)
    found = dict(made.records())
    assert len(found) == 57 and all(isinstance(record, torch.Tensor) for record in found.values())
    told = {problem.name: problem.reason for problem in made.problems}
    assert told == {
        "line 7": "another number of values than the header",
        "line 5": "age: outside 0 to 100 years",
        "line 6": "sex: a code that is no level of the contract",
    }
