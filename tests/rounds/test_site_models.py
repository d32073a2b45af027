"""Silos that train models of their own architecture: whole runs, drop-outs, resumed runs, refusals."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from tests.rounds.server import test_resume
from tests.rounds.test_setup import HEART
from tests.support.jobs import SMALL
from tests.support.methods import lossy
from tests.support.runs import FOUR, twin
from torch.nn import functional

from tightframe import federation
from tightframe.config.job import parse_job
from tightframe.errors import JobError
from tightframe.learning.own_models import OWN
from tightframe.methods.fedproto import PROTOTYPES, VALID
from tightframe.rounds.setup import prepare
from tightframe_app.jobs import pairs

Tensors = dict[str, torch.Tensor]
# Beside a small CNN of three blocks: a network of fully connected layers, and a CNN of two blocks.
OTHERS = {
    "site-2": {"model": "mlp", "model_options": {"widths": [12, 8]}},
    "site-3": {"model": "small_cnn", "model_options": {"widths": [16, 8]}},
}


def _cnn(blocks: int) -> Callable[[Tensors, torch.Tensor], torch.Tensor]:
    def features(model: Tensors, inputs: torch.Tensor) -> torch.Tensor:
        for block in range(blocks):
            weight = model[f"backbone.{4 * block}.weight"]
            norm = (model[f"backbone.{4 * block + 1}.{name}"] for name in ("weight", "bias"))
            inputs = functional.group_norm(functional.conv2d(inputs, weight, padding=1), 8, *norm)
            inputs = functional.max_pool2d(inputs.relu(), 2)
        return inputs.mean((2, 3))

    return features


def _mlp(model: Tensors, inputs: torch.Tensor) -> torch.Tensor:
    found = inputs.flatten(1)
    for layer in (1, 3):
        found = (found @ model[f"backbone.{layer}.weight"].T + model[f"backbone.{layer}.bias"]).relu()
    return found


FEATURES = {"site-1": _cnn(3), "site-2": _mlp, "site-3": _cnn(2), "site-4": _cnn(3)}


def _run(folder: Path, summation: str, **values: Any) -> federation.Result:
    return federation.run(
        "fedproto",
        {site: twin(site) for site in FOUR},
        2,
        folder=folder,
        summation=summation,
        class_rules="off",
        personalise=True,
        **{key: SMALL[key] for key in ("dataset", "dataset_options", "model_options", "training", "seed")},
        **{"site_models": OTHERS, **values},
    )


def _prototypes(models: dict[str, Tensors]) -> NDArray[np.float64]:
    """The mean over holders of their class means of features, with models written out here."""
    means: dict[int, list[NDArray[np.float64]]] = {}
    for site, model in models.items():
        records, labels = twin(site).records("train"), np.asarray(twin(site).labels("train"))
        inputs = torch.stack([records[i][0] for i in range(len(labels))])
        found = FEATURES[site](model, inputs).double().numpy()
        for label in np.unique(labels):
            means.setdefault(int(label), []).append(found[labels == label].mean(axis=0))
    return np.stack([np.mean(means[label], axis=0) for label in sorted(means)])


@pytest.mark.whole
def test_a_run_of_three_architectures(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="tightframe.run")
    plain, secure = _run(tmp_path / "plain", "plain"), _run(tmp_path / "secure", "secure")
    assert "with small_cnn (site-2: mlp, site-3: another small_cnn);" in caplog.text
    for name in (PROTOTYPES, VALID):
        assert torch.equal(plain.state.extra[name], secure.state.extra[name])
    folder = tmp_path / "secure"
    models = {site: load_file(folder / site / "model.safetensors") for site in FOUR}
    for site, model in models.items():
        other = load_file(tmp_path / "plain" / site / "model.safetensors")
        assert model.keys() == other.keys() and all(torch.equal(model[name], other[name]) for name in model)
    valid = secure.state.extra[VALID].bool()
    found = secure.state.extra[PROTOTYPES][valid]
    np.testing.assert_allclose(found.double().numpy(), _prototypes(models), rtol=0, atol=2e-6)
    assert secure.state.model == {} and not (folder / "server" / "model.safetensors").exists()
    final = secure.outcome.final()
    assert final is not None and final.evaluation is not None
    tested = sum(len(twin(site).labels("test")) for site in FOUR)
    assert final.evaluation.test.records == tested, "each silo's own model is evaluated"
    assert secure.outcome.personal is not None and secure.outcome.personal.silos == len(FOUR)


@pytest.mark.usefixtures("pages")
def test_reports_name_the_architecture(tmp_path: Path) -> None:
    _run(tmp_path, "plain")
    told = {site: json.loads((tmp_path / site / "local_report.json").read_text())["model"] for site in FOUR}
    common = {"model": "small_cnn", "model_options": SMALL["model_options"]}
    assert told == {"site-1": common, "site-4": common, **OTHERS}
    page = (tmp_path / "site-2" / "report.html").read_text()
    assert "mlp (widths: [12, 8])" in page and "each silo has models of its own" in page
    server = (tmp_path / "server" / "report.html").read_text()
    assert "own models (small_cnn; others are mlp at site-2, small_cnn at site-3)" in server
    card = json.loads((tmp_path / "server" / "model.json").read_text())
    assert card["job"]["site_models"] == OTHERS and card["model_sha256"] is None


@pytest.mark.whole
def test_a_drop_out_goes_on_with_its_own_model_and_so_do_the_others(tmp_path: Path) -> None:
    asked = {"site_models": OTHERS, "model_options": {"widths": [8, 8, 8]}}
    _, once = lossy.run("fedproto", tmp_path / "once", (), rounds=1, **asked)
    _, kept = lossy.run("fedproto", tmp_path / "twice", {(2, "site-2")}, rounds=2, **asked)
    for site in FOUR:
        assert kept[site].keys() == once[site].keys()
        same = all(torch.equal(kept[site][name], once[site][name]) for name in once[site])
        assert same == (site == "site-2"), "only what was summed is taken up"
    assert kept["site-2"][f"{OWN}backbone.1.weight"].shape == (12, 3 * 16 * 16)


@pytest.mark.whole
def test_a_resumed_run_ends_as_the_unbroken_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="tightframe.run")
    others = {"site-2": {"model": "mlp", "model_options": {"widths": [6, 4]}}}
    wanted = test_resume.job(method="fedproto", model_options={"widths": [4]}, site_models=others)
    whole = test_resume.run_job(wanted, folder=tmp_path / "whole")
    going_on = test_resume.stopped(wanted, tmp_path / "broken")
    assert going_on.site_models == wanted.site_models
    found = test_resume.run_job(going_on, folder=tmp_path / "resumed", stopped=tmp_path / "broken")
    assert test_resume.same(found.state.extra, whole.state.extra)
    assert test_resume.rows(tmp_path / "resumed") == test_resume.rows(tmp_path / "whole")
    for site in wanted.roster:
        ours, theirs = (tmp_path / run / site / "model.safetensors" for run in ("resumed", "whole"))
        assert ours.read_bytes() == theirs.read_bytes()


MLP: dict[str, Any] = {"model": "mlp", "model_options": {"widths": [4]}}


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        (
            {"site-22": MLP},
            "site_models: site-22: no such site of `sites`: did you mean 'site-2'[?] Known are site-1, ",
        ),
        ({"site-2": {"model": "huge"}}, "site_models.site-2.model: .*huge"),
        ({"site-2": {"model_options": {}}}, "site_models.site-2.model: Field required"),
        ({"site-2": {**MLP, "layers": 3}}, "site_models.site-2.layers: no such key: .*Known are model, "),
        (
            {"site-2": {"model": "mlp", "model_options": {"width": [4]}}},
            "site_models.site-2.model_options.width: no such key: did you mean 'widths'",
        ),
        ({"site-2": {"model": "small_cnn"}}, r"site_models.site-2.model: Expected small_cnn to get images"),
        (
            {"site-3": {"model": "mlp", "model_options": {"widths": [4, 6]}}},
            r"site_models.site-3: Expected a model of feature width 4, as that of the job's mlp, because "
            r"fedproto's sums have it, but got mlp of width 6",
        ),
        (
            {"site-3": {"model": "mlp", "model_options": {"widths": [4], "standardise": True}}},
            "site_models.site-3.model_options.standardise: fedproto has no global model",
        ),
        ([MLP], "site_models: "),
    ],
)
def test_what_cannot_be_is_refused(asked: Any, problem: str) -> None:
    with pytest.raises(JobError, match=problem) as caught:
        prepare({**HEART, "method": "fedproto", "site_models": asked})
    assert caught.value.code == "TF-101" and len(caught.value.problems) == 1


def test_all_problems_come_at_once() -> None:
    wide = {"model": "mlp", "model_options": {"widths": [9]}}
    asked = {"site-1": wide, "site-2": {"model": "small_cnn"}, "site-3": wide}
    with pytest.raises(JobError) as caught:
        prepare({**HEART, "method": "fedproto", "site_models": asked, "local_baseline_epochs": 1})
    places = [problem.partition(":")[0] for problem in caught.value.problems]
    assert places == [
        "local_baseline_epochs",
        "site_models.site-1",
        "site_models.site-2.model",
        "site_models.site-3",
    ]


def test_nothing_may_be_called_as_what_the_engine_would_build() -> None:
    built = {**MLP, "model_options": {"path": "x"}}
    with pytest.raises(JobError, match=r"site_models.b.model_options: no key may be called \['path'\]"):
        prepare({**HEART, "method": "fedproto", "sites": ["a", "b", "c"], "site_models": {"b": built}})
    with pytest.raises(JobError, match=r"site_models: no key may be called \['name'\]"):
        prepare({**HEART, "method": "fedproto", "sites": ["name", "b", "c"], "site_models": {"name": MLP}})


@pytest.mark.parametrize("method", ["fedavg", "ditto", "fedper"])
def test_a_method_with_a_global_model_has_one_for_all(method: str) -> None:
    refused = f"site_models: {method} has a global model.* with fedproto, local_only"
    with pytest.raises(JobError, match=refused):
        prepare({**HEART, "method": method, "site_models": {"site-2": MLP}})


def test_a_model_that_cannot_take_the_records_is_refused_by_name() -> None:
    with pytest.raises(JobError, match="Expected small_cnn to get images"):
        prepare({**HEART, "method": "fedproto", "model": "small_cnn", "model_options": {}})


def test_alone_silos_need_no_common_width(tmp_path: Path) -> None:
    values = {key: HEART[key] for key in ("dataset", "model", "model_options", "training", "seed")}
    others = {"site-2": {"model": "mlp", "model_options": {"widths": [7, 5]}}}
    result = federation.run("local_only", FOUR[:3], 1, folder=tmp_path, site_models=others, **values)
    assert result.outcome.trained
    heads = {site: load_file(tmp_path / site / "model.safetensors")["head.weight"] for site in FOUR[:3]}
    assert {site: head.shape[1] for site, head in heads.items()} == {"site-1": 4, "site-2": 5, "site-3": 4}


def test_jobs_without_it_are_what_they_were() -> None:
    job = parse_job(SMALL)
    assert "site_models" not in job.model_dump(mode="json")
    assert job.sha256() == parse_job({**SMALL, "site_models": {}}).sha256()
    other = parse_job({**SMALL, "site_models": {"site-2": MLP}})
    assert other.sha256() != job.sha256() and parse_job(other.model_dump(mode="json")) == other


def test_a_job_is_exported_with_it() -> None:
    recipe = pairs.pair("fedproto", "fed_isic2019")
    own = {"site_models.site-2.model": "mlp", "site_models.site-2.model_options.widths": [64, 128]}
    job = recipe.job(changes=own)
    assert job.model_at("site-2").model_options == {"widths": [64, 128]}
    assert job.model_at("site-1").model == job.model == "small_cnn"
    told = recipe.described(job, "rehearsal")
    assert told == "FedProto on Fed-ISIC2019 with small_cnn (site-2: mlp), personal models"
