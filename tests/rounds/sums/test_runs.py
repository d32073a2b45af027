"""Whole runs with secure sums: equal to plain ones, with drop-outs, and what the server ever sees."""

from __future__ import annotations

import hashlib
import json
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from tests.support.runs import FOUR, JOB_ID, Wire, contexts, coordinator, in_round, job, run

from tightframe.config.policy import PolicyBlock
from tightframe.config.site import SiteEntry
from tightframe.errors import PolicyError, RunError, SecureSumError
from tightframe.methods import fedmr
from tightframe.rounds import codec
from tightframe.rounds.run_state import state_bytes
from tightframe.rounds.setup import prepare
from tightframe.rounds.silo.session import SiloSession
from tightframe.rounds.silo.view import LocalSilo
from tightframe.rounds.sums import secure_server
from tightframe.securesum import messages, transcript
from tightframe.securesum.identity import Anchor
from tightframe.securesum.primitives import Secret


def _equal(a: Any, b: Any) -> bool:
    return all(torch.equal(a.model[name], b.model[name]) for name in a.model) and all(
        torch.equal(a.extra[name], b.extra[name]) for name in a.extra
    )


def test_a_secure_run_is_the_plain_run_bit_for_bit(tmp_path: Path) -> None:
    secure, _ = run(job(rounds=3), tmp_path / "secure")
    plain, _ = run(job(rounds=3, summation="plain"), tmp_path / "plain")
    assert _equal(secure.state, plain.state)
    for ours, theirs in zip(secure.outcome.rows, plain.outcome.rows, strict=True):
        assert ours.evaluation == theirs.evaluation and ours.training == theirs.training
    assert secure.state.extra[fedmr.VALID].any(), "class sums were used"
    assert secure.outcome.rows[1].static_opened


