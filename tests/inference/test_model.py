"""A trained run of each kind of model loads again and gives what the run's own evaluation gave."""

from __future__ import annotations

import functools
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sklearn.metrics import balanced_accuracy_score, confusion_matrix
from typer.testing import CliRunner

import tightframe
from tightframe import federation, methods
from tightframe.config.job import parse_job
from tightframe.data.image_sets import open_silos
from tightframe.errors import ModelError
from tightframe.inference import exports
from tightframe.inference.model import TrainedModel
from tightframe.learning.model_update import build_template
from tightframe.results.files import BEST, CARD, LOCAL, MODEL, PERSONAL
from tightframe.rounds.setup import assemble
from tightframe_app.cli import app

OPTIONS = {"partition": "iid", "silos": 3, "subset": 240, "test_subset": 90, "test": "own"}
TRAINING = {"epochs": 1, "batch_size": 16, "learning_rate": 0.05, "momentum": 0.0}
SMALL: dict[str, Any] = {
    "dataset": "digits",
    "dataset_options": OPTIONS,
    "model_options": {"widths": [16]},
    "training": TRAINING,
    "min_sites": 3,
    "seed": 5,
    "summation": "plain",
}
FROZEN: dict[str, Any] = {"encoder": "random", "model_options": {"widths": [8, 16]}}
OWN: dict[str, dict[str, Any]] = {
    "combine": {"method_options": {"head": "etf", "server": "fedyogi"}},
    "fed3r": FROZEN,
    "fedcgs": FROZEN,
    "fedncm": FROZEN,
    "fedprox": {**FROZEN, "start": "fed3r", "training": {**TRAINING, "augment": False}},
    "fednh": {"model_options": {"widths": [32]}},
}
"""What a method's run has beside ``SMALL``."""
SILOS = open_silos("digits", **OPTIONS)
FEW = open_silos("digits", **{**OPTIONS, "subset": 30})
Trained = Callable[[str], tuple[Path, federation.Result]]


def run(method: str, folder: Path, silos: Any = SILOS, **changes: Any) -> federation.Result:
    values = {**SMALL, **OWN.get(method, {}), **changes}
    return federation.run(method, silos, 1, folder=folder, **values)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """One run of a method, with personal models, for all tests that only read it."""

    @functools.cache
    def once(method: str) -> tuple[Path, federation.Result]:
        folder = tmp_path_factory.mktemp(method)
        return folder, run(method, folder, personalise=True)

    return once


def records(silo: str, silos: Any = SILOS) -> tuple[torch.Tensor, np.ndarray]:
    """The test records as the run's evaluation reads them."""
    data = silos[silo]
    items = data.records("test")
    return torch.stack([items[i][0] for i in range(len(data.labels("test")))]), data.labels("test")


def last(folder: Path) -> dict[str, Any]:
    """The last row of metrics.jsonl that has a model's metrics, with the confusion matrix of the outcome."""
    rows = [json.loads(line) for line in (folder / "server/metrics.jsonl").read_text().splitlines()]
    told: dict[str, Any] = [row for row in rows if row.get("evaluation")][-1]["evaluation"]["test"]
    outcome = json.loads((folder / "server/outcome.json").read_text())["evaluation"]["test"]
    assert outcome["balanced_accuracy"] == told["balanced_accuracy"]
    return {**told, "confusion": outcome["confusion"]}


QUICK = ("fedetf", "fedproto", "fedrod")
HEADS = ("fedavg", "fedetf", "fednh", "fedavg_etf", "fedprox", "fedbabu", "creff", "fedproc", "fed3r")
"""The first method of each kind of head and encoder: all methods' ONNX would take two minutes."""
PERSONAL_MODELS = (
    *("fedavg", "fedetf", "fednh", "fedavg_etf", "fedilc", "fedsgd", "fedrod", "fedprox", "fednova", "ditto"),
    *("fedper", "fedrep", "fedbabu", "creff", "fedproto", "fedproc", "fed3r", "combine"),
)
"""The first method of each kind by those and by what makes its personal models: others are kept alike."""


