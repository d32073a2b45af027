"""``tightframe data init`` and ``check``, and a contract's way into a job, as people type them."""

from __future__ import annotations

import html
import json
import re
import shlex
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
from sklearn.datasets import (
    load_breast_cancer,
    load_diabetes,
    load_wine,
    make_multilabel_classification,
)
from tests.attacks import test_rare_values as rare
from tests.support.tables import HEADER, WARD, contract, ward_rows, write
from typer.testing import CliRunner, Result

from tightframe.data.base import FOLDS
from tightframe.data.contract import Contract
from tightframe.data.table import TableOptions, TableSite
from tightframe.data.table.encoding import encode
from tightframe.data.table.proposal import propose
from tightframe.data.table.silo import open_site
from tightframe.data.table.sources.rows import read
from tightframe.data.table.summary import describe
from tightframe.errors import DataError
from tightframe_app.cli import app
from tightframe_app.jobs import folders


def typed(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(part) for part in arguments])


def told(result: Result) -> str:
    return " ".join((result.output + str(result.exception or "")).split())


def kinds(values: dict[str, Any]) -> dict[str, str]:
    return {item["column"]: item["kind"] for item in values["columns"]}


@pytest.mark.parametrize("load", [load_breast_cancer, load_wine, load_diabetes])
def test_a_proposal_is_a_contract_that_its_own_file_keeps(load: Any, tmp_path: Path) -> None:
    """Also as a German spreadsheet writes it: semicolons, decimal commas, cp1252."""
    bunch = load(as_frame=True)
    frame = bunch.frame.rename(columns={bunch.frame.columns[0]: "Größe"})
    if load is load_diabetes:
        frame["target"] = (frame["target"] > 140).map({True: "high", False: "low"})
    frame["note"] = [f"text {place}" for place in range(len(frame))]
    file = tmp_path / "table.csv"
    frame.to_csv(file, index=False, sep=";", decimal=",", encoding="cp1252")
    output = tmp_path / "contract.json"
    done = typed("data", "init", file, "--label", "target", "-o", output)
    assert done.exit_code == 0, told(done)
    values = json.loads(output.read_text())
    made = Contract.model_validate(values)
    assert set(kinds(values)) == set(frame.columns) - {"target", "note"}
    for item in made.columns:
        if item.kind == "number":
            column = frame[item.column]
            assert item.low is not None and item.high is not None
            assert item.low < column.min() or item.low == 0, "rounded outwards"
            assert item.high > column.max()
    assert "note: left out" in (tmp_path / "contract.notes.md").read_text()
    (line,) = [line for line in done.output.splitlines() if line.startswith('{"data"')]
    entry = json.loads(line)
    table = entry["data"]["table"]
    assert (table["delimiter"], table["decimal"], table["encoding"]) == (";", ",", "cp1252")
    config = tmp_path / "site.json"
    config.write_text(json.dumps(entry))
    checked = typed("data", "check", "--contract", output, "-s", config)
    assert checked.exit_code == 0, told(checked)
    assert f"{len(frame)} rows" in checked.output


def test_a_proposal_tells_kinds_and_what_to_decide(tmp_path: Path) -> None:
    frame = pd.DataFrame(
        {
            "age": [30.5 + place for place in range(40)],
            "smoker": ["yes", "no"] * 20,
            "pain": ["none", "mild", "strong", None] * 10,
            "cp": [1, 2, 3, 4] * 10,
            "born": ["1954-03-02"] * 20 + ["1960-01-01"] * 20,
            "same": [1] * 40,
            "empty": [None] * 40,
            "mixed": [*range(30), *["high"] * 10],
            "crp": [*[1, 2, 3] * 12, 4, *["k.A."] * 3],
            "who": [f"p{place}" for place in range(40)],
            "ill": [0, 1] * 20,
        }
    )
    frame.to_csv(tmp_path / "ward.csv", index=False)
    made = propose(tmp_path / "ward.csv", {"label": "ill", "patient": "who"})
    wanted = {"age": "number", "smoker": "boolean", "pain": "category", "cp": "number", "crp": "category"}
    assert kinds(made.contract) == wanted
    pain = next(item for item in made.contract["columns"] if item["column"] == "pain")
    assert pain["vocabulary"] == ["mild", "none", "strong"] and pain["missing"] == "indicator"
    assert made.contract["patient"] == "who" and "record" not in made.contract
    said = " ".join(made.notes)
    for words in ("pain: 10 of 40 values are missing", "cp: only 4 whole numbers", "born: left out: dates"):
        assert words in said
    for words in ("same: left out", "empty: left out", "mixed: left out: 10 of 40", "age: which `unit`"):
        assert words in said
    assert made.notes[0].startswith("title: 'ward', the file's name, will stand in the job"), "and is public"
    unnamed = propose(tmp_path / "ward.csv", {"label": "ill"})
    assert any("No column names the patient (--patient): " in note for note in unnamed.notes)
    frame.rename(columns={"who": "patient_id"}).to_csv(tmp_path / "named.csv", index=False)
    named = propose(tmp_path / "named.csv", {"label": "ill"})
    assert any("(--patient; by its name `patient_id` may): " in note for note in named.notes)
    assert "crp: 37 of 40 values are numbers; does 'k.A.' stand for no value?" in said
    assert "misspelt" not in said
    frame.assign(ill=["good", "bad"] * 19 + ["god", "bad"]).to_csv(tmp_path / "spelt.csv", index=False)
    assert "ill: god (1) of 40 records: misspelt?" in " ".join(
        propose(tmp_path / "spelt.csv", {"label": "ill"}).notes
    )
    frame[["mixed", "crp"]] = frame[["mixed", "crp"]].astype(str)
    frame.to_parquet(tmp_path / "ward.parquet")
    again = propose(tmp_path / "ward.parquet", {"label": "ill", "patient": "who"})
    assert kinds(again.contract) == kinds(made.contract)


