"""Jobs with a frozen encoder: what trains, what travels, what is refused, and features computed once."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tightframe import federation, methods, models
from tightframe.config.job import JobConfig, parse_job
from tightframe.data.arrays import ArrayData
from tightframe.errors import JobError
from tightframe.learning import model_update
from tightframe.models.frozen import FrozenEncoder, is_frozen
from tightframe.results.files import CHECKPOINT
from tightframe.rounds.encoded import used_parts
from tightframe.rounds.setup import prepare
from tightframe.rounds.silo.view import LocalSilo

SITES = ("a", "b", "c")
SIDE, CLASSES = 16, 8
TRAIN, REST = 24, 8
NEEDS = {"fedavg_etf", "fedbabu", "fedper", "fedrep", "fedproto"}
"""Methods that learn nothing together from a head on fixed features."""


def silos() -> dict[str, ArrayData]:
    stream = np.random.default_rng(0)

    def fold(count: int) -> tuple[np.ndarray, np.ndarray]:
        labels = np.arange(count) % CLASSES
        shift = labels[:, None, None, None] / 4
        return (stream.normal(size=(count, 3, SIDE, SIDE)) + shift).astype(np.float32), labels

    return {
        site: ArrayData(
            {"train": fold(TRAIN), "validation": fold(REST), "test": fold(REST)},
            source=site,
            num_classes=CLASSES,
            synthetic=True,
        )
        for site in SITES
    }


def values(**changes: Any) -> dict[str, Any]:
    return {
        "job_name": "frozen",
        "method": "fedavg",
        "dataset": "fed_isic2019",
        "dataset_options": {"image_size": SIDE},
        "model": "resnet20",
        "sites": list(SITES),
        "min_sites": 3,
        "rounds": 2,
        "summation": "plain",
        "encoder": "random",
        "training": {"batch_size": 8, "augment": False, "learning_rate": 0.1},
        **changes,
    }


def run(folder: Path | None = None, **changes: Any) -> Any:
    return federation.run_job(parse_job(values(**changes)), data=silos(), folder=folder)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of a network with statistics that are not those of an untrained one."""
    torch.manual_seed(7)
    spec = models.get("resnet20")
    model = spec.build(spec.options(), (3, SIDE, SIDE), CLASSES).train()
    with torch.no_grad():
        model(torch.randn(16, 3, SIDE, SIDE) + 1)
    path = tmp_path_factory.mktemp("start") / "start.safetensors"
    save_file(model.state_dict(), path)
    return path


@pytest.mark.parametrize("method", ["fedavg", "fedmr", "fedetf", "scaffold", "fednova"])
def test_the_head_alone_travels(method: str) -> None:
    training = {"momentum": 0.0}
    schemas = {
        encoder: [
            item
            for phase in prepare(values(method=method, encoder=encoder, training=training)).training_phases(1)
            for item in phase.schema.fields
        ]
        for encoder in ("trained", "random")
    }
    frozen = schemas["random"]
    assert [item.name for item in frozen if "head." in item.name]
    assert not [item.name for item in frozen if "backbone." in item.name], (
        "no update, buffer, control variate"
    )
    sizes = {encoder: sum(item.bytes for item in fields) for encoder, fields in schemas.items()}
    assert sizes["random"] * 10 < sizes["trained"]


@pytest.mark.parametrize("method", ["fedavg", "fed3r"])
def test_only_what_a_run_uses_is_encoded(method: str) -> None:
    """An evaluation of a finished model reads no training record."""
    trained = parse_job(values(method=method, rounds=1))
    changes = {"evaluate_only": {}, "rounds": 0, "initial_model_sha256": "0" * 64}
    evaluated = parse_job({**trained.model_dump(mode="json"), **changes, "encoder": "frozen"})
    assert {fold for fold, _ in used_parts(prepare(trained))} == {"train", "validation", "test"}
    assert used_parts(prepare(evaluated)) == (("validation", False), ("test", False))