@pytest.mark.whole
@pytest.mark.parametrize(
    "method",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.whole) for name in PERSONAL_MODELS],
)
def test_every_kind_of_method_round_trips(method: str, trained: Trained, tmp_path: Path) -> None:
    """Same probabilities as the run's network; sklearn's confusion of them is the run's; exported, too."""
    folder, ended = trained(method)
    own = methods.get(method).own_model is not None
    truth, answers = [], []
    for silo in SILOS:
        model = tightframe.load_model(folder / (silo if own else "server"))
        x, labels = records(silo)
        probabilities = model.predict_proba(x)
        assert probabilities.shape == (len(x), 10)
        np.testing.assert_allclose(probabilities.sum(1), 1, atol=1e-12)
        if not own:
            theirs = build_template(ended_setting(ended))
            theirs.load_state_dict(dict(ended.state.model))
            with torch.no_grad():
                logits = theirs.eval()(x).double()
            np.testing.assert_allclose(probabilities, torch.softmax(logits, 1).numpy(), atol=2e-6)
        truth.append(labels)
        answers.append(model.predict(x))
    expected = last(folder)
    found = confusion_matrix(np.concatenate(truth), np.concatenate(answers), labels=range(10))
    assert found.tolist() == expected["confusion"]
    assert balanced_accuracy_score(np.concatenate(truth), np.concatenate(answers)) == pytest.approx(
        expected["balanced_accuracy"], abs=1e-12
    )
    for silo in SILOS:
        personal = tightframe.load_model(folder / silo / PERSONAL)
        told = json.loads((folder / silo / LOCAL).read_text())["personal"]
        x, labels = records(silo)
        found = confusion_matrix(labels, personal.predict(x), labels=range(10))
        assert found.tolist() == told["confusion"]
        assert personal.hash == told["model_sha256"]
        final = tightframe.load_model(folder / silo)
        found = confusion_matrix(labels, final.predict(x), labels=range(10))
        own_test = json.loads((folder / silo / LOCAL).read_text())["global"]["test"]
        assert found.tolist() == own_test["confusion"]
    for name, model in (("personal", personal), ("final", final)):
        script = exports.export(model, "torchscript", tmp_path / f"{name}.ts").path
        exported = torch.jit.load(script)(x).detach().numpy()
        np.testing.assert_allclose(exported, model.predict_proba(x), atol=1e-5)


@pytest.mark.whole
@pytest.mark.parametrize("method", [*HEADS, "fedproto", "fedrod"])
def test_bundles_of_each_head_and_encoder(method: str, trained: Trained, tmp_path: Path) -> None:
    """What MONAI runs is the TorchScript that every method's models become above."""
    folder, _ = trained(method)
    for place in (Path("silo-1"), Path("silo-1", PERSONAL)):
        model = tightframe.load_model(folder / place)
        check_bundle(model, records("silo-1")[0], tmp_path / f"{place.name}-bundle")


@pytest.mark.whole
@pytest.mark.usefixtures("operators_once")
@pytest.mark.parametrize("method", HEADS)
def test_onnx_of_each_head_and_encoder(method: str, trained: Trained, tmp_path: Path) -> None:
    """Of test records, run by onnxruntime."""
    import onnxruntime

    model = tightframe.load_model(trained(method)[0])
    file = exports.export(model, "onnx", tmp_path / "model.onnx").path
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    x, _ = records("silo-1")
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    np.testing.assert_allclose(found, model.predict_proba(x), atol=1e-5)


@pytest.mark.whole
def test_each_kind_has_a_method() -> None:
    """By the types of all modules: a method with a new one is to be exported, too."""
    first: dict[frozenset[str], str] = {}
    personal: dict[Any, str] = {}
    for item in methods.METHODS:
        values = {"model": "small_cnn", "rounds": 1, "job_name": "kinds", **SMALL, **OWN.get(item.name, {})}
        setting = assemble(parse_job({**values, "method": item.name, "sites": list(SILOS)})).setting
        kind = frozenset(type(module).__name__ for module in build_template(setting).modules())
        first.setdefault(kind, item.name)
        makes = item.personalise and (item.personalise.__module__, item.personalise.__qualname__)
        personal.setdefault((kind, makes, item.predict, item.own_model is None), item.name)
    assert tuple(first.values()) == HEADS
    assert tuple(personal.values()) == PERSONAL_MODELS