@pytest.mark.parametrize(
    ("header", "first", "more", "said"),
    [
        ("age,age,ill", "1,2,0", [], "the column 'age' is there 2 times"),
        ("10,20,ill", "1,2,0", ["--label", "x"], "Is its first line a record, not names?"),
        ("PK\x03\x04", "", [], "an Excel file or another archive: save the table as CSV"),
    ],
)
def test_a_file_that_no_contract_comes_from_is_named(
    header: str, first: str, more: list[str], said: str, tmp_path: Path
) -> None:
    (tmp_path / "t.csv").write_text(f"{header}\n{first}\n")
    done = typed("data", "init", tmp_path / "t.csv", *(more or ["--label", "ill"]), "-o", tmp_path / "c.json")
    assert done.exit_code != 0 and said in told(done)


def test_a_database_is_to_be_exported_first(tmp_path: Path) -> None:
    done = typed("data", "init", tmp_path / "ward.sqlite", "--label", "ill", "-o", tmp_path / "c.json")
    assert "rows of a database, as CSV" in told(done) and "TF-206" in told(done)


def test_utf_16_ragged_rows_and_a_mark_for_no_value_are_seen(tmp_path: Path) -> None:
    rows = [
        f"{20 + place}.5,p{place // 2},{('train', 'test')[place == 1]},{place % 2}" for place in range(40)
    ]
    rows[5], rows[7] = "k.A.,p2,train,1", "1,2"
    table, output = tmp_path / "t.csv", tmp_path / "c.json"
    table.write_text("\n".join(["age,who,fold,ill", *rows]) + "\n", encoding="utf-16")
    words = ("data", "init", table, "--label", "ill", "--patient", "who", "--fold", "fold", "-o", output)
    done = typed(*words, "--missing", "k.A.")
    assert done.exit_code == 0, told(done)
    (entry,) = [json.loads(line) for line in done.output.splitlines() if line.startswith('{"data"')]
    assert entry["data"]["table"]["encoding"] == "utf-16" and entry["data"]["table"]["missing"] == [
        "",
        "k.A.",
    ]
    assert kinds(json.loads(output.read_text())) == {"age": "number"}
    notes = (tmp_path / "c.notes.md").read_text()
    assert "left out here: 1 row (9)" in notes and "(TF-216): 1 of 20 patients" in notes
    output.unlink()
    (tmp_path / "c.notes.md").unlink()
    assert typed(*words).exit_code != 0, "a column with texts is left out, and it was the only one"
    assert typed("data", "init", tmp_path, "--missing", "k.A.").exit_code == 2, "pictures have no such text"


@pytest.mark.parametrize(
    ("text", "every", "said"),
    [
        ("1954-03-02", True, "age: no number: '1954-03-02'; a date: give an age"),
        ("inf", False, "age: no number: 'inf'; not finite"),
        ("1'075.2", False, "; write it without marks between thousands"),
        ("k.A.", False, "age: no number: 'k.A.'; name in `missing`"),
    ],
)
def test_check_says_what_to_do_about_what_is_no_number(
    text: str, every: bool, said: str, agreed: Path, tmp_path: Path
) -> None:
    rows = [
        [row[0], text if every or not place else row[1], *row[2:]] for place, row in enumerate(ward_rows())
    ]
    entry = {"file": str(write(tmp_path / "a.csv", rows))}
    done = told(typed("data", "check", "--contract", agreed, "-s", sites(tmp_path, a=entry)))
    assert said in done and '"invalid": "set_aside"' in done


