"""A server that asks for the exchanges of a run in another order than the job's plan has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.serialization import Encoding
from tests.attacks.test_own_states import open_a_seal
from tests.support.attacks.malicious_server import ROOT, Federation, Records
from typer.testing import CliRunner

from tightframe import load_model
from tightframe.errors import TightframeError
from tightframe.results.files import LOCAL, MODEL, UNPROVEN
from tightframe.rounds.checkpoint import tensor_bytes
from tightframe.rounds.server.collecting import SharedState
from tightframe.rounds.silo.checks import request_order
from tightframe.rounds.withdrawn_list import LIST
from tightframe_app import cli

ASKED = "hospital-2"
VALUES = {
    "rounds": 4,
    "weights": "uniform",
    "model_options": {"widths": [16]},
    "training": {"learning_rate": 1e-5},
}
ONE_SUM = {
    "method": "fedncm",
    "rounds": 1,
    "weights": "uniform",
    "model": "random_features",
    "model_options": {"width": 8},
}


def refused(federation: Federation, kind: str, number: int, index: int = 0, **changes: Any) -> None:
    """Ask for an exchange that every hospital refuses, so that none has a result of it."""
    with pytest.raises(TightframeError) as caught:
        federation.sum(kind, number, index, **changes)
    assert caught.value.code == "TF-525"
    for session in federation.sessions.values():
        folder = session.context.run_dir
        assert not [name for name in (MODEL, LOCAL, UNPROVEN) if (folder / name).exists()]


@pytest.mark.parametrize("rounds", [(), (1,), (1, 2, 3)])
def test_no_round_is_skipped_and_no_state_but_the_last_is_a_final_model(
    federation: Federation, rounds: tuple[int, ...]
) -> None:
    """Nor at one hospital alone, whose term nobody opens."""
    for number in rounds:
        federation.sum("train", number)
    others = set(federation.sessions) - {ASKED}
    refused(federation, "closing", 4, unasked=others)
    if len(rounds) < 3:
        refused(federation, "train", 4)


def test_what_was_passed_over_is_not_asked_any_more(hospitals: dict[str, Records], tmp_path: Path) -> None:
    """The closing's sum may stay shut, so personal models may come at once; then it does not come back."""
    values = {**VALUES, "rounds": 1, "personalise": True}
    federation = Federation(values, hospitals, state=tmp_path).enroll()
    refused(federation, "personal", 1)
    federation.sum("train", 1)
    federation.sum("personal", 1)
    with pytest.raises(TightframeError, match=r"^TF-525: "):
        federation.sum("closing", 1)


def test_no_record_is_trained_on_before_the_statistics(hospitals: dict[str, Records], tmp_path: Path) -> None:
    """Without them values are raw, of which wide layers show single ones in an honest total."""
    values = {**VALUES, "model_options": {"widths": [16], "standardise": True}}
    federation = Federation(values, hospitals, state=tmp_path).enroll()
    refused(federation, "train", 1)
    federation.statistics()
    federation.sum("train", 1)


@pytest.mark.whole
def test_a_resumed_job_ends_on_the_state_of_its_round_alone(
    federation: Federation, hospitals: dict[str, Records], tmp_path: Path
) -> None:
    states = [federation.shared]
    for number in range(1, 5):
        federation.sum("train", number)
        states.append(federation.shared)
    open_a_seal(federation)
    for number in (3, 4):
        where = {"lineage": "job-a", "previous": "job-a", "after_round": 4, "checkpoint_sha256": "0" * 64}
        values = {**VALUES, "resume": where}
        resumed = Federation(values, hospitals, state=tmp_path, job_id=f"job-{number}", previous="job-a")
        resumed.enroll()
        resumed.shared = SharedState(states[number].state)
        if number == 3:
            refused(resumed, "closing", 4)
        else:
            resumed.sum("closing", 4)
            folder = resumed.sessions[ASKED].context.run_dir
            open_a_seal(resumed)  # of no round, behind which silos would not go back
            assert (folder / MODEL).read_bytes() == tensor_bytes(states[4].state.model)
            assert load_model(folder).hash