def check_bundle(model: TrainedModel, x: torch.Tensor, folder: Path) -> None:
    """Write a model's bundle and have MONAI run it, in this process: its own takes seconds to start."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter, about itself
        exports._bundle(model, exports.Probabilities(model), folder)
    check_written(model, x, folder)
    metadata = json.loads((folder / exports.METADATA).read_text())
    outputs = metadata["network_data_format"]["outputs"][exports.PROBABILITIES]
    assert tuple(outputs["channel_def"].values()) == model.class_names


def check_written(model: TrainedModel, x: torch.Tensor, folder: Path) -> None:
    """Have MONAI run a bundle."""
    from monai.bundle import ConfigWorkflow

    np.save(folder / "input.npy", x.numpy())
    workflow = ConfigWorkflow(
        str(folder / exports.CONFIG),
        str(folder / exports.METADATA),
        workflow_type="infer",
        logging_file=False,
        bundle_root=str(folder),
    )
    workflow.initialize()
    workflow.run()
    found = np.load(folder / "output.npy", allow_pickle=False)
    np.testing.assert_allclose(found, model.predict_proba(x), atol=1e-5)
    told = json.loads((folder / exports.DESCRIPTION).read_text())
    assert told["model_sha256"] == model.hash and ("card" in told or "job" in told)


@pytest.mark.whole
def test_what_a_lead_calls_a_class_is_text_to_monai(tmp_path: Path) -> None:
    """Who resolves a bundle's metadata would run, look up or open what begins with a sign of MONAI's."""
    from monai.bundle import ConfigParser

    ran = tmp_path / "ran"
    names = [f"$__import__('pathlib').Path({str(ran)!r}).touch()", "@version", "% of the vessel", "plain"]
    setup = SimpleNamespace(
        job=SimpleNamespace(job_name="a"),
        method=SimpleNamespace(title="b"),
        dataset=SimpleNamespace(title="c"),
    )
    model: Any = SimpleNamespace(class_names=names, setup=setup, hash="0" * 64, input_shape=(3, 8, 8))
    parser = ConfigParser({"_meta_": exports._metadata(model)})
    parser.parse()
    told = parser.get_parsed_content("_meta_")["network_data_format"]["outputs"][exports.PROBABILITIES]
    assert list(told["channel_def"].values()) == [*map(repr, names[:3]), "plain"]
    assert not ran.exists()


@pytest.mark.whole
def test_the_commands_bundle_is_run_by_monai(trained: Trained, tmp_path: Path) -> None:
    ran, bundle = trained("fedetf")[0], tmp_path / "bundle"
    made = CliRunner().invoke(app, ["export", str(ran), "--format", "monai-bundle", "-o", str(bundle)])
    assert made.exit_code == 0, made.output
    check_written(tightframe.load_model(ran), records("silo-1")[0], bundle)


def ended_setting(ended: federation.Result) -> Any:
    return assemble(ended.outcome.job).setting


@pytest.fixture(scope="module")
def ran(trained: Trained) -> Path:
    return trained("fedetf")[0]


@pytest.fixture
def copied(ran: Path, tmp_path: Path) -> Path:
    shutil.copytree(ran, tmp_path / "run")
    return tmp_path / "run"


def test_it_says_what_it_is(ran: Path) -> None:
    model = tightframe.load_model(ran)
    assert model.path == ran / "server" / MODEL, "found below a run's folder"
    assert model.class_names == tuple("0123456789")
    assert model.input_shape == (1, 8, 8)
    assert model.hash == json.loads((ran / "server" / CARD).read_text())["model_sha256"]
    assert tightframe.load_model(ran / "server" / BEST).path.name == BEST


FORMS: list[dict[str, Any]] = [
    {"model": "mlp", "model_options": {"widths": [16], "standardise": True}},
    {"model": "resnet20", "model_options": {}, "weights": "uniform", "privacy": {"epsilon": 8.0}},
]


@pytest.mark.whole
@pytest.mark.parametrize("changes", FORMS, ids=["standardised", "private"])
def test_pooled_moments_and_the_network_of_privacy_come_back(changes: dict[str, Any], tmp_path: Path) -> None:
    """Moments are in the file; a network of a job with privacy has GroupNorm in place of BatchNorm."""
    silos = FEW if "privacy" in changes else SILOS
    run("fedavg", tmp_path, silos, **changes)
    model = tightframe.load_model(tmp_path)
    if "privacy" in changes:
        kinds = {type(part) for part in model.module.modules()}
        assert torch.nn.GroupNorm in kinds and torch.nn.BatchNorm2d not in kinds
    else:
        inputs = torch.cat([silos[name].records("train")[i][0].flatten() for name in silos for i in range(3)])
        assert float(model.module.standardise.mean[0]) == pytest.approx(float(inputs.mean()), abs=0.1)
    x, labels = records("silo-0", silos)
    told = json.loads((tmp_path / "silo-0" / LOCAL).read_text())["global"]["test"]
    assert confusion_matrix(labels, model.predict(x), labels=range(10)).tolist() == told["confusion"]


def test_a_changed_file_is_refused(copied: Path) -> None:
    path = copied / "server" / MODEL
    tensors = load_file(path)
    tensors["head.beta"] = tensors["head.beta"] + 1e-3
    save_file(tensors, path)
    with pytest.raises(ModelError, match=r"TF-822: Expected .* with SHA-256 .* it was changed"):
        tightframe.load_model(copied)


@pytest.mark.parametrize(
    ("break_it", "code", "word"),
    [
        (lambda run: (run / "server" / CARD).unlink(), "TF-821", "The weights alone do not say"),
        (lambda run: (run / "server" / MODEL).unlink(), "TF-821", "it has not trained to its end"),
        (lambda run: shutil.rmtree(run / "server"), "TF-821", "name a folder of a run's results"),
    ],
)
def test_what_is_missing_is_named(copied: Path, break_it: Any, code: str, word: str) -> None:
    break_it(copied)
    with pytest.raises(ModelError, match=rf"^{code}: [\s\S]*{word}"):
        tightframe.load_model(copied)


def test_an_older_silo_report_asks_for_the_card(copied: Path) -> None:
    """Reports of before had no job; the server's card beside them serves."""
    path = copied / "silo-0" / LOCAL
    values = json.loads(path.read_text())
    del values["job"], values["classes"]
    path.write_text(json.dumps(values))
    with pytest.raises(ModelError, match=r"TF-821.*a version that did not write it .* Copy model.json"):
        tightframe.load_model(copied / "silo-0")
    shutil.copy(copied / "server" / CARD, copied / "silo-0" / CARD)
    assert tightframe.load_model(copied / "silo-0").class_names == tuple("0123456789")


