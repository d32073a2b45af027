"""Every part of a transcript is changed in turn: what is signed must fail, and what is not is listed."""

from __future__ import annotations

import base64
import copy
import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.support.securesum import protocol
from tests.support.securesum.certificates import AT, issue, make_root
from tests.support.securesum.replay import VECTORS
from tests.support.securesum.transcripts import (
    NAMES,
    PARAMS,
    Epoch,
    Opening,
    Run,
    advertise,
    dumped,
    edited,
    identities,
    rechained,
    short_run,
    whole_run,
)

from tightframe.securesum import checks, identity, transcript
from tightframe.securesum.errors import IdentityError, MessageError, ParametersError, SignatureError
from tightframe.securesum.identity import public_key_hash
from tightframe.securesum.messages import GROUPS, Agreement, SumId, Told, challenge
from tightframe.securesum.proofs import combinations
from tightframe.securesum.transcript import SERVER, Chain, SumRecord, TranscriptError, verify
from tightframe.securesum.transcript import lines as transcript_lines

Path = tuple[str | int, ...]

# What the module says is the writer's word alone, as places of lines; a sum that failed is "failed".
UNSIGNED = {
    "run/started",
    "session/time",
    "sum/schema",  # any of the epoch's
    "failed/schema",
    "failed/failure/code",
    # What is known of a sum that failed may be left out, but not made up.
    "failed/receipts",
    "failed/receipts/0",
    "failed/receipts/1",
    "end/reason",
}
UNSIGNED_AT_SERVER = {
    "sum/total/update",
    "sum/total/static",
    "sum/blamed",
    "sum/blamed/site-3",
    "failed/blamed",
    "failed/blamed/site-4",
}
UNSIGNED_AT_SITES = {
    "run/view",  # any site that is in every sum
    "sum/groups",  # any that the rules allow
    "sum/groups/0",
    "sum/groups/1",
}


@pytest.fixture(scope="module")
def server_run() -> Run:
    return whole_run()


@pytest.fixture(scope="module")
def site_run() -> Run:
    return whole_run("site-1")


def refused(lines: Sequence[bytes], run: Run, **options: Any) -> TranscriptError:
    with pytest.raises(TranscriptError) as caught:
        verify(lines, run.root.anchor(), **options)
    assert caught.value.code == "TF-616"
    assert str(caught.value).startswith(f"Line {caught.value.line}: Expected ")
    return caught.value


# What a valid transcript says


def test_report_of_the_server(server_run: Run) -> None:
    report = server_run.verify()
    assert (report.view, report.job, report.version, report.started) == (SERVER, "job-7", "0.1.0", AT)
    assert report.sites == NAMES
    assert [item.params.epoch for item in report.epochs] == [0, 2]
    assert [item.params.roster for item in report.epochs] == [NAMES, NAMES[:3]]
    assert report.epochs[0].params == PARAMS and report.epochs[0].time == AT
    assert report.epochs[0].keys == {
        name: public_key_hash(identity.certificate).hex() for name, identity in server_run.sites.items()
    }
    assert [(item.slot, str(item.sum_id), item.groups) for item in report.opened] == [
        (0, "0/train-0/0", GROUPS),
        (1, "1/train-0/0", ("update",)),
        (1, "21/train-0/0", ("update",)),
    ]
    assert [item.failure for item in report.failed] == ["TF-613", "TF-611"]
    assert [item.missing for item in report.sums] == [
        (),
        ("site-2",),
        ("site-2",),
        ("site-2", "site-3"),
        (),
    ]
    assert [dict(item.blamed) for item in report.sums][1:3] == [
        {"site-3": "a share is not the one signed"},
        {"site-4": "silent"},
    ]
    assert report.skipped == ((2, 0),)
    assert not report.simulated and report.complete and report.reason == "too few silos"
    assert report.head == hashlib.sha256(server_run.lines[-1][:-1]).hexdigest()


def test_report_of_a_site(site_run: Run) -> None:
    report = site_run.verify()
    assert report.view == "site-1"
    assert [item.missing for item in report.sums][3] == (), "without a survivor set a site cannot know"
    assert all(not item.blamed for item in report.sums)
    assert not any("total" in json.loads(line) for line in site_run.lines)


def test_newlines_at_the_end_are_no_part_of_a_line(server_run: Run) -> None:
    bare = [line.removesuffix(b"\n") for line in server_run.lines]
    assert verify(bare, server_run.root.anchor()) == server_run.verify()
    assert verify(iter(server_run.lines), server_run.root.anchor()) == server_run.verify()


def test_a_simulated_root_is_reported() -> None:
    assert whole_run(simulated=True).verify().simulated


@pytest.mark.parametrize("view", [SERVER, "site-3"])
def test_a_run_without_sums(view: str) -> None:
    run = Run(view=view)
    assert run.verify().epochs == () and not run.verify().complete
    run.end()
    report = run.verify()
    assert report.complete and report.reason is None and report.sums == report.skipped == ()


def test_totals_are_hashes_of_the_opened_bytes() -> None:
    run = Run()
    record, total = run.record(run.epoch(), 0), {"static": memoryview(b"b" * 16), "update": b"a" * 8}
    line = transcript.opened(run.chain, record, groups=("static", "update"), total=total)
    value = json.loads(line)
    assert value["groups"] == ["update", "static"]
    assert value["total"] == {name: hashlib.sha256(data).hexdigest() for name, data in total.items()}
    assert value["blamed"] == {}
    run.lines.append(line)
    run.verify()


def test_times_are_written_in_utc() -> None:
    local = datetime(2030, 6, 1, 14, 30, tzinfo=timezone(timedelta(hours=2)))
    line = transcript.start(view=SERVER, job="j", version="1", time=local)
    assert json.loads(line)["started"] == "2030-06-01T12:30:00+00:00"
    with pytest.raises(ValueError, match="time zone"):
        transcript.start(view=SERVER, job="j", version="1", time=datetime(2030, 6, 1))


# Of the protocol itself


def protocol_run(*, sites: int = 4) -> tuple[protocol.World, list[bytes], list[bytes]]:
    """A server's and a site's transcript of a real run: two sums, the second without one site."""
    world = protocol.World(sites, seed="transcript")
    session = world.set_up()
    site = protocol.names(sites)[0]
    views = {}
    for view in (SERVER, site):
        line = transcript.start(view=view, job=protocol.JOB, version=protocol.VERSION, time=AT)
        views[view] = [
            line,
            transcript.session(
                Chain.resume(line),
                params=world.params,
                advertisements=tuple(session.peers.values()),
                ready=session.ready,
                time=AT,
            ),
        ]
    for slot, missing in enumerate([[], [protocol.names(sites)[-1]]]):
        total = world.start(slot)
        here = [name for name in world.params.roster if name not in missing]
        world.contribute(total, here)
        total.close()
        world.agree(total, here)
        world.reveal(total, here)
        done = world.finish(total)
        record = SumRecord(
            epoch=world.params.epoch,
            slot=slot,
            sum_id=total.sum_id,
            schema=total.schema,
            basis=total.basis,
            rests_on=None if total.rests_on is None else total.rests_on.ground.told,
            receipts=total.receipts,
            survivors=total.survivors,
            agreements=total.agreements,
            proved=total.proved,
        )
        for view, lines in views.items():
            opened = done.evidence.total.groups
            at_server = {"total": opened, "blamed": done.blamed} if view == SERVER else {}
            groups = tuple(opened)
            lines.append(transcript.opened(Chain.resume(lines[-1]), record, groups=groups, **at_server))
    return world, views[SERVER], views[site]


