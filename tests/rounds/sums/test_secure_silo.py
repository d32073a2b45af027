"""What a silo refuses in a task of its secure sums, and that it does so before it trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from tests.support.attacks.malicious_server import NOW, ROOT, Federation, Records, hearts

from tightframe.errors import SecureSumError, TightframeError
from tightframe.learning.few_records.products import Sizes
from tightframe.rounds import codec
from tightframe.rounds.declaration import Declaration
from tightframe.rounds.state_files import BEFORE_REQUEST
from tightframe.rounds.sums.common import Encoded
from tightframe.rounds.sums.parameters import schema_name
from tightframe.rounds.sums.release import DECLARED, OWN_WEIGHT
from tightframe.rounds.sums.secure_silo import SecureSite
from tightframe.securesum import messages, server
from tightframe.securesum.errors import ReplayError, StateError
from tightframe.securesum.identity import Anchor, Verifier
from tightframe.securesum.site.journal import MAX_STARTS, History, ProfileUsed
from tightframe.securesum.site.state import Masked

ONE, TWO = "hospital-1", "hospital-2"


@pytest.fixture(scope="module")
def hospitals() -> dict[str, Records]:
    return hearts(4)


@pytest.fixture
def federation(hospitals: dict[str, Records], tmp_path: Path) -> Federation:
    """Four hospitals of a job of two rounds, as in production; nothing of them has been asked."""
    return Federation({"rounds": 2}, hospitals, state=tmp_path)


def site_of(federation: Federation, name: str = ONE) -> SecureSite:
    site = federation.sessions[name]._secure
    assert site is not None
    return site


def unexpected(*_: Any, **__: Any) -> NoReturn:
    raise AssertionError("the request was not refused before this")


def refused(call: Callable[[], Any], code: str) -> str:
    with pytest.raises(TightframeError) as caught:
        call()
    assert caught.value.code == code
    return str(caught.value)


def request_of(
    federation: Federation, slot: int = 0, number: int = 1, *, shown: bool = True, attempt: int = 0
) -> messages.TermRequest:
    """What an honest server asks a hospital for its term."""
    exchange = federation.setup.plan.find("train", number, 0)
    phase = exchange.phase_for(exchange.phase.broadcast(federation.shared.state))
    sum_id = messages.SumId.of("train", number, 0, attempt)
    turn = server.Sum(
        federation.session,
        slot=slot,
        sum_id=sum_id,
        schema=schema_name(sum_id.phase, codec.specs(phase.schema, 4)),
        basis=bytes.fromhex(federation.shared.sha256),
        spool=server.MemorySpool(),
        rests_on=federation.evidence,
    )
    return turn.term_request(federation.session.setup_for(ONE).to_bytes() if shown else b"")


def ask(
    federation: Federation, request: messages.TermRequest, train: Callable[..., Any], name: str = ONE
) -> bytes:
    site, state = site_of(federation, name), federation.shared.sha256
    return site.contribute(request.to_bytes(), state, train, lambda: federation.setup)


def zeros(
    federation: Federation, request: messages.TermRequest, also: Callable[[], Any] = lambda: None
) -> Callable[..., Encoded]:
    """Training that sends zeros, once its request is checked."""

    def train(*_: Any, check: Any, **__: Any) -> Encoded:
        fields = federation.proposed.schemas[request.schema]
        check(request.sum_id, fields, None)
        also()
        term = {
            group: bytes(sum(item.size * item.ring // 8 for item in fields if item.group == group))
            for group in {item.group for item in fields}
        }
        return Encoded(request.sum_id, fields, term, bytes.fromhex(federation.shared.sha256), True)

    return train


def declare(federation: Federation, name: str, monkeypatch: pytest.MonkeyPatch, **values: Any) -> None:
    """Let a hospital declare other values."""
    session = federation.sessions[name]
    told = session._declare
    monkeypatch.setattr(session, "_declare", lambda again: told(again=again).model_copy(update=values))


def advertised(federation: Federation) -> bytes:
    """Let all hospitals advertise; return what the server shows of it."""
    federation.proposed = federation.params()
    enrolment = server.Enrolment(
        federation.proposed, verifier=Verifier(Anchor(ROOT.certificate), {}, False, NOW)
    )
    for name in federation.sessions:
        enrolment.add(name, federation.ask_to_enroll(name, federation.proposed))
    return enrolment.relay().to_bytes()


def confirm(federation: Federation, relay: bytes, name: str = ONE) -> bytes:
    return site_of(federation, name).confirm(relay, lambda: federation.setup)


def test_a_task_out_of_turn_is_refused(federation: Federation) -> None:
    relay, request = (
        advertised(federation),
        messages.TermRequest(0, messages.SumId(1, "train-0", 0), "schema"),
    )
    assert "confirmed" in refused(lambda: ask(federation, request, unexpected), "TF-609")
    confirm(federation, relay)
    assert "advertised" in refused(lambda: confirm(federation, b"another"), "TF-609")
    with pytest.raises(StateError, match="established by a first term"):
        site_of(federation)._established()


def test_a_request_is_refused_before_anything_is_trained(federation: Federation) -> None:
    federation.enroll()
    first = request_of(federation)
    fields = federation.proposed.schemas[first.schema]

    def of_another_sum(*_: Any, check: Any, **__: Any) -> NoReturn:
        check(messages.SumId(1, "train-0", 9), fields, None)
        unexpected()

    def of_other_fields(*_: Any, check: Any, **__: Any) -> NoReturn:
        check(first.sum_id, fields[:1], None)
        unexpected()

    assert "the sum of the request" in refused(lambda: ask(federation, first, of_another_sum), "TF-610")
    refused(lambda: ask(federation, first, of_other_fields), "TF-601")
    another = replace(first, sum_id=messages.SumId(1, "train-0", 1))
    assert "found another" in refused(lambda: ask(federation, another, unexpected), "TF-608")
    ask(federation, first, zeros(federation, first))
    assert "the slot of sum" in refused(lambda: ask(federation, another, unexpected), "TF-608")


def test_a_request_is_on_record_before_training_and_tried_a_few_times(federation: Federation) -> None:
    """A process that dies over a record has told something by that."""

    class DiedError(Exception):
        pass

    def dies(*_: Any, **__: Any) -> NoReturn:
        raise DiedError

    federation.enroll()
    request = request_of(federation)
    for _ in range(MAX_STARTS):
        with pytest.raises(DiedError):
            ask(federation, request, dies)
    assert "once more" in refused(lambda: ask(federation, request, unexpected), "TF-608")


def test_a_term_is_not_masked_once_its_request_was_undone(federation: Federation) -> None:
    """While it trains, its server asks another process for shares that are refused, and undoes the request.

    What that settled of the silo's own training would be dropped although the term has left.
    """
    federation.enroll().sum("train", 1)
    assert federation.evidence is not None
    request, site = request_of(federation, 1, 2, shown=False), site_of(federation)
    folder, receipts = site._context.state_folder, tuple(federation.evidence.receipts.values())

    def undoes() -> None:
        assert (folder / BEFORE_REQUEST).is_dir()
        shares = messages.RevealRequest(1, receipts, (), {}, {})
        refused(lambda: site.reveal(shares.to_bytes()), "TF-609")
        assert not (folder / BEFORE_REQUEST).exists()

    message = refused(lambda: ask(federation, request, zeros(federation, request, undoes)), "TF-608")
    assert "while this silo trained" in message
    assert ask(federation, request, zeros(federation, request)), "asked again, it trains again"


def begin_another(federation: Federation, name: str) -> None:
    """Let another job of a hospital form its terms otherwise."""
    site = site_of(federation, name)
    with site._vault.locked():
        mine = dict(site._profile(lambda: federation.setup) or ())
        other = tuple(sorted({**mine, "weights": "power_of_two"}.items()))
        site._vault.note(ProfileUsed("hearts", other, "another"))


def test_a_job_beside_which_another_forms_terms_otherwise_gets_no_term(federation: Federation) -> None:
    """None was known at enrolment; it is seen at the confirmation, and at each request before training."""
    relay = advertised(federation)
    begin_another(federation, TWO)
    refused(lambda: confirm(federation, relay, TWO), "TF-617")


def test_nor_does_one_that_has_begun(federation: Federation) -> None:
    federation.enroll()
    begin_another(federation, ONE)
    refused(lambda: ask(federation, request_of(federation), unexpected), "TF-617")


def test_outside_production_there_is_no_release_profile(federation: Federation) -> None:
    site = site_of(federation)
    assert site._profile(None) is None
    declared = {name: session._declare(again=False) for name, session in federation.sessions.items()}
    early, later = (site._profile(lambda: federation.setup, known) for known in (None, declared))
    assert early is not None and later is not None
    assert dict(later) == {**dict(early), OWN_WEIGHT: DECLARED}
    site._context = replace(site._context, production=False)
    assert site._profile(unexpected) is None


def test_declarations_are_checked_before_anything_is_masked(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    declare(federation, TWO, monkeypatch, weight=0.5)
    relay = advertised(federation)
    for name in federation.sessions:
        refused(lambda name=name: confirm(federation, relay, name), "TF-631")


def test_declared_sizes_are_those_of_all_but_the_colluders(federation: Federation) -> None:
    relay, given = advertised(federation), list[Sizes]()
    site = site_of(federation)
    site._check_sizes = given.append
    confirm(federation, relay)
    declared = sorted(session._declare(again=True).weight for session in federation.sessions.values())
    assert given == [Sizes(sum(declared), sum(declared[-federation.proposed.colluders :]))]


@pytest.mark.parametrize(
    ("own", "lax", "seen"), [("enrolled", "any", True), ("any", "any", False), ("any", "enrolled", False)]
)
def test_where_others_open_counts_for_any_cohort_a_stricter_silo_takes_no_part(
    federation: Federation, monkeypatch: pytest.MonkeyPatch, own: str, lax: str, seen: bool
) -> None:
    session = federation.sessions[ONE]
    declare(federation, TWO, monkeypatch, any_static_cohort=lax == "any")
    declare(federation, ONE, monkeypatch, any_static_cohort=own == "any")
    site = site_of(federation)
    monkeypatch.setattr(
        SecureSite,
        "_rules",
        property(
            lambda of: replace(of._context.policy.site_rules(), any_static_cohort=of is site and own == "any")
        ),
    )
    relay = advertised(federation)
    assert session.context.policy.static_cohort == "enrolled"
    if seen:
        assert TWO in refused(lambda: confirm(federation, relay), "TF-614")
    else:
        confirm(federation, relay)


def test_what_a_sum_meanwhile_changed_is_not_forgotten(federation: Federation) -> None:
    """Another process of the job answers for a later slot while this one trains."""
    federation.enroll()
    first, second = (request_of(federation, slot, attempt=slot) for slot in (0, 1))

    def meanwhile() -> None:
        ask(federation, second, zeros(federation, second))

    assert "slot" in refused(lambda: ask(federation, first, zeros(federation, first, meanwhile)), "TF-608")
    slots = site_of(federation)._established().slots
    assert [isinstance(slots[slot], Masked) for slot in (0, 1)] == [False, True]


def test_a_set_up_that_was_checked_before_training_is_used_only_while_nothing_changed(
    federation: Federation,
) -> None:
    federation.enroll()
    vault = site_of(federation)._vault
    first, second = (request_of(federation, slot, attempt=slot) for slot in (0, 1))
    ask(federation, first, zeros(federation, first))

    def meanwhile() -> None:
        state = site_of(federation)._established()
        vault._state = replace(state, slots=(*state.slots[:2], state.slots[0], *state.slots[3:]))

    ask(federation, second, zeros(federation, second, meanwhile))
    assert isinstance(site_of(federation)._established().slots[2], Masked)


@pytest.mark.parametrize(
    ("resumed", "seal", "fails_at", "asked"),
    [(False, False, 0, 0), (True, False, 0, 2), (True, False, 1, 1), (True, False, 2, 2), (True, True, 0, 0)],
)
def test_a_resumed_job_is_held_to_its_chain_before_training_and_after(
    federation: Federation,
    monkeypatch: pytest.MonkeyPatch,
    resumed: bool,
    seal: bool,
    fails_at: int,
    asked: int,
) -> None:
    """A seal is of no round of the plan, and sums nothing."""
    federation.enroll()
    site, calls = site_of(federation), list[tuple[str, bool, bool]]()
    request, trained = request_of(federation), list[bool]()
    if seal:
        request = replace(request, schema="seal", sum_id=messages.SumId(0, "seal-0", 0))
    job = SimpleNamespace(
        resume=SimpleNamespace() if resumed else None,
        max_weight_share=federation.job.max_weight_share,
        dataset=federation.job.dataset,
    )
    site._context = replace(site._context, job=job)

    def check(_: Any, params: Any, sum_id: messages.SumId, basis: bytes, *, first: bool) -> None:
        assert (params, basis) == (federation.proposed, bytes.fromhex(federation.shared.sha256))
        calls.append((str(sum_id), first, bool(trained)))
        if len(calls) == fails_at:
            raise ReplayError("the round", expected="", found="")

    monkeypatch.setattr(History, "check_resumed", check)
    train = zeros(federation, request, lambda: trained.append(True))
    if fails_at:
        refused(lambda: ask(federation, request, train), "TF-608")
    else:
        ask(federation, request, train)
    assert calls == [("1/train-0/0", True, False), ("1/train-0/0", True, True)][:asked]


def test_an_epochs_setup_is_recorded_once(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tried again with the next request that shows it, if the disk was full."""
    federation.enroll()
    site, written = site_of(federation), list[int]()

    def write(_: Any, request: messages.TermRequest) -> None:
        written.append(request.slot)
        if request.slot == 0:
            raise OSError("disk full")

    monkeypatch.setattr(site._record, "session", write)
    for slot, shown in enumerate((True, False, True, True)):
        request = request_of(federation, slot, shown=shown, attempt=slot)
        if slot == 0:
            with pytest.raises(OSError, match="disk full"):
                ask(federation, request, zeros(federation, request))
        else:
            ask(federation, request, zeros(federation, request))
    assert written == [0, 2]


