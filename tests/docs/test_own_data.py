"""The guide to a table of one's own: its files are valid, and its commands lead from a file to a model."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
import sqlalchemy
from sklearn.datasets import load_breast_cancer
from tests.support import ROOT, postgres
from typer.testing import CliRunner

from tightframe import federation
from tightframe.config.job import parse_job
from tightframe.config.site import parse_single, parse_site_file
from tightframe.data.contract import Contract
from tightframe.data.table import TableSite
from tightframe_app.cli import app
from tightframe_app.jobs.folders import read_job

PAGE = (ROOT / "docs" / "own-data.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)


def test_its_contract_and_entries_are_valid() -> None:
    contract, file, database = (json.loads(text) for text in blocks("json"))
    assert Contract.model_validate(contract).features == (
        "radius",
        "side = right",
        "pregnant",
        "pregnant missing",
    )
    for values in (file, database):
        entry, _ = parse_single(values)
        assert TableSite.model_validate(entry.data["table"])


def test_it_names_every_key_of_contract_and_entry() -> None:
    for model in (Contract, TableSite):
        for name in model.model_fields:
            assert f"`{name}`" in PAGE or f'"{name}"' in PAGE, name


@pytest.fixture
def database(tmp_path: Path) -> Iterator[str]:
    """The address of a PostgreSQL; of an SQLite file where there is no such server."""
    if postgres.missing():
        yield f"sqlite:///{tmp_path / 'masses.db'}"
        return
    with postgres.cluster() as address:
        yield address


@pytest.mark.whole
def test_its_commands_lead_from_three_files_and_a_database_to_answers(
    tmp_path: Path, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With another name, code and unit at each site; the simulation in one process, its sums secure."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TABLE_DB_URL", database)
    bunch = load_breast_cancer(as_frame=True)
    frame = bunch.data.iloc[:, :5].rename(columns=lambda name: name.removeprefix("mean "))
    frame.insert(0, "id", [f"r{row}" for row in frame.index])
    frame.insert(1, "patient", [f"p{row // 2}" for row in frame.index])
    frame["diagnosis"] = bunch.target.map({0: "M", 1: "B"})
    parts = [frame[frame.index // 2 % 4 == site] for site in range(4)]
    parts[0].to_csv("masses.csv", index=False)
    parts[1].rename(columns={"radius": "Radius"}).to_csv("b.csv", index=False, sep=";", decimal=",")
    parts[2].assign(area=parts[2]["area"] / 100).to_parquet("c.parquet")
    own = parts[3].assign(diagnosis=parts[3]["diagnosis"].map({"M": "boesartig", "B": "gutartig"}))
    own.to_sql("masses", sqlalchemy.create_engine(database), index=False)
    query = {"url_env": "TABLE_DB_URL", "query": "SELECT * FROM masses"}
    tables = [
        {"file": "masses.csv"},
        {"file": "b.csv", "columns": {"Radius": "radius"}, "delimiter": ";", "decimal": ","},
        {"file": "c.parquet", "units": {"area": {"unit": "cm2", "factor": 100.0}}},
        {"database": query, "codes": {"diagnosis": {"boesartig": "M", "gutartig": "B"}}},
    ]
    for entry in tables:
        # Wider than what one file proposes: another site's largest value is set aside.
        entry |= {"file": str(tmp_path / str(entry["file"]))} if "file" in entry else {}
        entry |= {"invalid": "set_aside"}
    sites = {f"site-{number}": {"data": {"table": entry}} for number, entry in enumerate(tables, start=1)}
    Path("sites.json").write_text(json.dumps({"sites": sites}))
    commands = [line for block in blocks("sh") for line in block.splitlines()]
    wanted = ["data", "data", "data", "jobs", "site", "simulate", "predict", "jobs"]
    assert [line.split()[1] for line in commands] == wanted
    for line in commands:
        if line.split()[1] == "simulate":
            job = parse_job(read_job(Path(shlex.split(line)[2])))
            entries = parse_site_file(json.loads(Path("sites.json").read_text())).sites
            result = federation.run_job(job, entries=entries, folder=Path("simulator_workspace"))
            continue
        done = CliRunner().invoke(app, shlex.split(line)[1:])
        assert done.exit_code == 0, f"{line}\n{done.output}{done.exception}"
    assert Path("described.html").is_file() and Path("contract.notes.md").is_file()
    assert Path("simulator_workspace", "server", "report.html").is_file()
    own_words = ["--site-config", "sites.json", "--site", "site-2", "--name", "id", "-o", "b-answers.csv"]
    done = CliRunner().invoke(app, ["predict", "simulator_workspace", "b.csv", *own_words])
    assert done.exit_code == 0, f"{done.output}{done.exception}"
    answers = pd.read_csv("b-answers.csv", dtype=str).set_index("input")["answer"]
    assert (answers == parts[1].set_index("id")["diagnosis"]).mean() > 0.85
    answers = pd.read_csv("answers.csv", dtype=str).set_index("input")["answer"]
    truth = parts[0].set_index("id")["diagnosis"]
    assert answers.index.equals(truth.index) and (answers == truth).mean() > 0.85
    assert job.summation == "secure" and result.outcome.trained and not result.outcome.synthetic
    test = result.outcome.final().test
    assert test.records is not None and test.records > 50
    assert test.auroc is not None and test.auroc > 0.95, "an area in another unit would spoil it"