def test_a_run_of_the_protocol_gives_valid_transcripts() -> None:
    world, at_server, at_site = protocol_run()
    anchor = protocol.verifier().anchor
    last = protocol.names(4)[-1]
    for lines in (at_server, at_site):
        report = verify(lines, anchor)
        assert [item.missing for item in report.opened] == [(), (last,)]
        assert [item.groups for item in report.opened] == [GROUPS, ("update",)]
        assert report.epochs[0].params == world.params
        (checked,) = report.totals
        assert (checked.combined, checked.proved) == (protocol.names(3), (last,))
        assert [item.slot for item in report.unchecked] == [1]
    shown = json.loads(at_server[2])["total"]
    assert shown == {
        group: hashlib.sha256(data).hexdigest() for group, data in world.plain(world.params.roster).items()
    }


# The chain


def test_resume_goes_on_in_another_process() -> None:
    first = transcript.start(view=SERVER, job="j", version="1", time=AT)
    expected = hashlib.sha256(first[:-1]).hexdigest()
    assert Chain.resume(first) == Chain.resume(first[:-1]) == Chain(expected)
    assert json.loads(first)["previous"] == "0" * 64
    assert json.loads(transcript.end(Chain.resume(first), reason=None, sums=0))["previous"] == expected


@pytest.mark.parametrize("torn", [b"", b"\n", b'{"line":"run"', b"[]\n", b"{}\n"])
def test_resume_refuses_a_torn_line(torn: bytes) -> None:
    with pytest.raises(MessageError):
        Chain.resume(torn)


@pytest.mark.parametrize("view", ["server", "site-1"])
def test_removed_swapped_and_doubled_lines(view: str, request: pytest.FixtureRequest) -> None:
    run: Run = request.getfixturevalue("server_run" if view == "server" else "site_run")
    count = len(run.lines)
    for place in range(count):
        if place < count - 1:
            less = run.lines[:place] + run.lines[place + 1 :]
            assert refused(less, run).line == place + 1
            swapped = list(run.lines)
            swapped[place : place + 2] = reversed(swapped[place : place + 2])
            assert refused(swapped, run).line == place + 1
        doubled = run.lines[: place + 1] + run.lines[place:]
        assert refused(doubled, run).line == place + 2
        inserted = [*run.lines[: place + 1], b"\n", *run.lines[place + 1 :]]
        assert refused(inserted, run).line == place + 2


def test_the_same_with_the_hashes_made_anew(server_run: Run) -> None:
    lines = server_run.lines
    assert rechained(lines) == lines
    for place in range(len(lines)):
        refused(rechained(lines[: place + 1] + lines[place:]), server_run)
    for wrong in (
        lines[1:],  # no run line
        [lines[0], *lines[2:]],  # sums without a session
        [lines[0], lines[2], lines[1], *lines[3:]],  # a sum before its session
        [lines[0], lines[6], lines[1]],  # epochs backwards
        [*lines[:6], lines[7]],  # a sum of another session
        [*lines[:7], lines[2]],  # a sum of an earlier epoch
        [*lines[:3], lines[8]],  # fewer sums than the end says
    ):
        refused(rechained(wrong), server_run)


def test_a_cut_file_is_incomplete_and_no_error(server_run: Run) -> None:
    for length in range(1, len(server_run.lines)):
        report = verify(server_run.lines[:length], server_run.root.anchor())
        assert not report.complete and report.reason is None
    assert "empty" in refused([], server_run).found


def test_a_line_that_was_cut_off_is_an_error(server_run: Run) -> None:
    for length in (1, 40, len(server_run.lines[1]) - 2):
        error = refused([server_run.lines[0], server_run.lines[1][:length]], server_run)
        assert error.line == 2 and "cut off" in error.found


# Every leaf in turn


def leaves(value: Any, path: Path = ()) -> Iterator[Path]:
    """All places of a JSON value: leaves, and each map and list itself."""
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from leaves(value[key], (*path, key))


def changes(value: Any, path: Path) -> Iterator[Any]:
    """The line with the thing at ``path`` changed, in each way that its type offers."""

    def parent(made: Any) -> Any:
        for key in path[:-1]:
            made = made[key]
        return made

    def changed(change: Callable[[Any, Any], None]) -> Any:
        made = copy.deepcopy(value)
        change(parent(made), path[-1])
        return made

    found = value
    for key in path:
        found = found[key]
    for other in other_values(found):
        if path:
            yield changed(lambda holder, key, other=other: holder.__setitem__(key, other))
        else:
            yield other
    if path:
        yield changed(lambda holder, key: holder.__delitem__(key))
        if isinstance(path[-1], str):
            yield changed(lambda holder, key: holder.__setitem__(key + "x", holder.pop(key)))
        else:
            yield changed(lambda holder, key: holder.insert(key, holder[key]))
            if path[-1]:
                yield changed(lambda holder, key: holder.insert(key - 1, holder.pop(key)))


def other_values(found: Any) -> list[Any]:
    """Other values: of another type, and of the same, of which some are well-formed."""
    wrong: list[Any] = [None, [found]]
    if isinstance(found, str):
        wrong += [found + "x", found[:-1]]
        if len(found) < 24:
            wrong += ["site-1", "site-3", "closing", "\ud800"]
        if len(found) > 3:  # another character of the same alphabet: it has to fail by what it means
            place = len(found) // 2
            wrong.append(found[:place] + ("0" if found[place] != "0" else "1") + found[place + 1 :])
    elif isinstance(found, int):
        wrong += [found + 1, -1, 1.5, 2**70]
    elif isinstance(found, dict):
        wrong += [{}, {**found, "x": 0}, {**found, "site-9": "x"}]
    elif isinstance(found, list):
        wrong += [[], [*found, "site-9"], found[:-1], found[::-1]]
    return [item for item in wrong if item != found]


def all_changes(run: Run) -> Iterator[tuple[int, str, bytes]]:
    """Line number from 0, where in it, and the line with one thing changed there."""
    for number, line in enumerate(run.lines):
        value = json.loads(line)
        kind = "failed" if "failure" in value else value["line"]
        for path in leaves(value):
            for made in changes(value, path):
                yield number, "/".join([kind, *(str(part) for part in path)]), dumped(made)