@pytest.mark.whole
def test_a_resumed_job_trains_on_the_state_of_its_round_in_the_next_one_alone(
    federation: Federation, hospitals: dict[str, Records], tmp_path: Path
) -> None:
    states = [federation.shared]
    for number in (1, 2):
        federation.sum("train", number)
        states.append(federation.shared)
    open_a_seal(federation)
    where = {"lineage": "job-a", "previous": "job-a", "after_round": 2, "checkpoint_sha256": "0" * 64}
    resumed = Federation(
        {**VALUES, "resume": where}, hospitals, state=tmp_path, job_id="job-b", previous="job-a"
    ).enroll()
    for state, number in ((2, 4), (1, 2), (1, 3), (1, 4), (0, 3)):
        resumed.shared = SharedState(states[state].state)
        with pytest.raises(TightframeError) as caught:
            resumed.sum("train", number)
        assert caught.value.code in ("TF-505", "TF-525", "TF-608"), (state, number)
    resumed.shared = SharedState(states[2].state)
    resumed.sum("train", 3)


def withdrawal(previous: str, state: str) -> dict[str, Any]:
    """A job that withdraws records from a run of one sum."""
    where = {"lineage": "job-a", "previous": previous, "checkpoint_sha256": "0" * 64, "state_sha256": state}
    return {**ONE_SUM, "withdraw": {**where, "min_withdrawn": 10}}


@pytest.mark.whole
def test_a_withdrawal_begins_with_its_numbers(hospitals: dict[str, Records], tmp_path: Path) -> None:
    """The closing first: the difference to the first run's tells a single withdrawn record's class.

    And the sums first, on a state that an earlier withdrawal asked on, which the silos have verified.
    """
    first = Federation(ONE_SUM, hospitals, state=tmp_path).enroll()
    states = [first.shared]
    for exchange in first.setup.plan:
        first.sum(*exchange.place)
        states.append(first.shared)
    open_a_seal(first)
    final = first.shared
    lines = {
        name: [f"record,train-{index}" for label in (0, 1) for index in few(data, label)]
        for name, data in hospitals.items()
    }
    made = {"state": tmp_path, "withdrawn": {ASKED: ["record,test-5"]}}
    begun = withdrawal("job-a", final.sha256)
    one = Federation(begun, hospitals, job_id="job-b", previous="job-a", **made).enroll()
    one.shared = SharedState(states[1].state)  # the hospitals have verified it, too
    with pytest.raises(TightframeError, match=r"^TF-518: .*begin with the state"):
        one.sum("before", 0, 0)
    for exchange in one.setup.plan:
        one.shared = SharedState(final.state)
        if exchange.place != ("before", 0, 0):
            refused(one, *exchange.place)
    made["withdrawn"] = lines
    honest = Federation(begun, hospitals, job_id="job-c", previous="job-a", **made).enroll()
    honest.shared = SharedState(final.state)
    asked = []
    for index in (0, 1):
        honest.sum("before", 0, index)
        asked.append(honest.shared)
        open_a_seal(honest, index)
        honest._slot += 1
    honest.sum("before", 0, 2)
    lists = {path: path.read_bytes() for path in tmp_path.rglob(LIST)}
    assert lists
    made["withdrawn"] = {**lines, ASKED: [*lines[ASKED], "record,train-0"]}
    lie = withdrawal("job-c", final.sha256)  # the lead's: the state is still the first run's
    for index, shared in enumerate(asked, 1):
        again = Federation(lie, hospitals, job_id=f"job-{index}", previous="job-c", **made).enroll()
        again.shared = SharedState(shared.state)
        refused(again, "before", 0, index)
    assert {path: path.read_bytes() for path in tmp_path.rglob(LIST)} == lists


def few(data: Records, label: int) -> list[int]:
    """The first five training records of a class."""
    return np.flatnonzero(np.asarray(data.labels("train")) == label)[:5].tolist()


@pytest.mark.whole
@pytest.mark.parametrize(
    "places",
    [
        [("train", 1), ("train", 2), ("train", 3), ("train", 4), ("closing", 4)],
        [("train", 4), ("closing", 4), ("train", 1)],
        [("train", 1), ("train", 3)],
        [("closing", 4)],
        [("train", 1), ("closing", 4)],
    ],
)
def test_a_transcript_shows_it(
    federation: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, places: list[tuple[str, int]]
) -> None:
    """As silos that do not look would write it; only the job's order is valid."""
    monkeypatch.setattr(request_order, "check_order", lambda *_: None)
    for place in places:
        federation.sum(*place)
    root = tmp_path / "rootCA.pem"
    root.write_bytes(ROOT.x509.public_bytes(Encoding.PEM))
    path = federation.sessions[ASKED].context.transcript
    command = ["transcript", "verify", str(path), "--root", str(root), "--missing-role"]
    done = CliRunner().invoke(cli.app, command, env={"COLUMNS": "300"})
    honest = len(places) == 5
    assert done.exit_code == (0 if honest else 1)
    assert honest or "in the order of the job's plan" in done.stderr
