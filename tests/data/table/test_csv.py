"""A table in a text file: values by an oracle, folds that stay, and every broken file by name."""

from __future__ import annotations

import gzip
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pydantic import ValidationError
from sklearn.datasets import load_breast_cancer, load_diabetes, load_wine
from sklearn.preprocessing import OneHotEncoder
from tests.support.tables import HEADER, contract, options, site, ward_rows, write

from tightframe import federation
from tightframe.config.job import parse_job
from tightframe.config.site import SiteEntry
from tightframe.data.base import FOLDS, record_patients
from tightframe.data.table import TableSite
from tightframe.data.table.silo import TableData, open_site
from tightframe.errors import DataError, RunError

OF_A_RECORD = "Xq7-of-a-record"


def opened(path: Path, values: dict[str, Any] | None = None, **entry: Any) -> TableData:
    return open_site(site(path, **entry), options(values or contract()))


def whole(data: TableData) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """All records in the order of their names: values, labels, names."""
    names = [name for fold in FOLDS for name in data.record_ids(fold)]
    order = np.argsort(names)
    features = np.concatenate([data.features(fold) for fold in FOLDS])[order]
    return features, np.concatenate([data.labels(fold) for fold in FOLDS])[order], sorted(names)


def test_values_are_those_of_pandas_and_scikit_learn(tmp_path: Path) -> None:
    rows = ward_rows()
    rows[3][3], rows[4][4], rows[5][5] = "", "", ""
    data = opened(write(tmp_path / "ward.csv", rows))
    features, labels, names = whole(data)
    frame = pd.read_csv(tmp_path / "ward.csv", dtype=str).sort_values("id")
    assert frame["id"].tolist() == names
    age, weight = frame["age"].astype(float), frame["weight"].astype(float)
    np.testing.assert_allclose(features[:, 0], age / 50 - 1, atol=1e-6)
    np.testing.assert_allclose(features[:, 7], (weight.fillna(120) - 20) / 100 - 1, atol=1e-6)
    assert (features[:, 1] == (frame["sex"] == "male")).all()
    assert (features[:, 2] == (frame["smoker"] == "yes")).all()
    assert (features[:, 3] == frame["smoker"].isna()).all()
    pain = frame[["pain"]].fillna("unknown")
    levels = OneHotEncoder(categories=[["none", "mild", "strong", "unknown"]], drop="first").fit_transform(
        pain
    )
    np.testing.assert_array_equal(features[:, 4:7], levels.toarray())
    assert (labels == frame["outcome"].astype(int)).all()


@pytest.mark.parametrize("load", [load_breast_cancer, load_wine, load_diabetes])
def test_tables_of_scikit_learn_split_over_sites_that_name_and_measure_in_their_own_way(
    load: Any, tmp_path: Path
) -> None:
    """Four sites: own column names, codes, units, delimiter, decimal comma; together they are the table."""
    bunch = load()
    target = (
        bunch.target if load is not load_diabetes else (bunch.target > np.median(bunch.target)).astype(int)
    )
    names = [f"m{place}" for place in range(bunch.data.shape[1])]
    low, high = bunch.data.min(0) - 1, bunch.data.max(0) + 1
    titles = [f"class {place}" for place in range(target.max() + 1)]
    values = {
        "title": "Table",
        "columns": [
            {"column": name, "kind": "number", "low": low[place], "high": high[place]}
            for place, name in enumerate(names)
        ],
        "label": {"column": "y", "classes": [{"code": title} for title in titles]},
        "record": "id",
    }
    found, labels, ids = [], [], []
    for number in range(4):
        places = np.arange(number, len(target), 4)
        frame = pd.DataFrame(bunch.data[places], columns=names)
        frame.insert(0, "id", [f"{place:04d}" for place in places])
        frame["m0"] = (frame["m0"] - 32) / 1.8 if number == 1 else frame["m0"]
        frame["y"] = target[places] if number == 2 else [titles[label] for label in target[places]]
        frame = frame.rename(columns={"m1": "eigene Spalte"} if number == 3 else {})
        path = tmp_path / f"site-{number}.csv"
        comma = number == 3
        frame.to_csv(path, index=False, sep=";" if comma else ",", decimal="," if comma else ".")
        entry: dict[str, Any] = {}
        if number == 1:
            entry = {"units": {"m0": {"unit": "F", "factor": 1.8, "offset": 32.0}}}
        if number == 2:
            entry = {"codes": {"y": {str(place): title for place, title in enumerate(titles)}}}
        if comma:
            entry = {"columns": {"eigene Spalte": "m1"}, "delimiter": ";", "decimal": ","}
        part = whole(opened(path, values, **entry))
        found.append(part[0]), labels.append(part[1]), ids.extend(part[2])
    order = np.argsort(ids)
    assert [ids[place] for place in order] == [f"{place:04d}" for place in range(len(target))]
    scaled = 2 * (bunch.data - low) / (high - low) - 1
    np.testing.assert_allclose(np.concatenate(found)[order], scaled, atol=2e-6)
    np.testing.assert_array_equal(np.concatenate(labels)[order], target)