@pytest.fixture
def remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was valid once is not computed again for the same arguments; refusals are never kept.

    Thousands of transcripts that differ in one place would else read the same lines and check the same
    signatures before that place.
    """
    monkeypatch.setattr(transcript, "parse", functools.lru_cache(maxsize=32)(transcript.parse))
    for module, name in (
        (checks, "ed25519_verify"),
        (checks, "public_key_hash"),
        (identity, "verify_certificate"),
        (identity, "verify_signature"),
        (transcript, "public_key_hash"),
    ):
        monkeypatch.setattr(module, name, functools.cache(getattr(module, name)))
    monkeypatch.setattr(transcript._Reading, "take", _kept(transcript._Reading.take))


def _kept(take: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """What reading a valid line led to is restored for the same line behind the same lines."""
    parts = ("session", "epochs", "sums", "checked", "identifiers", "static_cohort", "last")
    after: dict[tuple[str, int, int, bytes], tuple[Any, Any, dict[str, Any]]] = {}

    def copied(reading: dict[str, Any]) -> dict[str, Any]:
        made = {part: copy.copy(reading[part]) for part in parts}
        if made["session"] is not None:
            made["session"].slots = dict(made["session"].slots)
        return made

    def taken(reading: Any, value: Any) -> None:
        # The hash stands for all lines before; what an id names is kept below, so that no other gets it.
        key = reading.previous, id(value), id(reading.totals), reading.anchor.root
        if key not in after:
            take(reading, value)
            after[key] = value, reading.totals, copied(vars(reading))
        vars(reading).update(copied(after[key][2]))

    return taken


@pytest.mark.many
@pytest.mark.usefixtures("remembered")
@pytest.mark.parametrize("view", ["server", "site-1"])
def test_a_change_to_what_nobody_signed_fails_a_line_on(view: str) -> None:
    run = short_run(view)
    found: set[str] = set()
    for number, where, changed in all_changes(run):
        if where not in UNSIGNED | UNSIGNED_AT_SERVER | UNSIGNED_AT_SITES or number == len(run.lines) - 1:
            continue  # the next test has what is signed; and nothing follows the last line
        lines = [*run.lines[:number], changed, run.lines[number + 1]]
        try:
            verify(lines[:-1], run.root.anchor())
        except TranscriptError:
            continue
        found.add(where)
        error = refused(lines, run)
        assert error.line == number + 2 and "hash" in error.what
    assert len(found) >= 8


@pytest.mark.parametrize(
    ("read", "values"),
    [
        (transcript_lines._base64(1, 2), (None, "A===", "AB==", "AA==\n", "", "AAAA")),
        (transcript_lines._hex, (None, "AA" * 32, "aa" * 31, "aa" * 32 + "\n")),
        (
            transcript_lines._time,
            (None, "today", "2030-01-01T00:00:00", "2030-01-01T01:00:00+01:00", "2030-01-01"),
        ),
        (transcript_lines._code, (None, "TF-1", "TF-1234", "tf-501")),
    ],
    ids=["base64", "hex", "time", "code"],
)
def test_a_value_has_one_text(read: Callable[[object, str], object], values: Sequence[object]) -> None:
    for value in values:
        with pytest.raises(MessageError, match=r"^Expected here "):
            read(value, "here")


@pytest.mark.whole
@pytest.mark.many
@pytest.mark.usefixtures("remembered")
@pytest.mark.parametrize("view", ["server", "site-1"])
def test_any_change_to_what_is_signed_fails_even_with_a_new_chain(view: str) -> None:
    """At its own line, with nothing behind it: the chain cannot be what refuses it."""
    run = short_run(view)
    accepted: set[str] = set()
    count = 0
    for number, where, changed in all_changes(run):
        if view != SERVER and where.startswith("session"):
            continue  # the same line as the server's
        count += 1
        lines = [*run.lines[:number], changed]
        try:
            verify(lines, run.root.anchor())
            if number == 0:  # what the first line says is held against what the sessions say
                verify(rechained([*lines, *run.lines[1:]]), run.root.anchor())
        except TranscriptError as error:
            assert error.line == number + 1 or number == 0, where
        else:
            accepted.add(where)
    at_site = UNSIGNED_AT_SITES | UNSIGNED - {"session/time"}
    assert accepted == (UNSIGNED | UNSIGNED_AT_SERVER if view == SERVER else at_site)
    assert count > 1000


@pytest.mark.parametrize(("part", "step"), [("params", 3), ("advertisements", 17)])
def test_every_byte_of_a_session_counts(server_run: Run, part: str, step: int) -> None:
    found = json.loads(server_run.lines[1])[part]
    raw = base64.b64decode(found if part == "params" else found[1])
    for place in range(0, len(raw), step):
        wrong = raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :]

        def change(value: Any, wrong: bytes = wrong) -> None:
            text = base64.b64encode(wrong).decode()
            if part == "params":
                value[part] = text
            else:
                value[part][1] = text

        lines = rechained([server_run.lines[0], edited(server_run.lines[1], change)])
        assert refused(lines, server_run).line == 2


@pytest.mark.parametrize("part", ["params", "advertisements"])
def test_messages_have_one_form_in_a_transcript(server_run: Run, part: str) -> None:
    """The same map with its count in a longer form: one content must not have two hashes."""

    def change(value: Any) -> None:
        found = value[part] if part == "params" else value[part][0]
        raw = base64.b64decode(found)
        assert raw[0] & 0xF0 == 0x80, "a short map"
        longer = base64.b64encode(b"\xde\x00" + bytes([raw[0] & 0x0F]) + raw[1:]).decode()
        if part == "params":
            value[part] = longer
        else:
            value[part][0] = longer

    error = refused(rechained([server_run.lines[0], edited(server_run.lines[1], change)]), server_run)
    assert error.line == 2 and "canonical" in error.expected


@pytest.mark.parametrize(
    "line",
    [
        b'{"line":"run"}',
        b"null",
        b"[" * 100_000,
        b"\xff",
        b'{"line":"run","line":"run"}',
        b'{"a": 1}',
        b'{"x":NaN}',
        b'{"x":' + b"9" * 5000 + b"}",
        '{"line":"é"}'.encode(),
        dumped({"line": "other", "previous": "0" * 64}),
        dumped({"line": "run", "previous": 0}),
    ],
)
def test_lines_that_are_none(server_run: Run, line: bytes) -> None:
    assert refused([line], server_run).line == 1
    assert refused([server_run.lines[0], line], server_run).line == 2


def test_a_line_has_a_largest_size(server_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transcript_lines, "MAX_LINE", len(server_run.lines[0]) - 1)
    assert "at most" in refused(server_run.lines, server_run).expected
    assert refused(server_run.lines, server_run).line == 2


@pytest.mark.many
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_no_bytes_make_it_fail_otherwise(server_run: Run, data: st.DataObject) -> None:
    """Whatever a line is turned into, the answer is TF-616 (or that it is still valid, without its end)."""
    number = data.draw(st.integers(0, len(server_run.lines) - 1))
    line = bytearray(server_run.lines[number])
    for _ in range(data.draw(st.integers(1, 4))):
        line[data.draw(st.integers(0, len(line) - 1))] = data.draw(st.integers(0, 255))
    lines = [*server_run.lines[:number], bytes(line)]
    try:
        verify(lines, server_run.root.anchor())
    except TranscriptError as error:
        assert error.line == number + 1


# Identities


def test_another_root(server_run: Run) -> None:
    with pytest.raises(TranscriptError) as caught:
        verify(server_run.lines, make_root("project").anchor())
    assert caught.value.line == 2 and caught.value.blamed == "site-1"
    assert isinstance(caught.value.__cause__, IdentityError)


def test_a_root_that_is_no_certificate(server_run: Run) -> None:
    anchor = replace(server_run.root.anchor(), root=b"x")
    with pytest.raises(IdentityError):
        verify(server_run.lines, anchor)


def test_certificates_are_checked_at_the_time_of_their_session() -> None:
    run = Run(time=AT + timedelta(days=400))
    run.epoch()
    error = refused(run.lines, run)
    assert error.line == 2 and "valid at 2031" in error.expected


def test_pins(server_run: Run) -> None:
    keys = {name: frozenset({public_key_hash(item.certificate)}) for name, item in server_run.sites.items()}
    server_run.verify(pins=keys)
    stranger = public_key_hash(issue(server_run.root, "site-2").certificate)
    error = refused(server_run.lines, server_run, pins={**keys, "site-2": frozenset({stranger})})
    assert error.line == 2 and error.blamed == "site-2"


def test_a_certificate_without_a_role_only_if_allowed() -> None:
    root = make_root()
    run = Run(root, sites={name: issue(root, name, role=None) for name in NAMES})
    run.epoch()
    refused(run.lines, run)
    verify(run.lines, root.anchor(missing_role=True))


# Sessions


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"job": "job-8"}, "job id"),
        ({"version": "0.2.0"}, "version"),
        ({"roster": NAMES[:2]}, "number of sites"),
        ({"threshold": 2}, "threshold"),
        ({"threshold": 5}, "threshold"),
        ({"colluders": 0}, "colluders"),
        ({"colluders": 3, "threshold": 4}, "colluders"),
    ],
)
def test_parameters_below_the_rules(change: dict[str, Any], what: str) -> None:
    run = Run()
    run.epoch(**change)
    error = refused(run.lines, run)
    assert error.line == 2 and what in error.what
    assert isinstance(error.__cause__, ParametersError)


def test_what_the_rules_permit_is_reported() -> None:
    run = Run()
    run.epoch(trust="semi_honest", threshold=3, weights="exact", min_sites=4)
    (epoch,) = run.verify().epochs
    assert (epoch.params.trust, epoch.params.weights, epoch.params.min_sites) == ("semi_honest", "exact", 4)


def test_a_site_is_in_every_roster_of_its_transcript() -> None:
    run = Run(view="site-4")
    run.epoch(roster=NAMES[:3])
    assert "site-4" in refused(run.lines, run).expected


@pytest.mark.parametrize(
    "change",
    [{"epoch": 1}, {"epoch": 0}, {"lineage": "job-6"}, {"config_sha256": bytes(32)}],
)
def test_epochs_increase_within_one_job(change: dict[str, Any]) -> None:
    run = Run()
    run.epoch(epoch=1)
    run.epoch(**{"epoch": 2, **change})
    assert refused(run.lines, run).line == 3


def session_with(run: Run, *, params: Any = PARAMS, **changes: Any) -> Epoch:
    """An epoch whose second advertisement deviates, although all of it is signed as it should be."""
    epoch = Epoch.make(params, run.sites)
    name = "site-2"
    items = list(epoch.advertisements)
    items[1] = advertise(params, name, run.sites[name], epoch.secrets[name], **changes)
    return replace_items(epoch, items)


def replace_items(epoch: Epoch, items: Sequence[Any]) -> Epoch:
    return Epoch(
        epoch.params,
        tuple(items),
        transcript.session_id(epoch.params, items),
        epoch.secrets,
    )


def test_an_advertisement_of_other_parameters() -> None:
    run = Run()
    epoch, other = Epoch.make(PARAMS, run.sites), Epoch.make(replace(PARAMS, epoch=1), run.sites)
    run.write(replace_items(epoch, [epoch.advertisements[0], *other.advertisements[1:]]))
    error = refused(run.lines, run)
    assert error.line == 2 and isinstance(error.__cause__, SignatureError)


def test_advertisements_are_exactly_the_rosters() -> None:
    run = Run()
    epoch = Epoch.make(PARAMS, run.sites)
    for items in (
        epoch.advertisements[:3],
        [*epoch.advertisements, epoch.advertisements[0]],
        [*epoch.advertisements[:3], epoch.advertisements[0]],
    ):
        run.write(replace_items(epoch, items))
        assert refused(run.lines, run).line == 2
        del run.lines[1:]


def test_two_seats_for_one_key() -> None:
    root = make_root()
    sites = identities(root)
    sites["site-2"] = issue(root, "site-2", key=sites["site-1"].key)
    run = Run(root, sites=sites)
    run.epoch()
    assert "key" in refused(run.lines, run).what


@pytest.mark.parametrize("key", ["session_key", "channel_key"])
def test_a_key_of_another_site(key: str) -> None:
    run = Run()
    epoch = Epoch.make(PARAMS, run.sites)
    first = epoch.advertisements[0]
    second = advertise(
        PARAMS, "site-2", run.sites["site-2"], epoch.secrets["site-2"], **{key: getattr(first, key)}
    )
    secrets = {**epoch.secrets}
    if key == "session_key":
        secrets["site-2"] = secrets["site-1"]
    run.write(replace_items(replace(epoch, secrets=secrets), [first, second, *epoch.advertisements[2:]]))
    assert "key" in refused(run.lines, run).what


def test_every_site_was_ready_for_this_session() -> None:
    run = Run()
    epoch, other = Epoch.make(PARAMS, run.sites), Epoch.make(PARAMS, run.sites)
    right = epoch.ready()
    for wrong in (
        {name: right[name] for name in NAMES[:3]},
        {**right, "site-9": right["site-1"]},
        {**right, "site-3": right["site-4"]},
        {**right, "site-3": other.ready()["site-3"]},
    ):
        run.write(epoch, wrong)
        assert refused(run.lines, run).line == 2
        del run.lines[1:]
    run.write(epoch, right)
    run.verify()


# Sums


def test_receipts_of_another_session_slot_sum_basis_or_total() -> None:
    run = Run()
    epoch, other = run.epoch(), Epoch.make(PARAMS, run.sites)
    right = run.record(epoch, 0)
    name, sum_id = "site-3", right.sum_id
    wrong = {
        "another session": other.receipt(name, 0, sum_id, right.basis, None),
        "another slot": epoch.receipt(name, 1, sum_id, right.basis, None),
        "another sum": epoch.receipt(name, 0, SumId(0, "train-0", 1), right.basis, None),
        "another basis": epoch.receipt(name, 0, sum_id, bytes(32), None),
        "another total": epoch.receipt(name, 0, sum_id, right.basis, None, total=bytes(31) + b"1"),
        "borrowed": replace(right.receipts[0], name=name),
        "a stranger's": replace(right.receipts[2], name="site-9"),
    }
    for what, receipt in wrong.items():
        kept = [item for item in right.receipts if item.name != name]
        survivors = tuple(sorted([*(item.name for item in kept), receipt.name]))
        receipts = tuple(sorted([*kept, receipt], key=lambda item: item.name))
        wrong_one = replace(right, receipts=receipts, survivors=survivors)
        run.opened(wrong_one)
        assert refused(run.lines, run).line == 3, what
        del run.lines[2:]
    run.opened(right)
    run.verify()


def test_survivors_are_those_who_signed() -> None:
    run = Run()
    epoch = run.epoch()
    right = run.record(epoch, 0)
    for wrong in (
        replace(right, survivors=NAMES[:3]),
        replace(right, receipts=right.receipts[:3]),
        replace(right, receipts=(*right.receipts, right.receipts[0])),
        replace(right, survivors=()),
        replace(right, survivors=(), receipts=()),
    ):
        run.opened(wrong)
        assert refused(run.lines, run).line == 3
        del run.lines[2:]


def test_a_failed_sum_may_lack_survivors_but_has_no_others() -> None:
    run = Run()
    epoch = run.epoch()
    run.failed(run.record(epoch, 0, receipts=(), survivors=(), agreements=()))
    run.failed(run.record(epoch, 1, survivors=(), agreements=()))
    run.verify()
    run.failed(run.record(epoch, 2, missing=["site-1"], survivors=NAMES, agreements=()))
    assert refused(run.lines, run).line == 5


def test_too_few_survivors() -> None:
    run = Run()
    epoch = run.epoch(min_sites=4)
    run.failed(run.record(epoch, 0, missing=["site-1"]))
    run.verify()
    run.opened(run.record(epoch, 1, missing=["site-1"]))
    error = refused(run.lines, run)
    assert error.line == 4 and (error.expected, error.found) == ("at least 4", "3")


def test_agreements_on_survivors_and_receipts() -> None:
    sites = (*NAMES, "site-5", "site-6", "site-7")
    root = make_root()
    run = Run(root, sites=identities(root, sites))
    epoch = run.epoch(roster=sites, threshold=5)
    right = run.record(epoch, 0, missing=["site-7"])
    run.opened(right)
    run.verify()
    del run.lines[2:]
    run.opened(replace(right, agreements=right.agreements[1:]))
    run.verify()
    del run.lines[2:]
    first, second, *others = right.agreements
    here = right.receipts
    other = epoch.receipt("site-2", 0, right.sum_id, right.basis, None)
    wrong: dict[str, list[Agreement]] = {
        "none": [],
        "too few": list(right.agreements[:4]),
        "of another set": [epoch.agreement("site-1", here[:5]), second, *others],
        "of other receipts": [epoch.agreement("site-1", [here[0], other, *here[2:]]), second, *others],
        "of another slot": [epoch.agreement("site-1", here, slot=1), second, *others],
        "borrowed": [replace(second, name="site-1"), second, *others],
        "doubled": [first, first, second, *others],
        "out of order": [second, first, *others],
        "of the one missing": [*right.agreements, epoch.agreement("site-7", here)],
    }
    for what, agreements in wrong.items():
        line = transcript.opened(run.chain, right, groups=("update",), total={"update": b""})
        values = transcript.opened(run.chain, replace(right, agreements=tuple(agreements)), groups=())
        listed = {item["name"]: item for item in json.loads(values)["agreements"]}
        in_order = [listed[item.name] for item in agreements]
        run.lines.append(edited(line, lambda value, made=in_order: value.update(agreements=made)))
        assert refused(run.lines, run).line == 3, what
        del run.lines[2:]


def test_nobody_agrees_to_the_whole_roster() -> None:
    run = Run()
    epoch = run.epoch()
    right = run.record(epoch, 0)
    signed = tuple(epoch.agreement(name, right.receipts) for name in NAMES)
    for write in (run.opened, run.failed):
        for agreements in (signed, signed[:1]):
            write(replace(right, agreements=agreements))  # type: ignore[operator]
            assert "agreements" in refused(run.lines, run).what
            del run.lines[2:]
    run.opened(right, GROUPS)
    run.verify()


def test_agreements_need_survivors() -> None:
    run = Run()
    epoch = run.epoch()
    run.failed(run.record(epoch, 0, missing=["site-1"], agreeing=["site-2"], survivors=()))
    assert "agreements" in refused(run.lines, run).what


def test_totals_that_the_silos_verified(server_run: Run, site_run: Run) -> None:
    """Each is named by all receipts of the next sum; whoever has its integers can make the check anew."""
    for run in (server_run, site_run):
        report = run.verify()
        (checked,) = report.totals
        assert (checked.epoch, checked.told.slot, checked.told.groups) == (0, 0, GROUPS)
        assert checked.agreed == checked.combined == ("site-1", "site-3", "site-4")
        assert checked.proved == ("site-2",) and not checked.recomputed
        assert [(item.epoch, item.slot) for item in report.unchecked] == [(0, 1), (2, 1)]


def chained_sums(*, missing: Sequence[str] = (), view: str = SERVER, **changes: Any) -> Run:
    """A sum, and one that rests on its total."""
    run = Run(view=view)
    epoch = run.epoch()
    run.opened(run.record(epoch, 0), GROUPS)
    run.opened(run.record(epoch, 1, missing=missing, **changes))
    return run


def test_a_total_whose_integers_are_there_is_checked_anew() -> None:
    run = chained_sums()
    right = run.totals[run.verify().totals[0].told.digest()]
    asked = []

    def given(epoch: int, told: Told) -> Any:
        asked.append((epoch, told.slot))
        return right

    (checked,) = run.verify(totals=given).totals
    assert checked.recomputed and checked.combined == NAMES and asked == [(0, 0)]
    flipped = bytes([right["update"][0] ^ 1]) + right["update"][1:]
    other = {**right, "update": flipped}
    error = refused(run.lines, run, totals=lambda epoch, told: other)
    assert error.line == 4 and "these hashes" in error.expected
    # A server that names a false total by its own hash is found out by the silos' combinations.
    lied = Run()
    epoch = lied.epoch()
    lied.opened(lied.record(epoch, 0), GROUPS)
    opening = lied.last[epoch.session]
    false = {**lied.totals[opening.told.digest()]}
    false["update"] = bytes([false["update"][0] ^ 1]) + false["update"][1:]
    hashes = {group: hashlib.sha256(data).digest() for group, data in false.items()}
    lied.last[epoch.session] = replace(opening, told=replace(opening.told, hashes=hashes))
    lied.lines[2] = edited(
        lied.lines[2], lambda value: value.update(total={group: data.hex() for group, data in hashes.items()})
    )
    lied.opened(lied.record(epoch, 1))
    assert not lied.verify().totals[0].recomputed, "without the integers nobody can tell"
    error = refused(lied.lines, lied, totals=lambda epoch, told: false)
    assert error.line == 4 and "the sum of its silos' terms" in error.expected
    # With a term that the server showed the file has not all combinations.
    partly = chained_sums(missing=["site-2"])
    assert not partly.verify(totals=lambda epoch, told: given(epoch, told)).totals[0].recomputed


def solved(bits: NDArray[np.uint8], combined: NDArray[np.uint64], size: int) -> list[int] | None:
    """Solve for the integers of a ring by their combinations; None if several have these."""
    ring = 8 * combined.itemsize
    rows = [
        [*map(int, bits[place : place + size]), int(value)] for place, value in enumerate(combined.tolist())
    ]
    for column in range(size):
        pivot = next((row for row in rows[column:] if row[column] % 2), None)
        if pivot is None:
            return None
        rows.remove(pivot)
        rows.insert(column, [value * pow(pivot[column], -1, 2**ring) % 2**ring for value in pivot])
        for row in rows:
            if row is not rows[column] and (factor := row[column]):
                row[:] = [(a - factor * b) % 2**ring for a, b in zip(row, rows[column], strict=True)]
    return [row[-1] for row in rows[:size]]


def test_whoever_has_a_transcript_computes_totals_of_few_numbers() -> None:
    """What silos sign of their terms adds up to 128 equations on the integers of a total."""
    run = chained_sums()
    (checked,), line = run.verify().totals, json.loads(run.lines[3])
    for group, ring, size in (("update", 32, 6), ("static", 64, 8)):
        parts = [base64.b64decode(item["combinations"][group]) for item in line["receipts"]]
        combined = sum(np.frombuffer(part, f"<u{ring // 8}") for part in parts)
        made = challenge(run.sessions[0], checked.told)  # of what the file has, too
        found = solved(combinations.random_bits(made, group, ring, size), combined, size)
        true = run.totals[checked.told.digest()][group]  # type: ignore[index]
        assert found == np.frombuffer(true, f"<u{ring // 8}").tolist()


@pytest.mark.parametrize("view", [SERVER, "site-1"])
def test_a_sum_rests_on_the_last_opened_total(view: str) -> None:
    run = chained_sums(view=view)
    epoch_line, right = run.lines[1], json.loads(run.lines[3])["rests_on"]
    assert run.verify().totals
    session = next(iter(run.last))
    last = run.last[session].told
    told = Told(0, SumId(0, "train-0"), "train", NAMES, dict(last.hashes), last.receipts)
    assert epoch_line and right["slot"] == 0
    for wrong in (
        replace(told, slot=1),
        replace(told, slot=3),
        replace(told, sum_id=SumId(9, "x")),
        replace(told, schema="closing"),
        replace(told, schema="none"),
        replace(told, survivors=NAMES[:3]),
        replace(told, survivors=NAMES[::-1]),
        replace(told, survivors=("site-9", *NAMES[1:])),
        replace(told, receipts=bytes(32)),
        replace(told, hashes={**told.hashes, "update": bytes(32)}) if view == SERVER else None,
        None if view == SERVER else replace(told, slot=9),
    ):
        again = Run(view=view)
        epoch = again.epoch()
        again.opened(again.record(epoch, 0), ("update",) if wrong == told else GROUPS)
        opening = again.last[epoch.session]
        if wrong is None:
            again.last.clear()
            if view != SERVER:
                continue
        else:
            hashes = wrong.hashes if wrong.hashes != told.hashes else opening.told.hashes
            digest = wrong.receipts if wrong.receipts != told.receipts else opening.told.receipts
            made = replace(wrong, hashes=hashes, receipts=digest)
            again.last[epoch.session] = Opening(made, {})
        receipts = again.record(epoch, 1)
        again.lines.append(
            transcript.opened(
                again.chain, receipts, groups=("update",), total={"update": b""} if view == SERVER else None
            )
        )
        error = refused(again.lines, again)
        assert error.line == 4 and "rests_on" in error.what, wrong


def test_groups_of_a_total_are_those_that_were_opened() -> None:
    run = Run(view="site-1")
    epoch = run.epoch()
    run.opened(run.record(epoch, 0))
    opening = run.last[epoch.session]
    more = {**opening.told.hashes, "static": bytes(32)}
    run.last[epoch.session] = Opening(replace(opening.told, hashes=more), {})
    run.lines.append(transcript.opened(run.chain, run.record(epoch, 1), groups=("update",)))
    assert "groups" in refused(run.lines, run).what


def test_the_parts_of_a_check_are_the_totals_sites() -> None:
    run = Run()
    epoch = run.epoch()
    run.opened(run.record(epoch, 0, missing=["site-4"]))
    start = list(run.lines)
    last = run.last[epoch.session]
    good = run.record(epoch, 1)
    one = good.receipts[0].combinations

    def saying(place: int, combined: Any) -> Any:
        """The sum in which a silo's receipt has other combinations."""
        receipts = list(good.receipts)
        receipts[place] = epoch.resigned(receipts[place], combinations=combined)
        return replace(good, receipts=tuple(receipts))

    run.opened(replace(good, proved=("site-1",)))
    assert run.verify().totals[0].combined == NAMES[1:3], "a proof takes the place of combinations"
    for what, record in {
        "left out": saying(1, {}),
        "proved and not in the total": replace(good, proved=("site-4",)),
        "doubled": replace(good, proved=("site-1", "site-1")),
        "of a site without a term": saying(3, one),
        "of another form": saying(0, {"update": one["update"][:-4]}),
        "of another group": saying(0, {"static": one["update"]}),
    }.items():
        run.lines, run.last = list(start), {epoch.session: last}
        run.opened(record)
        assert refused(run.lines, run).line == 4, what
    first = Run()
    epoch = first.epoch()
    first.opened(first.record(epoch, 0, proved=("site-1",)))
    assert "proved" in refused(first.lines, first).what, "there is no total to prove"


