"""A job cannot make the engine build anything but our controller and our executor.

That these two suffice for training is seen in `test_parity`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tightframe.data.isic.folder import IMAGES


def _reads_show(folder: Path) -> bool:
    """Whether this file system keeps the time of a file's last reading."""
    control = folder / "control"
    control.write_text("x")
    os.utime(control, (0, 0))
    control.read_text()
    return control.stat().st_atime > 0


def test_a_class_with_arguments_of_the_jobs_choice_is_not_built(
    export: Callable[..., Path], simulate: Callable[..., Any], tmp_path: Path
) -> None:
    """The engine would build it before any of our code sees the job, and it would read the file."""
    if not _reads_show(tmp_path):
        pytest.skip("this file system does not keep the time of a file's last reading")
    (tmp_path / "data" / IMAGES).mkdir(parents=True)
    victim = tmp_path / "victim"
    victim.write_text("image,target,center,fold\nwhat-nobody-should-read,0,0,train\n")
    os.utime(victim, (0, 0))
    folder = export(sites=3)
    for name in ("server", "client"):
        path = folder / "app" / "config" / f"config_fed_{name}.json"
        config = json.loads(path.read_text())
        place = config["workflows"][0] if name == "server" else config["executors"][0]["executor"]
        place["args"]["method_options"] = {
            "path": "tightframe.data.isic.fed_isic2019.FedIsic2019",
            "args": {"data_path": str(tmp_path / "data"), "split_path": str(victim)},
        }
        path.write_text(json.dumps(config))
    run = simulate(folder, threads=3)
    assert run.code != 0
    assert "ComponentNotAuthorized" in run.output and "FedIsic2019" in run.output
    assert not (run.server / "metrics.jsonl").exists() and not (run.server / "outcome.json").exists()
    assert victim.stat().st_atime == 0, "the job had a file read"
