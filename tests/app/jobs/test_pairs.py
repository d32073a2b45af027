"""A job of every pair of method and data set, or a reason."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from tests.support import ROOT
from typer.testing import CliRunner

from tightframe.errors import JobError
from tightframe.methods import METHODS
from tightframe_app.cli import app
from tightframe_app.jobs import pairs, presets, recipes

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
    assert "the method's preset has: personalise=true, training.momentum=0.0\n" in result.output
    heart = ["jobs", "export", "--method", "fedprox", "--data", "fed_heart_disease"]
    assert "the method's preset has: personalise=true\n" in run.invoke(app, heart).output
    without = run.invoke(app, [*heart, "--set", "personalise=false"])
    assert without.exit_code == 0 and "preset has" not in without.output
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


def test_a_pair_has_the_methods_preset_and_every_method_has_one() -> None:
    assert set(presets.PRESETS) == {method.name for method in METHODS}, "app/tightframe_app/jobs/presets.py"
    base = recipes.get("fedavg_eicu").job()
    job = pairs.pair("fednh", "eicu").job()
    assert job.method_options["lr_decay"] == 0.99
    assert job.training == base.training.model_copy(update={"weight_decay": 1e-5, "momentum": 0.9})
    assert pairs.pair("scaffold", "eicu").job().training.momentum == 0.0


@pytest.mark.parametrize(
    ("dataset", "model", "options"),
    [
        ("fed_isic2019", "scattering", {"colours": "rgb", "width": 256, "J": 3}),
        ("eicu", "identity", {}),
        ("fed_heart_disease", "identity", {"standardise": True}),
    ],
)
@pytest.mark.parametrize(
    ("method", "method_options"),
    [("fed3r", {"priors": "balanced"}), ("fedcgs", {"priors": "balanced", "shrinkage": 0.4}), ("fedncm", {})],
)
def test_a_method_of_one_sum_gets_the_frozen_encoder_and_the_options_that_were_measured(
    method: str, method_options: dict[str, object], dataset: str, model: str, options: dict[str, object]
) -> None:
    job = pairs.pair(method, dataset).job()
    assert (job.model, job.model_options, job.personalise) == (model, options, False)
    assert job.method_options == method_options
    assert "oversample_minority" not in job.dataset_options and not job.training.augment


def test_a_preset_tells_truly_whether_each_hospital_gets_its_own_model() -> None:
    for method in METHODS:
        own = method.personalise is not None and method.one_sum is None
        assert presets.of(method.name).own_models == own, f"{method.name}: `own_models` in presets.py"
        assert ("personalise true" in presets.of(method.name).sets) == own
    of_another_package = presets.lines("theirs")
    assert len(of_another_package) == 2 and of_another_package[0].endswith("nothing beyond its defaults")


def test_an_effect_is_seen_only_where_five_seeds_leave_zero_out() -> None:
    values = {"method": "fednh", "options": "", "setting": "s", "baseline": "FedAvg", "command": "c"}
    cases = [
        ("accuracy, %", 2.0, 0.5, 3.5, 5, True),
        ("accuracy, %", 2.0, 0.5, 3.5, 4, False),
        ("accuracy, %", 2.0, -0.5, 4.5, 5, False),
        ("loss", -0.08, -0.13, -0.03, 5, True),
        ("loss", 0.08, 0.03, 0.13, 5, False),
    ]
    for measure, mean, low, high, seeds, seen in cases:
        effect = presets.Effect(**values, measure=measure, mean=mean, low=low, high=high, seeds=seeds)
        assert effect.seen == seen and f"{seeds} seeds" in effect.line


def test_the_command_shows_the_preset_and_what_was_measured() -> None:
    folder = Path(presets.__file__).parent
    measured = json.loads((folder / presets.FILE).read_text())
    assert all(presets.Effect(**values).method in presets.PRESETS for values in measured)
    shown = CliRunner().invoke(app, ["methods", "fednh"]).output
    assert (
        "preset (`tightframe jobs export --method fednh --data DATASET`)" in shown
        and "method_options.lr_decay 0.99" in shown
    )
    for values in measured:
        if values["method"] == "fednh":
            assert f"{values['mean']:+.1f} [{values['low']:+.1f}, {values['high']:+.1f}]" in shown
            assert values["command"] in shown
    assert "not measured here" in CliRunner().invoke(app, ["methods", "fedproto"]).output
    own = CliRunner().invoke(app, ["methods", "fedper"]).output
    assert "heart, own records: balanced accuracy -0.0" in own and "personalise true" in own


def test_options_of_an_installed_package_are_explained_and_a_wrong_word_is_told_shortly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = tmp_path / "tightframe_vitals-0.1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: tightframe-vitals\nVersion: 0.1.0\n")
    groups = tomllib.loads((ROOT / "docs/extension/pyproject.toml").read_text())["project"]["entry-points"]
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in of.items()) for group, of in groups.items()]
    (about / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "extension"))
    monkeypatch.syspath_prepend(str(tmp_path))
    for word, told in (
        ("vital_momentum", "server_momentum (0.9)"),
        ("vital_mlp", "The model `vital_mlp`"),
        ("vital_signs", "data.vital_signs.file (required)"),
    ):
        assert told in CliRunner().invoke(app, ["explain", word]).output
    wrong = CliRunner().invoke(app, ["explain", "vital_momentun"])
    assert wrong.exit_code == 2 and "'vital_momentum'" in wrong.output and len(wrong.output.splitlines()) < 12


def test_privacy_replaces_what_it_excludes_of_a_preset_but_no_value_that_is_set(tmp_path: Path) -> None:
    table = {"columns": [{"column": "a", "kind": "number", "low": 0, "high": 1}], "title": "t"}
    labels = [
        ("fedcgs", {"column": "y", "classes": [{"code": "0"}, {"code": "1"}]}),
        ("fedprox", {"findings": [{"column": "y"}, {"column": "z"}]}),
    ]
    for method, label in labels:
        (tmp_path / "contract.json").write_text(json.dumps({**table, "label": label}))
        recipe = pairs.pair_with_contract(method, tmp_path / "contract.json")
        job = recipe.job("full", changes={"privacy.epsilon": 2})
        assert (job.weights, job.personalise, job.local_baseline_epochs) == ("uniform", False, 0)
        own = {"personalise": False} if method == "fedprox" else {}
        assert recipe.adapted("rehearsal", {"privacy.epsilon": 2}) == {
            "weights": "uniform",
            **own,
            "model_options.standardise": False,
        }
        assert recipe.adapted("full", {}) == {} and recipe.job("full").weights == "exact"
        wrong = {"privacy.epsilon": 2, "weights": "exact", "model_options.standardise": True}
        with pytest.raises(JobError, match=r"--set weights=uniform --set model_options\.standardise=false"):
            recipe.job(changes=wrong)
    (tmp_path / "contract.json").write_text(json.dumps({**table, "label": labels[0][1]}))
    one_sum = pairs.pair_with_contract("fed3r", tmp_path / "contract.json")
    wide = {"model": "random_features", "model_options.width": 85}
    assert one_sum.job(changes=wide).model_options == {"width": 85, "standardise": True}
    assert one_sum.dropped("rehearsal", wide) == {}
    assert not one_sum.job(changes={**wide, "privacy.epsilon": 2}).model_options["standardise"]
    alone = pairs.pair_with_contract("local_only", tmp_path / "contract.json").job("full")
    assert not alone.model_options["standardise"]
