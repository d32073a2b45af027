"""The wire format of messages: one msgpack map, every part of which is checked before it is used.

A check takes a value as msgpack or JSON decodes it and its path in the message. It returns the
value, or raises an error that describes the value without showing it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Self, TypeAlias, cast, get_type_hints

import msgpack

from tightframe.securesum.errors import MessageError
from tightframe.securesum.primitives import Value

Check: TypeAlias = Callable[[object, str], Any]
"""(value, its path in the message) -> the value; raises MessageError (TF-604) if it is not as expected."""
Keys: TypeAlias = Mapping[str, Check]
"""The exact keys of a map, each with the check for its value."""


@dataclass(frozen=True)
class Record:
    """A frozen value that is sent, or hashed, as the map of its fields."""

    def as_value(self) -> dict[str, Value]:
        """Return plain values in the order of the fields, for the wire and for hashing."""
        return {name: plain(getattr(self, name)) for name in _names_of(type(self))}

    def unsigned(self) -> list[Value]:
        """Return the values of all fields but the last, which is the signature, in their order."""
        return list(self.as_value().values())[:-1]


class SizedMessage(Record):
    """A record that is a message of its own. The lengths of its parts depend on the epoch's parameters."""

    def to_bytes(self) -> bytes:
        """Return the message in its wire format."""
        return pack(self.as_value())

    @classmethod
    def read(cls, raw: bytes, keys: Keys) -> Self:
        """Read a message from the wire and check it.

        Raises:
            MessageError: TF-604.
        """
        return cast("Self", unpack(raw, cls.__name__, built(cls, keys)))


class Message(SizedMessage):
    """A record that is a message of its own, always checked against the same ``keys_of``."""

    @classmethod
    def from_bytes(cls, raw: bytes) -> Self:
        """Read a message from the wire and check it.

        Raises:
            MessageError: TF-604.
        """
        return cls.read(raw, keys_of(cls))


_NAMES: dict[type[Record], tuple[str, ...]] = {}


def _names_of(kind: type[Record]) -> tuple[str, ...]:
    """Return the names of a record's fields, in their order."""
    if kind not in _NAMES:
        _NAMES[kind] = tuple(item.name for item in fields(kind))
    return _NAMES[kind]


_KEYS: dict[type[Record], Keys] = {}


def keys_of(kind: type[Record]) -> Keys:
    """Return the check of each field of a record: the last part of its ``Annotated`` type."""
    if kind not in _KEYS:
        hints = get_type_hints(kind, include_extras=True)
        _KEYS[kind] = {item.name: hints[item.name].__metadata__[-1] for item in fields(kind)}
    return _KEYS[kind]


def plain(value: Any) -> Value:
    """Convert a field's value to plain values: ``as_value`` where there is one, tuples to lists."""
    if isinstance(value, (bytes, str, int)):  # most values, before what takes longer to find out
        return value
    if hasattr(value, "as_value"):
        return cast(Value, value.as_value())
    if isinstance(value, (dict, Mapping)):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    return cast(Value, value)


_LARGE = 2**16
"""Bytes from which on msgpack has one form for them (bin 32)."""


def pack(value: Mapping[str, Value]) -> bytes:
    """Encode a map in msgpack, its keys in the order given.

    Terms and totals are joined as they are: msgpack's own packer would hold a second copy of each.
    """
    return b"".join(_packed(value, msgpack.Packer(use_bin_type=True)))


def _packed(value: Value, packer: msgpack.Packer) -> Iterator[bytes]:
    """Yield a value in msgpack, in pieces."""
    if not _has_large(value):
        yield packer.pack(value)
    elif isinstance(value, dict):
        yield packer.pack_map_header(len(value))
        for key, item in value.items():
            yield packer.pack(key)
            yield from _packed(item, packer)
    else:
        data = cast(bytes, value)
        yield b"\xc6" + len(data).to_bytes(4, "big")
        yield data


def _has_large(value: Value) -> bool:
    """Return True for large bytes, and for a map that holds some at any depth."""
    if isinstance(value, dict):
        return any(_has_large(item) for item in value.values())
    return isinstance(value, bytes) and _LARGE <= len(value) < 2**32