def test_folds_are_a_function_of_the_patient_alone(tmp_path: Path) -> None:
    rows = [[*row, f"p{place // 3}"] for place, row in enumerate(ward_rows(600))]
    values, header = contract(patient="who"), [*HEADER, "who"]
    first = opened(write(tmp_path / "a.csv", rows, header), values)
    second = opened(write(tmp_path / "b.csv", rows[300:][::-1], header), values)
    of = [{name: fold for fold in FOLDS for name in data.patient_ids(fold) or ()} for data in (first, second)]
    assert all(of[0][patient] == fold for patient, fold in of[1].items()), "another site, another order"
    for data in (first, second):
        sets = [set(data.patient_ids(fold) or ()) for fold in FOLDS]
        assert not sets[0] & sets[1] and not sets[0] & sets[2] and not sets[1] & sets[2]
        numbers = [set(record_patients(data, fold).tolist()) for fold in FOLDS]
        assert [len(item) for item in numbers] == [len(item) for item in sets]
        assert not numbers[0] & numbers[1]
    shares = [len(first.labels(fold)) / 600 for fold in FOLDS]
    np.testing.assert_allclose(shares, (0.7, 0.15, 0.15), atol=0.08)


def test_a_column_tells_the_folds(tmp_path: Path) -> None:
    rows = [[*row, ("learn", "look", "test")[place % 3]] for place, row in enumerate(ward_rows())]
    path, codes = (
        write(tmp_path / "a.csv", rows, [*HEADER, "split"]),
        {"learn": "train", "look": "validation"},
    )
    data = opened(path, contract(fold={"column": "split"}), codes={"split": codes})
    assert [len(data.labels(fold)) for fold in FOLDS] == [20, 20, 20]
    assert "r2" in data.record_ids("test")
    two = {"learn": "train", "look": "train"}
    data = opened(path, contract(fold={"column": "split", "validation": 0.25}), codes={"split": two})
    assert [len(data.labels(fold)) for fold in FOLDS] == [30, 10, 20]
    with pytest.raises(DataError, match=r"TF-218.*no validation fold"):
        opened(path, contract(fold={"column": "split", "validation": 0.25}), codes={"split": codes})


def test_a_patient_in_two_folds_is_refused_even_where_rows_are_set_aside(tmp_path: Path) -> None:
    rows = [[*row, ("train", "test")[place % 2], f"p{place // 2}"] for place, row in enumerate(ward_rows())]
    rows[0][-1] = OF_A_RECORD
    rows[1][-1] = OF_A_RECORD
    path = write(tmp_path / "a.csv", rows, [*HEADER, "split", "who"])
    with pytest.raises(DataError, match=r"TF-216.*30 rows \(3, 5, 7") as caught:
        opened(path, contract(fold={"column": "split"}, patient="who"), invalid="set_aside")
    assert OF_A_RECORD not in str(caught.value)


