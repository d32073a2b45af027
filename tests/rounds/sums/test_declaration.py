"""What a silo makes public of itself, and that every silo and the server see the same of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.runs import FOUR, Wire, contexts, coordinator, job, run

from tightframe.config.policy import PolicyBlock
from tightframe.config.site import SiteEntry
from tightframe.data.contract import MAX_FINDINGS
from tightframe.errors import ContributionError, RunError
from tightframe.rounds.declaration import Declaration, public_weight
from tightframe.rounds.silo.session import SiloSession
from tightframe.securesum import messages

GOOD = Declaration(
    weight=290.0,
    synthetic=False,
    profile="standard",
    min_class_count=5,
    any_static_cohort=False,
    untold=(),
)


def test_it_comes_back_as_it_was() -> None:
    for item in (
        GOOD,
        GOOD.model_copy(update={"weight": 1.0, "synthetic": True, "any_static_cohort": True}),
        GOOD.model_copy(update={"weight": 2.0**30, "profile": "research", "min_class_count": 2**31 - 1}),
    ):
        assert Declaration.from_bytes(item.to_bytes(), "site-1") == item


def test_the_longest_fits_a_message() -> None:
    folds = ("validation", "test")
    parts = ["own", *folds, *(f"{fold}/{place}" for fold in folds for place in range(MAX_FINDINGS))]
    values = {"weight": 2.0**30 - 1, "profile": "x" * 32, "min_class_count": 2**31 - 1, "untold": parts}
    raw = json.dumps({**GOOD.model_dump(), **values}).encode()
    made = Declaration.from_bytes(raw, "site-1")
    assert len(made.untold) == 203 and len(made.to_bytes()) <= messages.MAX_APPLICATION


def test_it_says_six_things_and_no_number_of_records_beside_the_weight() -> None:
    assert set(json.loads(GOOD.to_bytes())) == {
        "weight",
        "synthetic",
        "profile",
        "min_class_count",
        "any_static_cohort",
        "untold",
    }


@pytest.mark.parametrize(
    "changes",
    [
        {"weight": 0.0},
        {"weight": -1.0},
        {"weight": 2.0**30 + 1},
        {"weight": "290"},
        {"weight": None},
        {"synthetic": 1},
        {"profile": "Standard; drop table"},
        {"profile": ""},
        {"profile": "x" * 33},
        {"profile": "[bold]"},
        {"min_class_count": 0},
        {"min_class_count": 2**31},
        {"min_class_count": 5.5},
        {"any_static_cohort": "no"},
        {"records": 290},
        {"untold": ["test/1", "test/1"]},
        {"untold": [f"test/{place}" for place in range(2 * MAX_FINDINGS + 4)]},
    ],
)
def test_anything_else_is_refused_by_the_silos_name(changes: dict[str, Any]) -> None:
    raw = json.dumps({**GOOD.model_dump(), **changes}).encode()
    with pytest.raises(ContributionError, match="Expected site-7 to declare") as caught:
        Declaration.from_bytes(raw, "site-7")
    assert caught.value.code == "TF-403"
    for value in changes.values():
        assert len(str(value)) < 5 or str(value) not in str(caught.value), "a stranger's words are not shown"


@pytest.mark.parametrize("key", sorted(GOOD.model_dump()))
def test_nothing_is_left_out(key: str) -> None:
    values = GOOD.model_dump()
    del values[key]
    with pytest.raises(ContributionError):
        Declaration.from_bytes(json.dumps(values).encode(), "site-1")


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"null",
        b"[]",
        b"\xff\xfe",
        b"{",
        GOOD.to_bytes() + b"x",
        GOOD.to_bytes().decode(),
        None,
        GOOD.model_dump(),
        json.dumps({**GOOD.model_dump(), "weight": float("inf")}).encode(),
        json.dumps({**GOOD.model_dump(), "weight": float("nan")}).encode(),
    ],
)
def test_what_is_no_declaration_is_refused(raw: object) -> None:
    with pytest.raises(ContributionError, match="site-1"):
        Declaration.from_bytes(raw, "site-1")


@pytest.mark.parametrize("records", [1, 2, 3, 255, 256, 257, 18597])
def test_weights_tell_as_much_as_the_job_asks(records: int) -> None:
    assert public_weight(records, "exact") == records
    assert public_weight(records, "uniform") == 1.0
    bucket = public_weight(records, "power_of_two")
    assert bucket <= records < 2 * bucket and bucket in [2.0**k for k in range(20)]


# ---------------------------------------------------------------- in a run


def _advertised(line: Wire) -> dict[str, dict[str, bytes]]:
    """What each silo was shown of each silo when it confirmed."""
    return {
        site: {
            item.name: item.application
            for item in (
                messages.Advertisement.from_bytes(raw, slots=_slots(line))
                for raw in messages.Advertisements.from_bytes(request["secure"]).items
            )
        }
        for task, site, request, _ in line.seen
        if task == "confirm"
    }


def _slots(line: Wire) -> int:
    first = next(request for task, _, request, _ in line.seen if task == "enroll")
    return messages.Params.from_bytes(first["secure"]).slots


def _own(line: Wire) -> dict[str, Declaration]:
    """What each silo said of itself when it enrolled."""
    return {
        site: Declaration.from_bytes(
            messages.Advertisement.from_bytes(answer["secure"], slots=_slots(line)).application, site
        )
        for task, site, _, answer in line.seen
        if task == "enroll"
    }


@pytest.mark.whole
@pytest.mark.parametrize("weights", ["exact", "power_of_two", "uniform"])
def test_server_and_silos_go_by_what_each_silo_has_signed(tmp_path: Path, weights: str) -> None:
    of = job(rounds=1, weights=weights)
    entries = {"site-2": SiteEntry(policy=PolicyBlock(min_class_count=7))}
    sessions = {s: SiloSession(c) for s, c in contexts(of, tmp_path, entries=entries).items()}
    line, server = Wire(sessions), coordinator(of, tmp_path)
    result = server.run(line)
    own = _own(line)
    least = {s: 7 if s in entries else 1 for s in sessions}
    held = {s: np.bincount(each.context.data.labels("train")) for s, each in sessions.items()}
    assert held["site-2"].sum() > held["site-2"][held["site-2"] >= 7].sum(), "classes of few are there"
    records = {s: int(counts[counts >= least[s]].sum()) for s, counts in held.items()}
    assert {site: item.weight for site, item in own.items()} == {
        site: public_weight(count, weights) for site, count in records.items()
    }
    assert server.weights == {site: item.weight for site, item in own.items()}
    shown = _advertised(line)
    assert sorted(shown) == FOUR
    for seen in shown.values():
        assert {site: Declaration.from_bytes(raw, site) for site, raw in seen.items()} == own
    assert [own[site].min_class_count for site in FOUR] == [1, 7, 1, 1]
    assert not any(item.any_static_cohort for item in own.values())
    assert "from 1 to 7 local records on" in result.outcome.screen()


def test_a_server_cannot_show_a_silo_another_ones_other_weight(tmp_path: Path) -> None:
    def change(task: str, site: str, request: Any) -> Any:
        if task == "confirm" and site == "site-3":
            relay = messages.Advertisements.from_bytes(request["secure"])
            slots = job_slots[0]
            item = messages.Advertisement.from_bytes(relay.items[0], slots=slots)
            lighter = Declaration.from_bytes(item.application, item.name).model_copy(update={"weight": 1.0})
            forged = replace(item, application=lighter.to_bytes()).to_bytes()
            request["secure"] = messages.Advertisements((forged, *relay.items[1:])).to_bytes()
        elif task == "enroll":
            job_slots[:] = [messages.Params.from_bytes(request["secure"]).slots]
        return request

    job_slots: list[int] = []
    with pytest.raises(RunError, match="site-3 refused: TF-603"):
        run(job(rounds=1), tmp_path, change=change)


@pytest.mark.parametrize("summation", ["secure", "plain"])
def test_a_silo_that_declares_nonsense_ends_the_run_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, summation: str
) -> None:
    of = job(rounds=1, summation=summation)
    sessions = {s: SiloSession(c) for s, c in contexts(of, tmp_path).items()}
    heavy = Declaration.model_construct(**GOOD.model_dump() | {"weight": 1e300})
    monkeypatch.setattr(sessions["site-2"], "_declare", lambda *, again: heavy)
    with pytest.raises(RunError, match="site-2 refused: TF-403"):
        coordinator(of, tmp_path).run(Wire(sessions))
    outcome = json.loads((tmp_path / "server" / "outcome.json").read_text())
    assert outcome["trained"] is False and outcome["rounds_done"] == 0 and "site-2" in outcome["reason"]


def test_the_records_are_read_through_once_a_run_though_the_setup_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = job(rounds=1)
    sessions = {s: SiloSession(c) for s, c in contexts(of, tmp_path).items()}
    read: list[str] = []
    for site, session in sessions.items():
        data = session.context.data
        monkeypatch.setattr(data, "check", lambda progress=None, site=site: read.append(site))
    line = Wire(sessions, silent=lambda task, site, _: task == "confirm" and site == "site-2")
    coordinator(of, tmp_path).run(line)
    asked = [site for task, site, _, _ in line.seen if task == "enroll"]
    assert asked == [*FOUR, "site-1", "site-3", "site-4"]
    assert read == FOUR
    again = [
        messages.Advertisement.from_bytes(answer["secure"], slots=_slots(line)).application
        for task, site, _, answer in line.seen
        if task == "enroll" and site == "site-1"
    ]
    assert len(again) == 2 and again[0] == again[1]
