"""A job that trains nothing: a finished model, by its hash, is evaluated over all silos in one exchange."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from sklearn.metrics import confusion_matrix, recall_score
from tests.support import runs
from torch import nn
from typer.testing import CliRunner

import tightframe
from tightframe import federation
from tightframe.config.job import JobConfig, check_job, parse_job
from tightframe.config.site import SiteEntry
from tightframe.data.base import SiloData
from tightframe.data.image_sets import open_silos
from tightframe.errors import JobError, RunError, TightframeError
from tightframe.privacy import accounting
from tightframe.privacy.training import portions
from tightframe.results.files import MODEL
from tightframe.rounds.plan import CLOSING
from tightframe.rounds.run_state import state_bytes
from tightframe.rounds.server.coordinator import Coordinator
from tightframe.rounds.setup import prepare
from tightframe.rounds.silo.session import SiloSession
from tightframe.rounds.sums.release import release_profile
from tightframe.rounds.sums.simulated_identity import simulated_anchor
from tightframe.rounds.sums.transcripts import ServerIdentity
from tightframe_app.cli import app
from tightframe_app.jobs import evaluating, folders

OPTIONS = {"partition": "iid", "silos": 4, "subset": 280, "test_subset": 160, "test": "own"}
SILOS = open_silos("digits", **OPTIONS)
SMALL: dict[str, Any] = {
    "dataset": "digits",
    "dataset_options": OPTIONS,
    "model_options": {"widths": [8, 8, 16]},
    "training": {"epochs": 2, "batch_size": 16, "learning_rate": 0.05, "momentum": 0.0},
    "seed": 5,
}


FEW_STEPS = {"epochs": 10, "match_steps": 10}
FEW_DRAWS = {"virtual_features": 100, "epochs": 2}
"""Of CReFF's server and CCVR's; all that they take by default are in ``tests/methods/test_defaults.py``."""


def train(method: str, folder: Path, **changes: Any) -> federation.Result:
    return federation.run(method, SILOS, 1, folder=folder, **(SMALL | changes))


def pooled(place: Path, silos: Mapping[str, SiloData] = SILOS) -> tuple[np.ndarray, np.ndarray]:
    """True classes and a model's answers for the test records of all silos, by scikit-learn's reading."""
    model = tightframe.load_model(place)
    truth, answers = [], []
    for data in silos.values():
        records: Any = data.records("test")
        truth.append(data.labels("test"))
        answers.append(model.predict(torch.stack([records[i][0] for i in range(len(truth[-1]))])))
    return np.concatenate(truth), np.concatenate(answers)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ran")
    train("fedetf", folder)
    return folder


def evaluate(
    made: evaluating.Evaluation, folder: Path, data: Mapping[str, SiloData] = SILOS, **changes: Any
) -> federation.Result:
    return federation.run_job(made.job, data=data, folder=folder, initial_model=str(made.model), **changes)


@pytest.mark.whole
@pytest.mark.usefixtures("pages")
def test_one_exchange_gives_what_scikit_learn_counts(ran: Path, tmp_path: Path) -> None:
    made = evaluating.of_run(ran, None, {})
    assert made.job.evaluate_only is not None and made.job.rounds == 0
    ended = evaluate(made, tmp_path)
    assert [row.kind for row in ended.outcome.rows] == ["start", "closing"]
    truth, answers = pooled(ran)
    assert ended.outcome.evaluation is not None
    test = ended.outcome.evaluation.test
    assert test.confusion == confusion_matrix(truth, answers, labels=range(10)).tolist()
    recalls = recall_score(truth, answers, average=None, labels=range(10), zero_division=0)
    assert list(test.recall.values()) == pytest.approx(recalls.tolist(), abs=1e-12)
    unchanged = (ran / "server" / MODEL).read_bytes()
    assert (tmp_path / "server" / MODEL).read_bytes() == unchanged
    assert all((tmp_path / site / MODEL).read_bytes() == unchanged for site in SILOS), "left at each silo"
    assert tightframe.load_model(tmp_path).hash == made.job.initial_model_sha256
    screen = ended.outcome.screen()
    assert "EVALUATED: " in screen and "4 of 4 took part in the evaluation" in screen
    page = (tmp_path / "server" / "report.html").read_text()
    assert "Evaluated." in page and "nothing was trained" in page


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("fedavg", {"model": "mlp", "model_options": {"widths": [16], "standardise": True}}),
        pytest.param("fed3r", {"encoder": "random"}, marks=pytest.mark.whole),
        pytest.param("creff", {"method_options": FEW_STEPS}, marks=pytest.mark.whole),
        pytest.param("ccvr", {"method_options": FEW_DRAWS}, marks=pytest.mark.whole),
        pytest.param("fedavg", {"model": "resnet20", "model_options": {}}, marks=pytest.mark.whole),
        pytest.param("fedrod", {"personalise": True, "local_baseline_epochs": 1}, marks=pytest.mark.whole),
    ],
)
def test_it_is_the_trained_runs_last_row(method: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """With pooled moments, closed forms, phases after training and running statistics; none is made anew."""
    once = {**SMALL["training"], "epochs": 1}
    trained = train(method, tmp_path / "ran", summation="plain", training=once, **changes)
    ended = evaluate(evaluating.of_run(tmp_path / "ran", None, {}), tmp_path / "again")
    assert [row.kind for row in ended.outcome.rows] == ["start", "closing"]
    assert trained.outcome.evaluation == ended.outcome.evaluation


@pytest.mark.whole
def test_a_network_of_a_job_with_privacy_is_evaluated_exactly_or_with_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network is that of the training; the noise of the evaluation is the evaluation's."""
    # Not what each silo's training costs by PRV, nor the probe of what is trained: tests/privacy has both.
    monkeypatch.setattr(accounting, "_prv", lambda *_: None)
    monkeypatch.setattr(portions, "check_per_record", lambda *_, **__: None)
    private = {"weights": "uniform", "privacy": {"epsilon": 20.0, "noise_multiplier": 1.5}}
    model = {"model": "resnet20", "model_options": {}, "training": {"epochs": 1, "batch_size": 512}}
    options = OPTIONS | {"subset": 24, "test_subset": 40}
    few = open_silos("digits", **options)
    given = SMALL | model | private | {"dataset_options": options}
    federation.run("fedavg", few, 1, folder=tmp_path / "ran", **given)
    exact = evaluating.of_run(tmp_path / "ran", None, {"privacy": None})
    assert exact.job.normalisation == "group" and exact.job.privacy is None
    ended = evaluate(exact, tmp_path / "exact", few)
    truth, answers = pooled(tmp_path / "ran", few)
    assert ended.outcome.evaluation is not None
    expected = confusion_matrix(truth, answers, labels=range(10)).tolist()
    assert ended.outcome.evaluation.test.confusion == expected