def test_more_than_c_silos_follow_the_run_by_themselves() -> None:
    run = Run()
    epoch = run.epoch(colluders=2, threshold=4)
    record = run.record(epoch, 0)
    for following, valid in ((3, True), (2, False)):
        receipts = tuple(
            epoch.receipt(item.name, 0, record.sum_id, record.basis, None, follows=place < following)
            for place, item in enumerate(record.receipts)
        )
        run.last.clear()
        run.opened(replace(record, receipts=receipts))
        if valid:
            run.verify()
        else:
            error = refused(run.lines, run)
            assert (error.expected, error.found) == ("at least 3", "2")
        del run.lines[2:]


def written(form: int, view: str) -> tuple[list[bytes], identity.Anchor]:
    """A transcript that an earlier version wrote, and the root of its certificates."""
    root = x509.load_pem_x509_certificate((VECTORS / f"transcript-format-{form}-root.pem").read_bytes())
    lines = (VECTORS / f"transcript-format-{form}-{view}.jsonl").read_bytes().splitlines(keepends=True)
    return lines, identity.Anchor(root.public_bytes(Encoding.DER))


def totals_written() -> Any:
    """The totals of the transcript of format 2."""
    integers = json.loads((VECTORS / "transcript-format-2-totals.json").read_text())

    def totals(epoch: int, told: Told) -> Any:
        return {group: bytes.fromhex(data) for group, data in integers[told.slot].items()}

    return totals


