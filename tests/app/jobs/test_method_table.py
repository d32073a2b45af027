"""``tightframe methods``: every method is listed, and the numbers are those of terms as they travel."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tightframe.errors import JobError
from tightframe.methods import METHODS
from tightframe.rounds import codec
from tightframe_app.cli import app
from tightframe_app.jobs import method_table
from tightframe_app.kept_files import ANEW


def test_what_is_kept_is_what_the_code_says() -> None:
    kept = {item.name: item for item in method_table.kept()}
    now = {method.name: method_table.describe(method.name) for method in METHODS}
    stale = sorted(name for name in kept.keys() | now.keys() if kept.get(name) != now.get(name))
    assert stale == [] and list(kept) == list(now), f"{method_table.KEPT.name} is stale: {ANEW}"


def test_a_file_of_other_code_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(method_table, "KEPT", tmp_path / "method_sums.json")
    method_table.KEPT.write_text('[{"name": "fedavg", "each_round": [], "once": [], "of_yesterday": 1}]')
    with pytest.raises(ValueError, match=r"method_sums.json .* is stale: .*python -m tightframe_app\.kept"):
        method_table.kept()


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_the_bytes_are_those_of_encoded_terms(method: object) -> None:
    name = method.name  # type: ignore[attr-defined]
    found, setup = method_table.describe(name), method_table.setup_of(name, method_table.LIKE)
    sizes = []
    for number in range(1, setup.job.rounds + 1):
        total = 0
        for exchange in setup.plan.round(number):
            schema = exchange.phase.schema
            zeros = {item.name: torch.zeros(item.shape, dtype=torch.float64) for item in schema.fields}
            total += sum(len(part) for part in codec.encode(schema, zeros, share=1.0, parties=6).values())
        sizes.append(total)
    assert found.upload == max(sizes) > 0
    assert bool(found.upload_once) == bool(found.once)
    assert found.sums == max(len(setup.plan.round(number)) for number in range(1, setup.job.rounds + 1))


def test_sizes_are_those_of_the_job_exported_with_an_own_contract(tmp_path: Path) -> None:
    columns = [{"column": name, "kind": "number", "low": 0, "high": 1} for name in "abc"]
    label = {"column": "y", "classes": [{"code": "0"}, {"code": "1"}]}
    path = tmp_path / "contract.json"
    path.write_text(json.dumps({"title": "t", "columns": columns, "label": label}))
    found = method_table.describe("fed3r", contract=path)
    assert found.opened["G, products of features, d (d + 1) / 2"] == 6, "of three columns"
    assert found.upload_once < method_table.describe("fed3r").upload_once
    done = CliRunner().invoke(app, ["methods", "fed3r", "--contract", str(path)])
    assert f"of {path}, its default" in " ".join(done.output.split()) and "6 of G," in done.output
    path.write_text(
        json.dumps(
            {"title": "t", "columns": columns, "label": {"findings": [{"column": "y"}, {"column": "z"}]}}
        )
    )
    with pytest.raises(JobError):
        method_table.describe("fednh", contract=path)
    listed = [item.name for item in method_table.computed(None, method_table.LIKE, path)]
    assert "fedavg" in listed and "fednh" not in listed


def test_what_is_told_of_some_methods() -> None:
    fedmr, fedilc, ccvr, fedavg = (
        method_table.describe(name) for name in ("fedmr", "fedilc", "ccvr", "fedavg")
    )
    assert fedmr.each_round == (
        "prototype/feature_sums (8 x 128), by class",
        "prototype/counts (8), by class",
    )
    assert fedilc.sums == 2 and fedilc.each_round[0] == method_table.NO_UPDATE and fedilc.private
    assert fedavg.each_round == fedavg.once == () and fedavg.private is None
    assert not fedavg.shares_noise and not fedilc.shares_noise
    fedsgd = method_table.describe("fedsgd")
    assert fedsgd.shares_noise and fedsgd.each_round[0] == method_table.NO_UPDATE and fedsgd.rounded
    assert ccvr.rounded and fedilc.rounded and not fedmr.rounded
    assert ccvr.each_round == () and "moments/sums (8 x 128), by class" in ccvr.once


def test_the_table_has_every_method() -> None:
    result = CliRunner().invoke(app, ["methods"], env={"COLUMNS": "140"})
    assert result.exit_code == 0, result.output
    for method in METHODS:
        assert method.name in result.output
    single = CliRunner().invoke(app, ["methods", "fednh"])
    assert "Dai" in single.output and "--method fednh --contract CONTRACT.json" in single.output
    one = CliRunner().invoke(app, ["methods", "fed3r"], env={"COLUMNS": "200"}).output
    (sums,) = (item.once[0] for item in method_table.kept("fed3r"))
    assert sums == "frozen: 17,561 numbers in 7 fields"
    assert f"in a round, and {method_table.kept('fed3r')[0].upload_once:,} once" in one
    assert method_table.kept("fed3r")[0].upload_once > 17_561
    assert "per round, in place of the model's update, besides the mean losses: own/trained (1)" in one
    narrow = CliRunner().invoke(app, ["methods"], env={"COLUMNS": "60"}).output
    assert "\N{HORIZONTAL ELLIPSIS}" not in narrow
    shared = CliRunner().invoke(app, ["methods", "fedsgd"], env={"COLUMNS": "200"})
    assert "made by all silos together (privacy.noise: shared)" in shared.output
    assert "each with two exchanges" in single.output and "the same to the bit" in single.output


def test_an_unknown_method_names_the_known_ones() -> None:
    result = CliRunner().invoke(app, ["methods", "nothing"])
    assert result.exit_code and "'fedavg'" in str(result.exception)