@pytest.mark.whole
def test_noise_is_charged_to_each_silos_ledger_and_to_the_promise(ran: Path, tmp_path: Path) -> None:
    made = evaluating.of_run(ran, None, {"privacy.epsilon": 6.0})
    ended = evaluate(made, tmp_path)
    assert ended.outcome.evaluation is not None and ended.outcome.evaluation.test.noisy
    for site in SILOS:
        spent = json.loads((tmp_path / site / "local_report.json").read_text())["privacy"]
        assert 0 < spent["epsilon"] <= spent["promised"] == 6.0
        # One of two planned evaluations, the other being a spare: well below the whole.
        assert spent["epsilon"] > 2.0
    truth, answers = pooled(ran)
    exact = confusion_matrix(truth, answers, labels=range(10))
    test = ended.outcome.evaluation.test
    assert test.noise_deviation is not None
    low, high = test.records_interval or (0, 0)
    assert low <= exact.sum() <= high


def test_a_sites_rules_hold_as_for_any_job(ran: Path, tmp_path: Path) -> None:
    """Policy, budget and cohort: an evaluation is one release of the job's, and cannot exceed the cap."""
    strict = SiteEntry.model_validate({"policy": {"profile": "standard", "pinned_only": False}})
    exact = evaluating.of_run(ran, None, {}).job
    refused = strict.policy.resolve(production=True)
    refused.check(exact, submitter=None)
    with pytest.raises(TightframeError, match="score_bins"):
        refused.check(evaluating.of_run(ran, None, {"evaluation.score_bins": 64}).job, submitter=None)
    noisy = evaluating.of_run(ran, None, {"privacy.epsilon": 9.0}).job
    with pytest.raises(TightframeError, match="epsilon_cap"):
        refused.check(noisy, submitter=None)
    private = SiteEntry.model_validate({"policy": {"required_privacy": True}}).policy
    with pytest.raises(TightframeError, match="required_privacy"):
        private.resolve(production=True).check(exact, submitter=None)
    none = SiteEntry.model_validate({"policy": {"max_releases": 1}}).policy.resolve(production=True)
    none.check(evaluating.of_run(ran, None, {"privacy.epsilon": 1.0}).job, submitter=None)