def test_check_notes_a_class_that_the_site_does_not_have(agreed: Path, tmp_path: Path) -> None:
    rows = [[*row[:-1], "0"] for row in ward_rows()]
    entry = {"file": str(write(tmp_path / "a.csv", rows))}
    done = typed("data", "check", "--contract", agreed, "-s", sites(tmp_path, a=entry))
    assert done.exit_code == 0 and "no record of 'ill' here" in told(done)


def test_several_records_of_one_patient_count_as_one_of_a_class(tmp_path: Path) -> None:
    agreed = tmp_path / "contract.json"
    agreed.write_text(json.dumps({**WARD, "patient": "who"}))
    places = {}
    for name, ill in (("a", 30), ("b", 30), ("c", 4)):  # patients
        rows = [
            [*row, f"ill-{place // 2 % ill}" if row[-1] == "1" else f"well-{place}"]
            for place, row in enumerate(ward_rows(120))
        ]
        places[name] = {"file": str(write(tmp_path / f"{name}.csv", rows, (*HEADER, "who")))}
    config = sites(tmp_path, **places)
    done = told(typed("data", "check", "--contract", agreed, "-s", config))
    assert "ill: fewer than 3 sites have 5 patients with training records" in done
    folder = tmp_path / "job"
    made = ["--method", "fed3r", "--contract", agreed, "--sites", "a,b,c", "-o", folder]
    assert typed("jobs", "export", *made).exit_code == 0
    checked = told(typed("site", "check", "-c", config, "--job", folder))
    assert "ill: fewer than 3 sites have 5 patients with training records; fed3r will never" in checked


def test_classes_that_too_few_sites_have_are_named_of_all_sites_together(
    agreed: Path, tmp_path: Path
) -> None:
    few = [[*row[:-1], "0"] for row in ward_rows()]
    rows = {"a": ward_rows(), "b": ward_rows(), "c": few}
    places = {name: {"file": str(write(tmp_path / f"{name}.csv", part))} for name, part in rows.items()}
    config = sites(tmp_path, **places)
    done = told(typed("data", "check", "--contract", agreed, "-s", config))
    assert "well:" not in done
    assert "ill: fewer than 3 sites have 5 patients with training records; fed3r, fedcgs and fedncm" in done
    lines = {}
    for method in ("fed3r", "fedavg"):
        folder = tmp_path / method
        made = ["--method", method, "--contract", agreed, "--sites", "a,b,c", "-o", folder]
        assert typed("jobs", "export", *made).exit_code == 0
        lines[method] = told(typed("site", "check", "-c", config, "--job", folder))
    assert "ill: fewer than 3 sites have 5 patients with training records; fed3r will never" in lines["fed3r"]
    assert "never answer" not in lines["fedavg"]
    assert lines["fedavg"].count("rules of the profile that differ") == 1, "a note that all have, once"
    assert "policy all sites: rules of the profile" in lines["fedavg"]


def test_a_table_is_divided_by_a_column_and_no_cell_is_lost(tmp_path: Path) -> None:
    frame = pd.DataFrame({"ward": ["B", "A, west", "B", "A, west"], "x": ["1,5", 'a "b"', " c ", "Ä;"]})
    frame.insert(1, "id", ["1", "2", "3", "4"])
    frame.to_csv(tmp_path / "all.csv", sep=";", index=False, encoding="cp1252")
    done = typed("data", "split", tmp_path / "all.csv", "--by", "ward", "-o", tmp_path / "sites")
    assert done.exit_code == 0, done.output
    assert "site-1: A, west, 2 rows" in told(done)
    whole = shlex.split(done.output.splitlines()[-1].replace("COLUMN", "x").replace("NAME", "wards"))
    made = typed(*whole[1:], "-o", tmp_path / "of-all.json")
    assert made.exit_code == 0, made.output
    assert "configuration, unless `tightframe data split` has written sites.json:" in told(made)
    contract = json.loads((tmp_path / "of-all.json").read_text())
    assert len(contract["label"]["classes"]) == 4, "all sites'"
    assert [item["column"] for item in contract["columns"]] == ["id"], "without the hospital"
    sites = json.loads((tmp_path / "sites" / "sites.json").read_text())["sites"]
    for site, ward in (("site-1", "A, west"), ("site-2", "B")):
        entry = TableSite.model_validate(sites[site]["data"]["table"])
        assert sites[site]["dataset_id"] == ward
        assert entry.file == tmp_path / "sites" / f"{site}.csv"
        own = pd.read_csv(entry.file, sep=entry.delimiter, encoding=entry.encoding, dtype=str)
        wanted = frame[frame["ward"] == ward].drop(columns="ward").reset_index(drop=True)
        pd.testing.assert_frame_equal(own, wanted)
    again = typed("data", "split", tmp_path / "all.csv", "--by", "ward", "-o", tmp_path / "sites")
    assert isinstance(again.exception, FileExistsError)
    for column, rows, code in (
        ("nobody", "a,b\n1,2\n", "TF-204"),
        ("a", "a,b,a\n1,2,1\n2,2,2\n", "TF-204"),
        ("a", "a,b\n1,2\n,3\n", "TF-207"),
        ("a", "a,b\n1,2\n1,3\n", "TF-207"),
        ("a", "a,b\n1,2\n2\n", "TF-206"),
    ):
        (tmp_path / "bad.csv").write_text(rows)
        refused = typed("data", "split", tmp_path / "bad.csv", "--by", column, "-o", tmp_path / "none")
        assert isinstance(refused.exception, DataError) and refused.exception.code == code
        assert not (tmp_path / "none").exists()


