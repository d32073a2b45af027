"""Two jobs, or rounds, of one cohort, in one of which a hospital's training fails, say by its learning rate.

Counts hardly depend on the model. A term that lacks them is as good as another cohort: the difference of the
totals is that hospital's own. Who writes jobs can look for a learning rate at which one hospital alone fails.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.attacks.test_products import totals
from tests.attacks.test_withdrawals import continued
from tests.support.attacks.malicious_server import ANY_WIDTH, Federation, hearts
from tests.support.tables import statistics_job

from tightframe.config.job import parse_job
from tightframe.errors import RunError, TrainingError
from tightframe.learning import loop, one_sum
from tightframe.learning.one_sum import temperature
from tightframe.methods import METHODS
from tightframe.phases import Cohort
from tightframe.rounds import codec
from tightframe.rounds.codec import integer_totals
from tightframe.rounds.riders import evaluation, failures
from tightframe.rounds.setup import prepare
from tightframe.rounds.silo.contribute import Contributor
from tightframe.rounds.silo.view import LocalSilo

VICTIM = "hospital-1"
FLAGS_OR_COUNTS = {
    "fedmr": {"prototype/counts"},
    "fedproto": {"prototype/shares"},
    "fedavg_etf": {"memory/denominator"},
    "fedproc": {"prototypes/holders"},
    "creff": {"creff/holders"},
}


def both_totals(
    folder: Path, monkeypatch: pytest.MonkeyPatch, method: str, *, features: bool = True
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Totals of round 2 of two jobs, in the second of which the victim's training fails there.

    Args:
        folder: of the sites.
        monkeypatch: of the test.
        method: of both jobs.
        features: whether the model that the victim received still gives features of its records.
    """
    fit, batches, failing = loop.fit, LocalSilo.batches, {"job-b": False}
    at_work = {"name": ""}

    def begins(self: LocalSilo, *given: Any, **named: Any) -> Any:
        at_work["name"] = self.name
        if failing["job-b"] and self.name == VICTIM and given[0] == "train" and not features:
            raise TrainingError("not finite", code="TF-301")
        return batches(self, *given, **named)

    def fails(model: Any, read: Any, *given: Any, **named: Any) -> Any:
        next(iter(read(0)))
        if failing["job-b"] and at_work["name"] == VICTIM:
            raise TrainingError("not finite", code="TF-301")
        return fit(model, read, *given, **named)

    monkeypatch.setattr(loop, "fit", fails)
    monkeypatch.setattr(LocalSilo, "batches", begins)
    data, totals = hearts(4), []
    values = {
        "method": method,
        "rounds": 2,
        "min_sites": 3,
        "answer_grid": 0.0,
        "weights": "uniform",
        "training": {"learning_rate": 1e-6, "epochs": 1, "batch_size": 8},
        "method_options": {"epochs": 10, "match_steps": 10} if method == "creff" else {},
    }
    for job in ("job-a", "job-b"):
        federation = Federation(values, data, state=folder, job_id=job, policy=ANY_WIDTH).enroll()
        for number in (1, 2):
            failing["job-b"] = job == "job-b" and number == 2
            totals.append(federation.sum("train", number))
    first, second = totals[1], totals[3]
    assert (first["failed"], second["failed"]) == (0, 1)
    return first, second


@pytest.mark.whole
def test_the_numbers_of_its_test_records_do_not_follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, less = both_totals(tmp_path, monkeypatch, "fedavg")
    for fold in ("validation", "test"):
        name = f"evaluation/{fold}/confusion"
        assert np.array_equal(whole[name].sum(1), less[name].sum(1))


@pytest.mark.whole
@pytest.mark.parametrize(
    ("method", "features"),
    [("fedmr", True), ("fedproto", True), ("creff", True), ("fedavg_etf", False), ("fedproc", False)],
)
def test_what_it_holds_of_each_class_does_not_follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, features: bool
) -> None:
    """Not even where the model received, which a start may make so, gives no features of its records."""
    whole, less = both_totals(tmp_path, monkeypatch, method, features=features)
    classes = len(whole["classes/holders"])
    of_classes = {
        name for name, total in whole.items() if total.shape == (classes,) and not name.startswith("update/")
    }
    assert of_classes == FLAGS_OR_COUNTS[method] | {"classes/holders"}
    for name in of_classes:
        assert whole[name].any() and np.array_equal(whole[name], less[name])


