"""Records with several findings, from files to answers: against torch and scikit-learn."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from scipy.stats import binomtest
from sklearn.datasets import make_multilabel_classification
from sklearn.metrics import average_precision_score, multilabel_confusion_matrix, roc_auc_score
from tests.support.error_bounds import auroc_error_bound, average_precision_error_bound
from tests.support.ledgers import charges_of
from tests.support.tables import FOUR, statistics_job
from torch import nn
from typer.testing import CliRunner

import tightframe
from tightframe import federation, metrics
from tightframe.config.job import parse_job
from tightframe.config.policy import PolicyBlock
from tightframe.config.site import SiteEntry
from tightframe.data import get
from tightframe.data.base import FOLDS, check_form
from tightframe.data.contract import Contract
from tightframe.data.images import ImagesOptions, ImagesSite
from tightframe.data.images.contract import PictureContract
from tightframe.data.images.proposal import propose
from tightframe.data.images.silo import open_site
from tightframe.data.table import TableOptions, TableSite
from tightframe.data.table.summary import describe
from tightframe.errors import DataError, JobError
from tightframe.learning.model_update import build_template
from tightframe.learning.outputs import loss, losses
from tightframe.learning.stages import cross_entropy
from tightframe.methods import METHODS
from tightframe.methods.fedavg import positive_weights
from tightframe.phases import FINDING_COUNTS, UNKNOWN
from tightframe.privacy.training.per_sample import ENGINES, RecordLoss, running
from tightframe.report.comparing import read_runs
from tightframe.results.local_report import SiloReport
from tightframe.results.parts.evaluation import FoldMetrics
from tightframe.results.statistics import Count
from tightframe.rounds.privacy_plan import honest_silos
from tightframe.rounds.setup import prepare
from tightframe.rounds.sums.release import release_profile
from tightframe_app.cli import app

NAMES = ["edema", "effusion", "nodule"]
TITLES = ["edema", "effusion", "Nodule"]
CONTRACT: dict[str, Any] = {
    "title": "Chests",
    "columns": [{"column": f"v{place}", "kind": "number", "low": 0, "high": 40} for place in range(6)],
    "label": {
        "findings": [
            {"column": "edema"},
            {"column": "effusion", "missing": "absent"},
            {"column": "nodule", "title": "Nodule", "missing": "unknown"},
        ]
    },
    "record": "id",
    "fold": {"column": "fold"},
}
TAKES = {
    *("fedavg", "fedprox", "fedopt", "scaffold", "fednova", "feddyn", "feddc", "moon", "ditto", "fedper"),
    *("fedrep", "fedbabu", "fedmmd", "fedsgd", "fedcurv", "combine", "local_only"),
}


def chests() -> pd.DataFrame:
    values, labels = make_multilabel_classification(480, 6, n_classes=3, random_state=0)
    frame = pd.DataFrame(values, columns=[f"v{place}" for place in range(6)])
    frame[NAMES] = labels
    frame["nodule"] = frame["nodule"].astype(object).where(frame.index % 7 != 0, None)
    frame["id"] = [f"r{row}" for row in frame.index]
    frame["fold"] = [("train", "test", "train", "validation")[row // 4 % 4] for row in frame.index]
    return frame


FRAME = chests()
TEST = FRAME[FRAME["fold"] == "test"]


def job(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "job_name": "chests",
        "method": "fedavg",
        "model": "mlp",
        "model_options": {"widths": [8]},
        "dataset": "table",
        "dataset_options": {"contract": CONTRACT},
        "sites": FOUR,
        "min_sites": 3,
        "rounds": 1,
        "seed": 3,
        "summation": "plain",
        "training": {"epochs": 2, "batch_size": 16, "learning_rate": 0.1, "momentum": 0.0},
    }
    return json.loads(json.dumps({**values, **changes}))  # type: ignore[no-any-return]


def entries(folder: Path, frame: pd.DataFrame = FRAME) -> dict[str, SiteEntry]:
    made = {}
    for place, site in enumerate(FOUR):
        frame[frame.index % 4 == place].to_csv(path := folder / f"{site}.csv", index=False)
        made[site] = SiteEntry.model_validate({"data": {"table": {"file": str(path)}}})
    return made


def truths(frame: pd.DataFrame) -> np.ndarray:
    columns = [pd.to_numeric(frame[name]).fillna(UNKNOWN) for name in NAMES]
    return np.stack(columns, axis=1).astype(np.int64)


def inputs(frame: pd.DataFrame) -> torch.Tensor:
    values = frame[[f"v{place}" for place in range(6)]].to_numpy() / 20 - 1
    return torch.from_numpy(values).float()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chests")


@pytest.fixture(scope="module")
def result(place: Path) -> federation.Result:
    """A secure run; the others of this file are plain, which gives the same."""
    training = {"epochs": 4, "batch_size": 8, "learning_rate": 0.3, "momentum": 0.0}
    values = job(summation="secure", method_options={"loss": "weighted"}, rounds=2, training=training)
    values["model_options"]["standardise"] = True
    return federation.run_job(parse_job(values), entries=entries(place), folder=place / "run")


@pytest.mark.parametrize("method", [item.name for item in METHODS])
def test_a_method_takes_findings_or_says_why_not(method: str) -> None:
    """Add a new one with ``Method.findings`` to ``TAKES``."""
    rounds = next(item.rounds for item in METHODS if item.name == method)
    values = job(method=method, rounds=rounds or 2)
    if method == "fedsgd":
        values["training"]["epochs"] = 1
    if method in TAKES:
        assert prepare(values).setting.findings
        return
    with pytest.raises(JobError, match=f"method: {method} does not take .* because it.*; these do: .*fedavg"):
        prepare(values)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"method_options": {"loss": "focal"}}, "softmax"),
        (
            {"method": "combine", "method_options": {"loss": "fedrs", "head": "etf"}},
            "head 'etf' and loss 'fedrs'",
        ),
        ({"start": "fed3r"}, "start: fed3r sums"),
    ],
)
def test_what_counts_a_record_in_one_class_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(JobError, match="TF-101") as caught:
        prepare(job(**wrong))
    assert said in str(caught.value)


def test_weights_of_positives_need_findings() -> None:
    contract = {**CONTRACT, "label": {"column": "edema", "classes": [{"code": "0"}, {"code": "1"}]}}
    with pytest.raises(JobError, match="'weighted', but each has one class"):
        prepare(job(dataset_options={"contract": contract}, method_options={"loss": "weighted"}))


def test_the_loss_is_torchs_over_what_is_known() -> None:
    stream = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 3, generator=stream)
    labels = torch.randint(0, 2, (5, 3), generator=stream)
    weights = torch.tensor([0.5, 1.0, 3.0])
    torch.testing.assert_close(
        loss(logits, labels, weights), nn.BCEWithLogitsLoss(pos_weight=weights)(logits, labels.float())
    )
    labels[1, 2] = labels[4, 0] = UNKNOWN
    known = labels >= 0
    expected = nn.BCEWithLogitsLoss(reduction="sum")(logits[known], labels[known].float()) / 15
    torch.testing.assert_close(losses(logits, labels).mean(), expected)
    classes = torch.tensor([0, 2, 1, 1, 0])
    assert torch.equal(loss(logits, classes), nn.functional.cross_entropy(logits, classes))


def test_counts_are_those_of_scikit_learn() -> None:
    stream = np.random.default_rng(0)
    labels = stream.integers(0, 2, (200, 3))
    scores = stream.integers(0, 20, (200, 3)) / 20 + 0.01  # one value a bin
    found = metrics.finding_confusion(labels, scores >= 0.5)
    np.testing.assert_array_equal(found, multilabel_confusion_matrix(labels, scores >= 0.5))
    histogram = metrics.score_histogram(scores, labels, 20)
    np.testing.assert_allclose(metrics.auroc(histogram), roc_auc_score(labels, scores, average=None))
    np.testing.assert_allclose(
        metrics.average_precision(histogram), average_precision_score(labels, scores, average=None)
    )
    hidden = np.where(stream.random(labels.shape) < 0.3, UNKNOWN, labels)
    for finding in range(3):
        rows = hidden[:, finding] != UNKNOWN
        alone = metrics.score_histogram(scores[rows][:, [finding]], labels[rows][:, [finding]], 20)
        np.testing.assert_array_equal(metrics.score_histogram(scores, hidden, 20)[[finding]], alone)


def check_metrics(found: FoldMetrics, likely: np.ndarray, truth: np.ndarray) -> None:
    """Hold a fold's metrics against scikit-learn on all records together."""
    assert found.findings is not None and found.records == len(truth)
    areas, recalls = [], []
    for place, (name, one) in enumerate(found.findings.items()):
        known = truth[:, place] != UNKNOWN
        y, p = truth[known, place], likely[known, place]
        (absent, false), (missed, hits) = one.confusion
        np.testing.assert_array_equal(one.confusion, multilabel_confusion_matrix(y, p >= 0.5, labels=[1])[0])
        assert found.class_records[name] == y.sum() and known.sum() == len(y)
        assert one.sensitivity == hits / (hits + missed) == found.recall[name]
        assert one.specificity == absent / (absent + false)
        assert found.scores is not None
        histogram = np.array([found.scores[name]])
        off = auroc_error_bound(histogram).item() + 1e-9
        assert one.auroc == pytest.approx(roc_auc_score(y, p), abs=off)
        off = average_precision_error_bound(histogram).item() + 1e-9
        assert one.average_precision == pytest.approx(average_precision_score(y, p), abs=off)
        areas.append(one.auroc)
        recalls.append((one.sensitivity + one.specificity) / 2)
        assert found.reading is not None and found.reading[name].brier is not None
        low, high = found.reading[name].brier  # type: ignore[misc]
        assert low <= np.mean((p - y) ** 2) <= high
    assert found.auroc == pytest.approx(np.mean(areas))
    assert found.balanced_accuracy == pytest.approx(np.mean(recalls))