def test_init_without_a_label_lists_what_could_be_one_and_overwrites_nothing(tmp_path: Path) -> None:
    file, output = write(tmp_path / "ward.csv", ward_rows()), tmp_path / "c.json"
    asked = typed("data", "init", file, "-o", output)
    assert asked.exit_code == 2 and "outcome" in told(asked) and not output.exists()
    output.write_text("mine")
    refused = typed("data", "init", file, "--label", "outcome", "-o", output)
    assert refused.exit_code != 0 and "exists already" in told(refused)
    assert output.read_text() == "mine"
    assert "'outcom'" in told(typed("data", "init", file, "--label", "outcom", "-o", output)), "the worse one"
    output.unlink()
    assert typed("data", "init", file, "--label", "outcome", "-o", output).exit_code == 0
    made = (output, tmp_path / "c.notes.md")
    assert {path.stat().st_mode & 0o777 for path in made} == {0o600}, "until a person has decided"


@pytest.mark.parametrize(
    ("roles", "said"),
    [
        ({"label": "no"}, "TF-204"),
        ({"label": "id"}, "TF-207"),
        ({"label": "outcome", "patient": "no"}, "TF-204"),
    ],
)
def test_init_names_roles_that_cannot_be(roles: dict[str, str], said: str, tmp_path: Path) -> None:
    file = write(tmp_path / "ward.csv", ward_rows())
    options = [part for role, column in roles.items() for part in (f"--{role}", column)]
    done = typed("data", "init", file, *options, "-o", tmp_path / "c.json")
    assert done.exit_code != 0 and said in told(done)


BROKEN = [b"", b"a\n", b"a,a\n1,2\n", b"\xff\xfe\x00", b"x" * (1 << 21), b"a,b{c\n0,1\n1,2\n0,3\n"]


@pytest.mark.parametrize("content", BROKEN)
def test_init_names_a_broken_file(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "ward.csv").write_bytes(content)
    done = typed("data", "init", tmp_path / "ward.csv", "--label", "a", "-o", tmp_path / "c.json")
    assert done.exit_code != 0 and "TF-20" in told(done)


