"""Local-only: a silo's rounds are its own training, and nothing but losses and hits is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support.methods import by_hand
from tests.support.pages import Page, said
from tests.support.runs import FOUR

from tightframe.errors import JobError
from tightframe.learning.own_models import OWN, TRAINED
from tightframe.methods.local_only import METHOD, LocalOnlyConfig
from tightframe_app.jobs import pairs


def test_rounds_are_the_silos_own_training(open_sum: Callable[..., Any]) -> None:
    setting = by_hand.setting_of(METHOD, LocalOnlyConfig())
    state, kept = by_hand.federate(METHOD, setting, 3, open_sum)
    assert not state.model and not state.extra
    for name, silo in by_hand.silos_of(setting).items():
        assert METHOD.own_model is not None
        model = setting.build_model()
        model.load_state_dict(dict(METHOD.own_model(silo, {})))
        for number in (1, 2, 3):
            by_hand.train(model, silo, number)
        mine = {key.removeprefix(OWN): item for key, item in kept[name].items()}
        by_hand.assert_models_agree(mine, model.state_dict())


def test_only_losses_are_told() -> None:
    setting = by_hand.setting_of(METHOD, LocalOnlyConfig())
    (phase,) = METHOD.plan(setting, 1, 1)
    names = [item.name for item in phase.schema.fields]
    assert names == [TRAINED.name, "training/loss", "training/cross_entropy"]
    assert phase.broadcast(METHOD.init_server(setting, 1)) == {}


@pytest.mark.whole
@pytest.mark.usefixtures("pages")
def test_a_whole_run_keeps_each_model_at_its_silo(tmp_path: Path) -> None:
    result = by_hand.whole_run("local_only", personalise=True, folder=tmp_path)
    assert result.outcome.trained and result.outcome.own_models
    server = [path for path in tmp_path.rglob("outcome.json")]
    assert len(server) == 1 and json.loads(server[0].read_text())["own_models"] is True
    assert not (server[0].parent / "model.safetensors").exists()
    assert json.loads((server[0].parent / "model.json").read_text())["model_sha256"] is None
    assert "there is no global model" in (server[0].parent / "report.html").read_text()
    reports = sorted(tmp_path.rglob("local_report.json"))
    assert len(reports) == len(FOUR)
    models = [load_file(path.parent / "model.safetensors") for path in reports]
    assert not torch.equal(models[0]["head.weight"], models[1]["head.weight"])
    for path, model in zip(reports, models, strict=True):
        own = load_file(path.parent / "personal_model.safetensors")
        assert all(torch.equal(own[name], model[name]) for name in model), "the personal model is that"
        assert "there is no global one" in (path.parent / "report.html").read_text()
    page = Page.of(server[0].parent)
    assert "final model" not in page.text and "each round's model" not in page.text
    assert "The silos' own models" in page.titles()
    assert "that the silos' own models find, all silos" in page.text
    assert "Test records of the silos' own models, all silos: rows" in page.text
    assert "of the silos' own models, which are evaluated after the last round only." in page.text
    assert "here each silo counts once, and there each record" in said(page.section("Personal models"))
    for path in reports:
        assert "Test records of this silo's own model (there is no global one)" in Page.of(path.parent).text
    screen = result.outcome.screen()
    assert "They were evaluated after the last round only" in screen and "missing" not in screen
    assert "the same models as above; here each silo counts once, there each record" in screen
    final = result.outcome.final()
    assert final is not None and final.evaluation is not None and result.outcome.personal is not None
    accuracy = [json.loads(path.read_text())["global"]["test"] for path in reports]
    records = sum(item["records"] for item in accuracy)
    pooled = sum(item["accuracy"] * item["records"] for item in accuracy) / records
    assert final.evaluation.test.accuracy == pytest.approx(pooled)


def test_what_needs_a_global_model_is_refused() -> None:
    with pytest.raises(JobError, match="local_only has no global model with which pooled moments"):
        pairs.pair("local_only", "fed_heart_disease").job()
    with pytest.raises(JobError, match="local_baseline_epochs: local_only has no global model"):
        pairs.pair("local_only", "fed_isic2019").job(changes={"local_baseline_epochs": 3})
