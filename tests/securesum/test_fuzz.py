"""Bytes from strangers: a reader refuses them with TF-604 and nothing else; a handler stays as it was."""

from __future__ import annotations

import functools
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.securesum.replay import Player, load, order, play

from tightframe.securesum.errors import MessageError, ProtocolError, StateError
from tightframe.securesum.messages import (
    Advertisement,
    Advertisements,
    Agreement,
    AgreementRequest,
    Confirmation,
    Masked,
    Params,
    Reveal,
    RevealRequest,
    Setup,
    TermRequest,
)
from tightframe.securesum.site import journal
from tightframe.securesum.site.state import Advertised, Confirmed, Established

RUN = load("run")
READERS: dict[str, Callable[[bytes], Any]] = {
    "Params": Params.from_bytes,
    "Advertisement": functools.partial(Advertisement.from_bytes, slots=4),
    "Advertisements": Advertisements.from_bytes,
    "Confirmation": functools.partial(Confirmation.from_bytes, slots=4),
    "Setup": functools.partial(Setup.from_bytes, sites=4, slots=4),
    "TermRequest": TermRequest.from_bytes,
    "Masked": Masked.from_bytes,
    "AgreementRequest": AgreementRequest.from_bytes,
    "Agreement": Agreement.from_bytes,
    "RevealRequest": RevealRequest.from_bytes,
    "Reveal": Reveal.from_bytes,
}
TASKS = {
    "enroll": ("Params", "Advertisement"),
    "confirm": ("Advertisements", "Confirmation"),
    "contribute": ("TermRequest", "Masked"),
    "agree": ("AgreementRequest", "Agreement"),
    "reveal": ("RevealRequest", "Reveal"),
}


def kind_of(item: Any) -> str:
    down, up = TASKS[item["task"]]
    return down if item["from"] == "server" else up


GOOD = {kind_of(item): bytes.fromhex(item["bytes"]) for item in RUN["messages"]}
GOOD["TermRequest"] = bytes.fromhex(RUN["messages"][16]["bytes"])
GOOD["Setup"] = TermRequest.from_bytes(GOOD["TermRequest"]).setup

WRONG: list[Any] = [
    *(None, True, False, 0, -1, 1, 2**31 + 1, 2**63, 2**64 - 1, -(2**63), 0.0, 1.5),
    *(float("inf"), float("nan")),
    *("", "x", "x" * 5000, "\x00", b"", b"x", bytes(32), bytes(64), bytes(70_000)),
    *([], [1], [[]], {}, {"x": 1}, {"": b""}, msgpack.ExtType(5, b"x"), msgpack.Timestamp(1, 2)),
]  # fmt: skip


def refused_or_read(kind: str, raw: bytes) -> Any:
    """What is read, or None if it is refused; any other error comes through."""
    try:
        read = READERS[kind](raw)
    except MessageError as error:
        assert error.code == "TF-604"
        assert str(error).isprintable()
        return None
    # Whatever is read can be written, and is then one form of the same message.
    assert READERS[kind](read.to_bytes()) == read
    return read


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where the values are in a plain value, itself included."""
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy with another value in one place."""
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


def at(value: Any, path: tuple[Any, ...]) -> Any:
    return functools.reduce(lambda found, key: found[key], path, value)


# Readers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", READERS)
def test_every_reader_reads_its_own_message_and_no_other(kind: str) -> None:
    for other, raw in GOOD.items():
        assert (refused_or_read(kind, raw) is not None) == (other == kind)


