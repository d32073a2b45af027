"""A package of somebody else's adds a data set, a backbone and a method, by being installed."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support import forking

from tightframe import federation
from tightframe.errors import JobError
from tightframe.flare.simulation import simulator
from tightframe.learning import halves, stages
from tightframe.rounds.setup import prepare

JOB: dict[str, Any] = {
    "job_name": "vitals",
    "method": "vital_momentum",
    "dataset": "vital_signs",
    "model": "vital_mlp",
    "sites": ["site-1", "site-2", "site-3"],
    "min_sites": 3,
    "rounds": 2,
}
MOMENTUM = 0.5

# Both methods with the same seeds, so that they differ by what the server does alone.
TRAIN = f"""
import json, sys
import numpy as np
from tightframe import data, federation
spec = data.get("vital_signs")
sites = json.load(open("vitals.json"))["sites"]
silos = {{
    name: spec.open(spec.site.model_validate(site["data"]["vital_signs"]), spec.options())
    for name, site in sites.items()
}}
training = {{"epochs": 2, "batch_size": 16, "learning_rate": 0.1}}
tensors = {{}}
for method, options in (("fedavg", {{}}), ("vital_momentum", {{"server_momentum": {MOMENTUM}}})):
    for rounds in (1, 2):
        result = federation.run(
            method, silos, rounds, dataset="vital_signs", model="vital_mlp",
            method_options=options, training=training, summation="secure" if rounds == 2 else "plain",
        )
        assert result.outcome.trained
        for part in ("model", "extra"):
            for name, tensor in getattr(result.state, part).items():
                tensors[f"{{method}}/{{rounds}}/{{part}}/{{name}}"] = tensor.numpy()
        tensors[f"{{method}}/{{rounds}}/accuracy"] = result.outcome.final().test.accuracy
np.savez(sys.argv[1], **tensors)
"""


@pytest.fixture(scope="module")
def site(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to install into, as a site would, with ``docs/extension``."""
    folder = tmp_path_factory.mktemp("extension")
    shutil.copytree(root / "docs" / "extension", folder / "source")  # building leaves files behind
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    alone = ["--no-deps", "--no-build-isolation", "--no-index"]
    _run([*pip, "install", *alone, "--target", "site", "./source"], folder)  # by way of a wheel
    return folder / "site"


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three sites' vital signs, and the site configuration of the page with their places."""
    folder = tmp_path_factory.mktemp("records")
    random = np.random.default_rng(0)
    centers = random.normal(size=(3, 6))
    config = json.loads(_blocks("extension.md", "json")[0])
    for name, entry in config["sites"].items():
        arrays = {}
        for fold, count in (("train", 60), ("validation", 15), ("test", 30)):
            labels = random.integers(0, 3, count)
            arrays[f"y_{fold}"] = labels
            arrays[f"x_{fold}"] = centers[labels] + 0.5 * random.normal(size=(count, 6))
        np.savez(folder / f"{name}.npz", **arrays)
        entry["data"]["vital_signs"]["file"] = str(folder / f"{name}.npz")
    (folder / "vitals.json").write_text(json.dumps(config))
    return folder