BROKEN: dict[str, tuple[int, str, str]] = {
    # the column, its text, what is said
    "a date": (1, "1954-03-02", "age: no number"),
    "a date as a number": (1, "19540302", "age: outside 0 to 100 years"),
    "negative": (1, "-4", "age: outside 0 to 100 years"),
    "another unit": (5, "154000", "weight: outside 20 to 220 kg"),
    "nan": (1, "NaN", "age: no number"),
    "infinity": (1, "inf", "age: no number"),
    "too large for a float": (1, "1e999", "age: outside"),
    "hexadecimal": (1, "0x10", "age: no number"),
    "underscore": (1, "1_0", "age: no number"),
    "thousands": (1, "1'000", "age: no number"),
    "another script": (1, "\u0663\u0664", "age: no number"),
    "empty": (1, "", "age: no value"),
    "spaces only": (1, "  ", "age: no value"),
    "a decimal point in a boolean": (3, "1.0", "smoker: a code that is no boolean"),
    "a code": (2, "F", "sex: a code that is no level of the contract"),
    "another case": (2, "Female", "sex: a code that is no level"),
    "a class": (6, "2", "outcome: a code that is no class"),
    "no class": (6, "", "outcome: no value"),
    "no name": (0, "", "id: no name"),
    "a name twice": (0, "r0", "id: the name of an earlier row"),
    "too many cells": (6, "1,1", "another number of cells than the header"),
    "text with a number": (1, "54 years", "age: no number"),
    "a percentage": (1, "54%", "age: no number"),
    "two values": (5, "70/71", "weight: no number"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_record_is_refused_by_rule_and_row_or_counted(kind: str, tmp_path: Path) -> None:
    place, text, said = BROKEN[kind]
    rows = ward_rows()
    rows[7][place] = text
    path = write(tmp_path / "ward.csv", rows)
    with pytest.raises(DataError, match="TF-215") as caught:
        opened(path)
    assert said in str(caught.value) and "1 row (9)" in str(caught.value), "the line in the file"
    assert text.strip() in ("", "2", "-4", "F", "r0") or text.strip() not in str(caught.value)
    data = opened(path, invalid="set_aside")
    assert len(whole(data)[2]) == 59 and "r7" not in whole(data)[2]
    told: list[str] = []
    data.check(told.append)
    assert len(told) == 1 and told[0].startswith("set aside:") and said in told[0] and "(9)" in told[0]


def test_a_class_that_nobody_has_is_a_class_of_no_records(tmp_path: Path) -> None:
    """Too few cells are a broken row, and every row with that class may be one."""
    rows = ward_rows()
    path = write(tmp_path / "ward.csv", [row[:-1] if row[6] == "1" else row for row in rows])
    data = opened(path, invalid="set_aside")
    assert sum(np.bincount(data.labels(fold), minlength=2)[1] for fold in FOLDS) == 0
    assert sum(len(data.labels(fold)) for fold in FOLDS) == 30
    told: list[str] = []
    data.check(told.append)
    assert "another number of cells than the header: 30 rows (3, 5" in told[0]


def test_all_findings_are_told_at_once_and_no_value(tmp_path: Path) -> None:
    rows = ward_rows()
    for place, row in enumerate(rows[10:20]):
        row[place % 7] = OF_A_RECORD if place % 7 else rows[0][0]
    with pytest.raises(DataError) as caught:
        opened(write(tmp_path / "ward.csv", rows))
    assert str(caught.value).count("\n  - ") == 7
    assert OF_A_RECORD not in str(caught.value)


def test_no_column_is_proposed_for_two_of_the_contract(tmp_path: Path) -> None:
    """A column that the contract has itself, however alike, is not what another is called here."""
    path = write(tmp_path / "ward.csv", ward_rows())
    with pytest.raises(DataError, match="TF-204") as caught:
        opened(path, columns={"ages": "weight"})
    assert "there is no column 'ages'\n" in str(caught.value)


def broken_file(kind: str, path: Path) -> tuple[str, str, dict[str, Any]]:
    """Write a file that is wrong as a whole; return code, what is said, and the entry."""
    rows, text = ward_rows(), ""
    for row in rows:
        row[4] = "none"
    body = "\n".join([",".join(HEADER), *(",".join(row) for row in rows)]) + "\n"
    entry: dict[str, Any] = {}
    if kind == "no file":
        return "TF-205", "no such file", entry
    if kind == "empty":
        path.write_bytes(b"")
        return "TF-208", "empty", entry
    if kind == "blank lines":
        path.write_text("\n\n\n")
        return "TF-208", "empty", entry
    if kind == "header only":
        path.write_text(",".join(HEADER) + "\n")
        return "TF-208", "train fold, but it has a header and no rows", entry
    written = {
        "semicolons": (body.replace(",", ";"), "TF-204", "';' 6 times: is that the `delimiter`"),
        "tabs": (body.replace(",", "\t"), "TF-204", r"'\t' 6 times"),
        "no header": (body.partition("\n")[2].replace("r0", OF_A_RECORD), "TF-204", "no column 'age'"),
        "no header, nor a name": (
            body.partition("\n")[2].replace("r0", OF_A_RECORD),
            "TF-204",
            "Is its first line a record, not names?",
        ),
        "column missing": (
            body.replace("weight", "Weight", 1),
            "TF-204",
            "did you mean 'Weight'? Write {'Weight': 'weight'} into `columns`",
        ),
        "column twice": (body.replace("weight", "age", 1), "TF-204", "'age' is there 2 times"),
        "open quote": (body.replace("none", '"none', 1), "TF-206", "quotes"),
        "quote inside": (body.replace("none", '"no"ne"', 1), "TF-206", "line 2"),
        "a huge cell": (body.replace("none", "x" * (1 << 21), 1), "TF-206", "line 2"),
        "no gzip": (body, "TF-206", "BadGzipFile"),
    }
    if kind in written:
        changed, code, said = written[kind]
        path.write_text(changed)
        return code, said, entry
    if kind == "latin-1":
        path.write_bytes(body.replace("none", "n\u00f6ne", 1).encode("latin-1"))
        return "TF-206", "not in utf-8", entry
    if kind == "utf-16":
        path.write_bytes(body.encode("utf-16"))
        return "TF-206", "not in utf-8 at byte 0: name its `encoding`, utf-16", entry
    if kind == "an Excel file":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("xl/workbook.xml", "<x/>")
        return "TF-206", "an Excel file or another archive: save the table as CSV", entry
    if kind == "utf-16 without mark":
        path.write_bytes(body.encode("utf-16-le"))
        return "TF-206", "zero bytes", entry
    if kind == "binary":
        path.write_bytes(bytes(range(256)) * 40)
        return "TF-206", "", entry
    if kind == "a folder":
        path.mkdir()
        return "TF-206", "IsADirectoryError", entry
    if kind == "half a gzip":
        packed = gzip.compress(body.encode())
        path.write_bytes(packed[: len(packed) // 2])
        return "TF-206", "EOFError", entry
    if kind == "all records broken":
        path.write_text(body.replace("female", OF_A_RECORD).replace(",male", f",{OF_A_RECORD}"))
        return "TF-208", "none of its 0 records", {"invalid": "set_aside"}
    raise AssertionError(kind + text)


@pytest.mark.parametrize(
    "kind",
    [
        *("no file", "empty", "blank lines", "header only", "latin-1", "utf-16", "utf-16 without mark"),
        *("semicolons", "tabs", "no header", "column missing", "column twice", "open quote", "quote inside"),
        *("a huge cell", "binary", "a folder", "no gzip", "half a gzip", "all records broken"),
        *("an Excel file", "no header, nor a name"),
    ],
)
def test_a_broken_file_is_named_and_tells_no_record(kind: str, tmp_path: Path) -> None:
    path = tmp_path / ("ward.csv.gz" if "gzip" in kind else "ward.csv")
    code, said, entry = broken_file(kind, path)
    with pytest.raises(DataError, match=code) as caught:
        opened(path, **entry)
    assert said in str(caught.value)
    assert OF_A_RECORD not in str(caught.value) and "r1" not in str(caught.value)
    assert (caught.value.__cause__ is None and caught.value.__suppress_context__) or kind != "latin-1"


def test_marks_quotes_spaces_blank_lines_and_foreign_columns_do_no_harm(tmp_path: Path) -> None:
    rows = ward_rows()
    plain = whole(opened(write(tmp_path / "plain.csv", rows)))
    lines = [",".join([*HEADER, *(["x"] * 2000)])]
    for place, row in enumerate(rows):
        cells = [f'"{cell}"' if place % 2 else f" {cell} " for cell in row]
        lines += ["", ",".join([*cells, *('"a\nb"' for _ in range(2000))])]
    odd = tmp_path / "odd.csv"
    odd.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    packed = tmp_path / "odd.csv.gz"
    packed.write_bytes(gzip.compress(odd.read_bytes()))
    latin = tmp_path / "latin.tsv"
    latin.write_bytes(
        "\n".join(
            "\t".join(row) for row in [[*HEADER, "\u00e4"], *([*row, "\u00f6"] for row in rows)]
        ).encode("cp1252")
    )
    for data in (opened(odd), opened(packed), opened(latin, encoding="cp1252", delimiter="\t")):
        for found, expected in zip(whole(data), plain, strict=True):
            np.testing.assert_array_equal(found, expected)


@pytest.mark.whole
def test_a_quarter_of_a_million_columns_are_read(tmp_path: Path) -> None:
    others = [f"g{place}" for place in range(250_000)]
    rows = [[*row, *["0"] * len(others)] for row in ward_rows(12)]
    data = opened(write(tmp_path / "wide.csv", rows, [*HEADER, *others]), contract(shares=[0.4, 0.2, 0.4]))
    assert len(whole(data)[2]) == 12


def test_without_names_records_are_called_by_their_values(tmp_path: Path) -> None:
    rows = [row[1:] for row in ward_rows(100)]  # equal rows among them
    rows += [list(rows[0]), list(rows[0])]
    first = opened(write(tmp_path / "a.csv", rows, HEADER[1:]), contract(record=None))
    second = opened(write(tmp_path / "b.csv", rows[::-1], HEADER[1:]), contract(record=None))
    names = [{name: fold for fold in FOLDS for name in data.record_ids(fold)} for data in (first, second)]
    assert names[0] == names[1] and len(names[0]) == 102
    (common,) = {
        fold
        for name, fold in names[0].items()
        if name.partition("-")[0] in {n.partition("-")[0] for n in names[0] if n.endswith("-3")}
    }
    assert common in FOLDS, "equal records are in one fold"


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"columns": {"Alter": "Age"}}, "'Alter' is mapped to 'Age'"),
        (
            {"codes": {"sex": {"F": "Female"}}},
            r"'sex' has ['female', 'male'], but codes are mapped to ['Female']",
        ),
        ({"codes": {"age": {"x": "1"}}}, "no codes for a column 'age'"),
        ({"units": {"sex": {"factor": 2.0}}}, "no number 'sex'"),
        ({"contract": "0" * 64}, "this site takes part with the contract 0000"),
    ],
)
def test_an_entry_that_does_not_fit_the_contract_is_refused(
    entry: dict[str, Any], said: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "ward.csv", ward_rows())
    with pytest.raises(DataError, match="TF-218") as caught:
        opened(path, **entry)
    assert said in str(caught.value)


