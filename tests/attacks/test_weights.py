"""A hospital that lies about its number of records is refused, or counts for the job's share and no more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.attacks.kits import accept_release
from tests.support.attacks.malicious_server import Federation, hearts, identity
from tests.support.runs import Wire, contexts, coordinator, job, run

from tightframe.config.policy import PolicyBlock
from tightframe.errors import ContributionError, PolicyError, RunError, SecureSumError
from tightframe.rounds import codec
from tightframe.rounds.declaration import Declaration, applied_weights
from tightframe.rounds.silo.session import SiloSession
from tightframe.rounds.sums.common import RefusedError
from tightframe.securesum.errors import ReleaseProfileError
from tightframe.securesum.site.journal import History, Profile, ProfileAccepted, ProfileUsed

LIAR = "hospital-4"


def lie(session: SiloSession, weight: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a hospital declare another weight than its records give."""
    honest = session._declare

    def declare(*, again: bool) -> Declaration:
        return honest(again=again).model_copy(update={"weight": weight})

    monkeypatch.setattr(session, "_declare", declare)


def declared(*weights: float) -> dict[str, Declaration]:
    plain: dict[str, Any] = {"synthetic": False, "profile": "standard", "min_class_count": 5, "untold": ()}
    return {
        f"s{i:02}": Declaration(weight=weight, any_static_cohort=False, **plain)
        for i, weight in enumerate(weights)
    }


@given(
    st.lists(st.integers(1, 2**30).map(float), min_size=1, max_size=12),
    st.floats(0.01, 1.0),
)
def test_no_declared_weight_gets_more_than_the_jobs_share(weights: list[float], share: float) -> None:
    applied = list(applied_weights(declared(*weights), share).values())
    most = max(share, 1 / len(weights))
    assert max(applied) <= most * sum(applied) * (1 + 1e-9)
    level = max(applied)
    for before, after in zip(weights, applied, strict=True):
        assert after == min(before, level)  # only what is over the level is lowered, and none is raised
    if max(weights) <= share * sum(weights) * (1 - 1e-9):
        assert applied == weights