def _run(command: list[str], folder: Path, path: Path | None = None) -> str:
    """Run a command and give what it printed; ``path`` is where an extension is installed."""
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PATH": programs} | ({} if path is None else {"PYTHONPATH": str(path)})
    environment = forking.environment(environment)
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def _blocks(page: str, language: str) -> list[str]:
    """The code blocks of one language on a page of ``docs/``."""
    text = (Path(__file__).resolve().parent.parent / "docs" / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.whole
def test_all_three_train_and_the_method_is_the_papers(site: Path, records: Path, tmp_path: Path) -> None:
    _run([sys.executable, "-c", TRAIN, str(tmp_path / "tensors.npz")], records, site)
    found = np.load(tmp_path / "tensors.npz")

    def model(method: str, rounds: int) -> dict[str, Any]:
        start = f"{method}/{rounds}/model/"
        return {name.removeprefix(start): found[name] for name in found.files if name.startswith(start)}

    names = model("fedavg", 1).keys()
    assert len(names) == 4, "two layers of weight and bias"
    for name in names:
        first, second = (model("vital_momentum", rounds)[name] for rounds in (1, 2))
        # There is nothing to repeat in round 1; the first step is half repeated in round 2.
        assert np.allclose(first, model("fedavg", 1)[name], rtol=0, atol=1e-6)
        step = -found[f"vital_momentum/1/extra/server/momentum/{name}"]  # the optimiser goes downhill
        assert np.abs(step).max() > 1e-3
        assert np.allclose(second, model("fedavg", 2)[name] + MOMENTUM * step, rtol=0, atol=1e-6)
    assert found["vital_momentum/2/accuracy"] > 0.8, "three separate classes are learned"


def test_what_is_not_installed_cannot_be_named() -> None:
    with pytest.raises(JobError) as caught:
        prepare(JOB)
    method, dataset, model = caught.value.problems
    assert re.search(r"method of \[.*'fedavg'.*'fedmr'.*\], but got 'vital_momentum'", method)
    assert re.search(r"data set of \[.*'fed_isic2019'.*\], but got 'vital_signs'", dataset)
    assert re.search(r"backbone of \[.*'small_cnn'.*\], but got 'vital_mlp'", model)
    assert caught.value.code == "TF-101"


@pytest.mark.whole
def test_what_is_installed_is_among_the_known_names(site: Path, tmp_path: Path) -> None:
    job = JOB | dict.fromkeys(("method", "dataset", "model"), "nothing")
    code = (
        f"from tightframe.rounds.setup import prepare\ntry: prepare({job!r})\nexcept Exception as e: print(e)"
    )
    said = _run([sys.executable, "-c", code], tmp_path, site)
    assert said.count("but got 'nothing'") == 3
    assert [f"'{JOB[key]}'" in said for key in ("method", "dataset", "model")] == [True] * 3


def test_the_example_is_about_thirty_lines_of_code(root: Path) -> None:
    text = (root / "docs" / "extension" / "tightframe_vitals.py").read_text(encoding="utf-8")
    bare = ast.parse(text)
    described = (ast.Module, ast.ClassDef, ast.FunctionDef)
    told = {
        number
        for node in ast.walk(bare)
        if isinstance(node, described) and ast.get_docstring(node)
        for number in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    }
    lines = [line for number, line in enumerate(text.splitlines(), 1) if line.strip() and number not in told]
    assert len(lines) <= 35


@pytest.mark.whole
def test_the_pages_own_loss_without_focus_is_the_cross_entropy() -> None:
    (cell,) = _blocks("extension.md", "python")
    names: dict[str, Any] = {}
    exec(cell, names)  # noqa: S102 (the page's own code)
    random = np.random.default_rng(0)
    silos = {
        name: (random.normal(size=(40, 6)).astype("float32"), random.integers(0, 3, 40)) for name in "abc"
    }

    def trained(method: Any, **options: float) -> dict[str, Any]:
        run = federation.run(method, silos, 1, model="mlp", method_options=options, seed=1)
        return {name: tensor.numpy() for name, tensor in run.state.model.items()}

    plain, focal = trained("fedavg"), trained(names["METHOD"], gamma=2.0)
    for name, same in trained(names["METHOD"], gamma=0.0).items():
        np.testing.assert_allclose(same, plain[name], atol=1e-6)
    assert any(abs(focal[name] - plain[name]).max() > 1e-4 for name in plain)


def test_the_pages_signatures_are_the_codes() -> None:
    (block,) = [text for text in _blocks("extension.md", "text") if "LocalRule(" in text]
    shown = dict(re.findall(r"^(\w+)\((.*?)\)", block, flags=re.MULTILINE))
    assert len(shown) == 7
    for name, values in shown.items():
        found = getattr(stages, name, None) or getattr(halves, name)
        assert values.split(", ") == list(inspect.signature(found).parameters), name


def test_the_pages_entry_points_are_the_packages(root: Path) -> None:
    (block,) = _blocks("extension.md", "toml")
    assert block.strip() in (root / "docs" / "extension" / "pyproject.toml").read_text(encoding="utf-8")


@pytest.mark.whole
def test_the_pages_listing_shows_what_is_installed(site: Path, tmp_path: Path) -> None:
    (line,) = [block for block in _blocks("extension.md", "sh") if block.startswith("python -c")]
    said = _run(["bash", "-c", line.replace("python", sys.executable, 1)], tmp_path, site)
    assert [f"tightframe_vitals:{item}" in said for item in ("DATASET", "BACKBONE", "METHOD")] == [True] * 3


@pytest.mark.whole
def test_the_engines_allow_list_need_not_know_of_it(site: Path, records: Path, tmp_path: Path) -> None:
    """The page's commands, in the engine's simulator with the list as it is."""
    shutil.copy(records / "vitals.json", tmp_path)
    (commands,) = [block for block in _blocks("extension.md", "sh") if block.startswith("tightframe jobs")]
    said = _run(["bash", "-c", f"set -e\n{commands}"], tmp_path, site)
    assert "FedAvg with server momentum (vital_momentum) on Vital signs with vital_mlp" in said
    workspace = tmp_path / "simulator_workspace"
    assert (workspace / "local" / "resources.json").read_text() == simulator.allow_list_text()
    assert "vital" not in simulator.allow_list_text()
    outcome = json.loads((workspace / "server" / "simulate_job" / "outcome.json").read_text())
    assert outcome["trained"] is True