@pytest.mark.whole
def test_its_class_sums_do_not_follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At this learning rate training hardly moves features: what differs would be the victim's sums."""
    whole, less = both_totals(tmp_path, monkeypatch, "fedmr")
    sums = whole["prototype/feature_sums"]
    changed = sums - less["prototype/feature_sums"]
    assert np.abs(changed).max() < 1e-2 * np.abs(sums).max()


def test_the_moments_of_its_inputs_do_not_follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where reading failed once. Another batch size, which can fail for ever, is another release profile."""
    batches, fails = LocalSilo.batches, {"left": 0}

    def now_and_then(self: LocalSilo, *given: Any, **named: Any) -> Any:
        if self.name == VICTIM and fails["left"]:
            fails["left"] -= 1
            raise TrainingError("out of memory", code="TF-302")
        return batches(self, *given, **named)

    monkeypatch.setattr(LocalSilo, "batches", now_and_then)
    data = hearts(4)
    options = {"model_options": {"widths": [4], "standardise": True}, "min_sites": 3, "answer_grid": 0.0}
    totals = []
    for job in ("job-a", "job-b"):
        federation = Federation(options, data, state=tmp_path, job_id=job).enroll()
        federation.sum("statistics", 0)
        fails["left"] = 3 * (job == "job-b")  # two in the rehearsal
        totals.append(federation.sum("statistics", 0, 1))
    whole, less = totals
    assert (whole["failed"], less["failed"]) == (0, 1) and not fails["left"]
    for name in ("values", "sums", "squares"):
        assert whole[f"statistics/{name}"].any()
        assert np.array_equal(whole[f"statistics/{name}"], less[f"statistics/{name}"])


@pytest.mark.whole
@pytest.mark.parametrize("times", [1, 2])
def test_its_products_of_features_do_not_follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """Where it failed in one of two jobs, as the first one's end asks for: its records were few.

    Only a total without anybody's products shows none of its own.
    """
    left, summed = {VICTIM: times}, "frozen/products"
    sums = one_sum.contribute_sums

    def fails(silo: LocalSilo, *given: Any, **named: Any) -> Any:
        if left.get(silo.name, 0):
            left[silo.name] -= 1
            raise TrainingError("out of memory", code="TF-302")
        return sums(silo, *given, **named)

    monkeypatch.setattr(one_sum, "contribute_sums", fails)
    monkeypatch.setattr(Contributor, "_measure", lambda *given: None)  # it makes such sums for itself
    values = {
        "method": "fed3r",
        "weights": "exact",
        "model": "random_features",
        "model_options": {"width": 8, "standardise": True},
        "min_sites": 3,
    }
    opened = []
    for job in ("job-a", "job-b"):
        federation = Federation(values, hearts(4), state=tmp_path, job_id=job).enroll()
        with nullcontext() if job == "job-b" else pytest.raises(RunError, match="could not add its own"):
            totals(federation, summed)
        left.clear()
        assert federation.evidence is not None
        phase = federation.setup.plan.find("before", 0, 2).phase
        integers = integer_totals(phase.schema, federation.evidence.total.groups)
        opened.append(codec.decode(phase.schema, integers, parties=4))
    less, whole = opened
    for name in (summed, "frozen/fine_products", *(["frozen/sums"] if times == 2 else [])):
        assert of_nobody(less[name], whole[name])
    for name in ("frozen/counts", *(["frozen/sums"] if times == 1 else [])):
        assert np.array_equal(less[name], whole[name])


def fails_in(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, failing: dict[str, bool]) -> None:
    """Let a function fail at the victim, of which its first argument or the third's is the view."""
    done = getattr(module, name)

    def fails(silo: Any, *given: Any, **named: Any) -> Any:
        if failing["now"] and silo.name == VICTIM:
            raise TrainingError("out of memory", code="TF-302")
        return done(silo, *given, **named)

    monkeypatch.setattr(module, name, fails)


def of_nobody(less: np.ndarray, whole: np.ndarray) -> bool:
    """Whether a total is random instead of that of the others."""
    return bool(np.median(np.abs(less)) > 1e3 * np.abs(whole).max())