@pytest.mark.parametrize("name", ["ward", "ward.xlsx", "ward.csv"])
def test_init_names_what_is_no_table(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    for more in ([], ["--label", "a"]):
        done = typed("data", "init", tmp_path / name, *more, "-o", tmp_path / "c.json")
        assert done.exit_code != 0 and "TF-20" in told(done)


@pytest.fixture
def agreed(tmp_path: Path) -> Path:
    path = tmp_path / "contract.json"
    path.write_text(json.dumps(WARD))
    return path


def sites(folder: Path, **entries: Any) -> Path:
    path = folder / "sites.json"
    path.write_text(
        json.dumps({"sites": {name: {"data": {"table": entry}} for name, entry in entries.items()}})
    )
    return path


def test_check_shows_all_findings_of_all_sites_with_codes_to_map(agreed: Path, tmp_path: Path) -> None:
    rows = ward_rows()
    for row in rows:
        row[2] = row[2][0].upper()
    rows[3][1], rows[4][1], rows[9][5] = "-1", "x", "999"
    first = str(write(tmp_path / "a.csv", rows))
    second = str(write(tmp_path / "b.csv", [["z" + row[0], *row[1:]] for row in ward_rows()]))
    codes = {"sex": {"F": "female", "M": "male"}}
    config = sites(tmp_path, a={"file": first}, b={"file": second})
    done = typed("data", "check", "--contract", agreed, "-s", config)
    assert done.exit_code == 1
    for words in ("age: outside 0 to 100 years: 1 row (5)", "age: no number: 1 row (6)", "weight: outside"):
        assert words in told(done)
    assert "age: no number: 'x'; name in `missing`" in told(done)
    assert "sex: not in the contract: 'F', 'M'" in told(done) and "60 rows" in told(done)
    good = typed("data", "check", "--contract", agreed, "-s", config, "--site", "b")
    assert good.exit_code == 0 and "another unit" not in told(good)
    tiny = write(tmp_path / "c.csv", [[row[0], str(int(row[1]) / 100), *row[2:]] for row in ward_rows()])
    done = typed("data", "check", "--contract", agreed, "-s", sites(tmp_path, c={"file": str(tiny)}))
    assert done.exit_code == 0 and "age: all values lie in 0.59% of the contract's range" in told(done)
    config = sites(tmp_path, a={"file": first, "codes": codes, "invalid": "set_aside"})
    done = typed("data", "check", "--contract", agreed, "-s", config)
    assert done.exit_code == 0 and told(done).count("set aside") == 3 and "60 rows" in told(done)


def test_check_goes_on_with_the_sites_whose_entries_are_valid(agreed: Path, tmp_path: Path) -> None:
    config = sites(
        tmp_path, a={"file": "relative.csv"}, b={"file": str(write(tmp_path / "b.csv", ward_rows()))}
    )
    done = typed("data", "check", "--contract", agreed, "-s", config)
    assert done.exit_code != 0 and "60 rows" in done.output and "sites.a.data.table.file" in told(done)
    assert "no problem" not in done.output
    config = sites(tmp_path, a={"file": "relative.csv"})
    assert "TF-202" in told(typed("data", "check", "--contract", agreed, "-s", config))


def test_check_lists_a_wrong_mapping_line_by_line_and_asks_for_the_decimal_mark(
    agreed: Path, tmp_path: Path
) -> None:
    rows = [[row[0], f"{row[1]},5", *(cell.replace(".", ",") for cell in row[2:])] for row in ward_rows()]
    entry = {"file": str(write(tmp_path / "a.csv", rows, delimiter=";")), "delimiter": ";"}
    good = {"file": str(write(tmp_path / "b.csv", ward_rows()))}
    wrong = {**entry, "codes": {"colour": {"a": "b"}}}
    done = typed("data", "check", "--contract", agreed, "-s", sites(tmp_path, a=wrong, b=good))
    assert done.exit_code == 1 and "1 of 2 sites cannot take part like this" in told(done)
    assert "\\n" not in done.output and "`codes`: the contract has no codes" in told(done)
    assert "most values of age, weight are numbers with ',': is that the `decimal`?" in told(done)
    done = typed("data", "check", "--contract", agreed, "-s", sites(tmp_path, a={**entry, "decimal": ","}))
    assert done.exit_code == 0 and "the `decimal`" not in told(done)


def test_a_wrong_contract_and_a_site_without_a_table_are_named(agreed: Path, tmp_path: Path) -> None:
    agreed.write_text(json.dumps(contract(title=None, colour=1)))
    done = typed("data", "check", "--contract", agreed, "-s", sites(tmp_path, a={"file": "/x/a.csv"}))
    assert done.exit_code != 0 and "contract.title" in told(done) and "contract.colour" in told(done)
    agreed.write_text(json.dumps(WARD))
    config = tmp_path / "site.json"
    config.write_text("{}")
    assert "TF-201" in told(typed("data", "check", "--contract", agreed, "-s", config))


def test_a_contract_becomes_a_job_and_the_site_check_finds_what_breaks_it(
    agreed: Path, tmp_path: Path
) -> None:
    export = ["jobs", "export", "--contract", agreed, "--sites", "a,b,c"]
    for method in ("fedavg", "fedncm", "scaffold"):
        job = tmp_path / method
        done = typed(*export, "-o", job, "--method", method)
        assert done.exit_code == 0, told(done)
        values = json.loads((job / "app/config/config_fed_server.json").read_text())["workflows"][0]["args"]
        assert values["dataset_options"] == {"contract": WARD} and values["method"] == method
        assert typed("jobs", "check", job).exit_code == 0
    for wrong in (["--data", "eicu", "--method", "fedavg"], ["fedavg_isic"], []):
        assert typed(*export, *wrong).exit_code == 2
    rows = ward_rows()
    entry = {"file": str(write(tmp_path / "a.csv", rows))}
    config = tmp_path / "site.json"
    config.write_text(json.dumps({"data": {"table": entry}}))
    given = Contract.model_validate(WARD).sha256()
    for named in ({}, {"contract": given}):  # in a site's own file, and in one for several
        (tmp_path / "one.json").write_text(json.dumps({"data": {"table": {**entry, **named}}}))
        for file in (tmp_path / "one.json", sites(tmp_path, a={**entry, **named})):
            asked = typed("data", "check", "--contract", agreed, "-s", file)
            assert asked.exit_code == 0 and (f'"contract": "{given}"' in asked.output) == (not named)
    checked = typed("site", "check", "-c", config, "--job", job)
    assert "60 train" not in checked.output and "My ward" in told(checked), told(checked)
    assert checked.exit_code == 0
    assert "(--job)" in told(typed("site", "check", "-c", config))
    rows[3][1] = "-1"
    write(tmp_path / "a.csv", rows)
    checked = typed("site", "check", "-c", config, "--job", job)
    assert checked.exit_code == 1 and "TF-215" in told(checked) and "(5)" in told(checked)


def test_a_time_beyond_the_longest_gets_a_hint(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(
        json.dumps(contract(survival={"time": "days", "event": "died", "high": 1500}))
    )
    rows = [[*row, "1600" if place == 3 else "20", "yes"] for place, row in enumerate(ward_rows())]
    entry = {"file": str(write(tmp_path / "a.csv", rows, header=(*HEADER, "days", "died")))}
    done = typed("data", "check", "--contract", tmp_path / "c.json", "-s", sites(tmp_path, a=entry))
    assert done.exit_code == 1 and "days: outside 0 to 1500: 1 row (5)" in told(done)
    assert "days: longer than `high`? Raise it, or end curves there by `beyond`: `censor`" in told(done)


def test_a_job_of_a_contract_is_named_by_its_folder(agreed: Path, tmp_path: Path) -> None:
    words = ("jobs", "export", "--method", "fedavg", "--contract", agreed, "-o", tmp_path / "wide")
    assert typed(*words).exit_code == 0
    assert folders.read_job(tmp_path / "wide")["job_name"] == "wide"
    assert typed(*words, "--force", "--set", "job_name=own").exit_code == 0
    assert folders.read_job(tmp_path / "wide")["job_name"] == "own"
    said = typed(*words[:-1], tmp_path / "my job")
    assert said.exit_code == 0 and "'my job' cannot be one" in told(said)


def test_describe_has_the_numbers_of_pandas(tmp_path: Path) -> None:
    rows = ward_rows()
    rows[5][3], rows[6][4], rows[7][5], rows[8][1] = "", "", "", "-3"
    file = write(tmp_path / "a.csv", rows)
    site = TableSite.model_validate({"file": str(file), "invalid": "set_aside"})
    found = describe(Contract.model_validate(WARD), site)
    frame = pd.read_csv(file, keep_default_na=False, na_values=[""]).drop(index=8)
    assert found.broken == 1 and found.records == {"well": 29, "ill": 30}
    by_name = {item.column.column: item for item in found.columns}
    for name in ("age", "weight"):
        expected, item = frame[name].describe(), by_name[name]
        assert item.missing == int(frame[name].isna().sum())
        values = [item.mean, item.deviation, *item.quantiles]
        keys = ["mean", "std", "min", "25%", "50%", "75%", "max"]
        assert values == pytest.approx([expected[key] for key in keys], rel=1e-5)
        assert sum(sum(counts) for counts in item.counts.values()) == int(expected["count"])
    crossed = pd.crosstab(frame["outcome"], frame["pain"])
    for label, title in enumerate(("well", "ill")):
        assert by_name["pain"].counts[title] == tuple(crossed.loc[label, ["none", "mild", "strong"]])
    smokers = pd.crosstab(frame["outcome"], frame["smoker"])
    assert by_name["smoker"].counts["ill"] == tuple(smokers.loc[1, ["no", "yes"]])


@pytest.mark.parametrize(("count", "advised"), [(36, True), (60, False)])
def test_describe_advises_fewer_bins_where_most_cells_are_withheld(
    count: int, advised: bool, agreed: Path, tmp_path: Path
) -> None:
    config = sites(tmp_path, a={"file": str(write(tmp_path / "a.csv", ward_rows(count)))})
    done = typed("data", "describe", "--contract", agreed, "-s", config)
    assert done.exit_code == 0 and ("propose --set statistics.bins=" in told(done)) == advised, done.output


def test_describe_tells_where_curves_end_with_bins_of_its_own(tmp_path: Path) -> None:
    """All but the last few of a class have the event early, so that a late bin is withheld."""
    (tmp_path / "c.json").write_text(
        json.dumps(contract(survival={"time": "days", "event": "died", "high": 1000}))
    )
    rows = [
        [*row, "700" if place < 2 else str(10 + place // 2 % 2 * 200), "yes"]
        for place, row in enumerate(ward_rows())
    ]
    entry = {"file": str(write(tmp_path / "a.csv", rows, header=(*HEADER, "days", "died")))}
    words = ("data", "describe", "--contract", tmp_path / "c.json", "-s", sites(tmp_path, a=entry))
    done = typed(*words, "--time-ends", "90,365", "--bins", "7", "--format", "json")
    (one,) = json.loads(done.output)["sites"]
    assert {tuple(ends) for ends in one["curves"].values()} == {("3",)} and "7" in one["withheld"]["age"]
    assert one["curves"] == {"well": {"3": 90.0}, "ill": {"3": 90.0}}, "one late cell hides the one before it"
    assert "by time_ends 90,365, and one more bin" in told(typed(*words, "--time-ends", "90,365"))
    for wrong in ("365,90", "0,90", "90,1000", "nan"):
        assert "TF-218" in told(typed(*words, "--time-ends", wrong)), wrong
    assert typed(*words, "--time-ends", "soon").exit_code == 2


def test_describe_shows_a_table_and_writes_a_page_of_its_own(agreed: Path, tmp_path: Path) -> None:
    file, page = write(tmp_path / "a.csv", ward_rows()), tmp_path / "page.html"
    config = sites(tmp_path, a={"file": str(file)})
    done = typed("data", "describe", "--contract", agreed, "-s", config, "-o", page)
    assert done.exit_code == 0, told(done)
    assert "60 records (well 30, ill 30)" in told(done) and "female 30, male 30" in told(done)
    assert page.stat().st_mode & 0o077 == 0
    # Of three bins from 20 to 220 kg the second is too small in both classes; the first goes with it.
    frame = pd.read_csv(file)
    small = frame[frame["weight"] >= 20 + 200 / 3].groupby("outcome").size()
    assert small.between(1, 4).all() and len(small) == 2 and "4 of 8" in told(done)
    text = page.read_text()
    tree = ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>"))  # noqa: S314
    figures = list(tree.iter("figure"))
    assert len(figures) == 5 and all(any(item.tag.endswith("svg") for item in of.iter()) for of in figures)
    assert "default-src 'none'" in html.unescape(text)
    assert "Private to this site." in text and "<script" not in text


def test_describe_shows_the_others_where_a_site_of_several_cannot_be_read(
    agreed: Path, tmp_path: Path
) -> None:
    file, page = write(tmp_path / "a.csv", ward_rows()), tmp_path / "page.html"
    config = sites(tmp_path, gone={"file": str(tmp_path / "none.csv")}, last={"file": str(file)})
    words = ("data", "describe", "--contract", agreed, "-s", config)
    done = typed(*words, "-o", page)
    assert done.exit_code == 2 and "60 records (well 30, ill 30)" in done.stdout and page.is_file()
    assert "error: gone: TF-2" in done.stderr and "none.csv" in done.stderr
    assert "1 of 2 sites cannot be shown" in done.stderr
    as_json = typed(*words, "--format", "json")
    made = json.loads(as_json.stdout)
    assert as_json.exit_code == 2 and [one["site"] for one in made["sites"]] == ["last"]
    assert list(made["unreadable"]) == ["gone"]
    alone = typed(*words, "--site", "gone")
    assert isinstance(alone.exception, DataError) and not alone.stdout


FINDINGS = ["edema", "effusion", "nodule"]


def findings_table(path: Path) -> pd.DataFrame:
    """A table with three findings that records have together, written as booleans in words."""
    values, labels = make_multilabel_classification(200, 5, n_classes=3, random_state=0)
    frame = pd.DataFrame(values, columns=[f"v{place}" for place in range(5)])
    for name, column in zip(FINDINGS, labels.T, strict=True):
        frame[name] = pd.Series(column).map({1: "Yes", 0: "no"})
    frame["id"] = [f"r{row}" for row in range(len(frame))]
    frame.to_csv(path, index=False)
    return frame


def findings_site(tmp_path: Path, file: Path, **entry: Any) -> Path:
    config = tmp_path / "site.json"
    config.write_text(json.dumps({"data": {"table": {"file": str(file), **entry}}}))
    return config


def test_findings_go_from_a_file_to_a_description(tmp_path: Path) -> None:
    """Against pandas."""
    file, output, page = tmp_path / "table.csv", tmp_path / "contract.json", tmp_path / "page.html"
    frame = findings_table(file)
    done = typed("data", "init", file, "--label", ",".join(FINDINGS), "--record", "id", "-o", output)
    assert done.exit_code == 0, told(done)
    values = json.loads(output.read_text())
    assert values["label"] == {"findings": [{"column": name, "title": name} for name in FINDINGS]}
    assert list(kinds(values)) == [f"v{place}" for place in range(5)]
    config = findings_site(tmp_path, file)
    there = frame[FINDINGS] == "Yes"

    done = typed("data", "check", "--contract", output, "--site-config", config)
    assert done.exit_code == 0, told(done)
    made = Contract.model_validate(values)
    data = open_site(TableSite(file=file), TableOptions(contract=made))
    for fold in FOLDS:
        rows = [int(name[1:]) for name in data.record_ids(fold)]
        np.testing.assert_array_equal(data.labels(fold), there.to_numpy()[rows].astype(int))
    train = there.iloc[[int(name[1:]) for name in data.record_ids("train")]]
    for name in FINDINGS:
        assert f"{name} {train[name].sum()} present, {(~train[name]).sum()} absent" in told(done)

    done = typed("data", "describe", "--contract", output, "--site-config", config, "--output", page)
    assert done.exit_code == 0, told(done)
    some = int(there.any(axis=1).sum())
    assert f"200 records (no finding {200 - some}, findings {some}); 0 rows broken" in told(done)
    for name in FINDINGS:
        assert f"{name} {there[name].sum()}" in told(done)
        row = f"|{name}||{there[name].sum()}||{200 - there[name].sum()}|"
        assert row in re.sub(r"</?t[hd]\b[^>]*>", "|", page.read_text())
    (first, *_) = describe(made, TableSite(file=file)).columns
    assert sum(map(sum, first.counts.values())) == 200, "each record once, however many findings it has"

    where = ("--sites", "site-1,site-2,site-3", "-o", tmp_path / "job")
    done = typed("jobs", "export", "--method", "fedavg", "--contract", output, *where)
    assert done.exit_code == 0, told(done)


def test_a_finding_without_a_value_breaks_the_contract_or_is_absent(tmp_path: Path) -> None:
    file, output = tmp_path / "table.csv", tmp_path / "contract.json"
    frame = findings_table(file)
    frame.loc[[3, 7], "edema"] = None
    frame.loc[5, "nodule"] = "perhaps"
    frame.loc[9, "nodule"] = "ja"
    frame.to_csv(file, index=False)
    label = {"findings": [{"column": "edema"}, {"column": "nodule"}]}
    values = contract(columns=[{"column": "v0", "kind": "number", "low": -1, "high": 99}], label=label)
    output.write_text(json.dumps(values))
    config = findings_site(tmp_path, file, codes={"nodule": {"ja": "yes"}})
    done = typed("data", "check", "--contract", output, "--site-config", config)
    assert done.exit_code == 1
    assert "edema: no value" in told(done) and "nodule: a code that is no boolean" in told(done)
    assert "nodule: not in the contract: 'perhaps'" in told(done)

    label["findings"][0]["missing"] = "absent"
    made = Contract.model_validate({**values, "label": label})
    site = TableSite(file=file, codes={"nodule": {"ja": "yes"}})
    encoded = encode(read(made, site), made, site)
    expected = (frame[["edema", "nodule"]].replace("ja", "Yes") == "Yes").to_numpy()
    assert encoded.broken.nonzero()[0].tolist() == [5]
    np.testing.assert_array_equal(encoded.labels, expected.astype(int))


def test_a_column_of_classes_is_no_finding(tmp_path: Path) -> None:
    file = tmp_path / "table.csv"
    findings_table(file)
    done = typed("data", "init", file, "--label", "edema,v1", "-o", tmp_path / "contract.json")
    assert isinstance(done.exception, DataError) and done.exception.code == "TF-207"
    assert "'v1', as one of several findings" in told(done)
    done = typed("data", "init", file, "--label", "edema,efusion", "-o", tmp_path / "contract.json")
    assert isinstance(done.exception, DataError) and done.exception.code == "TF-204"
    assert not (tmp_path / "contract.json").exists()


def test_part_of_the_training_fold_is_held_out_from_records_with_findings(tmp_path: Path) -> None:
    file = tmp_path / "table.csv"
    frame = findings_table(file)
    frame["split"] = ["test" if row % 5 == 0 else "train" for row in range(len(frame))]
    frame.to_csv(file, index=False)
    values = contract(
        columns=[{"column": "v0", "kind": "number", "low": -1, "high": 99}],
        label={"findings": [{"column": name} for name in FINDINGS]},
        fold={"column": "split", "validation": 0.25},
    )
    made = Contract.model_validate(values)
    data = open_site(TableSite(file=file), TableOptions(contract=made))
    assert len(data.labels("test")) == 40
    assert len(data.labels("train")) + len(data.labels("validation")) == 160
    held = np.bincount(data.labels("validation").sum(axis=1), minlength=4)
    total = held + np.bincount(data.labels("train").sum(axis=1), minlength=4)
    assert np.all(abs(held - total / 4) <= 1)


@pytest.mark.parametrize("numbers", [False, True])
def test_a_table_of_few_possible_rows_is_told_before_any_job(tmp_path: Path, numbers: bool) -> None:
    tables, contract = rare.tables(tmp_path, numbers=numbers), tmp_path / "contract.json"
    contract.write_text(json.dumps(rare.job().dataset_options["contract"]))
    entry = {"file": str(tables["site-1"])}
    said = told(typed("data", "check", "--contract", contract, "-s", sites(tmp_path, a=entry)))
    found = re.search(
        r"at most 2 to the (\S+) rows are possible here, most by \w+ 1\.0, .*; .* 2 to the 24 \(TF-628\)",
        said,
    )
    assert found is None if numbers else found is not None and 1.9 <= float(found[1]) <= 2.5