@pytest.mark.parametrize("view", ["server", "site"])
def test_a_transcript_of_format_1_is_still_read(view: str) -> None:
    """Written by the code of before totals were verified; what it signed then is what is checked now."""
    lines, anchor = written(1, view)
    report = verify(lines, anchor)
    assert (report.form, report.complete, report.totals) == (1, True, ())
    assert [item.missing for item in report.opened] == [(), ("site-004",)]
    assert [item.slot for item in report.unchecked] == [0, 1]
    few = json.loads(lines[3])
    few["agreements"].pop("site-001")
    with pytest.raises(TranscriptError, match="at least 3, but found 2"):
        verify([*lines[:3], dumped(few)], anchor)
    later = [edited(lines[0], lambda value: value.update(format=2)), *lines[1:]]
    with pytest.raises(TranscriptError):
        verify(rechained(later), anchor)
    with pytest.raises(TranscriptError):
        verify([edited(lines[0], lambda value: value.update(format=4))], anchor)


@pytest.mark.parametrize("view", ["server", "site"])
@pytest.mark.usefixtures("remembered")
def test_a_transcript_of_format_2_is_still_read(view: str) -> None:
    """Written by the code of before a total's combinations were made from its hash."""
    lines, anchor = written(2, view)
    totals = totals_written()
    report = verify(lines, anchor, totals=totals)
    assert (report.form, report.complete) == (2, True)
    assert [item.missing for item in report.opened] == [(), ("site-004",), (), (), ()]
    assert [(item.told.slot, item.proved, item.recomputed) for item in report.totals] == [
        (0, ("site-004",), False),
        (1, ("site-003",), False),
        (2, ("site-003",), False),
        (3, (), True),
    ]
    assert report.totals[1].agreed == ("site-001", "site-002", "site-004")
    assert report.unchecked == ()

    def false(epoch: int, told: Told) -> Any:
        made = totals(epoch, told)
        return {**made, "update": bytes([made["update"][0] ^ 1]) + made["update"][1:]}

    with pytest.raises(TranscriptError, match="these hashes"):
        verify(lines, anchor, totals=false)
    few = json.loads(lines[3])
    few["agreements"].pop()
    with pytest.raises(TranscriptError, match="at least 3, but found 2"):
        verify([*lines[:3], dumped(few)], anchor)
    for form in (1, 3):
        other = [edited(lines[0], lambda value, form=form: value.update(format=form)), *lines[1:]]
        with pytest.raises(TranscriptError):
            verify(rechained(other), anchor)