@pytest.mark.parametrize("kind", READERS)
def test_cut_off_or_continued_messages_are_refused(kind: str) -> None:
    raw = GOOD[kind]
    step = max(1, len(raw) // 300)
    for length in {*range(0, len(raw), step), *range(min(100, len(raw))), len(raw) - 1}:
        assert refused_or_read(kind, raw[:length]) is None
        assert length == 0 or refused_or_read(kind, raw[length:]) is None
    for more in (b"\x00", b"\xc0", raw, b"\x80", b"\xc1"):
        assert refused_or_read(kind, raw + more) is None
        assert refused_or_read(kind, more + raw) is None


@pytest.mark.many
@pytest.mark.parametrize("kind", READERS)
def test_every_part_with_a_wrong_value_is_refused_or_read_as_it_is(kind: str) -> None:
    """Each value of a message is replaced by each wrong one; where it is read, it is allowed to be so."""
    good = msgpack.unpackb(GOOD[kind])
    chosen = list(places(good))
    chosen = chosen[:: max(1, len(chosen) // 60)]  # of the many that are alike, some
    for path in chosen:
        for wrong in WRONG:
            read = refused_or_read(kind, msgpack.packb(replaced(good, path, wrong)))
            if read is not None:
                assert type(at(good, path)) is type(wrong), (path, wrong)
                assert msgpack.unpackb(read.to_bytes()) == replaced(good, path, wrong)
    assert len(chosen) >= 3


@pytest.mark.parametrize("kind", READERS)
def test_missing_unknown_and_doubled_keys_are_refused(kind: str) -> None:
    good = msgpack.unpackb(GOOD[kind])
    for path in [path for path in places(good) if isinstance(at(good, path), dict)][:20]:
        part = at(good, path)
        more = {**part, "unknown": 0}
        assert refused_or_read(kind, msgpack.packb(replaced(good, path, more))) is None
        if part and kind != "Confirmation":
            less = {key: part[key] for key in list(part)[1:]}
            read = refused_or_read(kind, msgpack.packb(replaced(good, path, less)))
            # Maps by name or group may be smaller: whether they are whole is for the handler to say.
            names = {*RUN["params"]["roster"], "update", "static"}
            assert read is None or set(part) & names or "train" in part
    first = next(iter(good))
    body = GOOD[kind][1:]
    doubled = bytes([GOOD[kind][0] + 1]) + msgpack.packb(first) + msgpack.packb(good[first]) + body
    assert refused_or_read(kind, doubled) is None


@settings(deadline=None, max_examples=250)
@given(st.sampled_from(sorted(READERS)), st.data())
def test_random_changes_to_bytes_are_refused_or_read(kind: str, data: st.DataObject) -> None:
    raw = bytearray(GOOD[kind])
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, min(len(raw) - 1, 400)) | st.integers(0, len(raw) - 1))
        match data.draw(st.integers(0, 3)):
            case 0:
                raw[place] = data.draw(st.integers(0, 255))
            case 1:
                del raw[place : place + data.draw(st.integers(1, 40))]
            case 2:
                raw[place:place] = data.draw(st.binary(min_size=1, max_size=12))
            case _:
                start = data.draw(st.integers(0, len(raw) - 1))
                raw[place:place] = raw[start : start + 40]
        if not raw:
            break
    refused_or_read(kind, bytes(raw))


@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from(sorted(READERS)), st.binary(max_size=200) | st.binary(max_size=60).map(b"\x8f".__add__)
)
def test_random_bytes_are_refused(kind: str, raw: bytes) -> None:
    assert refused_or_read(kind, raw) is None


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=150)
@given(st.sampled_from(sorted(READERS)), PLAIN, st.data())
def test_any_plain_value_in_any_place_is_refused_or_read(kind: str, value: Any, data: st.DataObject) -> None:
    good = msgpack.unpackb(GOOD[kind])
    path = data.draw(st.sampled_from(list(places(good))))
    refused_or_read(kind, msgpack.packb(replaced(good, path, value)))


BOMBS = {
    "lists in lists": b"\x91" * 200_000,
    "maps in maps": b"\x81\xa1x" * 70_000,
    "a long list": b"\xdd" + struct.pack(">I", 2**32 - 1),
    "a long map": b"\xdf" + struct.pack(">I", 2**32 - 1),
    "long bytes": b"\xc6" + struct.pack(">I", 2**32 - 1),
    "long text": b"\xdb" + struct.pack(">I", 2**32 - 1),
    "long lists in lists": (b"\xdd" + struct.pack(">I", 1_900_000)) * 400 + bytes(1_998_000),
    "long maps in maps": (b"\xdf" + struct.pack(">I", 60_000) + b"\xa1x") * 400 + bytes(120_000),
    "a key that is a list": b"\x81\x91\x01\x01",
    "a key that is bytes": b"\x81\xc4\x01a\x01",
    "text that is none": b"\x81\xa1\xff\x01",
    "half a surrogate": b"\x81\xa3\xed\xa0\x80\x01",
}