def test_its_sum_is_the_closing_of_a_training_job(ran: Path) -> None:
    """So cohorts, folds and minimum counts are held as there; and one way of forming terms, too."""
    job = evaluating.of_run(ran, None, {}).job
    trained = parse_job({**job.model_dump(mode="json"), "evaluate_only": None, "rounds": 2})
    ours, theirs = prepare(job), prepare(trained)
    (exchange,) = ours.plan
    (closing,) = theirs.plan.at(CLOSING, 2)
    assert (exchange.kind, exchange.counts_only) == (CLOSING, True)
    assert exchange.phase.schema == closing.phase.schema
    assert all(item.static for item in exchange.phase.schema.fields)
    own, other = release_profile(ours, SiteEntry()), release_profile(theirs, SiteEntry())
    assert own is not None and other is not None and set(own) < set(other)


def test_a_model_from_elsewhere_is_evaluated(tmp_path: Path) -> None:
    """A plain torch network's state dict; its answers counted by plain torch."""
    stream = torch.Generator().manual_seed(4)
    tensors = {
        "backbone.1.weight": torch.randn(12, 64, generator=stream),
        "backbone.1.bias": torch.randn(12, generator=stream),
        "head.weight": torch.randn(10, 12, generator=stream),
        "head.bias": torch.randn(10, generator=stream),
    }
    values = {**SMALL, "model": "mlp", "model_options": {"widths": [12]}, "method": "fedavg", "rounds": 3}
    job = parse_job({**values, "job_name": "elsewhere", "sites": sorted(SILOS), "min_sites": 4})
    names = list(prepare(job).initial_state().model)
    assert len(names) == 4, names
    path = tmp_path / "weights.safetensors"
    save_file(dict(zip(names, tensors.values(), strict=True)), path)
    made = evaluating.of_file(path, job, {})
    ended = evaluate(made, tmp_path / "run")
    truth, answers = [], []
    for data in SILOS.values():
        records: Any = data.records("test")
        x = torch.stack([records[i][0] for i in range(len(records))]).flatten(1)
        hidden = torch.relu(x @ tensors["backbone.1.weight"].T + tensors["backbone.1.bias"])
        answers.append((hidden @ tensors["head.weight"].T + tensors["head.bias"]).argmax(1).numpy())
        truth.append(data.labels("test"))
    expected = confusion_matrix(np.concatenate(truth), np.concatenate(answers), labels=range(10))
    assert ended.outcome.evaluation is not None
    assert ended.outcome.evaluation.test.confusion == expected.tolist()
    for change, word in (
        ({names[0]: torch.zeros(3, 64)}, "to have shape"),
        ({names[2]: torch.zeros(7, 12), names[3]: torch.zeros(7)}, "the head of the file has another number"),
        ({"more": torch.zeros(1)}, "is not in the model"),
    ):
        save_file({**dict(zip(names, tensors.values(), strict=True)), **change}, path)
        with pytest.raises(JobError, match=word):
            evaluating.of_file(path, job, {})