@pytest.mark.parametrize(
    ("rule", "weight", "code"),
    [
        ("exact", 5e11, "TF-403"),
        ("exact", 2.0**29, "TF-631"),
        ("exact", 100.5, "TF-631"),
        ("exact", 0.25, "TF-631"),
        ("power_of_two", 96.0, "TF-631"),
        ("uniform", 1000.0, "TF-631"),
    ],
)
def test_silos_refuse_a_weight_that_no_records_give(
    rule: str, weight: float, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slim = {"model_options": {"widths": [8]}}  # so few uniform records train no more units
    federation = Federation({**slim, "weights": rule}, hearts(4), state=tmp_path)
    lie(federation.sessions[LIAR], weight, monkeypatch)
    with pytest.raises(ContributionError, match=rf"^{code}: [\s\S]*{LIAR}"):
        federation.enroll()  # in `confirm`: nothing is trained or masked yet


def test_a_believable_lie_counts_for_its_share_at_every_silo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = Federation({}, hearts(4), state=tmp_path)
    lie(federation.sessions[LIAR], 9e6, monkeypatch)
    shares = []
    honest = codec.encode

    def encode(*args: Any, share: float, **more: Any) -> Any:
        shares.append(share)
        return honest(*args, share=share, **more)

    monkeypatch.setattr(codec, "encode", encode)
    federation.enroll()
    federation.sum("train", 1)
    assert len(shares) == 4 and max(shares) == 1.0
    assert 1 / sum(shares) == pytest.approx(0.6)  # with 9e6 of 9,000,387 it would be 0.99996


@pytest.mark.parametrize("summation", ["secure", "plain"])
def test_the_server_refuses_it_too_and_names_the_silo(
    summation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = job(summation=summation, weights="uniform", rounds=1)
    sessions = {site: SiloSession(context) for site, context in contexts(asked, tmp_path).items()}
    lie(sessions["site-2"], 64.0, monkeypatch)
    with pytest.raises(RefusedError, match="site-2 refused: TF-631"):
        coordinator(asked, tmp_path).run(Wire(sessions))


@pytest.mark.whole
def test_all_who_use_a_lowered_weight_use_the_same(tmp_path: Path) -> None:
    lowered = {
        name: run(job(rounds=1, max_weight_share=0.3, summation=name), tmp_path / name)
        for name in ("secure", "plain")
    }
    (secure, _), (plain, _) = lowered["secure"], lowered["plain"]
    whole, _ = run(job(rounds=1), tmp_path / "whole")
    assert all(torch.equal(secure.state.model[name], item) for name, item in plain.state.model.items())
    assert not all(torch.equal(secure.state.model[name], item) for name, item in whole.state.model.items())
    card = json.loads((tmp_path / "secure" / "server" / "model.json").read_text())
    weights = card["public_weights"]
    assert max(weights.values()) == pytest.approx(0.3 * sum(weights.values()))


def plain_request(session: SiloSession, **declared: bytes) -> dict[str, Any]:
    return {
        "kind": "train",
        "round": 1,
        "phase": 0,
        "attempt": 0,
        "opened": {},
        "state": "0" * 64,
        "before": "",
        "total": b"",
        "declared": declared,
    }


def test_a_silo_in_a_plain_sum_believes_no_more(tmp_path: Path) -> None:
    asked = job(rounds=1, summation="plain")
    sessions = {site: SiloSession(context) for site, context in contexts(asked, tmp_path).items()}
    own = {site: session._declare(again=False) for site, session in sessions.items()}
    honest = {site: item.to_bytes() for site, item in own.items()}
    session = sessions["site-1"]
    mine = own["site-1"]
    lies: list[tuple[dict[str, bytes], str]] = [
        ({**honest, "site-1": mine.model_copy(update={"weight": 1.0}).to_bytes()}, "TF-505"),
        ({site: item for site, item in honest.items() if site != "site-1"}, "TF-604"),
        ({**honest, "site-5": mine.to_bytes()}, "TF-505"),
        ({**honest, "site-2": mine.model_copy(update={"weight": 2.0**29}).to_bytes()}, "TF-631"),
        ({**honest, "site-2": mine.model_copy(update={"weight": 7.5}).to_bytes()}, "TF-631"),
        ({**honest, "site-2": b"nonsense"}, "TF-403"),
    ]
    for shown, code in lies:
        with pytest.raises((RunError, ContributionError), match=rf"^{code}: "):
            session.handle("contribute", plain_request(session, **shown))


def test_a_job_may_not_let_one_silo_weigh_more_than_the_policy(tmp_path: Path) -> None:
    policy = PolicyBlock(profile="standard", min_answer_grid=0.0).resolve(production=True)
    for share, weights, refused in ((1.0, "exact", True), (0.6, "exact", False), (1.0, "uniform", False)):
        federation = Federation({"max_weight_share": share, "weights": weights}, hearts(4), state=tmp_path)
        if refused:
            with pytest.raises(PolicyError, match=r"max_weight_share: the job asks for 1, at most 0\.6"):
                policy.check(federation.job)
        else:
            policy.check(federation.job)


@pytest.mark.whole
def test_no_other_silos_declared_weight_makes_a_second_equation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two jobs of the same settings, in which a liar moves the cap that lowers one honest hospital's weight.

    Else their totals, less what the liar knows of its own terms, differ by this hospital's update alone.
    """
    values = {
        "weights": "exact",
        "max_weight_share": 0.4,
        "training": {"batch_size": 65_536, "momentum": 0.0, "learning_rate": 1e-3},
    }
    data = hearts(4)

    def enrolled(job_id: str, weight: float) -> Federation:
        federation = Federation(values, data, state=tmp_path, job_id=job_id)
        lie(federation.sessions[LIAR], weight, monkeypatch)
        return federation.enroll()

    first, second = enrolled("job-a", 50.0), enrolled("job-b", 200.0)
    first.sum("train", 1)
    weights, before = second.applied(), first.applied()
    (victim,) = {name for name in data if weights[name] != before[name]} - {LIAR}  # or there is no attack

    def accepted(name: str) -> str:
        weight = "as declared" if weights[name] == second.weights()[name] else f"{weights[name]:.17e}"
        done = accept_release(second, name, tmp_path, identity, "--weight", weight)
        assert done.exit_code == 0, done.output
        return done.output

    accepted(LIAR)  # whose own weight moves, too
    with pytest.raises(SecureSumError, match=r"^TF-617: .*own weight"):
        second.sum("train", 1)
    with pytest.raises(SecureSumError, match=r"^TF-617: .*own weight"):
        enrolled("job-e", 200.0)  # where the first sum is known, before anything is trained
    enrolled("job-c", 50.0).sum("train", 1)
    assert "the cap on this silo's weight moved" in " ".join(accepted(victim).split())
    enrolled("job-d", 200.0).sum("train", 1)


def test_a_refusal_names_settings_of_which_only_the_combination_is_new() -> None:
    def profile(norm: str, *own: str) -> Profile:
        return (*(("own weight", weight) for weight in own), ("update_norm", norm))

    history = History(
        [
            ProfileUsed("hearts", profile("1", "200.0"), "job-a"),
            ProfileAccepted("hearts", profile("1", "300.0")),
            ProfileAccepted("hearts", profile("2")),
        ]
    )
    with pytest.raises(ReleaseProfileError) as caught:
        history.check_profile("hearts", profile("2", "300.0"))
    said = str(caught.value)
    assert "(own weight 200.0 or 300.0, update_norm 1 or 2)" in said
    assert "a new combination of these (own weight 300.0, update_norm 2)" in said


def test_a_site_accepts_no_weight_that_no_sum_applies(tmp_path: Path) -> None:
    def said(rule: str, weight: str) -> str:
        federation = Federation({"weights": rule}, data, state=tmp_path)
        done = accept_release(federation, LIAR, tmp_path, identity, "--weight", weight)
        assert done.exit_code == 2, done.output
        return " ".join(done.output.replace("│", " ").split())

    data = hearts(4)
    for weight in ("as agreed", "nan", "inf", "0", "-200.0"):
        assert f"expected a positive number or 'as declared', but got '{weight}'" in said("exact", weight)
    assert "expected a job that caps weights (`max_weight_share`)" in said("uniform", "200.0")