@pytest.mark.whole
def test_its_losses_do_not_follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By which a head gets its temperature; that keeps its scale, then."""
    failing = {"now": False}
    fails_in(monkeypatch, temperature, "contribute", failing)
    values = {
        "method": "fedncm",
        "weights": "exact",
        "model": "random_features",
        "model_options": {"width": 4, "standardise": True},
        "min_sites": 3,
    }
    opened = []
    for job in ("job-a", "job-b"):
        federation = Federation(values, hearts(4), state=tmp_path, job_id=job).enroll()
        for exchange in federation.setup.plan:
            if failing["now"] or exchange.training:
                break
            federation.sum(*exchange.place)
        failing["now"], before = job == "job-a", federation.shared.state.model
        opened.append(federation.sum("train", 1))
        failing["now"], after = False, federation.shared.state.model
        assert torch.equal(after["head.weight"], before["head.weight"]) is (job == "job-a")
    less, whole = opened
    assert (less["failed"], whole["failed"]) == (1 + failures.LACKING, 0)
    assert of_nobody(less[temperature.LOSSES], whole[temperature.LOSSES])


def test_its_evaluation_does_not_follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it cannot evaluate the model either; of such a sum the server uses no evaluation."""
    failing = {"now": False}
    fails_in(monkeypatch, evaluation, "count_at", failing)
    values = {"method": "fedavg", "rounds": 1, "min_sites": 3}
    opened = []
    for job in ("job-a", "job-b"):
        federation = Federation(values, hearts(4), state=tmp_path, job_id=job).enroll()
        failing["now"] = job == "job-a"
        opened.append(federation.sum("train", 1))
    less, whole = opened
    assert (less["failed"], whole["failed"]) == (1 + failures.LACKING, 0)
    for name in ("evaluation/test/confusion", "evaluation/test/loss"):
        assert of_nobody(less[name], whole[name])
    phase, cohort = (
        federation.setup.plan.find("train", 1, 0).carrying(True),
        Cohort(1, dict.fromkeys(hearts(4), 1.0), 1.0),
    )
    for found, noted in ((less, False), (whole, True)):
        reading = phase.read(federation.setup.initial_state(), found, cohort)
        assert (evaluation.NOTE in reading.notes) is noted


FROZEN = {"model": "random_features", "model_options": {"width": 4, "standardise": True}}
OTHERS: dict[str, dict[str, Any]] = {
    "start": {"method": "fedavg", "start": "fed3r"},
    "no rules": {"method": "fedmr", "class_rules": "off"},
    "prototypes and steps": {
        "method": "combine",
        "method_options": {"prototypes": "fedmr", "server": "fednova"},
    },
    "one covariance": {"method": "ccvr", "method_options": {"covariance": "shared"}},
    "withdrawal": {
        "model": "random_features",
        "model_options": {"width": 4},
        "method": "fed3r",
        "withdraw": {**continued("job-a"), "state_sha256": "0" * 64},
    },
    "statistics": statistics_job(),
}


@pytest.mark.parametrize("given", [*(each.name for each in METHODS), *OTHERS])
def test_no_number_of_its_records_is_zero_in_any_term(given: str) -> None:
    """Whatever it could make all the same: all of the term, which only could not be encoded, or nothing."""
    steps = {"training": {"momentum": 0.0}} | (FROZEN if given in ("fed3r", "fedcgs", "fedncm") else {})
    values = OTHERS.get(given, {"method": given, "personalise": True, **steps})
    base = {} if given == "statistics" else {"job_name": "j", "dataset": "fed_heart_disease", "model": "mlp"}
    setup = prepare(parse_job({**base, "rounds": 1, "sites": list("abcd"), "min_sites": 3, **values}))
    for exchange in setup.plan:
        for phase in exchange.phases:
            schema = phase.schema
            every = {item.name: torch.full(item.shape, 1.0) for item in schema.fields}
            for made in (every, {}):
                left = failures.without_update(schema, {}, made).tensors
                term = failures.blinded(schema, codec.encode(schema, left, share=1.0, parties=4))
                found = codec.unpack(schema, "static", term["static"])
                of_records = {item.name for item in failures.of_records(schema)}
                assert [name for name in sorted(of_records) if not found[name].any()] == [], exchange.place