CONTRACT: dict[str, Any] = {
    "title": "Masses",
    "columns": [{"column": "radius", "kind": "number", "low": 0, "high": 60}],
    "label": {"column": "diagnosis", "classes": [{"code": "B"}, {"code": "M"}]},
}


def test_a_model_from_elsewhere_on_an_own_contract(tmp_path: Path) -> None:
    """With the contract; and each refusal names what is to be done."""
    contract, weights, torn = (tmp_path / name for name in ("contract.json", "mine.safetensors", "mine.pt"))
    contract.write_text(json.dumps(CONTRACT))
    mine = nn.Sequential(nn.Flatten(), nn.Linear(1, 16), nn.ReLU(), nn.Linear(16, 2))
    named = {"backbone.1": mine[1], "head": mine[3]}
    tensors = {f"{to}.{name}": item for to, part in named.items() for name, item in part.state_dict().items()}
    save_file(tensors, weights)
    torch.save(mine, torn)
    words = ["jobs", "export", "--method", "fedavg", "--contract", contract, "--sites", "a,b,c"]
    words += ["-o", tmp_path / "job", "--set", "model_options.widths=[16]", "--evaluate"]

    def export(*more: Any) -> Any:
        return CliRunner().invoke(app, [*map(str, words), *map(str, more)], env={"COLUMNS": "300"})

    lacking = export(weights)
    assert "--set model_options.standardise=false" in str(lacking.exception)
    save_file({f"net.{name}": item for name, item in tensors.items()}, tmp_path / "other.safetensors")
    other = str(export(tmp_path / "other.safetensors").exception)
    assert "'backbone.1.weight', but the file has none (shape (16, 1))" in other, (
        "the names that the network has"
    )
    made = export(weights, "--set", "model_options.standardise=false")
    assert made.exit_code == 0, made.output
    job = folders.prepared(folders.read_job(tmp_path / "job"))
    assert job.evaluate_only is not None and job.dataset_options["contract"]["title"] == "Masses"
    assert "safetensors.torch.save_file" in str(export(torn).exception)
    circular = CliRunner().invoke(app, ["jobs", "export", "--evaluate", str(torn)])
    assert "--method fedavg --contract contract.json --evaluate FILE" in str(circular.exception)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"rounds": 2}, "rounds: Expected 0 with `evaluate_only`"),
        ({"initial_model_sha256": None}, "initial_model_sha256: Expected that of the model to evaluate"),
        ({"personalise": True}, "personalise: not possible with `evaluate_only`"),
        ({"start": "fed3r"}, "start: not possible with `evaluate_only`"),
        ({"local_baseline_epochs": 1}, "local_baseline_epochs: not possible"),
        ({"privacy": {}, "weights": "uniform"}, "privacy.evaluation: Expected 'noisy' with `evaluate_only`"),
        ({"evaluate_only": None}, "rounds: Expected 1 at least, but got 0"),
        ({"method": "fedproto", "method_options": {}}, "evaluate_only: fedproto has no global model"),
    ],
)
def test_what_contradicts_it_is_listed(ran: Path, changes: dict[str, Any], word: str) -> None:
    values = {**evaluating.of_run(ran, None, {}).job.model_dump(mode="json"), **changes}
    with pytest.raises(JobError) as caught:
        prepare(values)
    assert word in str(caught.value)


def test_other_jobs_hashes_stay() -> None:
    job, _ = check_job({**runs.SMALL})
    assert isinstance(job, JobConfig) and "evaluate_only" not in job.model_dump(mode="json")


ISIC = {"method": "fedetf", "rounds": 1, "sites": runs.FOUR, "min_sites": 3}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    runs.run(runs.job(**ISIC), folder)
    return folder / "server" / MODEL


Change = Callable[[str, str, dict[str, Any]], dict[str, Any]]


