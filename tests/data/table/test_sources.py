"""Parquet, SQLite and a real PostgreSQL: the same records as from a text file, read and never written."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import sqlalchemy
from tests.data.heart.test_heart_disease import real
from tests.support import postgres
from tests.support.tables import contract, options, ward_rows, write

from tightframe.data.base import FOLDS
from tightframe.data.contract import Contract
from tightframe.data.heart import CENTER_NAMES
from tightframe.data.table import TableSite
from tightframe.data.table.silo import TableData, open_site
from tightframe.errors import DataError

PLACE = "TIGHTFRAME_TEST_ADDRESS"


def asked(query: str, values: dict[str, Any] | None = None, **entry: Any) -> TableData:
    site = {"database": {"url_env": PLACE, "query": query}, **entry}
    return open_site(TableSite.model_validate(site), options(values or contract()))


def same(first: TableData, second: TableData) -> None:
    """Check that two sources give the same records in the same folds, in whichever order."""
    for fold in FOLDS:
        orders = [np.argsort(data.record_ids(fold)) for data in (first, second)]
        assert sorted(first.record_ids(fold)) == sorted(second.record_ids(fold))
        for part in ("features", "labels"):
            values = [
                getattr(data, part)(fold)[order] for data, order in zip((first, second), orders, strict=True)
            ]
            np.testing.assert_array_equal(*values)


@pytest.fixture
def text(tmp_path: Path) -> TableData:
    """The ward as a text file, with holes."""
    rows = ward_rows()
    rows[5][3], rows[6][5] = "", ""
    site = TableSite.model_validate({"file": str(write(tmp_path / "ward.csv", rows))})
    return open_site(site, options())


@pytest.fixture
def frame(text: TableData, tmp_path: Path) -> pd.DataFrame:
    """The same as pandas reads it, with types of its own."""
    made = pd.read_csv(tmp_path / "ward.csv")
    made["smoker"] = made["smoker"].map({"yes": True, "no": False}).astype("boolean")
    made["pain"] = pd.read_csv(tmp_path / "ward.csv", keep_default_na=False)["pain"].astype("category")
    return made


def test_parquet_of_pandas_gives_the_same_records(
    text: TableData, frame: pd.DataFrame, tmp_path: Path
) -> None:
    frame["unused"] = [{"nested": 1}] * len(frame)
    frame["outcome"] = frame["outcome"].astype(float)
    frame.to_parquet(tmp_path / "ward.parquet")
    site = TableSite.model_validate({"file": str(tmp_path / "ward.parquet")})
    same(text, open_site(site, options()))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"age": pd.Timestamp("1954-03-02")}, "age: no number"),
        ({"age": float("nan")}, "age: no value"),
        ({"age": float("inf")}, "age: no number"),
        ({"sex": b"female"}, "sex: a code that is no level"),
    ],
)
def test_what_breaks_the_contract_in_parquet_is_found(
    values: Any, said: str, frame: pd.DataFrame, tmp_path: Path
) -> None:
    for name, value in values.items():
        column = frame[name].astype(type(value) if isinstance(value, float) else object)
        frame[name] = pd.Series([value] * len(frame)) if isinstance(value, pd.Timestamp | bytes) else column
        frame.loc[3, name] = value
    frame.to_parquet(tmp_path / "ward.parquet")
    site = TableSite.model_validate({"file": str(tmp_path / "ward.parquet")})
    with pytest.raises(DataError, match="TF-215") as caught:
        open_site(site, options())
    assert said in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"PAR1", b"id,age\n1,2\n", b"PAR1" + bytes(200) + b"PAR1"])
def test_broken_parquet_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "ward.parquet"
    site = TableSite.model_validate({"file": str(path)})
    with pytest.raises(DataError, match="TF-205"):
        open_site(site, options())
    path.write_bytes(content)
    with pytest.raises(DataError, match="TF-206"):
        open_site(site, options())


def test_core_needs_none_of_these_packages(tmp_path: Path) -> None:
    """A site without the extras reads its text file, and of the others learns what to install."""
    write(tmp_path / "ward.csv", ward_rows())
    code = f"""