@dataclass(frozen=True)
class Whole:
    """A run of two rounds with secure sums that loses nobody.

    Attributes:
        terms: what silos encoded, in order.
    """

    folder: Path
    result: Any
    line: Wire
    terms: list[dict[str, bytes]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder, terms, encode = tmp_path_factory.mktemp("whole"), list[dict[str, bytes]](), codec.encode

    def spy(*args: Any, **kwargs: Any) -> Any:
        terms.append(dict(encode(*args, **kwargs)))
        return terms[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "encode", spy)
        return Whole(folder, *run(job(), folder), terms)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The result of the same run with plain sums."""
    return run(job(summation="plain"), tmp_path_factory.mktemp("plain"))[0]


def test_class_sums_begin_when_it_is_known_who_holds_what(whole: Whole, tmp_path: Path) -> None:
    one_round, _ = run(job(rounds=1), tmp_path / "one")
    assert not one_round.state.extra[fedmr.VALID].any()
    assert whole.result.state.extra[fedmr.VALID].any()


def test_without_the_class_rules_they_begin_at_once_and_the_outcome_says_so(tmp_path: Path) -> None:
    result, _ = run(job(rounds=1, class_rules="off"), tmp_path)
    assert result.state.extra[fedmr.VALID].any()
    assert "CLASS RULES OFF" in result.outcome.screen()
    assert any("CLASS RULES OFF" in line for line in json.loads(_read(tmp_path, "outcome.json"))["rules"])


def _read(folder: Path, name: str) -> str:
    return (folder / "server" / name).read_text()


def test_two_setup_tasks_two_a_phase_and_a_seal_when_nobody_drops_out(whole: Whole) -> None:
    order = [task for task, site, _, _ in whole.line.seen if site == "site-1"]
    assert order == ["enroll", "confirm", *["contribute", "reveal"] * 4]


@pytest.mark.parametrize("lost", ["site-1", "site-3"])
def test_a_round_with_a_drop_out_keeps_prototypes_and_marks_its_evaluation(tmp_path: Path, lost: str) -> None:
    def silent(task: str, site: str, request: Any) -> bool:
        return task == "contribute" and site == lost and in_round(request, 2)

    result, line = run(job(rounds=3), tmp_path, silent=silent)
    rows = {(row.kind, row.round): row for row in result.outcome.rows}
    second = rows["train", 2]
    assert not second.static_opened and second.dropped == {lost: "TF-502"} and lost not in second.silos
    assert rows["train", 1].evaluation is None, "the model of round 1 was to be counted in round 2"
    assert rows["train", 2].evaluation is not None and rows["train", 3].static_opened
    tasks = [task for task, site, message, _ in line.seen if site == "site-2"]
    assert tasks[tasks.index("agree") - 3 :][:5] == ["contribute", "reveal", "contribute", "agree", "reveal"]
    assert (tasks.count("agree"), tasks.count("contribute"), tasks.count("reveal")) == (1, 5, 5)
    # Only update fields were opened in round 2: the same as the plain mean over three silos.
    valid_after = result.state.extra[fedmr.VALID]
    assert valid_after.any(), "round 3 opened the class sums again"
    other, _ = run(job(rounds=2), tmp_path / "short", silent=silent)
    assert not other.state.extra[fedmr.VALID].any(), "and round 2 did not"


def test_a_silo_lost_after_its_term_stays_in_the_sum(plain: Any, tmp_path: Path) -> None:
    def silent(task: str, site: str, request: Any) -> bool:
        return task == "reveal" and site == "site-4"

    result, _ = run(job(), tmp_path, silent=silent)
    assert _equal(result.state, plain.state)
    assert all(row.silos == FOUR for row in result.outcome.rows if row.kind == "train")


def test_silos_that_are_away_when_shares_are_asked_for_are_asked_once_more(
    plain: Any, tmp_path: Path
) -> None:
    """Those that gave shares can join no other sum before this one is opened."""
    away = {"site-1", "site-4"}

    def silent(task: str, site: str, request: Any) -> bool:
        if task != "reveal" or site not in away:
            return False
        away.discard(site)
        return True

    result, line = run(job(), tmp_path, silent=silent)
    assert not away and _equal(result.state, plain.state)
    first = [site for task, site, _, _ in line.seen if task == "reveal"][:4]
    assert sorted(first) == ["site-1", "site-2", "site-3", "site-4"], "and nobody else twice"


def test_too_few_reveals_open_nothing_and_say_who(tmp_path: Path) -> None:
    def silent(task: str, site: str, request: Any) -> bool:
        return task == "reveal" and site in ("site-1", "site-4")

    with pytest.raises(RunError, match=r"^TF-501: [\s\S]*nothing was opened.*site-1 and site-4: TF-502"):
        run(job(), tmp_path, silent=silent)
    assert not list((tmp_path / "server").glob("*.safetensors"))
    assert '"failure"' in _read(tmp_path, "transcript.jsonl")
    report = _verified(tmp_path / "server", tmp_path / "server")
    assert (len(report.opened), len(report.failed)) == (0, 1) and report.reason is not None
    outcome = json.loads(_read(tmp_path, "outcome.json"))
    assert outcome["trained"] is False and outcome["rounds_done"] == 0
    assert "TF-501: too few silos in round 1: expected at least 3, but got 2" in outcome["reason"]
    assert "site-1 and site-4: TF-502" in outcome["reason"]


def _verified(folder: Path, server: Path) -> transcript.Report:
    """A transcript, held against the root that the server's folder has."""
    root = x509.load_pem_x509_certificate((server / "simulated_root.pem").read_bytes())
    lines = (folder / "transcript.jsonl").read_bytes().splitlines(keepends=True)
    return transcript.verify(lines, Anchor(root.public_bytes(Encoding.DER)))


def test_a_dealer_of_false_secrets_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every share is one that it signed, but together they are not the secret that it advertised."""
    make = secure_server.server.Sum._check_secret

    def check(self: Any, dealer: str, group: Any, secret: Any) -> None:
        make(self, dealer, group, Secret(bytes(32)) if dealer == "site-2" else secret)

    monkeypatch.setattr(secure_server.server.Sum, "_check_secret", check)
    with pytest.raises(RunError, match=r"^TF-613: [\s\S]*site-2 is to blame"):
        run(job(rounds=1), tmp_path)
    assert '"TF-613"' in _read(tmp_path, "transcript.jsonl")


@pytest.mark.parametrize("task", ["enroll", "confirm"])
def test_a_silo_missing_at_setup_makes_a_smaller_roster(tmp_path: Path, task: str) -> None:
    result, line = run(job(), tmp_path, silent=lambda t, site, _: t == task and site == "site-2")
    assert result.outcome.not_enrolled == {"site-2": "TF-502"}
    assert all(row.silos == ["site-1", "site-3", "site-4"] for row in result.outcome.rows if row.silos)
    epochs = [
        messages.Params.from_bytes(message["secure"])
        for t, site, message, _ in line.seen
        if t == "enroll" and site == "site-1"
    ]
    assert [(item.epoch, len(item.roster), item.threshold) for item in epochs] == [(0, 4, 3), (1, 3, 3)]


def test_a_silo_missing_at_setup_ends_the_run_where_the_rest_is_too_few(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"^TF-501: [\s\S]*too few silos in enrolment"):
        run(job(min_sites=4), tmp_path, silent=lambda task, site, _: task == "enroll" and site == "site-2")


def test_the_server_never_holds_a_silos_plaintext(whole: Whole) -> None:
    terms, line = whole.terms, whole.line
    uploads = [answer["secure"] for task, _, _, answer in line.seen if task == "contribute"]
    assert len(uploads) == len(terms) + 4 == 16, "the last four are those of the seal"
    everything = b"".join(
        part for _, _, _, answer in line.seen for part in answer.values() if isinstance(part, bytes)
    )
    for upload, term in zip(uploads, [*terms, *[{"update": b"", "static": b""}] * 4], strict=True):
        masked = messages.Masked.from_bytes(upload)
        for group in messages.GROUPS:
            plain, sent = term[group], getattr(masked, group)
            assert len(plain) == len(sent)
            if len(plain) < 1000:
                continue
            integers, seen = np.frombuffer(plain, np.uint32), np.frombuffer(sent, np.uint32)
            assert (integers == seen).sum() <= 1, "a masked element equals its own by chance at most"
            counts = np.bincount(np.frombuffer(sent, np.uint8), minlength=256)
            expected = len(sent) / 256
            chi_square = float(((counts - expected) ** 2 / expected).sum())
            assert chi_square < 450, "255 degrees of freedom: p < 1e-12 beyond, as keys are new each time"
            for start in range(0, len(plain) - 16, max(16, len(plain) // 200)):
                window = plain[start : start + 16]
                if len(set(window)) > 8:  # zeros and small counts occur everywhere
                    assert window not in everything


def test_one_process_a_task_gives_the_same_model_and_its_secrets_are_the_owners_alone(
    whole: Whole, tmp_path: Path
) -> None:
    of, folder = job(), tmp_path / "apart"

    def fresh(site: str) -> SiloSession:
        return SiloSession(contexts(of, folder, memory_only=False)[site])

    line = Wire({}, fresh=fresh)
    result = coordinator(of, folder).run(line)
    assert _equal(result.state, whole.result.state)
    assert list((folder / "site-1" / "secure_sum").iterdir())
    every = [path for own in (folder, whole.folder) for path in (own / "site-1").rglob("*")]
    others = [path for path in every if path.is_file() and stat.S_IMODE(path.stat().st_mode) & 0o077]
    assert len(every) > 20 and not others, "also its transcript, which tells totals of few numbers"
    # In memory nothing but the run's ledger with the journal is on the disk.
    memory = whole.folder / "site-1" / "secure_sum"
    left = {path.relative_to(memory).parts[:2] for path in memory.rglob("*") if path.is_file()}
    assert left == {("sums.lock",), (JOB_ID, "privacy")}


def test_a_request_that_comes_again_gets_the_identical_bytes(tmp_path: Path) -> None:
    of = job(rounds=1)
    again: list[tuple[bytes, bytes]] = []

    class Twice(Wire):
        def exchange(self, task: str, requests: Any, accept: Any) -> Any:
            def both(site: str, answer: Any) -> None:
                repeated = self.sessions[site].handle(task, requests[site])
                again.append((answer["secure"], repeated["secure"]))
                accept(site, answer)

            return super().exchange(task, requests, both)

    sessions = {site: SiloSession(context) for site, context in contexts(of, tmp_path).items()}
    coordinator(of, tmp_path).run(Twice(sessions))
    assert len(again) == 4 * (2 + 2 * 3) and all(one == other for one, other in again)


def test_a_task_that_two_processes_work_on_at_once_is_answered_alike_by_both(tmp_path: Path) -> None:
    """The simulator with fewer threads than silos was seen to do so; the later one masks nothing."""
    of, answers = job(rounds=1), []

    class Racing(Wire):
        def exchange(self, task: str, requests: Any, accept: Any) -> Any:
            if task == "contribute" and not answers:
                context = contexts(of, tmp_path, memory_only=False)["site-1"]
                late, early = SiloSession(context), SiloSession(context)
                training = late._training()
                contribute = training.contribute

                def slow(*arguments: Any, **named: Any) -> Any:
                    answers.append(early.handle(task, requests["site-1"])["secure"])
                    return contribute(*arguments, **named)

                training.contribute = slow  # type: ignore[method-assign]
                answers.append(late.handle(task, requests["site-1"])["secure"])
            return super().exchange(task, requests, accept)

    sessions = {site: SiloSession(one) for site, one in contexts(of, tmp_path, memory_only=False).items()}
    result = coordinator(of, tmp_path).run(Racing(sessions))
    assert len(answers) == 2 and answers[0] == answers[1]
    assert all(row.silos == FOUR for row in result.outcome.rows if row.kind == "train")


def test_a_slot_is_never_used_for_something_else(tmp_path: Path) -> None:
    of = job(rounds=1)
    _, line = run(of, tmp_path)
    task, site, request, _ = next(item for item in line.seen if item[0] == "contribute")
    with pytest.raises(SecureSumError) as caught:
        line.sessions[site].handle(task, {**request, "state": "0" * 64})
    assert caught.value.code in ("TF-608", "TF-609")


def test_all_slots_used_up_begin_a_new_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secure_server.rules, "MAX_SLOTS", 4)
    result, line = run(job(rounds=3), tmp_path / "secure")
    plain, _ = run(job(rounds=3, summation="plain"), tmp_path / "plain")
    assert _equal(result.state, plain.state)
    assert [task for task, site, _, _ in line.seen if site == "site-1"].count("confirm") == 2
    assert result.outcome.rows[-1].silos == FOUR and all(row.static_opened for row in result.outcome.rows)


def test_after_a_permanent_loss_counts_stay_shut_and_the_model_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secure_server.rules, "MAX_SLOTS", 4)
    gone = {"now": False}

    def silent(task: str, site: str, request: Any) -> bool:
        gone["now"] |= task == "contribute" and in_round(request, 2)
        return site == "site-4" and gone["now"]

    result, line = run(job(rounds=3), tmp_path, silent=silent)
    assert result.outcome.trained and result.outcome.final() is None
    assert "stay shut after a drop-out" in result.outcome.screen()
    last = messages.Params.from_bytes(
        [m for task, site, m, _ in line.seen if task == "enroll" and site == "site-1"][-1]["secure"]
    )
    assert last.roster == ("site-1", "site-2", "site-3") and not last.static_open


def test_a_plain_job_is_refused_by_a_site_that_requires_secure_sums(tmp_path: Path) -> None:
    of = job(summation="plain")
    strict = SiteEntry(policy=PolicyBlock(require_secure_sum=True))
    entries = {"site-2": strict}
    sessions = {s: SiloSession(c) for s, c in contexts(of, tmp_path, entries=entries).items()}
    with pytest.raises(RunError, match=r"^TF-509: [\s\S]*site-2 refused: TF-614"):
        coordinator(of, tmp_path).run(Wire(sessions))


def test_and_refuses_every_task_of_it_enrolment_or_not(tmp_path: Path) -> None:
    of = job(summation="plain", rounds=1)
    _, line = run(of, tmp_path / "asked")
    request = next(message for t, site, message, _ in line.seen if t == "contribute" and site == "site-2")
    for task in ("enroll", "contribute", "baseline"):
        entries = {"site-2": SiteEntry(state_dir=str(tmp_path))}
        context = contexts(of, tmp_path / task, entries=entries, production=True)["site-2"]
        with pytest.raises(PolicyError, match="require_secure_sum"):
            SiloSession(context).handle(task, request)


def test_a_job_that_chooses_who_submits_class_sums_is_below_the_standard_policy(tmp_path: Path) -> None:
    of = job(prototype_sites=FOUR[:3])
    with pytest.raises(PolicyError, match="prototype_sites"):
        PolicyBlock().resolve(production=True).check(of)
    PolicyBlock().resolve(production=False).check(of)


def test_in_production_no_two_jobs_repeat_a_silos_updates(tmp_path: Path) -> None:
    of = job()
    one, other = (
        contexts(of, tmp_path / name, production=True)["site-1"] for name in ("job-one", "job-other")
    )
    assert one.salt() == one.salt() != other.salt() and len(one.salt()[0]) == 32
    assert contexts(of, tmp_path / "simulated")["site-1"].salt() == ()
    assert (one.state_folder / "salt").stat().st_mode & 0o077 == 0
    again = contexts(of, tmp_path / "job-one", production=True)["site-1"]
    assert again.salt() == one.salt(), "a new process of the same job goes on with it"
    seeds = {
        LocalSilo(context, prepare(of), torch.device("cpu"), 1).stream("order", 0) for context in (one, other)
    }
    assert len(seeds) == 2


@pytest.mark.parametrize(
    ("kind", "number"), [("train", 0), ("train", 3), ("closing", 1), ("statistics", 1), ("before", 1)]
)
def test_a_silo_refuses_rounds_that_the_job_does_not_have(tmp_path: Path, kind: str, number: int) -> None:
    class EnoughError(Exception):
        pass

    def change(task: str, site: str, request: Any) -> Any:
        if in_round(request, 2):
            raise EnoughError
        if task == "contribute" and site == "site-1" and in_round(request, 1):
            phase = messages.TermRequest.from_bytes(request["secure"])
            sum_id = messages.SumId(number, f"{kind}-0", 0)
            term = messages.TermRequest(phase.slot, sum_id, phase.schema, phase.setup)
            request |= {"kind": kind, "round": number, "secure": term.to_bytes()}
        return request

    sessions = {site: SiloSession(context) for site, context in contexts(job(), tmp_path).items()}
    made = coordinator(job(), tmp_path)
    with pytest.raises(EnoughError):
        made.run(Wire(sessions, change=change))
    assert made.record.rows[0].dropped == {"site-1": "TF-505"}


def test_a_silo_whose_first_term_is_lost_has_one_session_in_its_transcript(tmp_path: Path) -> None:
    lost: list[int] = []

    class Losing(Wire):
        def exchange(self, task: str, requests: Any, accept: Any) -> Any:
            def take(site: str, answer: Any) -> None:
                if task == "contribute" and site == "site-1" and not lost:
                    lost.append(1)
                    raise RunError("lost on its way", code="TF-502")
                accept(site, answer)

            return super().exchange(task, requests, take)

    of = job()
    sessions = {site: SiloSession(context) for site, context in contexts(of, tmp_path).items()}
    coordinator(of, tmp_path).run(Losing(sessions))
    for view in ("site-1", "server"):
        report = _verified(tmp_path / view, tmp_path / "server")
        assert len(report.opened) == (3 if view == "site-1" else 4)


def test_a_closing_that_loses_a_silo_is_asked_for_again_even_if_too_few_are_left(tmp_path: Path) -> None:
    def gone(task: str, site: str, request: Any) -> bool:
        return task == "contribute" and site == "site-3" and request["kind"] == "closing"

    def once(task: str, site: str, request: Any) -> bool:
        return gone(task, site, request) and request["attempt"] == 0

    of = job(sites=FOUR[:3])
    result, _ = run(of, tmp_path, silent=once)
    assert result.outcome.trained and result.outcome.final() is not None
    closing = [row.dropped for row in result.outcome.rows if row.kind == "closing"]
    assert closing == [{"site-3": "TF-502"}, {}]
    four, _ = run(job(), tmp_path / "four", silent=once)
    assert [row.dropped for row in four.outcome.rows if row.kind == "closing"] == closing
    assert "site-3 was left out of closing: TF-502" in four.outcome.screen()
    result, _ = run(of, tmp_path / "gone", silent=gone)
    told = json.loads((tmp_path / "gone" / "server" / "outcome.json").read_text())
    assert (told["trained"], told["measured"], told["reason"]) == (True, False, None)
    assert told["status"] == "trained, not measured"
    assert told["lost"]["site-3"].items() >= {"kind": "closing", "round": 2, "code": "TF-502"}.items()
    assert "The final model was not measured: TF-501: too few silos in closing" in told["notes"][-2]
    assert "TRAINED, NOT MEASURED" in result.outcome.screen()


def test_a_silo_lost_for_good_is_told_of_with_what_cannot_be_measured_for_it(tmp_path: Path) -> None:
    """In the outcome, on the last screen and while the run goes on; the rest goes on without it."""
    seen: list[tuple[str, int, dict[str, Any]]] = []
    of = job(rounds=4)
    made = coordinator(of, tmp_path)

    def gone(task: str, site: str, request: Any) -> bool:
        if site == "site-1" and task == "contribute":
            seen.append((request["kind"], request["round"], made.record.status.as_json()))
        return site == "site-4" and task == "contribute" and request["round"] >= 2

    line = Wire({site: SiloSession(context) for site, context in contexts(of, tmp_path).items()}, silent=gone)
    result = made.run(line)
    told = json.loads(_read(tmp_path, "outcome.json"))
    assert (told["trained"], told["measured"], told["status"]) == (True, False, "trained, not measured")
    lost = told["lost"]["site-4"]
    assert list(told["lost"]) == ["site-4"] and (lost["kind"], lost["round"]) == ("train", 2)
    assert lost["code"] == "TF-502" and re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ", lost["at"])
    first, second, third, classes = told["notes"]
    assert classes.startswith("no class sum of")
    assert first.startswith("site-4 is missing since round 2 (20") and first.endswith(" UTC): TF-502 (late).")
    assert second.startswith("No loss and no metric from round 2 on: counts are opened for all 4 enrolled")
    assert "The final model was not measured for the same reason" in third
    assert "is that of round 0. Each silo's own report" in third
    assert all(note in result.outcome.screen() for note in told["notes"])
    assert result.outcome.screen().count("site-4 was left out of") == 1
    live = {(kind, number): now for kind, number, now in seen}
    assert live["train", 2]["lost"] == {} and live["train", 2]["notes"] == []
    assert live["train", 3]["lost"] == told["lost"] and live["train", 3]["notes"] == told["notes"][:2]
    assert made.record.status.as_json()["notes"] == told["notes"]


def test_a_silo_that_is_back_is_not_lost(tmp_path: Path) -> None:
    def away(task: str, site: str, request: Any) -> bool:
        return task == "contribute" and site == "site-4" and in_round(request, 2)

    result, _ = run(job(rounds=3), tmp_path, silent=away)
    assert result.outcome.status == "trained" and result.outcome.measured
    (classes,) = result.outcome.notes
    assert result.outcome.lost == {} and classes.startswith("no class sum of")


def test_where_counts_may_be_opened_for_any_cohort_the_rest_measures_the_final_model(tmp_path: Path) -> None:
    def gone(task: str, site: str, request: Any) -> bool:
        return task == "contribute" and site == "site-4" and request["round"] == 2

    of = job(class_rules="off")
    entry = SiteEntry(policy=PolicyBlock(profile="research", static_cohort="any"))
    made = contexts(of, tmp_path, entries=dict.fromkeys(FOUR, entry))
    sessions = {site: SiloSession(context) for site, context in made.items()}
    result = coordinator(of, tmp_path).run(Wire(sessions, silent=gone))
    final = result.outcome.final()
    assert result.outcome.status == "trained" and final is not None and final.evaluated_by == FOUR[:3]
    assert result.outcome.notes[1:] == ["The final model was measured without site-4: by 3 of 4 silos."]


def test_a_silo_that_refuses_a_later_epoch_is_left_out_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secure_server.rules, "MAX_SLOTS", 4)

    def change(task: str, site: str, request: Any) -> Any:
        if (
            task == "confirm"
            and site == "site-3"
            and request["secure"] != first.setdefault(site, request["secure"])
        ):
            request["secure"] = b"nonsense"
        return request

    first: dict[str, bytes] = {}
    result, _ = run(job(rounds=3), tmp_path, change=change)
    assert result.outcome.trained
    assert (
        result.outcome.rows[-1].silos == ["site-1", "site-2", "site-4"]
        and not result.outcome.rows[-1].static_opened
    )


@pytest.mark.parametrize(
    ("policy", "code"),
    [
        ({"minimum_cohort": 5}, "TF-614"),
        ({"colluders": 2}, "TF-614"),
        ({"pinned_only": True}, "TF-602"),
        ({"pins": {"site-3": ["00" * 32]}}, "TF-602"),
    ],
)
def test_what_the_server_proposes_is_held_against_the_sites_own_policy(
    tmp_path: Path, policy: dict[str, Any], code: str
) -> None:
    of = job()
    entries = {"site-1": SiteEntry(policy=PolicyBlock.model_validate(policy))}
    sessions = {s: SiloSession(c) for s, c in contexts(of, tmp_path, entries=entries).items()}
    with pytest.raises(RunError, match=f"site-1 refused: {code}"):
        coordinator(of, tmp_path).run(Wire(sessions))


def test_a_silo_does_not_sum_with_others_that_open_counts_for_any_cohort(tmp_path: Path) -> None:
    of, lax = job(), SiteEntry(policy=PolicyBlock(static_cohort="any"))
    some = {site: lax for site in of.roster[1:]}
    sessions = {s: SiloSession(c) for s, c in contexts(of, tmp_path / "some", entries=some).items()}
    with pytest.raises(RunError, match="site-1 refused: TF-614"):
        coordinator(of, tmp_path / "some").run(Wire(sessions))


def test_where_all_accept_it_counts_are_opened_for_any_cohort_and_the_outcome_says_so(tmp_path: Path) -> None:
    of, lax = job(rounds=1), SiteEntry(policy=PolicyBlock(static_cohort="any"))
    entries = {site: lax for site in of.roster}
    sessions = {s: SiloSession(c) for s, c in contexts(of, tmp_path, entries=entries).items()}
    line = Wire(sessions, silent=lambda task, site, _: task == "contribute" and site == "site-4")
    result = coordinator(of, tmp_path).run(line)
    assert all(row.static_opened for row in result.outcome.rows)
    assert result.outcome.final() is not None and result.outcome.final().evaluated_by == FOUR[:3]
    assert "COUNTS OPENED FOR ANY COHORT" in result.outcome.screen()


def test_a_round_is_not_repeated_with_fewer_silos(tmp_path: Path) -> None:
    """A silo trains the same in every try, so two totals would differ by one silo's whole update."""

    class Again(Wire):
        def exchange(self, task: str, requests: Any, accept: Any) -> Any:
            failed = super().exchange(task, requests, accept)
            if task == "reveal" and not self.repeated:
                first = {site: (m, a) for t, site, m, a in self.seen if t == "contribute"}
                for site, (message, _) in sorted(first.items()):
                    old = messages.TermRequest.from_bytes(message["secure"])
                    sum_id = messages.SumId(old.sum_id.round, old.sum_id.phase, 1)
                    term = messages.TermRequest(old.slot + 1, sum_id, old.schema)
                    again = {**message, "attempt": 1, "secure": term.to_bytes()}
                    with pytest.raises(SecureSumError) as caught:
                        self.sessions[site].handle("contribute", again)
                    self.repeated.append(caught.value.code)
            return failed

    of = job(rounds=1)
    sessions = {site: SiloSession(context) for site, context in contexts(of, tmp_path).items()}
    line = Again(sessions)
    line.repeated = []
    coordinator(of, tmp_path).run(line)
    assert line.repeated == ["TF-608"] * 4


def test_a_lying_server_cannot_give_a_silo_other_settings(tmp_path: Path) -> None:
    def change(task: str, site: str, request: Any) -> Any:
        if task == "enroll" and site == "site-2":
            params = messages.Params.from_bytes(request["secure"])
            request["secure"] = messages.Params(**{**vars(params), "config_sha256": bytes(32)}).to_bytes()
        return request

    with pytest.raises(RunError, match="site-2 refused: TF-601"):
        run(job(), tmp_path, change=change)


def another_state(task: str, site: str, request: Any) -> Any:
    """Send one silo another start than the others, one that another machine could have made."""
    if task == "contribute" and site == "site-2" and in_round(request, 1):
        start = prepare(job(rounds=1)).initial_state()
        other = start.evolve(model={name: item * (1 + 1e-6) for name, item in start.model.items()})
        sent = state_bytes(other)
        request |= {"state": hashlib.sha256(sent).hexdigest(), "state_bytes": sent}
    return request


def test_a_silo_that_was_sent_another_model_is_left_out(tmp_path: Path) -> None:
    result, _ = run(job(rounds=1), tmp_path, change=another_state)
    row = next(row for row in result.outcome.rows if row.kind == "train")
    assert row.dropped == {"site-2": "TF-610"} and not row.static_opened


def test_and_where_the_server_itself_does_it_the_other_silos_refuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that does not mind: it takes the term made from the other model; the silos do mind."""
    monkeypatch.setattr(secure_server.server.Sum, "_check_masked", lambda self, site, masked: None)
    with pytest.raises(RunError, match="0 with valid shares; nothing was opened") as caught:
        run(job(rounds=1), tmp_path, change=another_state)
    assert "TF-610" in str(caught.value)