def test_a_secure_run_has_scikit_learns_metrics_and_its_model_answers(
    result: federation.Result, place: Path
) -> None:
    model = tightframe.load_model(place / "run")
    assert model.findings and model.class_names == tuple(TITLES)
    likely, truth = model.predict_proba(inputs(TEST)), truths(TEST)
    found = result.outcome.final().test
    check_metrics(found, likely, truth)
    assert found.auroc is not None and found.auroc > 0.8
    known = torch.from_numpy(truth)
    exact, steps = float(losses(model.logits(inputs(TEST)), known).mean()), 0.5 * len(FOUR) / len(truth)
    assert found.loss == pytest.approx(exact, abs=steps), "each silo's sum in whole numbers"
    np.testing.assert_array_equal(model.predict(inputs(TEST)), likely >= 0.5)
    assert "false alarms" in (place / "run" / "server" / "report.html").read_text()


def test_weights_come_from_summed_counts(result: federation.Result) -> None:
    train = truths(FRAME[FRAME["fold"] == "train"])
    expected = torch.tensor([[int((column == there).sum()) for there in (1, 0)] for column in train.T])
    counts = result.state.extra[FINDING_COUNTS]
    torch.testing.assert_close(counts[:2], expected[:2].double())
    # Each of the four silos has 8 or 9 records whose nodule is unknown, and tells 10 (``min_class_count``).
    assert len(train) - int(expected[2].sum()) == 33 and len(train) - int(counts[2].sum()) == 40
    assert bool((counts[2] <= expected[2]).all())
    torch.testing.assert_close(positive_weights(expected.double()), (expected[:, 1] / expected[:, 0]).float())
    unknown = torch.zeros(1, 2, dtype=torch.float64)
    assert positive_weights(unknown).tolist() == [1.0]