@pytest.mark.whole
@pytest.mark.parametrize("view", ["server", "site"])
@pytest.mark.usefixtures("remembered")
def test_any_change_to_one_of_format_1_is_found(view: str) -> None:
    """At a site as of format 2."""
    lines, anchor = written(1, view)
    servers, _ = written(1, "server")
    parts = ("receipts", "survivors", "agreements", "broadcast")
    for number in (2, 3):
        value, same = json.loads(lines[number]), json.loads(servers[number])
        assert all(value.get(part) == same.get(part) for part in parts)
        for path in leaves(value):
            if path and path[0] in parts and (view == "server" or len(path) < 3):
                for made in changes(value, path):
                    with pytest.raises(TranscriptError) as caught:
                        verify([*lines[:number], dumped(made)], anchor)
                    assert caught.value.line == number + 1


@pytest.mark.whole
@pytest.mark.parametrize("view", ["server", "site"])
@pytest.mark.usefixtures("remembered")
def test_any_change_to_one_of_format_2_is_found(view: str) -> None:
    """At a site, whose lines have the same parts, a part and its items are changed, not what is in them.

    Nor are receipts and survivors of lines that have those of earlier ones with other signatures.
    """
    lines, anchor = written(2, view)
    servers, _ = written(2, "server")
    totals = totals_written()
    optional = set()
    parts = ("receipts", "survivors", "agreements", "basis", "rests_on", "proved")
    for number in range(2, 7):
        value, same = json.loads(lines[number]), json.loads(servers[number])
        assert all(value.get(part) == same.get(part) for part in parts)
        again = ("receipts", "survivors") if number in (4, 6) else ()
        for path in leaves(value):
            if path and path[0] in parts and (len(path) < 3 or (view == "server" and path[0] not in again)):
                for made in changes(value, path):
                    try:
                        verify([*lines[:number], dumped(made)], anchor, totals=totals)
                    except TranscriptError as error:
                        assert error.line == number + 1
                    else:
                        optional.add((number, path[0], len(path)))
    # Agreements beyond the threshold could be left out, if they had no combinations that are used.
    assert optional == {(2, "agreements", 1), (2, "agreements", 2), (5, "agreements", 2)}


