"""The files of the engine's recipes: as the engine's own writer makes them, found by its own command."""

from __future__ import annotations

import json
from pathlib import Path

from nvflare.apis.fl_context import FLContext
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.widgets.metrics_artifact_writer import METRICS_AGGREGATION_INFO, MetricsArtifactWriter
from nvflare.tool.job.job_cli import _discover_job_download_artifacts
from tests.support.results.building import evaluated, row

from tightframe.results import engine_files
from tightframe.results.files import MODEL

KEY = {"name": "test_balanced_accuracy", "mode": "max"}


class _Writer(MetricsArtifactWriter):
    """The engine's, writing into a folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._summary_file_path = str(folder / engine_files.SUMMARY)
        self._round_file_path = str(folder / engine_files.ROUNDS)


def test_the_engines_own_writer_makes_the_same(tmp_path: Path) -> None:
    rows = [row(n, "train", ["a"], evaluation=evaluated(accuracy=0.1 * n, auroc=None)) for n in (1, 2)]
    theirs = _Writer(tmp_path / "theirs")
    for item in rows:
        assert item.evaluation is not None
        folds = {"test": item.evaluation.test, "validation": item.evaluation.validation}
        names = ("accuracy", "balanced_accuracy", "auroc", "average_precision")
        scores = {f"{fold}_{name}": getattr(one, name) for fold, one in folds.items() for name in names}
        context, told = FLContext(), {name: value for name, value in scores.items() if value is not None}
        meta = {METRICS_AGGREGATION_INFO: {"key_metric": KEY}}
        model = FLModel(metrics=told, current_round=item.round, meta=meta)
        context.set_prop(AppConstants.AGGREGATION_RESULT, model)
        theirs._handle_after_aggregation(context)
    theirs._write_summary_if_needed(FLContext())
    (tmp_path / "ours").mkdir()
    engine_files.write(tmp_path / "ours", "study", [row(0, "start", []), *rows], (0.5, 2))

    def lines(name: str) -> list[object]:
        return [json.loads(line) for line in (tmp_path / name / engine_files.ROUNDS).read_text().splitlines()]

    assert lines("ours") == lines("theirs") and len(lines("ours")) == 2
    summary = json.loads((tmp_path / "ours" / engine_files.SUMMARY).read_text())
    written = json.loads((tmp_path / "theirs" / engine_files.SUMMARY).read_text())
    del written["notes"]
    assert {key: summary[key] for key in written} == written


def test_the_engines_download_finds_model_and_metrics(tmp_path: Path) -> None:
    results = tmp_path / "workspace"
    results.mkdir()
    (results / MODEL).write_bytes(b"model")
    engine_files.write(results, "study", [row(1, "train", ["a"], evaluation=evaluated())], None)
    found, missing = _discover_job_download_artifacts(str(tmp_path))
    assert found == {
        "global_model": str(results / MODEL),
        "metrics_summary": str(results / engine_files.SUMMARY),
        "round_metrics": str(results / engine_files.ROUNDS),
    }
    assert missing == ["client_logs"], "a hospital's log stays there"


def test_nothing_is_told_where_nothing_was_measured(tmp_path: Path) -> None:
    engine_files.write(tmp_path, "study", [row(1, "train", ["a"])], None)
    assert list(tmp_path.iterdir()) == []