def test_a_job_of_what_is_not_installed_is_named(copied: Path) -> None:
    path = copied / "server" / CARD
    values = json.loads(path.read_text())
    values["job"]["model"] = "somebody_elses_net"
    path.write_text(json.dumps(values))
    with pytest.raises(ModelError, match="somebody_elses_net"):
        tightframe.load_model(copied)


def test_other_classes_are_refused(copied: Path) -> None:
    path = copied / "server" / CARD
    values = json.loads(path.read_text())
    values["classes"] = values["classes"][::-1]
    path.write_text(json.dumps(values))
    with pytest.raises(ModelError, match="TF-822: Expected the classes"):
        tightframe.load_model(copied)


def test_records_of_another_form_are_refused(ran: Path) -> None:
    model = tightframe.load_model(ran)
    with pytest.raises(ModelError, match=r"TF-823: Expected records of shape \(n, 1, 8, 8\)"):
        model.predict_proba(np.zeros((1, 8, 8)))
    broken = np.zeros((3, 1, 8, 8))
    broken[1, 0, 0, 0] = np.nan
    with pytest.raises(ModelError, match=r"record 1 has others \(1 records\)"):
        model.predict_proba(broken)
    with pytest.raises(ModelError, match="TF-823: Expected records as numbers"):
        model.predict([["a"]])
    assert model.predict_proba(np.zeros((0, 1, 8, 8))).shape == (0, 10)


def test_a_model_that_diverged_gives_no_answer(ran: Path) -> None:
    model = tightframe.load_model(ran)
    with torch.no_grad():
        model.module.head.etf.fill_(float("nan"))
    with pytest.raises(ModelError, match="TF-824: Expected finite probabilities, but record 0"):
        model.predict(np.zeros((2, 1, 8, 8)))