def test_a_site_gave_shares_only_for_sums_that_it_is_in() -> None:
    run = Run(view="site-2")
    epoch = run.epoch()
    run.failed(run.record(epoch, 0, missing=["site-2"]))
    run.verify()
    run.opened(run.record(epoch, 1, missing=["site-2"]))
    assert "site-2" in refused(run.lines, run).expected


def test_the_static_group_is_opened_for_one_whole_roster() -> None:
    run = Run()
    epoch = run.epoch()
    run.opened(run.record(epoch, 0, missing=["site-1"]), GROUPS)
    assert "static" in refused(run.lines, run).what
    run.verify(any_static_cohort=True)

    run = Run()
    epoch = run.epoch(static_open=False)
    run.opened(run.record(epoch, 0), GROUPS)
    for allowed in (False, True):
        assert "static" in refused(run.lines, run, any_static_cohort=allowed).what

    run = Run()
    run.opened(run.record(run.epoch(), 0), GROUPS)
    epoch = run.epoch(epoch=1, roster=NAMES[:3])
    run.opened(run.record(epoch, 0))
    run.verify()
    run.opened(run.record(epoch, 1), GROUPS)
    error = refused(run.lines, run)
    assert error.line == 6 and str(list(NAMES)) in error.expected
    run.verify(any_static_cohort=True)