@pytest.mark.many
@pytest.mark.parametrize("bomb", BOMBS)
@pytest.mark.parametrize("inside", [False, True])
def test_no_message_makes_a_reader_hang_or_take_much_memory(bomb: str, inside: bool) -> None:
    """msgpack reserves what a list declares, but within bounds: 10,240 items in each of 1024 levels."""
    for kind in READERS:
        raw = BOMBS[bomb]
        if inside:  # in place of the first value of the message
            first = next(iter(msgpack.unpackb(GOOD[kind])))
            raw = GOOD[kind][:1] + msgpack.packb(first) + raw
        tracemalloc.start()
        assert refused_or_read(kind, raw) is None
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 40 * len(raw) + 1024 * 10_240 * 8


# Handlers ----------------------------------------------------------------------------------------


@functools.cache
def before(number: int) -> Player:
    """The run as it stands before one of its messages. Nothing that is refused changes it."""
    return play(RUN, number)[0]


def fingerprint(player: Player) -> Any:
    """All that a message could change."""
    sites = [(site.state, tuple(site.entries)) for site in player.sites.values()]
    server: list[Any] = [player.enrolment.missing]
    if hasattr(player, "session"):
        server += [player.session.missing, sorted(player.session.ready)]
    for total in player.sums:
        server += [total.receipts, total.survivors, total.agreements, total.revealers]
        server += [total._totals[group].to_bytes() for group in ("update", "static")]
    return sites, server


def altered(value: Any, data: st.DataObject) -> Any:
    """Another value of the same kind and, mostly, of the same size."""
    names = RUN["params"]["roster"]
    match value:
        case bool():
            return not value
        case int():
            return max(0, value + data.draw(st.sampled_from([-1, 1, 2])))
        case float():
            return value * 2
        case str():
            return data.draw(st.sampled_from([*names, value + "x", "train", "closing"]))
        case bytes():
            if not value:
                return bytes(data.draw(st.sampled_from([1, 48])))
            flipped = bytearray(value)
            flipped[data.draw(st.integers(0, len(value) - 1))] ^= 1 << data.draw(st.integers(0, 7))
            return data.draw(st.sampled_from([bytes(flipped), bytes(len(value)), value[::-1]]))
        case list() if value:
            first = data.draw(st.integers(0, len(value) - 1))
            second = data.draw(st.integers(0, len(value) - 1))
            swapped = list(value)
            swapped[first], swapped[second] = swapped[second], swapped[first]
            return data.draw(
                st.sampled_from([swapped, value[:first] + value[first + 1 :], [*value, value[first]]])
            )
        case dict() if value:
            keys = list(value)
            first, second = data.draw(st.sampled_from(keys)), data.draw(st.sampled_from(keys))
            return data.draw(
                st.sampled_from(
                    [
                        {key: part for key, part in value.items() if key != first},
                        {**value, first: value[second], second: value[first]},
                        {**value, "stranger": value[first]},
                    ]
                )
            )
        case _:
            return value


NUMBERS = (0, 1, 8, 9, 16, 17, 24, 25, 32, 33, 38, 39, 44, 45)
"""One message of each kind, of the full and of the other sum."""
CHOICE = ("enroll", "contribute")
"""Where the server may ask for other things that are in order: other parameters, another slot."""