@pytest.mark.whole
def test_a_pretrained_encoder_stays_as_it_is(start: Path, tmp_path: Path) -> None:
    """To the bit, with its statistics, in the final model, the checkpoint and the card's job."""
    job = parse_job(values(encoder="frozen", initial_model_sha256=_sha256(start)))
    result = federation.run_job(job, data=silos(), folder=tmp_path, initial_model=str(start))
    before, after = load_file(start), result.state.model
    assert set(before) == set(after)
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert changed == {"head.weight", "head.bias"}
    stored = load_file(tmp_path / "server" / CHECKPOINT)
    assert all(torch.equal(stored[f"model/{name}"], value) for name, value in after.items())
    card = json.loads((tmp_path / "server" / "model.json").read_text())
    assert card["job"]["encoder"] == "frozen"
    assert is_frozen(prepare(job).setting.build_model())


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.whole
@pytest.mark.parametrize("method", [item.name for item in methods.METHODS])
def test_each_method_trains_a_head_or_says_why_not(method: str) -> None:
    changes: dict[str, Any] = {
        "method": method,
        "rounds": 1,
        "model": "small_cnn",
        "model_options": {"widths": [8, 8]},
        "training": {"batch_size": 8, "augment": False, "momentum": 0.0},
        "method_options": {"ccvr": {"virtual_features": 20, "epochs": 1}}.get(method, {}),
    }
    if method in NEEDS:
        reason = methods.get(method).needs_encoder
        with pytest.raises(JobError) as refused:
            prepare(values(**changes))
        said = f"but {method} {reason}" if reason else f"and {method}'s head has nothing that trains"
        assert refused.value.problems == (f"encoder: small_cnn is frozen, {said}",)
        return
    assert not methods.get(method).needs_encoder
    before = prepare(values(**changes)).initial_state().model
    result = run(**changes)
    for name, value in result.state.model.items():
        if not name.startswith("head."):
            assert torch.equal(value, before[name]), name


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"encoder": "frozen"}, "a pretrained start"),
        ({"encoder": "random", "initial_model_sha256": "0" * 64}, "'frozen' with a pretrained start"),
        ({"encoder": "half"}, "encoder"),
        ({"encoder": "trained", "model": "random_features", "method": "fedrep"}, "head at home"),
    ],
)
def test_refused(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(JobError) as refused:
        prepare(values(**changes))
    assert len(refused.value.problems) == 1
    assert expected in refused.value.problems[0]


@pytest.mark.parametrize("name", ["identity", "random_features", "scattering"])
def test_a_backbone_without_parameters_needs_no_start(name: str) -> None:
    options = {"J": 2, "L": 4} if name == "scattering" else {}
    for encoder in ("trained", "frozen"):
        setup = prepare(values(model=name, model_options=options, encoder=encoder))
        assert is_frozen(model_update.shared_template(setup.setting))
    assert not is_frozen(model_update.shared_template(prepare(values(encoder="trained")).setting))


def test_older_jobs_keep_their_hashes() -> None:
    plain = parse_job({key: value for key, value in values().items() if key != "encoder"})
    assert "encoder" not in plain.model_dump()
    assert parse_job(values(encoder="trained")).sha256() == plain.sha256()
    assert JobConfig.model_validate(parse_job(values()).model_dump()).encoder == "random"


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Records that encoders have computed features of."""
    counted: Counter[str] = Counter()
    encode = FrozenEncoder.encode

    def counting(self: FrozenEncoder, x: torch.Tensor) -> torch.Tensor:
        counted["records"] += len(x)
        return encode(self, x)

    monkeypatch.setattr(FrozenEncoder, "encode", counting)
    return counted


@pytest.mark.parametrize("method", ["fedavg", "fedmr", "moon"])
def test_features_are_computed_once_and_change_nothing(
    method: str, seen: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rounds of two epochs: each record once; numbers as without the cache, but for rounding."""
    changes: dict[str, Any] = {
        "method": method,
        "model": "small_cnn",
        "model_options": {"widths": [8, 16]},
        "training": {"batch_size": 8, "epochs": 2, "augment": False, "learning_rate": 0.1},
    }
    kept = run(**changes)
    assert seen["records"] == len(SITES) * (TRAIN + 2 * REST)
    monkeypatch.setattr(LocalSilo, "_take_features", lambda self, model: None)
    anew = run(**changes)
    assert seen["records"] > 4 * len(SITES) * TRAIN
    for name, value in anew.state.model.items():
        assert torch.allclose(kept.state.model[name], value, rtol=1e-4, atol=1e-5), name
    start = prepare(values(**changes)).initial_state().model
    assert not torch.allclose(kept.state.model["head.weight"], start["head.weight"], atol=1e-2)


@pytest.mark.whole
def test_two_runs_are_the_same_to_the_bit() -> None:
    first, second = run(), run()
    assert all(torch.equal(value, second.state.model[name]) for name, value in first.state.model.items())


@pytest.mark.whole
def test_augmentation_is_told_and_keeps_no_features(
    seen: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    run(training={"batch_size": 8, "augment": True})
    told = [line for line in caplog.messages if "`training.augment`" in line]
    assert len(told) == len(SITES), "once at each silo"
    assert seen["records"] >= 2 * len(SITES) * (TRAIN + REST)


def test_progress_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    run(rounds=1)
    lines = [line for line in caplog.messages if "computing features" in line]
    assert f"a: computing features of {TRAIN} train records, once" in lines
    assert len(lines) == 3 * len(SITES)


def test_standardised_inputs_are_moments_of_the_inputs() -> None:
    """The statistics before round 1 see inputs, not features."""
    result = run(model="random_features", model_options={"standardise": True, "width": 32}, rounds=1)
    inputs = np.concatenate(
        [data.records("train")[i][0][None] for data in silos().values() for i in range(TRAIN)]
    )
    mean = result.state.model["standardise.mean"].numpy()
    assert np.allclose(mean, inputs.mean((0, 2, 3)), atol=1e-4)


@pytest.mark.whole
def test_under_privacy_the_head_trains_on_kept_features(seen: Counter[str]) -> None:
    """DP-SGD of the head; the encoder keeps its BatchNorm, in which no record meets another now."""
    changes: dict[str, Any] = {"weights": "uniform", "privacy": {"epsilon": 50.0, "noise_multiplier": 0.5}}
    model = prepare(values(**changes)).setting.build_model()
    assert any(isinstance(layer, torch.nn.BatchNorm2d) for layer in model.modules())
    before = prepare(values(**changes)).initial_state().model
    result = run(**changes)
    changed = {name for name, value in result.state.model.items() if not torch.equal(value, before[name])}
    assert changed == {"head.weight", "head.bias"}
    assert seen["records"] <= len(SITES) * (TRAIN + 2 * REST) + 10 * len(SITES), "but for the probe"


def test_memory_vectors_alone_train_the_head_on_fixed_features() -> None:
    """Without the frame, whose vectors nobody trains."""
    changes: dict[str, Any] = {
        "method": "fedavg_etf",
        "method_options": {"classifier": "trained", "warm_up": 3},
    }
    changes |= {"rounds": 3, "model": "small_cnn", "model_options": {"widths": [8, 8]}}
    changes |= {"training": {"batch_size": 8, "augment": False, "momentum": 0.0}}
    before = prepare(values(**changes)).initial_state().model
    after = run(**changes).state.model
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert changed == {"head.weight", "head.bias"}
