"""How a message travels: one msgpack map, and every part of it is checked before it is used.

A reader (``Check``) takes a value as msgpack or JSON gives it and says where in the message it
stands; it returns the value, or refuses it in words that do not show it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self, TypeAlias, cast

import msgpack

from tightframe.securesum.errors import MessageError
from tightframe.securesum.primitives import Value

Check: TypeAlias = Callable[[object, str], Any]
"""Takes a value and where it stands; raises MessageError (TF-604) if it is not what is expected."""
Keys: TypeAlias = Mapping[str, Check]
"""What a map must have: exactly these keys, each with a value that its reader takes."""


@dataclass(frozen=True)
class Record:
    """A frozen value that travels, or is hashed, as the map of its fields."""

    def as_value(self) -> dict[str, Value]:
        """Plain values in the order of the fields, for travelling and hashing."""
        return {item.name: plain(getattr(self, item.name)) for item in fields(self)}


class SizedMessage(Record):
    """A record that travels by itself. How long its parts are depends on the epoch's parameters."""

    def to_bytes(self) -> bytes:
        """The travelling form."""
        return pack(self.as_value())

    @classmethod
    def read(cls, raw: bytes, keys: Keys) -> Self:
        """Read and check.

        Raises:
            MessageError: TF-604.
        """
        return cast("Self", unpack(raw, cls.__name__, built(cls, keys)))


class Message(SizedMessage):
    """A record that travels by itself, always checked against the same ``KEYS``.

    This class is no dataclass, and its subclasses set ``KEYS`` without annotating it: an annotation
    would enter it in their ``__dataclass_fields__``.
    """

    KEYS: ClassVar[Keys]

    @classmethod
    def from_bytes(cls, raw: bytes) -> Self:
        """Read and check.

        Raises:
            MessageError: TF-604.
        """
        return cls.read(raw, cls.KEYS)


def plain(value: Any) -> Value:
    """A field's value without our own types: what has ``as_value`` as that, tuples as lists."""
    if hasattr(value, "as_value"):
        return cast(Value, value.as_value())
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return cast(Value, value)


def pack(value: Mapping[str, Value]) -> bytes:
    """A map in msgpack, its keys in the order given."""
    return cast(bytes, msgpack.packb(value, use_bin_type=True))


def unpack(raw: bytes, what: str, read: Check) -> Any:
    """What ``read`` makes of the one msgpack map that ``raw`` must be.

    Raises:
        MessageError: TF-604, if it is none, has trailing bytes or a key that stands twice, or
            ``read`` refuses it.
    """
    try:
        value = msgpack.unpackb(
            raw, raw=False, strict_map_key=True, use_list=True, object_pairs_hook=_each_key_once
        )
    except Exception:  # msgpack raises many kinds; each means that this is no message
        raise MessageError(
            what, expected="one msgpack map", found=f"{len(raw)} bytes that are none"
        ) from None
    return read(value, what)


def record(keys: Keys) -> Check:
    """Reads a map with exactly these keys, as a dict in their order."""

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


def built(kind: Callable[..., object], keys: Keys) -> Check:
    """Reads a map with exactly these keys, as ``kind`` called with them."""
    read = record(keys)
    return lambda value, where: kind(**read(value, where))


def text(longest: int) -> Check:
    """Reads text of 1 to ``longest`` bytes of UTF-8."""

    def check(value: object, where: str) -> str:
        if not isinstance(value, str) or not 1 <= len(value.encode()) <= longest:
            raise MessageError(where, expected=f"text of 1 to {longest} bytes", found=described(value))
        return value

    return check


def one_of(*allowed: str) -> Check:
    """Reads one of these words."""

    def check(value: object, where: str) -> str:
        if not isinstance(value, str) or value not in allowed:
            raise MessageError(where, expected=f"one of {list(allowed)}", found=described(value))
        return value

    return check


def integer(least: int, most: int) -> Check:
    """Reads an integer between two, both included; a truth value is none."""

    def check(value: object, where: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise MessageError(where, expected=f"an integer from {least} to {most}", found=described(value))
        return value

    return check


def number(value: object, where: str) -> float:
    """Reads a finite float; an integer is none."""
    if not isinstance(value, float) or not math.isfinite(value):
        raise MessageError(where, expected="a finite number", found=described(value))
    return value


def flag(value: object, where: str) -> bool:
    """Reads true or false."""
    if not isinstance(value, bool):
        raise MessageError(where, expected="true or false", found=described(value))
    return value


def blob(least: int, most: int | None = None) -> Check:
    """Reads bytes: ``least`` of them, or from ``least`` to ``most``."""
    largest = least if most is None else most

    def check(value: object, where: str) -> bytes:
        if not isinstance(value, bytes) or not least <= len(value) <= largest:
            size = f"{least}" if least == largest else f"{least} to {largest}"
            raise MessageError(where, expected=f"{size} bytes", found=described(value))
        return value

    return check


def either(first: Check, second: Check) -> Check:
    """Reads what one of two readers takes; the second says what was expected."""

    def check(value: object, where: str) -> Any:
        try:
            return first(value, where)
        except MessageError:
            return second(value, where)

    return check


def sequence(item: Check, least: int, most: int) -> Check:
    """Reads a list of ``least`` to ``most`` items, as a tuple."""

    def check(value: object, where: str) -> tuple[Any, ...]:
        if not isinstance(value, list) or not least <= len(value) <= most:
            raise MessageError(where, expected=f"a list of {least} to {most}", found=described(value))
        return tuple(item(part, f"{where}[{place}]") for place, part in enumerate(value))

    return check


def mapping(item: Check, least: int, most: int) -> Check:
    """Reads a map of ``least`` to ``most`` names, each of at most 256 bytes, to items."""
    name = text(256)

    def check(value: object, where: str) -> dict[str, Any]:
        if not isinstance(value, dict) or not least <= len(value) <= most:
            raise MessageError(where, expected=f"a map of {least} to {most}", found=described(value))
        return {name(key, f"{where} key"): item(part, f"{where}.{key}") for key, part in value.items()}

    return check


def described(value: object) -> str:
    """What a wrong value is, without showing it."""
    if isinstance(value, (str, bytes, list, dict)):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A map, unless a key stands in it twice: two readers could see two different values."""
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError
    return value
