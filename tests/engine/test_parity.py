"""Two rounds through NVFlare equal two rounds in one process, bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine

IN_PROCESS = """
import json, sys
from pathlib import Path
from tightframe import federation
from tightframe.config.job import parse_job
from tightframe_app import recipes
federation.run_job(parse_job(recipes.read_job(Path(sys.argv[1]))), folder=Path(sys.argv[2]))
"""


@pytest.mark.parametrize("threads", [None, 6], ids=["no flag", "-t 6"])
def test_nvflare_equals_in_process(
    export: Callable[..., Path], simulate: Callable[..., Any], tmp_path: Path, threads: int | None
) -> None:
    job = export(changes={"training.epochs": 1})
    alone = subprocess.run(
        [sys.executable, "-c", IN_PROCESS, str(job), str(tmp_path / "alone")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert alone.returncode == 0, alone.stderr
    run = simulate(job, threads=threads)
    assert run.code == 0, run.output
    expected = tmp_path / "alone" / "server"
    for name in ("model.safetensors", "best_model.safetensors", "checkpoint.safetensors"):
        assert (run.server / name).read_bytes() == (expected / name).read_bytes(), name
    mine = [json.loads(line) for line in (expected / "metrics.jsonl").read_text().splitlines()]
    assert [row["evaluation"] for row in run.rows] == [row["evaluation"] for row in mine]
    for site in ("site-1", "site-6"):
        kept = run.workspace / site / "simulate_job"
        assert (kept / "model.safetensors").read_bytes() == (expected / "model.safetensors").read_bytes()
        assert json.loads((kept / "local_report.json").read_text())["silo"] == site
