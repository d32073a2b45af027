"""Damage valid inputs: plain values place by place, and files byte by byte; a seed gives one example."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from random import Random
from typing import Any

WRONG: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 255, 2**31, 2**63, 2**64, -(2**63), 10**400),
    *(0.0, -1.5, 1e308, 5e-324, float("nan"), float("inf"), float("-inf")),
    *("", "x", "x" * 5000, "\x00", "\n", "\ud800", "../..", "/", "site-1", "1", "nan", "é" * 70),
    *(b"", b"x", bytes(32), bytes(5000)),
    *([], [None], [[]], ["x"] * 50, [1, "x"], {}, {"x": 1}, {"path": "os.system"}, {"": []}, {1: 2}),
)
"""Values that some reader somewhere does not expect."""


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where the values are in a plain value, itself included."""
    found = [path]
    if isinstance(value, dict):
        for key in value:
            found += places(value[key], (*path, key))
    elif isinstance(value, list):
        for index in range(min(len(value), 20)):
            found += places(value[index], (*path, index))
    return found


def changed(random: Random, value: Any, *, times: int = 3, wrong: tuple[Any, ...] = WRONG) -> Any:
    """A copy of a plain value that differs in one to ``times`` places."""
    made = copy.deepcopy(value)
    for _ in range(random.randint(1, times)):
        made = _once(random, made, wrong)
    return made


def _once(random: Random, value: Any, wrong: tuple[Any, ...]) -> Any:
    path = random.choice(places(value))
    if not path:
        return value if random.random() < 0.9 else copy.deepcopy(random.choice(wrong))
    parent = value
    for key in path[:-1]:
        parent = parent[key]
    _CHANGES[random.randrange(len(_CHANGES))](random, parent, path[-1], wrong)
    return value


def _replace(random: Random, parent: Any, key: Any, wrong: tuple[Any, ...]) -> None:
    parent[key] = copy.deepcopy(random.choice(wrong))


def _remove(random: Random, parent: Any, key: Any, wrong: tuple[Any, ...]) -> None:
    del parent[key]


def _add(random: Random, parent: Any, key: Any, wrong: tuple[Any, ...]) -> None:
    item = copy.deepcopy(random.choice(wrong))
    if isinstance(parent, dict):
        parent[random.choice(["x", "", str(key) + "x"])] = item
    else:
        parent.insert(random.randint(0, len(parent)), item)


def _swap(random: Random, parent: Any, key: Any, wrong: tuple[Any, ...]) -> None:
    keys = list(parent) if isinstance(parent, dict) else range(len(parent))
    other = random.choice(list(keys))
    parent[key], parent[other] = parent[other], parent[key]


def _retype(random: Random, parent: Any, key: Any, wrong: tuple[Any, ...]) -> None:
    """The same value as a neighbour of its type: a number as text, a text as bytes, one as a list of one."""
    value = parent[key]
    ways: list[Callable[[Any], Any]] = [str, lambda one: [one], lambda one: {"x": one}]
    if isinstance(value, str):
        ways += [lambda one: one.encode(errors="surrogatepass"), lambda one: one[:-1], lambda one: one * 2]
    if isinstance(value, int | float):
        ways += [lambda one: -one, lambda one: one + 1, lambda one: one / 2 if abs(one) < 1e300 else one]
    if isinstance(value, list | dict | bytes):
        ways += [len, lambda one: one[: len(one) // 2] if not isinstance(one, dict) else list(one)]
    parent[key] = random.choice(ways)(value)


_CHANGES = (_replace, _replace, _remove, _add, _swap, _retype, _retype)


def damaged(random: Random, raw: bytes) -> bytes:
    """Bytes that were cut, continued, flipped, overwritten, or are no such file at all."""
    kind = random.randrange(8)
    data = bytearray(raw)
    if kind == 0:
        return bytes(data[: random.randint(0, len(data))])
    if kind == 1:
        return bytes(data) + random.randbytes(random.randint(1, 40))
    if kind == 2:
        return random.randbytes(random.randint(0, 200))
    if kind == 3:
        return random.choice(
            [b"", b"\x00" * 64, b"[" * 100_000, b'{"a":' * 50_000, b"\xff\xfe", b"null", b"{}"]
        )
    if not data:
        return b"x"
    for _ in range(random.randint(1, 8)):
        place = random.randrange(len(data))
        if kind in (4, 5):
            data[place] = random.randrange(256)
        elif kind == 6:
            data[place : place + random.randint(1, 16)] = random.randbytes(random.randint(0, 16))
        else:  # a length field that promises too much
            data[place : place + 8] = random.choice([2**63 - 1, 2**40, 2**31, 0]).to_bytes(8, "little")
    return bytes(data)


def as_json(random: Random, value: Any) -> bytes:
    """JSON of a value, as far as JSON has it; now and then with what a strict reader does not take."""
    text = json.dumps(_jsonable(value), ensure_ascii=random.random() < 0.5, indent=random.choice([None, 1]))
    return text.encode("utf-8", errors=random.choice(["surrogatepass", "replace"]))


def _jsonable(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if isinstance(value, dict):
        return {
            (key.decode("latin-1") if isinstance(key, bytes) else key): _jsonable(item)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_jsonable(item) for item in value]
    if isinstance(value, int) and abs(value) > 10**100:
        return 10**100  # longer numbers are refused before any reader of ours sees them
    return value
