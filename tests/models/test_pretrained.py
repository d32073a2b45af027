"""Initial weights: everything fits, or nothing is loaded."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tightframe import models
from tightframe.errors import JobError, SiteConfigError
from tightframe.models.pretrained import InitialWeights, load_weights, read_weights


def load_initial(model: torch.nn.Module, path: Path) -> InitialWeights:
    """Load a file as a run does: read, then loaded."""
    return load_weights(model, read_weights(path), f"at {path}")


def _model(classes: int, seed: int) -> torch.nn.Module:
    spec = models.get("resnet18") if classes == 99 else models.get("small_cnn")
    torch.manual_seed(seed)
    return spec.build(spec.options(), (3, 16, 16), classes)


def _save(path: Path, tensors: dict[str, Any]) -> Path:
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, path)
    return path


def test_all_weights(tmp_path: Path) -> None:
    source, model = _model(99, 1), _model(99, 2)
    path = _save(tmp_path / "weights.safetensors", source.state_dict())
    summary = load_initial(model, path)
    assert summary.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert summary.fresh == ()
    assert set(summary.loaded) == set(model.state_dict())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, source.state_dict()[name])


def test_another_number_of_classes_keeps_the_fresh_head(tmp_path: Path) -> None:
    source, model = _model(5, 1), _model(8, 2)
    head = {name: tensor.clone() for name, tensor in model.head.state_dict().items()}
    summary = load_initial(model, _save(tmp_path / "weights.safetensors", source.state_dict()))
    assert summary.fresh == ("head.bias", "head.weight")
    assert all(torch.equal(model.head.state_dict()[name], head[name]) for name in head)
    for name in summary.loaded:
        assert torch.equal(model.state_dict()[name], source.state_dict()[name])


def test_half_precision_is_widened(tmp_path: Path) -> None:
    source, model = _model(5, 1).half(), _model(5, 2)
    load_initial(model, _save(tmp_path / "weights.safetensors", source.state_dict()))
    assert model.head.weight.dtype == torch.float32
    assert torch.equal(model.head.weight, source.head.weight.float())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("backbone.0.weight"), "'backbone.0.weight', but the file has none"),
        (lambda state: state.update(extra=torch.zeros(1)), "'extra' is not in the model"),
        (
            lambda state: state.update({"backbone.0.weight": torch.zeros(32, 1, 3, 3)}),
            r"but got \(32, 1, 3, 3\)",
        ),
        (
            lambda state: state.update({"head.weight": torch.zeros(5, 64)}),
            r"shape \(5, 128\), but got \(5, 64\)",
        ),
        (lambda state: state.update({"head.bias": torch.zeros(6)}), r"shape \(5,\), but got \(6,\)"),
        (lambda state: state.update({"head.bias": torch.zeros(5, dtype=torch.int64)}), "torch.int64"),
        (lambda state: state.update({"head.bias": torch.full((5,), torch.nan)}), "to be finite"),
        (
            lambda state: state.update({"head.bias": torch.full((5,), 1e300, dtype=torch.float64)}),
            "to be finite",
        ),
    ],
)
def test_nothing_is_loaded_if_anything_differs(tmp_path: Path, change: Any, message: str) -> None:
    state = dict(_model(5, 1).state_dict())
    change(state)
    model = _model(5, 2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(JobError, match=message):
        load_initial(model, _save(tmp_path / "weights.safetensors", state))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_every_difference_is_listed(tmp_path: Path) -> None:
    with pytest.raises(JobError) as caught:
        load_initial(_model(5, 2), _save(tmp_path / "weights.safetensors", {"other": torch.zeros(1)}))
    assert len(caught.value.problems) == len(_model(5, 2).state_dict()) + 1


def test_files_that_are_not_safetensors(tmp_path: Path) -> None:
    with pytest.raises(SiteConfigError, match="TF-202"):
        load_initial(_model(5, 2), tmp_path / "missing.safetensors")
    path = tmp_path / "pickle.pt"
    torch.save(_model(5, 1).state_dict(), path)
    with pytest.raises(SiteConfigError, match="safetensors format"):
        load_initial(_model(5, 2), path)