import sys
for name in ("pandas", "pyarrow", "sqlalchemy", "psycopg", "torch"):
    sys.modules[name] = None
sys.path.insert(0, {str(Path(__file__).resolve().parents[3])!r})
from tests.support.tables import options
from tightframe.data.table import TableSite
from tightframe.data.table.silo import open_site
data = open_site(TableSite.model_validate({{"file": {str(tmp_path / "ward.csv")!r}}}), options())
data.check(print)
print(len(data.labels("train")))
for site in ({{"file": "/x/a.parquet"}}, {{"database": {{"url_env": "A", "query": "SELECT 1"}}}}):
    try:
        open_site(TableSite.model_validate(site), options())
    except Exception as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "tightframe[parquet]" in done.stdout and "tightframe[sql]" in done.stdout
    assert done.stdout.count("TF-219") == 2


@pytest.fixture(scope="module")
def running() -> Iterator[str]:
    """A PostgreSQL at work."""
    if reason := postgres.missing():
        pytest.skip(reason)
    with postgres.cluster() as address:
        yield address


@pytest.fixture(params=["sqlite", "postgresql"])
def address(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of a database, which the site's environment has."""
    where = (
        f"sqlite:///{tmp_path / 'ward.db'}"
        if request.param == "sqlite"
        else request.getfixturevalue("running")
    )
    monkeypatch.setenv(PLACE, where)
    return where


def store(frame: pd.DataFrame, table: str, address: str) -> None:
    engine = sqlalchemy.create_engine(address.replace("postgresql://", "postgresql+psycopg://"))
    frame.to_sql(table, engine, index=False, if_exists="replace")
    engine.dispose()


def count(table: str, address: str) -> int:
    engine = sqlalchemy.create_engine(address.replace("postgresql://", "postgresql+psycopg://"))
    with engine.connect() as connection:
        found = connection.exec_driver_sql(f"SELECT count(*) FROM {table}").scalar()  # noqa: S608
    engine.dispose()
    return int(found or 0)


@pytest.mark.whole
def test_a_query_gives_the_same_records_in_any_order(
    address: str, text: TableData, frame: pd.DataFrame
) -> None:
    store(frame, "ward", address)
    first = asked("SELECT * FROM ward ORDER BY id")
    second = asked("SELECT *, 'x' AS more FROM ward WHERE sex LIKE '%ale' ORDER BY weight DESC;")
    same(text, first)
    for fold in FOLDS:
        assert first.record_ids(fold) == second.record_ids(fold), "to the bit, also their order"
        np.testing.assert_array_equal(first.features(fold), second.features(fold))
    queries = ("SELECT * FROM ward ORDER BY id ASC", "SELECT * FROM ward ORDER BY id DESC")
    nameless = [asked(query, contract(record=None)) for query in queries]
    np.testing.assert_array_equal(*(data.features("train") for data in nameless))


@pytest.mark.parametrize(
    "query",
    [
        "DELETE FROM ward",
        "DELETE FROM ward RETURNING *",
        "INSERT INTO ward SELECT * FROM ward",
        "DROP TABLE ward",
        "CREATE TABLE other AS SELECT * FROM ward",
        "SELECT * FROM ward; DELETE FROM ward",
        "COMMIT; DELETE FROM ward",
        "SET default_transaction_read_only = off; DELETE FROM ward",
        "WITH gone AS (DELETE FROM ward RETURNING *) SELECT * FROM gone",
    ],
)
def test_nothing_is_ever_written(query: str, address: str, frame: pd.DataFrame) -> None:
    store(frame, "ward", address)
    with pytest.raises(DataError, match="TF-217"):
        asked(query)
    assert count("ward", address) == len(frame)


@pytest.mark.parametrize(
    "query",
    [
        "SELECT * FROM elsewhere",
        "SELEC * FROM ward",
        "SELECT CAST(id AS integer) / 0 AS id FROM ward ORDER BY no_such_column",
    ],
)
def test_a_query_that_fails_tells_neither_address_nor_value(
    query: str, address: str, frame: pd.DataFrame, caplog: pytest.LogCaptureFixture
) -> None:
    store(frame, "ward", address)
    caplog.set_level(logging.DEBUG)
    with pytest.raises(DataError, match="TF-217") as caught:
        asked(query)
    told = "".join(traceback.format_exception(caught.value)) + caplog.text
    assert address not in told and postgres.PASSWORD not in told and "r17" not in told
    assert "elsewhere" not in str(caught.value)


def test_a_value_that_the_database_cannot_convert_is_in_no_message(
    running: str, frame: pd.DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL's own message has the value: `invalid input syntax for type integer: "r0"`."""
    monkeypatch.setenv(PLACE, running)
    store(frame, "ward", running)
    with pytest.raises(DataError, match=r"TF-217.*22P02") as caught:
        asked("SELECT CAST(id AS integer) AS id, * FROM ward")
    told = "".join(traceback.format_exception(caught.value))
    assert '"r0"' not in told and "invalid input" not in told


@pytest.mark.parametrize(
    "given", ["", "  ", "no address", "mysql://u:Pq7@h/d", "postgresql://u:Pq7-secret@/d?host=/nowhere"]
)
def test_an_address_that_cannot_be_used_is_named_and_not_shown(
    given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PLACE, given)
    with pytest.raises(DataError, match="TF-217") as caught:
        asked("SELECT 1")
    told = "".join(traceback.format_exception(caught.value))
    assert "Pq7" not in told and "nowhere" not in told


def test_the_address_may_be_in_a_file_that_is_closed_to_others(
    text: TableData, frame: pd.DataFrame, tmp_path: Path
) -> None:
    store(frame, "ward", f"sqlite:///{tmp_path / 'ward.db'}")
    secret = tmp_path / "address"
    secret.write_text(f"sqlite:///{tmp_path / 'ward.db'}\n")
    entry = {"database": {"url_file": str(secret), "query": "SELECT * FROM ward"}}
    secret.chmod(0o644)
    with pytest.raises(DataError, match=r"TF-217.*chmod 600"):
        open_site(TableSite.model_validate(entry), options())
    secret.chmod(0o600)
    same(text, open_site(TableSite.model_validate(entry), options()))
    os.remove(tmp_path / "ward.db")
    with pytest.raises(DataError, match="TF-217"):
        open_site(TableSite.model_validate(entry), options())
    assert not (tmp_path / "ward.db").exists(), "none is made"


HEART: dict[str, Any] = {
    "title": "Heart disease",
    "columns": [
        {"column": "age", "kind": "number", "unit": "years", "low": 0, "high": 120},
        {"column": "sex", "kind": "boolean"},
        *(
            {"column": column, "kind": "number", "low": low, "high": high}
            for column, low, high in (("trestbps", 0, 300), ("chol", 0, 800))
        ),
        {"column": "fbs", "kind": "boolean"},
        {"column": "thalach", "kind": "number", "low": 0, "high": 300},
        {"column": "exang", "kind": "boolean"},
        {"column": "oldpeak", "kind": "number", "low": -10, "high": 10},
        {"column": "cp", "kind": "category", "vocabulary": ["1", "2", "3", "4"]},
        {"column": "restecg", "kind": "category", "vocabulary": ["0", "1", "2"]},
    ],
    "label": {"column": "num", "classes": [{"code": "0"}, {"code": "1"}]},
    "record": "id",
    "fold": {"column": "split"},
}
COLUMNS = [
    "age",
    "sex",
    "cp",
    "trestbps",
    "chol",
    "fbs",
    "restecg",
    "thalach",
    "exang",
    "oldpeak",
    "slope",
    "ca",
    "thal",
    "num",
]


@pytest.mark.parametrize("center", range(4))
def test_heart_disease_in_postgresql_is_that_of_its_own_reader(
    center: int, running: str, real_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """UCI's table as it is, in a database: what is missing set aside, FLamby's folds in a column."""
    expected = real(real_data, center)
    path = real_data / "fed_heart_disease" / f"processed.{CENTER_NAMES[center]}.data"
    frame = pd.read_csv(path, names=COLUMNS, na_values="?")
    complete = frame[COLUMNS[:10]].notna().all(axis=1)
    names = [f"{CENTER_NAMES[center]}-{row}" for row in range(int(complete.sum()))]
    folds = {name: fold for fold in FOLDS for name in expected.record_ids(fold)}
    frame["id"] = [f"incomplete-{row}" for row in range(len(frame))]
    frame.loc[complete, "id"] = names
    frame["split"] = [folds.get(name, "train") for name in frame["id"]]
    monkeypatch.setenv(PLACE, running)
    store(frame, "heart", running)
    data = asked(
        "SELECT * FROM heart", HEART, codes={"num": {"2": "1", "3": "1", "4": "1"}}, invalid="set_aside"
    )
    low = np.array(
        [item.low if item.kind == "number" else 0 for item in Contract.model_validate(HEART).columns[:8]]
    )
    high = np.array(
        [item.high if item.kind == "number" else 1 for item in Contract.model_validate(HEART).columns[:8]]
    )
    for fold in FOLDS:
        assert sorted(data.record_ids(fold)) == sorted(expected.record_ids(fold))
        ours, theirs = np.argsort(data.record_ids(fold)), np.argsort(expected.record_ids(fold))
        np.testing.assert_array_equal(data.labels(fold)[ours], expected.labels(fold)[theirs])
        found = data.features(fold)[ours]
        number = [item.kind == "number" for item in Contract.model_validate(HEART).columns[:8]]
        values = np.where(number, (found[:, :8] + 1) / 2 * (high - low) + low, found[:, :8])
        raw = np.stack([expected.records(fold)[int(row)][0].numpy() for row in theirs])
        np.testing.assert_allclose(values, raw[:, :8], atol=1e-3)
        np.testing.assert_array_equal(found[:, 8:], raw[:, 8:])
    aside = {row for finding in data.aside for row in finding.rows}
    assert len(aside) == int((~complete).sum())


@pytest.mark.whole
def test_eicu_in_postgresql_is_joined_by_the_sites_own_query(
    running: str, real_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stays of the demo with the hospital's region from another table; counted again by pandas."""
    folder = real_data / "eicu_demo"
    patients = pd.read_csv(folder / "patient.csv.gz", dtype=str)
    hospitals = pd.read_csv(folder / "hospital.csv.gz", dtype=str)
    store(patients, "patient", running)
    store(hospitals, "hospital", running)
    monkeypatch.setenv(PLACE, running)
    values = {
        "title": "eICU stays",
        "columns": [
            {"column": "age", "kind": "number", "unit": "years", "low": 0, "high": 90},
            {"column": "gender", "kind": "category", "vocabulary": ["Female", "Male"]},
            {
                "column": "weight",
                "kind": "number",
                "unit": "kg",
                "low": 20,
                "high": 300,
                "missing": "indicator",
            },
        ],
        "label": {"column": "outcome", "classes": [{"code": "Alive"}, {"code": "Expired"}]},
        "record": "stay",
        "patient": "uniquepid",
    }
    query = (
        "SELECT p.patientunitstayid AS stay, uniquepid, replace(age, '> 89', '90') AS age, gender, "
        "admissionweight AS weight, unitdischargestatus AS outcome FROM patient p JOIN hospital h "
        "ON p.hospitalid = h.hospitalid WHERE h.region LIKE 'S%'"
    )
    data = asked(query, values, invalid="set_aside")
    south = patients.merge(hospitals, on="hospitalid").query("region == 'South'")
    age = pd.to_numeric(south["age"].replace("> 89", "90"))
    weight = pd.to_numeric(south["admissionweight"])
    kept = south[
        age.between(0, 90)
        & south["gender"].isin(["Female", "Male"])
        & (weight.isna() | weight.between(20, 300))
        & south["unitdischargestatus"].isin(["Alive", "Expired"])
    ]
    assert sum(len(data.labels(fold)) for fold in FOLDS) == len(kept) > 300
    dead = sum(int(data.labels(fold).sum()) for fold in FOLDS)
    assert dead == int((kept["unitdischargestatus"] == "Expired").sum()) > 5
    of = {fold: set(data.patient_ids(fold) or ()) for fold in FOLDS}
    assert sum(len(item) for item in of.values()) == kept["uniquepid"].nunique()
