"""``tightframe export``: what other programs run gives what the model gives, or is not written."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import tightframe
from tightframe import federation, models
from tightframe.data.image_sets import open_silos
from tightframe.errors import ModelError
from tightframe.inference import exports
from tightframe.models import BACKBONES
from tightframe.results.files import PERSONAL
from tightframe_app.cli import app

OPTIONS = {"partition": "iid", "silos": 3, "subset": 150, "test_subset": 60, "test": "own"}
SMALL: dict[str, Any] = {
    "dataset": "digits",
    "dataset_options": OPTIONS,
    "model_options": {"widths": [8, 8, 16]},
    "training": {"epochs": 1, "batch_size": 16, "momentum": 0.0},
    "summation": "plain",
    "min_sites": 3,
}


FEW: dict[str, dict[str, Any]] = {
    "scattering": {"J": 2},
    "wrn_28_10": {"widen_factor": 1},
    "monai": {"network": "ResNet10"},
}
"""Options of backbones that are large by default."""


def train(method: str, folder: Path, **changes: Any) -> Path:
    federation.run(method, open_silos("digits", **OPTIONS), 1, folder=folder, **(SMALL | changes))
    return folder


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train("fedetf", tmp_path_factory.mktemp("fedetf"), personalise=True)


def records(number: int) -> np.ndarray:
    return np.random.default_rng(8).normal(size=(number, 1, 8, 8)).astype(np.float32)


def command(*words: Any) -> Any:
    return CliRunner().invoke(app, ["export", *map(str, words)])


@pytest.mark.whole
@pytest.mark.usefixtures("operators_once")
def test_onnx_runs_elsewhere_and_says_what_it_is(ran: Path, tmp_path: Path) -> None:
    made = command(ran, "--format", "onnx", "-o", tmp_path / "model.onnx")
    assert made.exit_code == 0, made.output
    assert "largest difference of a probability on generated records: " in made.stdout
    model = tightframe.load_model(ran)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    for number in (1, 4, 11):
        (theirs,) = session.run(None, {"record": records(number)})
        np.testing.assert_allclose(theirs, model.predict_proba(records(number)), atol=1e-5)
    told = {item.key: item.value for item in onnx.load(tmp_path / "model.onnx").metadata_props}
    whole = json.loads(told["tightframe"])
    assert told["model_sha256"] == model.hash == whole["card"]["model_sha256"]
    assert whole["class_names"] == list("0123456789")
    assert whole["input"]["shape"] == ["n", 1, 8, 8]
    assert whole["input"]["made_of"] == "grey pictures of 8 x 8 pixels"


def test_exporters_say_errors_alone_and_only_for_so_long(
    ran: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of packages that torch's exporter misses, which need not be there."""
    chatty = logging.getLogger("torch.onnx._internal.exporter._registration")
    chatty.setLevel(logging.WARNING)
    # Some packages make torch keep its log to itself.
    monkeypatch.setattr(chatty, "handlers", [caplog.handler])
    monkeypatch.setattr(chatty, "propagate", False)
    script = exports._script

    def warns(*given: Any) -> None:
        chatty.warning("torchvision is not installed")
        chatty.error("broken")
        script(*given)

    monkeypatch.setattr(exports, "_script", warns)
    with caplog.at_level(logging.WARNING):
        assert command(ran, "--format", "torchscript", "-o", tmp_path / "model.ts").exit_code == 0
        chatty.warning("afterwards")
    assert [each.message for each in caplog.records if each.name == chatty.name] == ["broken", "afterwards"]


def test_torchscript_has_the_card_inside(ran: Path, tmp_path: Path) -> None:
    assert command(ran, "--format", "torchscript", "-o", tmp_path / "model.ts").exit_code == 0
    inside = {"tightframe.json": ""}
    network = torch.jit.load(tmp_path / "model.ts", _extra_files=inside)
    model = tightframe.load_model(ran)
    assert json.loads(inside["tightframe.json"])["model_sha256"] == model.hash
    theirs = network(torch.from_numpy(records(5))).detach().numpy()
    np.testing.assert_allclose(theirs, model.predict_proba(records(5)), atol=1e-5)


