"""A job of every pair of method and data set, or a reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tightframe.errors import JobError
from tightframe.methods import METHODS
from tightframe_app.cli import app
from tightframe_app.jobs import pairs, recipes

# What does not go together, and the reason.
REFUSED = {
    ("fedproto", "fed_heart_disease"): "standardise: fedproto has no global model",
    ("local_only", "fed_heart_disease"): "standardise: local_only has no global model",
    ("fedaws", "eicu"): "whose head has a weight vector for each of the 2 classes",
}


@pytest.mark.parametrize("dataset", sorted(pairs.BASES))
@pytest.mark.parametrize("method", [method.name for method in METHODS])
def test_every_pair_is_a_valid_job_or_refused_with_the_reason(method: str, dataset: str) -> None:
    recipe = pairs.pair(method, dataset)
    if (method, dataset) in REFUSED:
        with pytest.raises(JobError, match=REFUSED[method, dataset]):
            recipe.job()
        return
    job = recipe.job()
    assert (job.method, job.dataset, job.job_name) == (method, dataset, recipe.name)
    assert job.sites and job.rounds and job.method_options == recipe.job().method_options
    known = {item.name for item in recipes.RECIPES}
    assert (recipe.name in known) == (recipe in recipes.RECIPES), "no pair takes a recipe's name"


def test_a_pair_with_a_recipe_is_that_recipe() -> None:
    assert pairs.pair("fedmr", "fed_isic2019") is recipes.get("fedmr_isic")
    assert pairs.pair("fedilc", "eicu") is recipes.get("fedilc_eicu")


def test_a_method_of_one_round_gets_it_in_whatever_job() -> None:
    job = recipes.get("fedmr_isic").job("full", changes={"method": "fed3r"})
    assert (job.method, job.rounds) == ("fed3r", 1)
    assert recipes.get("fedmr_isic").job("full", changes={"start": "fed3r"}).rounds == 50
    with pytest.raises(JobError, match="rounds: Expected 1 with fed3r"):
        recipes.get("fedmr_isic").job(changes={"method": "fed3r", "rounds": 4})


def test_the_command_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = CliRunner()
    result = run.invoke(app, ["jobs", "export", "--method", "scaffold", "--data", "eicu", "--rounds", "2"])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "exported" / "scaffold_eicu" / "meta.json").is_file()
    assert "SCAFFOLD on" in result.output
    assert run.invoke(app, ["jobs", "check", "exported/scaffold_eicu"]).exit_code == 0
    for words in (["fedmr_isic", "--method", "fednh"], ["--method", "fednh"], []):
        wrong = run.invoke(app, ["jobs", "export", *words])
        assert wrong.exit_code == 2 and "--data" in wrong.output
    stopped = run.invoke(app, ["jobs", "export", "--method", "fednh", "--data", "eicu", "--resume", "."])
    assert stopped.exit_code == 2 and "--resume" in stopped.output
    told = run.invoke(app, ["jobs", "export", "--help"], env={"COLUMNS": "300", "NO_COLOR": "1"}).output
    assert all(name in told for name in pairs.BASES) and "NAME with --set dataset=digits" in told
    unknown = run.invoke(app, ["jobs", "export", "--method", "fednh", "--data", "mri"])
    assert unknown.exit_code and "fed_heart_disease" in str(unknown.exception)
