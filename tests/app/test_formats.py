"""``--format json`` on every command that shows something, by published schemas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from jsonschema import Draft202012Validator, ValidationError
from tests.app.test_reports import OUTCOME
from tests.support import ROOT
from tests.support.outputs import PUBLISHED, checked
from tests.support.tables import WARD, contract, ward_rows, write
from typer.testing import CliRunner, Result

from tightframe_app import outputs
from tightframe_app.cli import app
from tightframe_app.jobs import folders, recipes

ACT = {
    *("simulate", "predict", "export", "schema"),
    *("jobs export", "jobs sign", "jobs submit", "jobs fetch"),
    *("data init", "data split", "data prepare isic2019", "data prepare eicu"),
    *("federation init", "federation certify", "federation add-site"),
    *("site join", "site start", "site stop", "site leave", "site serve", "site page"),
    *("site cohort accept", "site release accept", "site model accept", "ledger begin"),
}
"""Commands that change or make something. All others show, and have a form for programs."""


def commands(group: Any, name: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part, command in group.commands.items():
        whole = f"{name} {part}".strip()
        found |= commands(command, whole) if hasattr(command, "commands") else {whole: command}
    return found


def _of_json(option: Any) -> bool:
    return "--format" in option.opts and option.default in ("text", "table")


def typed(*arguments: object) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)])


def test_every_command_that_shows_something_has_it() -> None:
    known = commands(typer.main.get_command(app))
    having = {name for name, command in known.items() if any(map(_of_json, command.params))}
    having.discard("export")  # its --format is that of a model
    assert having == set(outputs.OUTPUTS) and known.keys() - having == ACT


def test_the_published_schemas_are_those_of_the_models() -> None:
    written = PUBLISHED.read_text(encoding="utf-8")
    assert written == typed("schema", "--all").stdout, "tightframe schema --all > docs/output-schemas.json"
    published = json.loads(written)
    for name, schema in published.items():
        Draft202012Validator.check_schema(schema)
        assert json.loads(typed("schema", *name.split()).stdout) == schema
    assert typed("schema").stdout.splitlines() == list(outputs.OUTPUTS)
    assert typed("schema", "ledger", "shw").exit_code == 2


def test_the_oracle_refuses_what_no_command_prints() -> None:
    with pytest.raises(ValidationError):
        checked("jobs list", '{"format": 1, "jobs": [{"name": "a"}]}')


def test_lists() -> None:
    jobs = checked("jobs list", typed("jobs", "list", "--format", "json").stdout)["jobs"]
    assert [item["name"] for item in jobs] == [recipe.name for recipe in recipes.RECIPES]
    files = checked("provisioning show", typed("provisioning", "show", "--format", "json").stdout)["files"]
    names = typed("provisioning", "show").stdout.split()
    assert [item["name"] for item in files] == names
    one = checked(
        "provisioning show", typed("provisioning", "show", "local/privacy.json", "--format", "json").stdout
    )
    assert one["files"][0]["content"] == typed("provisioning", "show", "local/privacy.json").stdout
    (method,) = checked("methods", typed("methods", "fedsgd", "--format", "json").stdout)["methods"]
    assert method["shares_noise"] and method["private"] is None and method["upload"] > 0


def test_job_folders(tmp_path: Path) -> None:
    folders.write_job(folders.job_files(recipes.get("fedncm_heart").job()), tmp_path / "job")
    done = typed("jobs", "check", tmp_path / "job", "--format", "json")
    (told,) = checked("jobs check", done.stdout)["folders"]
    assert done.exit_code == 0 and not told["problems"] and told["signature"].startswith("not signed")
    (tmp_path / "job" / "more.txt").touch()
    done = typed("jobs", "check", tmp_path / "job", "--format", "json")
    values = checked("jobs check", done.stdout)
    assert done.exit_code == 1 and not values["valid"] and "more.txt" in values["folders"][0]["problems"][0]


def test_results(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        job = {"dataset": "digits", "seed": 1, "rounds": 2 if name == "one" else 3}
        (tmp_path / name / "outcome.json").write_text(json.dumps(OUTCOME | {"job": job}))
    told = checked("report", typed("report", tmp_path / "one", "--format", "json").stdout)
    assert told["of"] == "server" and not told["trained"] and Path(told["page"]).is_file()
    assert told["balanced_accuracy"] is None
    told = checked("compare", typed("compare", tmp_path / "one", tmp_path / "two", "--format", "json").stdout)
    assert told["differing"] == {"rounds": [2, 3]} and len(told["runs"]) == 2
    silo = tmp_path / "silo"
    silo.mkdir()
    kept = ROOT / "tests/results/before_formats/exact/local_report.json"
    (silo / "local_report.json").write_bytes(kept.read_bytes())
    assert checked("report", typed("report", silo, "--format", "json").stdout)["of"] == "silo"


def test_records_against_a_contract(tmp_path: Path) -> None:
    agreed, config = tmp_path / "contract.json", tmp_path / "sites.json"
    agreed.write_text(json.dumps(contract()))
    rows = ward_rows()
    rows[3][1] = "-1"
    entries = {"a": write(tmp_path / "a.csv", rows), "b": write(tmp_path / "b.csv", ward_rows())}
    sites = {name: {"data": {"table": {"file": str(file)}}} for name, file in entries.items()}
    config.write_text(json.dumps({"sites": sites}))
    options = ["--contract", agreed, "-s", config, "--format", "json"]
    done = typed("data", "check", *options)
    told = checked("data check", done.stdout)
    assert done.exit_code == 1 and not told["valid"]
    first, second = ({item["state"] for item in site["findings"]} for site in told["sites"])
    assert "problem" in first and "problem" not in second
    told = checked("data describe", typed("data", "describe", *options).stdout)
    age = told["sites"][1]["columns"][0]
    numbers = [float(row[1]) for row in ward_rows()]
    assert age["name"] == WARD["columns"][0]["column"] and age["unit"] == "years"
    assert age["mean"] == pytest.approx(sum(numbers) / len(numbers))
    assert told["sites"][0]["broken"] == 1
