"""The guide to statistics before training: its commands lead from four files to the page."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pandas as pd
import pytest
from sklearn.datasets import load_breast_cancer
from tests.support import ROOT
from tests.support.pages import Page
from typer.testing import CliRunner

from tightframe import federation
from tightframe.config.job import parse_job
from tightframe.config.site import parse_site_file
from tightframe.results.statistics import TableStatistics
from tightframe_app.cli import app
from tightframe_app.jobs.folders import read_job

PAGE = (ROOT / "docs" / "statistics.md").read_text(encoding="utf-8")


def commands(block: int) -> list[str]:
    found = re.findall(r"^```sh\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
    return [line for line in found[block].splitlines() if line]


def files(folder: Path) -> pd.DataFrame:
    """Four files, each with its own names, units and codes, and what the sites say of them."""
    bunch = load_breast_cancer(as_frame=True)
    frame = bunch.data.iloc[:, :3].rename(columns=lambda name: name.removeprefix("mean "))
    frame.insert(0, "id", [f"r{row}" for row in frame.index])
    frame.insert(1, "patient", [f"p{row}" for row in frame.index])
    frame["diagnosis"] = bunch.target.map({0: "M", 1: "B"})
    # So that one file has the whole range, and no record of another site is set aside.
    order = frame["radius"].sort_values(ascending=False).index
    frame = frame.loc[order].reset_index(drop=True)
    parts = [frame[frame.index % 4 == site] for site in range(4)]
    parts[0].to_csv(folder / "masses.csv", index=False)
    parts[1].rename(columns={"radius": "Radius"}).to_csv(folder / "b.csv", index=False, sep=";", decimal=",")
    parts[2].assign(radius=parts[2]["radius"] / 10).to_csv(folder / "c.csv", index=False)
    own = parts[3].assign(diagnosis=parts[3]["diagnosis"].map({"M": "boesartig", "B": "gutartig"}))
    own.to_csv(folder / "d.csv", index=False)
    tables = [
        {"file": "masses.csv"},
        {"file": "b.csv", "columns": {"Radius": "radius"}, "delimiter": ";", "decimal": ","},
        {"file": "c.csv", "units": {"radius": {"unit": "cm", "factor": 10.0}}},
        {"file": "d.csv", "codes": {"diagnosis": {"boesartig": "M", "gutartig": "B"}}},
    ]
    for entry in tables:
        entry |= {"file": str(folder / str(entry["file"])), "invalid": "set_aside"}
    sites = {f"site-{number}": {"data": {"table": entry}} for number, entry in enumerate(tables, start=1)}
    (folder / "sites.json").write_text(json.dumps({"sites": sites}))
    return frame


@pytest.mark.whole
def test_its_commands_lead_from_four_files_to_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The simulation in one process, its sums secure; numbers against pandas."""
    monkeypatch.chdir(tmp_path)
    frame = files(tmp_path)
    lines = commands(0)
    assert [line.split()[1] for line in lines] == ["data", "data", "jobs", "site", "simulate"]
    for line in lines[:-1]:
        done = CliRunner().invoke(app, shlex.split(line)[1:])
        assert done.exit_code == 0, f"{line}\n{done.output}{done.exception}"
    (noisy,) = commands(1)
    assert CliRunner().invoke(app, shlex.split(noisy)[1:]).exit_code == 0
    entries = parse_site_file(json.loads(Path("sites.json").read_text())).sites
    job = parse_job(read_job(Path(shlex.split(lines[-1])[2])))
    result = federation.run_job(job, entries=entries, folder=tmp_path / "run")
    assert job.summation == "secure" and result.outcome.ended == "counted"
    folder = tmp_path / "run" / "server"
    found = TableStatistics.read(folder)
    page = Page.of(folder)
    assert "Table 1" in page.titles()
    rows = {row[""]: row for row in page.tables("Table 1")[0]}
    radius = next(item for item in found.columns if item.column == "radius")
    for title, code in (("B", "B"), ("M", "M")):
        values = frame[frame["diagnosis"] == code]["radius"]
        count = found.records[title]
        assert count.value is not None and len(values) - 10 <= count.value <= len(values), "some set aside"
        moments = radius.classes[title].moments
        assert moments is not None and moments.mean is not None
        assert abs(moments.mean - values.mean()) < 0.2, "a radius in centimetres would spoil it"
        assert rows["radius: mean (deviation)"][title].startswith(f"{moments.mean:.4g}")
    assert "withheld" in page.text


def test_every_file_and_option_that_it_names_is_there() -> None:
    for name in ("statistics.json", "report.html", "min_class_count", "statistics.bins"):
        assert name in PAGE