def test_shares_confirm_the_total_told(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    federation.enroll()
    site, confirmed, verified = site_of(federation), list[str | None](), list[str]()
    monkeypatch.setattr(site, "_confirm", confirmed.append)
    monkeypatch.setattr(type(site._context.pace), "verified", lambda _, name: verified.append(name))
    federation.sum("train", 1)
    told = federation.evidence
    federation.sum("train", 2)
    assert told is not None
    assert confirmed == [None, told.total.digest().hex()]
    assert list(dict.fromkeys(verified)) == ["1/train-0/0", "2/train-0/0"]


def test_a_sum_is_planned_as_the_job_has_it(federation: Federation) -> None:
    site, params = site_of(federation), federation.params()
    for other in (replace(params, slots=params.slots - 1), replace(params, schemas={"seal": ()})):
        refused(
            lambda other=other: site.enroll(other.to_bytes(), unexpected, lambda: federation.setup), "TF-601"
        )
        refused(lambda other=other: site.check_proposal(other, federation.setup, []), "TF-601")
    strange = replace(params, roster=(*params.roster[:3], "stranger"))
    refused(lambda: site.enroll(strange.to_bytes(), unexpected, lambda: federation.setup), "TF-601")


def test_a_new_process_takes_no_part_in_a_job_that_another_began(federation: Federation) -> None:
    """It does not know for which sum the other gave its shares last."""
    declared, plan = federation.sessions[ONE]._declare, lambda: federation.setup
    again: list[bool] = []

    def declare(**how: bool) -> Declaration:
        again.append(how["again"])
        return declared(**how)

    params = federation.params()
    site_of(federation).enroll(params.to_bytes(), declare, None)  # nor need sums be planned at enrolment
    later = replace(params, epoch=1)
    site_of(federation).enroll(later.to_bytes(), declare, plan)
    assert again == [False, True]
    federation.start_again()
    last = replace(params, epoch=2).to_bytes()
    assert "another one" in refused(lambda: site_of(federation).enroll(last, unexpected, plan), "TF-608")


def test_a_silo_without_an_identity_signs_nothing(federation: Federation) -> None:
    site = site_of(federation)
    site._context = replace(site._context, identity=None)
    with pytest.raises(SecureSumError, match=r"^TF-615: .*no identity to sign with"):
        site._identity()


def test_a_repeated_request_gets_the_same_bytes(federation: Federation) -> None:
    """Also if it came in two processes at once, of which the other was first; not after another request."""
    site, made = site_of(federation), list[bytes]()

    def make(key: bytes) -> bytes:
        made.append(key)
        site._vault.keep("reply-task", key + b"answer")
        return b"answer"

    def fails(error: Exception, *, answered: bool = True) -> Callable[[bytes], NoReturn]:
        def made_before(key: bytes) -> NoReturn:
            if answered:
                site._vault.keep("reply-task", key + b"of the other")
            raise error

        return made_before

    for _ in range(2):
        assert site._once("task", b"one", b"", make) == b"answer"
    site._once("task", b"one", b"a state", make)
    site._once("task", b"one", b"", make)
    assert len(made) == 3 and len(set(made)) == 2
    replayed, charged, failed = (
        ReplayError("slot", expected="", found=""),
        TightframeError("no budget", code="TF-705"),
        TightframeError("another", code="TF-503"),
    )
    for number, error in enumerate((replayed, charged)):
        assert site._once("task", b"%d" % number, b"", fails(error)) == b"of the other"
        with pytest.raises(TightframeError):
            site._once("task", b"-%d" % number, b"", fails(error, answered=False))
    refused(lambda: site._once("task", b"failed", b"", fails(failed)), "TF-503")
    refused(lambda: site._once("task", None, b"", unexpected), "TF-604")