@pytest.mark.whole
@pytest.mark.usefixtures("operators_once")
@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("fed3r", {"model": "scattering", "model_options": {"J": 2, "L": 1}, "class_rules": "off"}),
        ("fedavg", {"model": "mlp", "model_options": {"widths": [8], "standardise": True}}),
    ],
)
def test_a_scattering_and_moments_are_exported(method: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Heads and frozen encoders: ``test_model``."""
    model = tightframe.load_model(train(method, tmp_path / "run", **changes))
    for form, name in (("onnx", "m.onnx"), ("torchscript", "m.ts")):
        made = exports.export(model, form, tmp_path / name)  # type: ignore[arg-type]
        assert made.path.is_file() and made.difference <= 1e-5


@pytest.mark.whole
@pytest.mark.parametrize("name", [spec.name for spec in BACKBONES])
def test_every_backbone_can_be_traced(name: str) -> None:
    """With another number of records than the trace had; what it gives after is what it gave before."""
    spec, shape = models.get(name), (3, 32, 32)
    network = spec.build(spec.options(**FEW.get(name, {})), shape, 3).eval()
    x, y = (torch.randn(number, *shape, generator=torch.Generator().manual_seed(number)) for number in (3, 5))
    with torch.no_grad():
        before = network(y)
        for part in network.modules():
            if isinstance(part, exports.ForExport):
                part.prepare_export()
        np.testing.assert_allclose(torch.jit.trace(network, x, check_trace=False)(y), before, atol=1e-5)


@pytest.mark.whole
def test_of_a_silos_own_model_no_result_is_inside(
    ran: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bundle is run by MONAI in ``test_model``, whose import takes seconds."""
    run = exports._run_script
    monkeypatch.setattr(exports, "_run_bundle", lambda path, given: run(path / exports.SCRIPT, given))
    model = tightframe.load_model(ran / "silo-0" / PERSONAL)
    told = exports.description(model)
    assert told["job"]["method"] == "fedetf" and "card" not in told
    keys = set(json.dumps(told).split('"')[1::2])
    assert not {"global", "personal", "confusion", "disclosed", "balanced_accuracy"} & keys
    for form, mode in (("torchscript", 0o600), ("monai-bundle", 0o700)):
        made = exports.export(model, form, tmp_path / form)  # type: ignore[arg-type]
        assert made.path.stat().st_mode & 0o777 == mode, "its owner's alone, as the model is"


class Refuses(nn.Module):
    """A part that cannot be traced."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.jit.is_tracing():
            raise RuntimeError("not traceable")
        return x


def test_the_part_that_cannot_be_exported_is_named(ran: Path, tmp_path: Path) -> None:
    model = tightframe.load_model(ran)
    network: Any = model.module
    network.head = nn.Sequential(network.head, Refuses())
    with pytest.raises(ModelError, match=r"TF-825: .* but head.1 \(Refuses\) cannot be exported") as caught:
        exports.export(model, "torchscript", tmp_path / "m.ts")
    assert "not traceable" in str(caught.value) and not (tmp_path / "m.ts").exists()


@pytest.mark.parametrize("sure", [1, 1e4])
def test_an_export_that_differs_is_not_written(ran: Path, tmp_path: Path, sure: float) -> None:
    """A trace keeps the branch that its example took; also where the model is sure of most records."""

    class Branches(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * sure if len(x) == 3 else x * sure * 2

    model = tightframe.load_model(ran)
    network: Any = model.module
    with torch.no_grad():
        features = network.features(torch.from_numpy(records(50)))
        head = nn.Linear(features.shape[1], 10)
        head.bias.copy_(-(head.weight @ features.median(0).values))  # answers that differ
    network.head = nn.Sequential(head, Branches())
    with pytest.raises(ModelError, match=r"TF-826: .* differ by"):
        exports.export(model, "torchscript", tmp_path / "m.ts")
    assert not (tmp_path / "m.ts").exists()


def test_missing_packages_and_formats_are_named(
    ran: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exports, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"TF-825: .* onnx, onnxruntime, onnxscript .*tightframe\[export\]"):
        exports.export(tightframe.load_model(ran), "onnx", tmp_path / "m.onnx")
    wrong = command(ran, "--format", "tflite", "-o", tmp_path / "m")
    assert wrong.exit_code == 2 and "expected one of" in wrong.output
    (tmp_path / "there").write_text("mine")
    assert isinstance(command(ran, "--format", "onnx", "-o", tmp_path / "there").exception, FileExistsError)