@pytest.mark.whole
@settings(deadline=None, max_examples=300)
@given(st.sampled_from(NUMBERS), st.data())
def test_a_well_formed_but_altered_message_is_refused_and_changes_nothing(
    number: int, data: st.DataObject
) -> None:
    item, player = RUN["messages"][number], before(number)
    good = msgpack.unpackb(bytes.fromhex(item["bytes"]))
    if good.get("setup"):
        good["setup"] = msgpack.unpackb(good["setup"])
    path = data.draw(st.sampled_from(list(places(good))))
    bad = replaced(good, path, altered(at(good, path), data))
    same = bad == good
    if isinstance(bad, dict) and isinstance(bad.get("setup"), dict):
        bad["setup"] = msgpack.packb(bad["setup"])
    raw = msgpack.packb(bad)
    if same or raw == bytes.fromhex(item["bytes"]):
        return
    kept = {name: (site.state, list(site.entries)) for name, site in player.sites.items()}
    randoms = {name: site.random.data for name, site in player.sites.items()}  # type: ignore[attr-defined]
    seen = fingerprint(player)
    try:
        player.deliver(item["task"], item["from"], item["to"], raw)
    except ProtocolError as error:
        assert str(error).isprintable()
        assert fingerprint(player) == seen
    else:
        if item["to"] == "server":
            before.cache_clear()
        reader = READERS[kind_of(item)]
        equal = reader(raw) == reader(bytes.fromhex(item["bytes"]))  # maps in another order
        chosen = item["from"] == "server" and item["task"] in CHOICE
        sealed = kind_of(item) == "Confirmation" and path[:1] == ("boxes",)  # for the holder to say
        assert equal or chosen or sealed, (path, bad)
    for name, site in player.sites.items():
        site.state, site.entries = kept[name][0], kept[name][1]
        site.random.data = randoms[name]  # type: ignore[attr-defined]


@pytest.mark.whole
def test_every_good_message_is_taken_where_altered_ones_were_refused() -> None:
    """So that the refusals above are due to what was altered."""
    for number in NUMBERS:
        item = RUN["messages"][number]
        assert (item["task"], item["to"] if item["from"] == "server" else item["from"]) == order(RUN)[
            number // 2
        ]
        player, _ = play(RUN, number)
        answer = player.deliver(item["task"], item["from"], item["to"], bytes.fromhex(item["bytes"]))
        assert answer is None or answer.hex() == RUN["messages"][number + 1]["bytes"]


@settings(deadline=None, max_examples=150)
@given(st.sampled_from([8, 16, 24, 40, 50]), st.data())
def test_a_damaged_stored_state_is_refused_or_one_of_its_kind(number: int, data: st.DataObject) -> None:
    """States are a site's own files; damage must not come up as anything but TF-609."""
    state = before(number).sites["clinic"].state
    kind = {8: Advertised, 16: Confirmed}.get(number, Established)
    assert type(state) is kind
    raw = bytearray(state.to_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(raw) - 1))
        if data.draw(st.booleans()):
            raw[place] = data.draw(st.integers(0, 255))
        else:
            del raw[place : place + data.draw(st.integers(1, 20))]
    try:
        read = kind.from_bytes(bytes(raw))
    except StateError as error:
        assert error.code == "TF-609"
        assert str(error).isprintable()
    else:
        assert type(read) is kind


ENTRIES = [entry.as_value() for entry in (
    journal.Advertised("j", 0, bytes(32), bytes(32)),
    journal.Agreed("j", 0, 1, ("a", "b")),
    journal.Revealed("j", 0, 1, ("a", "b"), ("update",)),
    journal.StaticOpened("d", ("a", "b"), "l"),
    journal.CohortAccepted("d", ("a",)),
)]  # fmt: skip


@settings(deadline=None, max_examples=150)
@given(st.sampled_from(ENTRIES), PLAIN, st.data())
def test_any_plain_value_in_any_place_of_the_journal_is_refused_or_read(
    entry: Any, value: Any, data: st.DataObject
) -> None:
    path = data.draw(st.sampled_from(list(places(entry))))
    try:
        read = journal.entry_from_value(replaced(entry, path, value))
    except MessageError as error:
        assert error.code == "TF-604"
    else:
        journal.History([read])
