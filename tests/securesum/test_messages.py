"""Messages: one form each, and every part of that form is checked before it is used."""

from __future__ import annotations

import msgpack
import pytest
from tests.support.securesum.protocol import World, make_params, names

from tightframe.securesum import reading
from tightframe.securesum.encoding import RingOverflowError, check_no_wrap
from tightframe.securesum.errors import MessageError, ParametersError
from tightframe.securesum.messages import Agreement, FieldSpec, Reveal, Setup

ONE = names(3)[0]


def test_a_bound_beyond_the_floats_is_refused_with_the_named_error() -> None:
    """The sum could reach 2**1984, which no float holds and no logarithm of a float tells."""
    huge = FieldSpec("huge", (1,), 32, 960, 1e308, "update")
    with pytest.raises(RingOverflowError, match=r"could reach 2\*\*1984\.74"):
        check_no_wrap(huge.ring, huge.bits, huge.bound, 3)
    with pytest.raises(ParametersError, match="huge"):
        World(3).sites[ONE].advertise(make_params(3, schemas={"train": (huge,)}).to_bytes())


def doubled(raw: bytes, key: str, value: object) -> bytes:
    """A map with one more pair in front, so that a reader who takes the last sees no difference."""
    assert 0x80 <= raw[0] < 0x8F
    return bytes([raw[0] + 1]) + msgpack.packb(key) + msgpack.packb(value) + raw[1:]


def test_a_key_that_stands_twice_is_refused_at_every_level() -> None:
    """Two readers, of the first and of the last value, would see two messages in the same bytes."""
    good = Agreement("a", 1, bytes(64)).to_bytes()
    assert msgpack.unpackb(doubled(good, "name", "b")) == msgpack.unpackb(good)
    for raw in (doubled(good, "name", "b"), doubled(good, "name", "a"), doubled(good, "slot", 2)):
        with pytest.raises(MessageError, match="one msgpack map"):
            Agreement.from_bytes(raw)
    share, signature = msgpack.packb("a") + msgpack.packb(bytes(48)), msgpack.packb(bytes(64))
    head = b"\x85\xa4name\xa1a\xa4slot\x00\xa6update"
    tail = b"\xa6static\x80\xa9signature" + signature
    assert list(Reveal.from_bytes(head + b"\x81" + share + tail).update) == ["a"]
    with pytest.raises(MessageError, match="one msgpack map"):
        Reveal.from_bytes(head + b"\x82" + share + share + tail)


def test_no_error_can_forge_a_line_of_a_log() -> None:
    """Names, versions and keys come from strangers; their line breaks and escapes are shown as such."""
    forged = "x\n2030-01-01 INFO all is well\r\x1b[2K\u202e\u2028"
    assert str(MessageError(forged, expected=forged, found=forged)).isprintable()
    site = World(3).sites[ONE]
    for changes in (
        {"version": forged},
        {"job": forged},
        {"weights": forged},
        {"roster": (*names(2), forged)},
    ):
        with pytest.raises(ParametersError) as refused:
            site.advertise(make_params(3, **changes).to_bytes())
        assert str(refused.value).isprintable()
        assert "all is well" in str(refused.value)
    raw = msgpack.packb({"dealt": {forged: 1, "b": 1, "c": 1}})
    with pytest.raises(MessageError, match="all is well") as malformed:
        Setup.from_bytes(raw, sites=3, slots=1)
    assert str(malformed.value).isprintable()
    assert str(MessageError("Zürich", expected="süd 1", found="ß")) == (
        "Expected Zürich to be süd 1, but found ß."
    )


def test_a_flag_is_true_or_false_and_no_number() -> None:
    with pytest.raises(MessageError, match="true or false"):
        reading.flag(1, "a field")
    assert reading.flag(False, "a field") is False