def test_a_finding_that_too_few_silos_have_enough_of_is_not_counted(tmp_path: Path) -> None:
    """Of those with it, and of those without it: at two of four silos all but one record has an edema."""
    frame = FRAME.copy()
    frame.loc[frame.index % 4 < 2, "edema"] = 1
    frame.loc[[0, 1], "edema"] = 0
    values = job(method_options={"loss": "weighted"})
    made = federation.run_job(parse_job(values), entries=entries(tmp_path, frame), folder=tmp_path / "run")
    counts = made.state.extra[FINDING_COUNTS]
    assert counts[0].tolist() == [0, 0] and bool((counts[1:] > 0).all())


def test_what_one_or_two_silos_know_and_a_single_unknown_value_are_not_in_the_totals(tmp_path: Path) -> None:
    """Each silo has 30 test records, and by its policy tells nothing of fewer than 10."""
    frame = FRAME.copy()
    frame[NAMES] = frame[NAMES].astype(object)
    known = truths(FRAME)
    frame["nodule"] = pd.Series(np.where(known[:, 2] == UNKNOWN, 0, known[:, 2]), dtype=object)
    frame.loc[frame.index % 4 > 0, "edema"] = None
    frame.loc[frame.index % 4 > 1, "effusion"] = None
    frame.loc[TEST.index[TEST.index % 4 == 0][7], "nodule"] = None
    label = {"findings": [{"column": name, "missing": "unknown"} for name in NAMES]}
    values = job(summation="secure", rounds=1, dataset_options={"contract": {**CONTRACT, "label": label}})
    policy = PolicyBlock(profile="research", min_test_count=10)
    made = federation.run_job(
        parse_job(values),
        entries={
            site: item.model_copy(update={"policy": policy})
            for site, item in entries(tmp_path, frame).items()
        },
        folder=tmp_path / "run",
    )
    outcome = json.loads((tmp_path / "run" / "server" / "outcome.json").read_text())
    test = outcome["evaluation"]["test"]
    for name in ("edema", "effusion"):
        assert set(test["findings"][name].values()) == {None} and test["recall"][name] is None
        assert (
            name not in test["scores"] and name not in test["class_records"] and name not in test["reading"]
        )
        rule = f"test records with {name} known of fewer than 3 silos could be counted: none are"
        assert rule in outcome["rules"]
    assert (
        "too few test records with effusion known to be counted (min_test_count): site-3, site-4"
        in (outcome["rules"])
    )
    assert (
        "the evaluation's counts are exact: of a finding that fewer than 3 silos know enough of, "
        "it shows nothing"
    ) in outcome["rules"]
    counted = np.array(test["findings"]["nodule"]["confusion"])
    assert test["records"] == len(TEST) and counted.sum() == len(TEST) - 10
    assert counted.sum() == np.sum(test["scores"]["nodule"])
    own = SiloReport.read(tmp_path / "run" / "site-1").final.test.findings or {}
    assert np.sum(own["nodule"].confusion) == 29 and np.sum(own["edema"].confusion) == 30
    (run,) = read_runs([tmp_path / "run" / "server"])
    assert run.interval("accuracy") is not None and made.outcome.trained


