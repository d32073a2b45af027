"""Collects bad messages for `make_vectors`; no test runs this."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgpack
from tests.support.securesum.replay import Player, order, play

from tightframe.securesum.errors import ProtocolError


class Maker:
    """Collects bad messages: each is made from the run as it stands after some messages."""

    def __init__(self, run: Mapping[str, Any]) -> None:
        self.run, self.made = run, []  # type: ignore[var-annotated]
        self.places = [
            place for task, name in order(run) for place in ((task, "server", name), (task, name, "server"))
        ]

    def at(self, task: str, sender: str, receiver: str, sum_number: int = 0) -> int:
        """The number of a message of the run."""
        found = [number for number, place in enumerate(self.places) if place == (task, sender, receiver)]
        return found[min(sum_number, len(found) - 1)]

    def add(
        self,
        name: str,
        after: int,
        place: tuple[str, str, str],
        make: Callable[[Player, bytes], bytes],
        why: str,
    ) -> None:
        """One message; the error is what its receiver says now, and is looked over by hand."""
        player, _ = play(self.run, after)
        good = b""
        if after < len(self.places) and self.places[after] == place:
            good = bytes.fromhex(self.run["messages"][after]["bytes"])
        raw = make(player, good)
        task, sender, receiver = place
        try:
            player.deliver(task, sender, receiver, raw)
        except ProtocolError as error:
            self.made.append(
                {
                    "name": name,
                    "why": why,
                    "after": after,
                    "task": task,
                    "from": sender,
                    "to": receiver,
                    "error": type(error).__name__,
                    "code": error.code,
                    "blamed": error.blamed,
                    "bytes": raw.hex(),
                }
            )
        else:
            raise AssertionError(f"{name} was not refused")


def repacked(raw: bytes, **changes: Any) -> bytes:
    """A msgpack map with other or more values."""
    return bytes(msgpack.packb({**msgpack.unpackb(raw), **changes}))