def attempt(weights: Path, folder: Path, **wire: Any) -> tuple[Coordinator, runs.Wire]:
    """The evaluation of a model by a server with a hand on the line; its run is not started."""
    import hashlib

    sha256 = hashlib.sha256(weights.read_bytes()).hexdigest()
    job = evaluating.from_job(runs.job(**ISIC), sha256, runs.FOUR, "batch", {})
    sessions = {site: SiloSession(context) for site, context in runs.contexts(job, folder).items()}
    identity = ServerIdentity(runs.JOB_ID, simulated_anchor(runs.JOB_ID, production=False), simulated=True)
    line = runs.Wire(sessions, **wire)
    return Coordinator(prepare(job), folder / "server", identity=identity, initial_model=str(weights)), line


def another(request: dict[str, Any]) -> bytes:
    """The bytes of a state of this job's form, with other weights."""
    return state_bytes(prepare(runs.job(**ISIC)).initial_state())


@pytest.mark.whole
def test_a_silo_evaluates_the_named_model_only(
    weights: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Other weights, another state, none at all but the server's own word: each is refused."""
    import hashlib

    def other_weights(task: str, site: str, request: dict[str, Any]) -> dict[str, Any]:
        return {**request, "start": request["start"][:-4] + b"\0\0\0\0"} if "start" in request else request

    def other_state(task: str, site: str, request: dict[str, Any]) -> dict[str, Any]:
        if "start" not in request:
            return request
        data = another(request)
        return {**request, "state": hashlib.sha256(data).hexdigest(), "state_bytes": data}

    def no_weights(task: str, site: str, request: dict[str, Any]) -> dict[str, Any]:
        made = other_state(task, site, request)
        made.pop("start", None)
        return made

    for number, (change, code) in enumerate(
        ((other_weights, "TF-505"), (other_state, "TF-518"), (no_weights, "TF-505"))
    ):
        coordinator, line = attempt(weights, tmp_path / str(number), change=change)
        with pytest.raises(RunError):
            coordinator.run(line)
        row = next(item for item in coordinator.record.rows if item.kind == CLOSING)
        assert set(row.dropped.values()) == {code}, change.__name__
        assert not any(item.evaluation for item in coordinator.record.rows)


def test_without_one_silo_nothing_is_opened_and_the_run_says_so(weights: Path, tmp_path: Path) -> None:
    """Counts are of all enrolled silos or of nobody, as at any closing."""
    coordinator, line = attempt(
        weights, tmp_path, silent=lambda task, site, request: task == "contribute" and site == "site-4"
    )
    with pytest.raises(RunError, match="TF-510: the evaluation could not be opened"):
        coordinator.run(line)
    outcome = json.loads((tmp_path / "server" / "outcome.json").read_text())
    assert outcome["evaluation"] is None and "could not be opened" in outcome["reason"]


@pytest.mark.whole
def test_the_command_writes_a_job_that_checks(ran: Path, tmp_path: Path) -> None:
    words = ["--evaluate", str(ran), "--sites", "a,b,c", "-o", str(tmp_path / "job")]
    made = CliRunner().invoke(app, ["jobs", "export", *words])
    assert made.exit_code == 0, made.output
    assert "evaluation of FedETF" in made.stdout and "initial_model" in made.stdout
    job = folders.prepared(folders.read_job(tmp_path / "job"))
    assert job.roster == ("a", "b", "c") and job.rounds == 0
    assert folders.check_folder(tmp_path / "job") == []
    assert str(folders.traffic(tmp_path / "job"))
    wrong = CliRunner().invoke(app, ["jobs", "export", "--evaluate", str(ran), "--rounds", "3"])
    assert wrong.exit_code == 2 and "omit --rounds" in wrong.output
    with pytest.raises(JobError, match="is a silo's personal model"):
        train("ditto", tmp_path / "ditto", personalise=True)
        evaluating.of_run(tmp_path / "ditto" / "silo-0" / "personal_model.safetensors", None, {})
