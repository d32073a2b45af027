"""What a run says of itself at its end: whose records were counted how often, and what the numbers mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.metrics import accuracy_score, balanced_accuracy_score
from tests.support.pages import Page, said

from tightframe import federation
from tightframe.data.base import SiloData
from tightframe.data.image_sets import open_silos
from tightframe.federation import Result
from tightframe.results.parts.evaluation import FoldMetrics
from tightframe.rounds.setup import prepare

DIVIDED = {"partition": "iid", "silos": 3}


def trained(folder: Path, silos: dict[str, SiloData], **options: Any) -> Result:
    return federation.run(
        "fedavg",
        silos,
        2,
        dataset="digits",
        dataset_options=DIVIDED | options,
        model_options={"widths": [8, 16]},
        training={"epochs": 2, "batch_size": 16, "learning_rate": 0.05},
        personalise=True,
        folder=folder,
    )


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path, dict[str, SiloData]]:
    """Three silos of real digits that all test on the whole test part, as the papers do."""
    silos = open_silos("digits", **DIVIDED)
    folder = tmp_path_factory.mktemp("shared")
    return trained(folder, silos), folder, silos


@pytest.mark.whole
def test_a_shared_test_set_is_counted_once_a_silo_and_changes_no_metric(
    shared: tuple[Result, Path, dict[str, SiloData]],
) -> None:
    """By scikit-learn on each image once, and by what one silo counted alone."""
    result, folder, silos = shared
    records = list(silos["silo-0"].records("test"))  # type: ignore[call-overload]
    truth = [label for _, label in records]
    final = result.outcome.final()
    assert final is not None and final.evaluation is not None
    pooled = final.evaluation.test
    assert pooled.records == 3 * len(truth)

    server = folder / "server"
    card = json.loads((server / "model.json").read_text())
    model = prepare(card["job"]).setting.build_model()
    model.load_state_dict(dict(result.state.model))
    model.eval()
    with torch.no_grad():
        guess = model(torch.stack([image for image, _ in records])).argmax(1).tolist()
    assert pooled.accuracy == pytest.approx(accuracy_score(truth, guess), abs=1e-12)
    assert pooled.balanced_accuracy == pytest.approx(balanced_accuracy_score(truth, guess), abs=1e-12)
    assert pooled.accuracy > 0.3, "it has learned something that could be counted wrong"
    for silo in silos:
        alone = json.loads((folder / silo / "local_report.json").read_text())["global"]["test"]
        assert alone["records"] == len(truth)
        for name in ("accuracy", "balanced_accuracy", "auroc", "average_precision"):
            assert getattr(pooled, name) == pytest.approx(alone[name], rel=1e-6), name
        assert pooled.loss == pytest.approx(alone["loss"], abs=0.5 / len(truth)), "summed in whole steps"

    screen = result.outcome.screen()
    assert f"Test records of all silos ({3 * len(truth)}: the same {len(truth)} at each of 3 silos)" in screen
    assert "mean of 3 silos on the test records, which all share" in screen
    page, same = Page.of(server), f"all silos (the same {len(truth)} test records at each of 3 silos)"
    assert f"On the {3 * len(truth)} test records of {same} the final model has" in page.text
    assert f"test records counted, 3 times the same {len(truth)}" in page.text
    for title in ("The final model", "Recall by class", "Confusion matrix"):
        assert same in said(page.section(title)), title
    assert json.loads((server / "outcome.json").read_text())["test_shared"] is True


@pytest.mark.whole
def test_a_divided_test_set_is_counted_once(tmp_path: Path) -> None:
    few: dict[str, Any] = {"test": "own", "subset": 240, "test_subset": 90}
    silos = open_silos("digits", **DIVIDED, **few)
    result = trained(tmp_path, silos, **few)
    total = sum(len(silo.labels("test")) for silo in silos.values())
    assert f"Test records of all silos ({total}): " in result.outcome.screen()
    assert "mean of 3 silos on their own test records" in result.outcome.screen()
    assert "the same" not in said(Page.of(tmp_path / "server").section("Recall by class"))
    assert json.loads((tmp_path / "server" / "outcome.json").read_text())["test_shared"] is False

    rows = [
        row.model_copy(update={"evaluation": None}) if row.round == 1 else row for row in result.outcome.rows
    ]
    job = result.outcome.job | {"evaluation": {"models": 2}}
    for more, course in (({}, "from round 0 on: 0."), ({"job": job}, "after rounds 0, 2: 0.")):
        screen = result.outcome.model_copy(update={"rows": rows, **more}).screen()
        assert f"Balanced accuracy {course}" in screen and (" -> missing -> " in screen) == (not more)

    last = result.outcome.final()
    assert last is not None and last.evaluation is not None
    alone = result.outcome.model_copy(update={"rows": [last]}).screen()
    assert f"Balanced accuracy after round {last.round}: 0." in alone
    assert "Best round by validation" in screen and "Best round by validation" not in alone
    nothing = last.evaluation.model_copy(update={"test": FoldMetrics(records=0)})
    bare = last.model_copy(update={"evaluation": nothing, "evaluated_by": []})
    rows = [bare if row is last else row for row in result.outcome.rows]
    screen = result.outcome.model_copy(update={"rows": rows}).screen()
    assert "Test metrics: not measured, because too few" in screen and "Test records of" not in screen


@pytest.mark.whole
def test_personal_metrics_are_explained(shared: tuple[Result, Path, dict[str, SiloData]]) -> None:
    result, _, _ = shared
    found = result.outcome.personal
    assert found is not None
    screen = result.outcome.screen()
    assert f"PM(V) {found.valid_classes:.3f}: accuracy on the classes that a silo trained on" in screen
    assert f"PM(L) {found.label_share:.3f}: the same, each class at its share of the silo's" in screen
    assert "temporary" not in screen


@pytest.mark.whole
def test_real_records_that_the_job_divides_are_not_called_the_sites_own(
    shared: tuple[Result, Path, dict[str, SiloData]],
) -> None:
    result, _, _ = shared
    assert result.outcome.data == "scikit-learn's handwritten digits, real records (iid, seed 0)"
