"""Metrics files in the format of NVFlare's own recipes, which `nvflare job download` lists.

They hold the pooled values of ``metrics.jsonl`` and ``outcome.json``; ``sites`` is empty.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tightframe.files import write_atomically
from tightframe.results.files import MODEL
from tightframe.results.parts.evaluation import FoldMetrics
from tightframe.results.rows import Row

ROUNDS, SUMMARY = "metrics/round_metrics.jsonl", "metrics/metrics_summary.json"
MANIFEST = "artifact_manifest.json"
_SCORES = ("accuracy", "balanced_accuracy", "auroc", "average_precision")
_KEY = {"name": "test_balanced_accuracy", "mode": "max"}


def write(folder: Path, job_name: str, rows: Sequence[Row], best: tuple[float, int] | None) -> None:
    """Write the files into a run's folder; metrics only if a model was evaluated.

    Args:
        best: the best model's balanced accuracy on validation records, and its round.
    """
    measured = [row for row in rows if row.test is not None]
    if measured:
        (folder / ROUNDS).parent.mkdir(exist_ok=True)
        lines = "".join(json.dumps(_line(row), allow_nan=False) + "\n" for row in measured)
        write_atomically(folder / ROUNDS, lines.encode())
        write_atomically(folder / SUMMARY, _text(_summary(job_name, measured[-1], best)))
    if (folder / MODEL).is_file():
        write_atomically(
            folder / MANIFEST, _text({"schema_version": "1", "artifacts": {"global_model": MODEL}})
        )


def _text(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, indent=2, allow_nan=False) + "\n").encode()


def _line(row: Row) -> dict[str, Any]:
    return {
        "round": row.round,
        "aggregated_metrics": _metrics(row),
        "sites": [],
        "skipped_metrics": [],
        "key_metric": _KEY,
    }


def _summary(job_name: str, last: Row, best: tuple[float, int] | None) -> dict[str, Any]:
    notes = ["Computed from counts that were summed over the silos; no silo's own metrics are known."]
    if last.test is not None and last.test.noisy:
        notes.append("The counts carry noise: metrics.jsonl has the intervals.")
    summary: dict[str, Any] = {
        "schema_version": "1",
        "status": "metrics_reported",
        "final_round": last.round,
        "final_aggregated_metrics": _metrics(last),
        "round_metrics_file": ROUNDS.rpartition("/")[2],
        "notes": notes,
        "job_name": job_name,
        "key_metric": _KEY,
    }
    if best is not None:
        value, number = best
        summary |= {"best_round": number, "best_metrics": _named("validation", {"balanced_accuracy": value})}
    return summary


def _metrics(row: Row) -> list[dict[str, Any]]:
    """Return a row's scores on both folds, without missing ones."""
    if row.evaluation is None:
        return []
    folds = {"test": row.evaluation.test, "validation": row.evaluation.validation}
    return [item for name, fold in folds.items() for item in _named(name, _scores(fold))]


def _scores(fold: FoldMetrics) -> dict[str, float | None]:
    return {name: getattr(fold, name) for name in _SCORES}


def _named(fold: str, scores: dict[str, float | None]) -> list[dict[str, Any]]:
    return [{"name": f"{fold}_{name}", "value": value} for name, value in scores.items() if value is not None]