def test_a_site_may_pin_the_contract(tmp_path: Path) -> None:
    pinned = options().contract.sha256()
    assert len(whole(opened(write(tmp_path / "ward.csv", ward_rows()), contract=pinned))[2]) == 60


@pytest.mark.parametrize(
    "entry",
    [
        {"file": "ward.csv"},
        {"file": "/x/ward.xlsx"},
        {},
        {"file": "/x/w.csv", "database": {"url_env": "A", "query": "SELECT 1"}},
        {"database": {"query": "SELECT 1"}},
        {"database": {"url_env": "A", "url_file": "/x", "query": "SELECT 1"}},
        {"database": {"url_env": "A", "query": "SELECT 1"}, "encoding": "cp1252"},
        {"file": "/x/w.parquet", "delimiter": ";"},
        {"file": "/x/w.csv", "encoding": "none"},
        {"file": "/x/w.csv", "encoding": "hex"},
        {"file": "/x/w.csv", "delimiter": ",", "decimal": ","},
        {"file": "/x/w.csv", "delimiter": '"'},
        {"file": "/x/w.csv", "columns": {"a": "c", "b": "c"}},
        {"file": "/x/w.csv", "units": {"a": {"factor": 0.0}}},
        {"file": "/x/w.csv", "invalid": "ignore"},
    ],
)
def test_an_entry_that_cannot_be_is_refused(entry: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TableSite.model_validate(entry)


def test_of_a_broken_table_its_code_alone_leaves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = ward_rows()
    rows[3][1] = OF_A_RECORD
    files = {name: write(tmp_path / f"{name}.csv", ward_rows()) for name in ("a", "b")}
    files["c"] = write(tmp_path / "c.csv", rows)
    values = {
        **{"job_name": "ward", "method": "fedavg", "dataset": "table", "model": "mlp", "rounds": 1},
        **{"sites": list(files), "min_sites": 3, "dataset_options": {"contract": contract()}},
    }
    entries = {
        name: SiteEntry(data={"table": {"file": str(path), "columns": {}, "invalid": "refuse"}})
        for name, path in files.items()
    }
    with pytest.raises(RunError) as caught:
        federation.run_job(parse_job(values), entries=entries, folder=tmp_path / "run")
    assert "TF-215" in str(caught.value) and "age" not in str(caught.value)
    kept = [path for path in (tmp_path / "run").rglob("*") if path.is_file() and path.name == "outcome.json"]
    assert kept and all(OF_A_RECORD not in path.read_text() for path in kept)
    assert OF_A_RECORD not in caplog.text, "not in the site's own log either"