def unpack(raw: bytes, what: str, read: Check) -> Any:
    """Decode one msgpack map and return what ``read`` makes of it.

    Raises:
        MessageError: TF-604, if ``raw`` is not one map, has trailing bytes or a repeated key, or
            ``read`` refuses it.
    """
    try:
        value = msgpack.unpackb(
            raw, raw=False, strict_map_key=True, use_list=True, object_pairs_hook=_each_key_once
        )
    except Exception:  # msgpack raises many kinds of error; each means that this is not a message
        raise MessageError(
            what, expected="one msgpack map", found=f"{len(raw)} bytes that are not one"
        ) from None
    return read(value, what)


def record(keys: Keys) -> Check:
    """Return a check for a map with exactly these keys; it gives a dict in their order."""

    def check(value: object, where: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise MessageError(where, expected="a map", found=type(value).__name__)
        if set(value) != set(keys):
            raise MessageError(
                where,
                expected=f"a map with the keys {sorted(keys)}",
                found=f"{len(set(keys) - set(value))} missing, {len(set(value) - set(keys))} unknown",
            )
        return {key: test(value[key], f"{where}.{key}") for key, test in keys.items()}

    return check


def built(kind: type[Record], keys: Keys | None = None) -> Check:
    """Return a check for a map with these keys, by default the record's; it calls ``kind`` with them."""
    read = record(keys_of(kind) if keys is None else keys)
    return lambda value, where: kind(**read(value, where))


def text(longest: int) -> Check:
    """Return a check for text of 1 to ``longest`` bytes of UTF-8."""

    def check(value: object, where: str) -> str:
        if not isinstance(value, str) or not 1 <= len(value.encode()) <= longest:
            raise MessageError(where, expected=f"text of 1 to {longest} bytes", found=described(value))
        return value

    return check


def one_of(*allowed: str) -> Check:
    """Return a check for one of these words."""

    def check(value: object, where: str) -> str:
        if not isinstance(value, str) or value not in allowed:
            raise MessageError(where, expected=f"one of {list(allowed)}", found=described(value))
        return value

    return check


def integer(least: int, most: int) -> Check:
    """Return a check for an integer from ``least`` to ``most``; a boolean is refused."""

    def check(value: object, where: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise MessageError(where, expected=f"an integer from {least} to {most}", found=described(value))
        return value

    return check


def number(value: object, where: str) -> float:
    """Check for a finite float; an integer is refused."""
    if not isinstance(value, float) or not math.isfinite(value):
        raise MessageError(where, expected="a finite number", found=described(value))
    return value


def flag(value: object, where: str) -> bool:
    """Check for true or false."""
    if not isinstance(value, bool):
        raise MessageError(where, expected="true or false", found=described(value))
    return value


def blob(least: int, most: int | None = None) -> Check:
    """Return a check for ``least`` bytes, or for ``least`` to ``most`` bytes."""
    largest = least if most is None else most

    def check(value: object, where: str) -> bytes:
        if not isinstance(value, bytes) or not least <= len(value) <= largest:
            size = f"{least}" if least == largest else f"{least} to {largest}"
            raise MessageError(where, expected=f"{size} bytes", found=described(value))
        return value

    return check


def either(first: Check, second: Check) -> Check:
    """Return a check that accepts what either of two checks accepts; the error is that of the second."""

    def check(value: object, where: str) -> Any:
        try:
            return first(value, where)
        except MessageError:
            return second(value, where)

    return check


def sequence(item: Check, least: int, most: int) -> Check:
    """Return a check for a list of ``least`` to ``most`` items; it gives a tuple."""

    def check(value: object, where: str) -> tuple[Any, ...]:
        if not isinstance(value, list) or not least <= len(value) <= most:
            raise MessageError(where, expected=f"a list of {least} to {most}", found=described(value))
        return tuple(item(part, f"{where}[{place}]") for place, part in enumerate(value))

    return check


def mapping(item: Check, least: int, most: int) -> Check:
    """Return a check for a map of ``least`` to ``most`` names, each of at most 256 bytes, to items."""
    name = text(256)

    def check(value: object, where: str) -> dict[str, Any]:
        if not isinstance(value, dict) or not least <= len(value) <= most:
            raise MessageError(where, expected=f"a map of {least} to {most}", found=described(value))
        return {name(key, f"{where} key"): item(part, f"{where}.{key}") for key, part in value.items()}

    return check


def described(value: object) -> str:
    """Describe a value by type and length, without showing it."""
    if isinstance(value, (str, bytes, list, dict)):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a map, and refuse repeated keys, for which two readers could see two different values."""
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError
    return value