def test_answers_exports_and_an_evaluation_of_the_finished_model(
    result: federation.Result, place: Path, tmp_path: Path
) -> None:
    typed = CliRunner().invoke
    TEST.to_csv(tmp_path / "test.csv", index=False)
    run, out = str(place / "run"), tmp_path / "answers.csv"
    point = ["--operating-point", "Nodule=0.9"]
    done = typed(app, ["predict", run, str(tmp_path / "test.csv"), "--name", "id", "-o", str(out), *point])
    assert done.exit_code == 0, done.output
    likely = tightframe.load_model(run).predict_proba(inputs(TEST))
    for row, p in zip(csv.DictReader(out.open()), likely, strict=True):
        assert [float(row[f"p_{name}"]) for name in TITLES] == pytest.approx(p.tolist(), abs=1e-6)
        said = [name for name, q, least in zip(TITLES, p, (0.5, 0.5, 0.9), strict=True) if q >= least]
        assert row["answer"] == ";".join(said)
    pins = {"own": Contract.model_validate(CONTRACT).sha256(), "others": "0" * 64}
    for whose, pin in pins.items():
        entry = {"data": {"table": {"file": str(tmp_path / "test.csv"), "contract": pin}}}
        (tmp_path / "site.json").write_text(json.dumps(entry))
        more = ["--site-config", str(tmp_path / "site.json"), "-o", str(tmp_path / f"{whose}.csv")]
        done = typed(app, ["predict", run, str(tmp_path / "test.csv"), *more])
        assert (done.exit_code == 0) == (whose == "own") == (tmp_path / f"{whose}.csv").is_file()
    assert isinstance(done.exception, DataError) and done.exception.code == "TF-218"
    script = tmp_path / "model.ts"
    assert typed(app, ["export", run, "--format", "torchscript", "-o", str(script)]).exit_code == 0
    traced = torch.jit.load(script)(inputs(TEST)).detach().numpy()
    np.testing.assert_allclose(traced, likely, atol=1e-5)

    folder = tmp_path / "evaluated"
    told = typed(app, ["jobs", "export", "--evaluate", run, "--sites", ",".join(FOUR), "-o", str(folder)])
    assert told.exit_code == 0, told.output
    from tightframe_app.jobs.folders import read_job

    initial = place / "run" / "server" / "model.safetensors"
    again = federation.run_job(
        parse_job(read_job(folder)), entries=entries(tmp_path), folder=tmp_path / "run", initial_model=initial
    )
    assert again.outcome.final().test == result.outcome.final().test


