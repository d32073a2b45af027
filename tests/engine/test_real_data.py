"""The same job on real dermoscopy images of four centres, through NVFlare."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CENTRES = {"site-1": 1, "site-2": 2, "site-3": 3, "site-4": 5}


def test_two_rounds_on_the_ham_four_centre_subset(
    export: Callable[..., Path], simulate: Callable[..., Any], real_data: Path
) -> None:
    root = real_data / "fed_isic_ham"
    if not root.is_dir():
        pytest.skip(f"no real images: {root} does not exist")
    job = export(sites=4, changes={"dataset_options.image_size": 32, "training.batch_size": 32})
    sites = {
        site: {"data": {"fed_isic2019": {"root": str(root), "center": centre}}}
        for site, centre in CENTRES.items()
    }
    run = simulate(job, threads=4, site_config={"sites": sites})
    assert run.code == 0, run.output
    assert "SYNTHETIC" not in run.output
    assert run.outcome["synthetic"] is False
    with (root / "train_test_split").open() as stream:
        tests = [
            row
            for row in csv.DictReader(stream)
            if row["fold"] == "test" and int(row["center"]) in CENTRES.values()
        ]
    final = run.outcome["evaluation"]["test"]
    assert final["records"] == len(tests) == 339
    by_class = [0] * 8
    for row in tests:
        by_class[int(row["target"])] += 1
    assert list(final["class_records"].values()) == by_class
    assert [row["silos"] for row in run.rows if row["kind"] == "train"] == [list(CENTRES)] * 2
    report = json.loads((run.workspace / "site-4" / "simulate_job" / "local_report.json").read_text())
    assert sum(report["records"]["test"].values()) == 33
    for path in run.server.rglob("*"):
        if path.is_file() and path.suffix in (".json", ".jsonl", ".txt"):
            text = path.read_text(errors="replace")
            assert "ISIC_00" not in text, f"an image's name reached {path.name}"
            assert "fed_isic_ham" not in text, f"a site's path reached {path.name}"
