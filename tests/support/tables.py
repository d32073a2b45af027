"""Small tables with a contract, for tests: as a job has it, and as files of sites."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tightframe.config.job import JobConfig
from tightframe.data.contract import Contract
from tightframe.data.table import TableOptions, TableSite

WARD: dict[str, Any] = {
    "title": "My ward",
    "columns": [
        {"column": "age", "kind": "number", "unit": "years", "low": 0, "high": 100},
        {"column": "sex", "kind": "category", "vocabulary": ["female", "male"]},
        {"column": "smoker", "kind": "boolean", "missing": "indicator"},
        {
            "column": "pain",
            "kind": "category",
            "vocabulary": ["none", "mild", "strong"],
            "missing": "indicator",
        },
        {"column": "weight", "kind": "number", "unit": "kg", "low": 20, "high": 220, "missing": "fill"},
    ],
    "label": {
        "column": "outcome",
        "classes": [{"code": "0", "title": "well"}, {"code": "1", "title": "ill"}],
    },
    "record": "id",
}
FOUR = ["site-1", "site-2", "site-3", "site-4"]
HEADER = ("id", "age", "sex", "smoker", "pain", "weight", "outcome")


def contract(**changes: Any) -> dict[str, Any]:
    """The ward's contract with other values; None takes a key out."""
    values = {**json.loads(json.dumps(WARD)), **changes}
    return {key: value for key, value in values.items() if value is not None}


def statistics_job(**changes: Any) -> dict[str, Any]:
    """A job that sums statistics of the ward's tables."""
    values = {
        "job_name": "statistics",
        "method": "statistics",
        "model": "identity",
        "dataset": "table",
        "dataset_options": {"contract": contract()},
        "sites": FOUR,
        "min_sites": 3,
        "rounds": 0,
        "weights": "uniform",
        "statistics": {},
    }
    return json.loads(json.dumps({**values, **changes}))


def taken(path: Path, job: JobConfig) -> dict[str, Any]:
    """A site's data: a table, and the job's contract as the one that it takes."""
    given = Contract.model_validate(job.dataset_options["contract"])
    return {"table": {"file": str(path), "contract": given.sha256()}}


def ward_rows(count: int = 60) -> list[list[str]]:
    """Rows that keep the ward's contract."""
    pains = ("none", "mild", "strong")
    return [
        [
            *(f"r{row}", str(20 + row % 70), ("female", "male")[row % 2], ("yes", "no")[row % 3 == 0]),
            *(pains[row % 3], f"{50 + row % 40}.5", str(row % 2)),
        ]
        for row in range(count)
    ]


def write(
    path: Path, rows: Iterable[Sequence[str]], header: Sequence[str] = HEADER, delimiter: str = ","
) -> Path:
    """Write a text file as it is, without quotes."""
    text = "".join(delimiter.join(row) + "\n" for row in [header, *rows])
    path.write_text(text, encoding="utf-8")
    return path


def site(path: Path, **values: Any) -> TableSite:
    """A site's entry."""
    return TableSite.model_validate({"file": str(path), **values})


def options(values: Mapping[str, Any] = WARD) -> TableOptions:
    """A job's options with a contract."""
    return TableOptions(contract=Contract.model_validate(values))