def test_one_step_of_fedsgd_is_torchs_over_all_records(tmp_path: Path) -> None:
    values = job(method="fedsgd", training={"epochs": 1, "batch_size": 1000, "learning_rate": 0.5})
    setup = prepare(values)
    made = federation.run_job(parse_job(values), entries=entries(tmp_path), folder=tmp_path / "run")
    model = build_template(setup.setting).double()
    model.load_state_dict({name: value.double() for name, value in setup.initial_state().model.items()})
    train = FRAME[FRAME["fold"] == "train"]
    truth = torch.from_numpy(truths(train))
    each = nn.BCEWithLogitsLoss(reduction="none")(model(inputs(train).double()), truth.clamp_min(0).double())
    (each * (truth >= 0)).mean().backward()
    for name, parameter in model.named_parameters():
        stepped = parameter - setup.setting.config.learning_rate * parameter.grad  # type: ignore[operator]
        torch.testing.assert_close(made.state.model[name].double(), stepped.detach(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("engine", ENGINES)
def test_gradients_of_single_records_are_torchs(engine: Any) -> None:
    """With the axis of views that such records always have."""
    model = build_template(prepare(job()).setting)
    records = inputs(TEST)[:4]
    labels = torch.from_numpy(truths(TEST))[:4]
    trained = list(model.parameters())
    expected = []
    for x, y in zip(records, labels, strict=True):
        each = nn.BCEWithLogitsLoss(reduction="none")(model(x[None]), y.clamp_min(0)[None].float())
        expected.append(torch.autograd.grad((each * (y >= 0)).mean(), trained))
    with running(engine, RecordLoss(model, (cross_entropy(),)), trained) as made:
        found = made(records.unsqueeze(1), labels.unsqueeze(1))
    for place, rows in enumerate(found):
        torch.testing.assert_close(rows, torch.stack([item[place] for item in expected]))


@pytest.mark.whole
@pytest.mark.parametrize("neighbours", ["record", "patient"])
def test_a_private_run_trains_and_is_charged(neighbours: str, tmp_path: Path) -> None:
    privacy: dict[str, Any] = {"epsilon": 8, "neighbours": neighbours}
    if neighbours == "record":
        privacy |= {"evaluation": "noisy", "epsilon": 100}
    contract = {**CONTRACT, "patient": "id"} if neighbours == "patient" else CONTRACT
    values = job(
        privacy=privacy,
        weights="uniform",
        summation="secure",
        method="fedsgd",
        dataset_options={"contract": contract},
        encoder="trained" if neighbours == "patient" else "random",
        training={"epochs": 1, "batch_size": 16, "learning_rate": 0.1, "augment": False},
    )
    made = federation.run_job(parse_job(values), entries=entries(tmp_path), folder=tmp_path / "run")
    assert made.outcome.trained and made.outcome.privacy is not None
    if neighbours == "patient":
        assert made.outcome.evaluation is None, "exact counts stay at the silos"
        return
    plan = prepare(values).privacy
    assert plan is not None and plan.evaluation is not None
    test = made.outcome.final().test
    # A record is in 3 cells, 3 bins and the number of records: sqrt(7), of 4 silos where 3 carry the promise.
    carried = 4 / honest_silos(parse_job(values), 4)
    expected = plan.evaluation.config.noise_multiplier * np.sqrt(7 * carried)
    assert test.noise_deviation == pytest.approx(expected, rel=1e-6)
    own = [SiloReport.read(tmp_path / "run" / site).final.test for site in FOUR]
    for name in TITLES:
        exact = np.sum([(one.findings or {})[name].confusion for one in own], axis=0)
        noisy = np.array((test.findings or {})[name].confusion)
        assert exact.sum() > 100 and (abs(noisy - exact) < 6 * expected + 1).all() and expected < 4
    assert test.records is not None and abs(test.records - len(TEST)) < 6 * expected + 1
    assert "All numbers are noisy" in (tmp_path / "run" / "server" / "report.html").read_text()
    purposes = [item.purpose for item in charges_of(tmp_path / "run", "site-1")]
    assert purposes[-1] == "closing evaluation"


def test_a_description_tells_the_unknown_from_the_absent(tmp_path: Path) -> None:
    contract = Contract.model_validate(CONTRACT)
    FRAME.to_csv(tmp_path / "chests.csv", index=False)
    found = describe(contract, TableSite(file=tmp_path / "chests.csv"))
    truth = truths(FRAME)
    assert list(found.present.values()) == (truth == 1).sum(0).tolist()
    assert list(found.unknown.values()) == [0, 0, int(FRAME["nodule"].isna().sum())]
    some, open_ones = (truth == 1).any(1), (truth != 1).all(1) & (truth == UNKNOWN).any(1)
    assert list(found.records.values()) == [(~some & ~open_ones).sum(), some.sum(), open_ones.sum()]
    (tmp_path / "contract.json").write_text(json.dumps(CONTRACT))
    site = {"data": {"table": {"file": str(tmp_path / "chests.csv")}}}
    (tmp_path / "site.json").write_text(json.dumps(site))
    options = ["--contract", str(tmp_path / "contract.json"), "--site-config", str(tmp_path / "site.json")]
    checked = CliRunner().invoke(app, ["data", "check", *options])
    of_training = truth[(FRAME["fold"] == "train").to_numpy(), 2]
    present, absent, unknown = ((of_training == there).sum() for there in (1, 0, UNKNOWN))
    assert f"Nodule {present} present, {absent} absent, {unknown} unknown)" in " ".join(
        checked.output.split()
    )
    told = CliRunner().invoke(app, ["data", "describe", *options, "--output", str(tmp_path / "page.html")])
    assert f"Nodule {(truth[:, 2] == 1).sum()} ({(truth[:, 2] == UNKNOWN).sum()} unknown)" in told.output
    cells = [str((truth[:, 2] == there).sum()) for there in (1, 0, UNKNOWN)]
    page = re.sub(r"<[^>]+>", " ", (tmp_path / "page.html").read_text())
    assert re.search(r"Nodule\s+" + r"\s+".join(cells), page)


def test_statistics_have_each_findings_prevalence(tmp_path: Path) -> None:
    values = statistics_job(dataset_options={"contract": CONTRACT})
    made = federation.run_job(parse_job(values), entries=entries(tmp_path), folder=tmp_path / "run")
    found = made.outcome.statistics
    assert found is not None and found.all_records == Count(value=len(FRAME))
    by_name = {item.column: item.overall for item in found.columns}
    truth = truths(FRAME)
    for place, title in enumerate(TITLES):
        counts = [count.value for count in by_name[title].counts]
        assert counts == [int((truth[:, place] == there).sum()) for there in (0, 1)]
        assert by_name[title].missing.value == int((truth[:, place] == UNKNOWN).sum())
    assert "Nodule = true" in (tmp_path / "run" / "server" / "report.html").read_text()


def test_generated_records_keep_the_contract_and_others_are_refused() -> None:
    options = TableOptions(contract=Contract.model_validate(CONTRACT))
    spec = get("table").of(options)
    assert spec.twin is not None and spec.multi_label and spec.class_names == tuple(TITLES)
    twin: Any = spec.twin(0, options)
    check_form(twin, spec, options)
    assert twin.labels("train").shape[1] == 3 and twin.records("train")[0][1].shape == (3,)
    twin._labels = twin._labels * 2
    with pytest.raises(DataError, match=r"TF-213.*1, 0 or -1"):
        check_form(twin, spec, options)
    twin._labels = twin._labels[:, 0]
    with pytest.raises(DataError, match=r"TF-213.*Expected 3 integers for each record"):
        check_form(twin, spec, options)


def test_pictures_have_findings_too(tmp_path: Path) -> None:
    """From a manifest to records, and the job that would train on them."""
    rows = ["file,edema,nodule"]
    for place in range(40):
        pixels = np.full((16, 16), 6 * place, np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{place}.png")
        rows.append(f"{place}.png,{place % 2},{'yes' if place % 3 else 'no'}")
    (tmp_path / "manifest.csv").write_text("\n".join(rows) + "\n")
    made = propose(tmp_path / "manifest.csv", {"label": "edema,nodule"}, "file", size=16)
    contract = PictureContract.model_validate(made.contract)
    data = open_site(ImagesSite.model_validate(made.site), ImagesOptions(contract=contract))
    values = job(dataset="images", dataset_options={"contract": made.contract}, model="small_cnn")
    values["model_options"] = {"widths": [8, 8, 8]}
    assert prepare(values).setting.findings
    for fold in FOLDS:
        for (pixels, label), own in zip(data.records(fold), data.labels(fold), strict=True):  # type: ignore[call-overload]
            place = round((float(pixels[0, 0, 0]) / 2 + 0.5) * 255 / 6)
            assert own.tolist() == label.tolist() == [place % 2, int(place % 3 > 0)]


def test_a_silos_own_report_counts_records_once(result: federation.Result, place: Path) -> None:
    own = FRAME[(FRAME.index % 4 == 0) & (FRAME["fold"] == "test")]
    report = SiloReport.read(place / "run" / "site-1")
    assert report.records.together("test") == len(own)
    assert report.records.test == {
        title: int((column == 1).sum()) for title, column in zip(TITLES, truths(own).T, strict=True)
    }
    unknown = int(own["nodule"].isna().sum())
    assert unknown and report.records.unknown is not None
    assert report.records.unknown["test"] == {"edema": 0, "effusion": 0, "Nodule": unknown}
    page = re.sub(r"<[^>]+>", " ", (place / "run" / "site-1" / "report.html").read_text())
    assert f"{report.records.test['Nodule']}, {unknown} unknown" in page


def test_personal_models_have_an_accuracy_for_each_finding(tmp_path: Path) -> None:
    """At the first silo fewer test values of the nodule are known than its policy tells of."""
    frame = FRAME.copy()
    test = frame.index[(frame.index % 4 == 0) & (frame["fold"] == "test")]
    frame.loc[test[5:], "nodule"] = None
    policy = PolicyBlock(profile="research", min_test_count=10)
    made = federation.run_job(
        parse_job(job(personalise=True)),
        entries={
            site: item.model_copy(update={"policy": policy})
            for site, item in entries(tmp_path, frame).items()
        },
        folder=tmp_path / "run",
    )
    told = []
    for place, site in enumerate(FOUR):
        own = frame[(frame.index % 4 == place) & (frame["fold"] == "test")]
        truth = truths(own)
        said = tightframe.load_model(tmp_path / "run" / site / "personal_model.safetensors").predict(
            inputs(own)
        )
        tables = [
            multilabel_confusion_matrix(y[y != UNKNOWN], a[y != UNKNOWN], labels=[1])[0]
            for y, a in zip(truth.T, said.T, strict=True)
        ]
        personal = SiloReport.read(tmp_path / "run" / site).personal
        assert personal is not None and personal.confusion is None and personal.judged == 0
        np.testing.assert_array_equal(personal.findings, tables)
        right = [np.trace(table) / table.sum() for table in tables]
        assert personal.accuracy == pytest.approx(np.mean(right))
        told.append(np.rint(32 * np.mean(right[:2] if place == 0 else right)) / 32)
        rates = [(table[0, 0] / table[0].sum() + table[1, 1] / table[1].sum()) / 2 for table in tables]
        assert personal.balanced_accuracy == pytest.approx(np.mean(rates))
    found = made.outcome.personal
    assert found is not None and found.silos == 4 and found.valid_classes is None
    assert found.accuracy == pytest.approx(np.mean(told))


def test_findings_are_handed_over_as_arrays_too(tmp_path: Path) -> None:
    """The same records in the same folds as from the sites' files give the same model, bit for bit."""
    silos: dict[str, dict[str, Any]] = {}
    for place, site in enumerate(FOUR):
        own = FRAME[FRAME.index % 4 == place]
        parts = {fold: own[own["fold"] == fold] for fold in FOLDS}
        silos[site] = {fold: (inputs(part), truths(part)) for fold, part in parts.items()}
    values = {key: item for key, item in job().items() if key not in ("dataset", "dataset_options", "sites")}
    training = {"model": "mlp", "model_options": {"widths": [8]}, "min_sites": 3, "seed": 3}
    training |= {"summation": "plain", "training": values["training"], "class_names": TITLES}
    made = federation.run("fedavg", silos, 1, folder=tmp_path / "arrays", **training)
    of_files = federation.run_job(parse_job(job()), entries=entries(tmp_path), folder=tmp_path / "files")
    assert made.outcome.final().test == of_files.outcome.final().test
    silos["site-2"]["test"] = (inputs(TEST)[:2], truths(TEST)[:2, :2])
    with pytest.raises(DataError, match="TF-213"):
        federation.run("fedavg", silos, 1, folder=tmp_path / "other", **training)


def test_weights_of_positives_leave_the_release_profile_as_it_is() -> None:
    """Counts are no class sums; that weights are another way of training the profile says."""
    profiles = [
        dict(release_profile(prepare(job(**more)), SiteEntry()) or ())
        for more in ({}, {"method_options": {"loss": "weighted"}})
    ]
    others = {name for name, value in profiles[1].items() if profiles[0].get(name) != value}
    assert others == {"training"} and "class_sums" not in profiles[0] | profiles[1]


def test_a_comparison_has_limits_of_sensitivities_and_specificities(
    result: federation.Result, place: Path
) -> None:
    """Against scipy's limits of each: those of the mean of proportions of the same records."""
    (run,) = read_runs([place / "run" / "server"])
    test = result.outcome.final().test
    limits = []
    for one in (test.findings or {}).values():
        (absent, false), (missed, hits) = one.confusion
        for right, wrong in ((absent, false), (hits, missed)):
            limits.append(binomtest(right, right + wrong).proportion_ci(method="wilson"))
    expected = np.mean([item.low for item in limits]), np.mean([item.high for item in limits])
    assert run.interval("balanced_accuracy") == pytest.approx(expected)
    assert test.balanced_accuracy is not None and expected[0] < test.balanced_accuracy < expected[1]
    known = [one.confusion for one in (test.findings or {}).values()]
    limits = [
        binomtest(right, sum(map(sum, table))).proportion_ci(method="wilson")
        for table in known
        for right in [table[0][0] + table[1][1]]
    ]
    assert run.interval("accuracy") == pytest.approx([np.mean(ends) for ends in zip(*limits, strict=True)])
    assert "sensitivity and specificity over the findings" in (place / "run/server/report.html").read_text()