def test_slots_and_sum_ids_are_used_once() -> None:
    run = Run()
    epoch = run.epoch()
    run.failed(run.record(epoch, 0))
    for again in (
        run.record(epoch, 0, attempt=1),  # the slot
        replace(run.record(epoch, 0), slot=1, receipts=(), survivors=(), agreements=()),  # the sum id
    ):
        run.failed(again)
        assert refused(run.lines, run).line == 4
        del run.lines[3:]
    later = run.epoch(epoch=1)
    run.opened(run.record(later, 0))
    run.verify()
    del run.lines[4:]
    run.failed(replace(run.record(epoch, 0), epoch=1, receipts=(), survivors=(), agreements=()))
    assert "once in a job" in refused(run.lines, run).expected


@pytest.mark.parametrize("change", [{"slot": 4}, {"epoch": 1}, {"schema": "statistics"}])
def test_places_that_an_epoch_does_not_have(change: dict[str, Any]) -> None:
    run = Run()
    record = run.record(run.epoch(), 0, receipts=(), survivors=(), agreements=())
    run.failed(replace(record, **change))
    assert refused(run.lines, run).line == 3


def test_the_end_counts_the_sums() -> None:
    run = Run()
    run.opened(run.record(run.epoch(), 0))
    run.end(sums=2)
    error = refused(run.lines, run)
    assert (error.expected, error.found) == ("1", "2")


def test_nothing_follows_the_end(server_run: Run) -> None:
    run = copy.copy(server_run)
    run.lines = [*server_run.lines]
    run.end()
    error = refused(run.lines, run)
    assert error.line == len(run.lines) and "end" in error.expected


def test_a_second_run_line() -> None:
    run = Run()
    run.epoch()
    first = edited(run.lines[0], lambda value: value.update(previous=run.chain.previous))
    assert refused([*run.lines, first], run).line == 3


def test_totals_belong_to_the_groups_and_the_server(server_run: Run, site_run: Run) -> None:
    for change in (
        lambda value: value["total"].pop("static"),
        lambda value: value["groups"].remove("static"),
        lambda value: value["groups"].reverse(),
        lambda value: value["groups"].append("static"),
        lambda value: value["blamed"].update({"site-9": "x"}),
    ):
        lines = rechained([*server_run.lines[:2], edited(server_run.lines[2], change)])
        assert refused(lines, server_run).line == 3
    added = edited(site_run.lines[2], lambda value: value.update(total={}, blamed={}))
    assert refused(rechained([*site_run.lines[:2], added]), site_run).line == 3


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"schema": "none"}, "schema"),
        ({"survivors": NAMES[::-1]}, "survivors"),
        ({"survivors": ("site-1", "site-1", "site-2")}, "survivors"),
        ({"survivors": ("site-1", "site-2", "site-9")}, "survivors"),
        ({"slot": 1}, "slot"),
        ({"slot": 2}, "slot"),
    ],
)
def test_a_total_without_a_line_of_its_own_fits_the_epoch(change: dict[str, Any], what: str) -> None:
    """As at a site that was not in that sum: no line says what was in its slot."""
    run = Run(view="site-1")
    epoch = run.epoch()
    run.opened(run.record(epoch, 0))
    opening = run.last[epoch.session]
    del run.lines[2:]
    run.lines.append(transcript.opened(run.chain, run.record(epoch, 1), groups=("update",)))
    run.verify()
    del run.lines[2:]
    run.last[epoch.session] = Opening(replace(opening.told, **change), {})
    receipts = run.record(epoch, 1, proved=())
    run.lines.append(transcript.opened(run.chain, receipts, groups=("update",)))
    error = refused(run.lines, run)
    assert (error.line, error.what) == (3, f"sum.rests_on.{what}")


def test_a_site_has_one_receipt_in_a_sum() -> None:
    run = Run()
    epoch = run.epoch()
    right = run.record(epoch, 0, missing=["site-4"])
    twice = (right.receipts[0], *right.receipts)
    run.failed(replace(right, receipts=twice, survivors=(), agreements=()))
    assert refused(run.lines, run).what == "sum.receipts"
    del run.lines[2:]
    signed = tuple(epoch.agreement(name, twice) for name in right.survivors)
    doubled = replace(right, receipts=twice, survivors=tuple(item.name for item in twice), agreements=signed)
    run.opened(doubled)
    assert refused(run.lines, run).what == "sum.receipts", "two of one site are no more silos"


def test_a_larger_roster_does_not_open_the_static_group_for_those_of_before() -> None:
    """Not even for the very cohort that it was opened for: no silo gives shares of it after a drop-out."""
    run = Run()
    run.opened(run.record(run.epoch(roster=NAMES[:3]), 0), GROUPS)
    epoch = run.epoch(epoch=1)
    run.opened(run.record(epoch, 0, missing=["site-4"]), GROUPS)
    error = refused(run.lines, run)
    assert (error.line, error.what, error.expected) == (5, "the static group", f"opened for {list(NAMES)}")


def test_an_opened_sum_names_its_survivors() -> None:
    run = Run()
    run.opened(replace(run.record(run.epoch(), 0), survivors=()))
    assert refused(run.lines, run).what == "sum.survivors"


def test_a_sum_without_fields_leaves_nothing_unchecked() -> None:
    run = Run()
    epoch = run.epoch(schemas={**PARAMS.schemas, "seal": ()})
    run.opened(run.record(epoch, 0))
    assert [item.slot for item in run.verify().unchecked] == [0]
    seal = run.record(epoch, 1, schema="seal")
    run.lines.append(transcript.opened(run.chain, seal, groups=("update",), total={"update": b""}))
    assert run.verify().unchecked == (), "the seal checked the sum, and has nothing to check itself"


def test_all_silos_of_a_sum_may_be_blamed() -> None:
    run = Run()
    record = run.record(run.epoch(), 0)
    run.failed(record, blamed=dict.fromkeys(NAMES, "TF-607"))
    assert set(run.verify().sums[0].blamed) == set(NAMES)


def test_who_wrote_what_cannot_be_read_is_told() -> None:
    told = transcript_lines.written_by_another
    assert told("0.1", "0.2").startswith(" It says that Tightframe 0.1 wrote it")
    assert told("0.2", "0.2") == told(7, "0.2") == ""
