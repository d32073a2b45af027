"""Known-answer vectors: how they are read, and how a run of them is played with the package's machines.

Every source of randomness is the vector's, so each message must come out byte for byte as it was
recorded. ``play`` stops before a given message; a vector of what must be refused is delivered then.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.serialization import load_der_private_key
from tests.support.securesum import mlkem
from tests.support.securesum.certificates import AT
from tests.support.securesum.independent import Stream
from tests.support.securesum.protocol import FixedSigner, World

from tightframe.securesum.errors import ProtocolError
from tightframe.securesum.identity import Anchor, Verifier
from tightframe.securesum.messages import Advertisements, FieldSpec, Group, Params, SumId
from tightframe.securesum.rules import SiteRules
from tightframe.securesum.server import Enrolment, Opened, Session, Sum

VECTORS = Path(__file__).parents[2] / "securesum" / "vectors"
VERSION = 3


@cache
def load(name: str) -> Any:
    """One file of vectors."""
    value = json.loads((VECTORS / f"{name}.json").read_text(encoding="utf-8"))
    assert value["version"] == VERSION
    return value


def params_of(values: Mapping[str, Any]) -> Params:
    """Parameters from a vector's plain values."""
    specs = {
        name: tuple(FieldSpec(**{**item, "shape": tuple(item["shape"])}) for item in items)
        for name, items in values["schemas"].items()
    }
    return Params(
        **{
            **values,
            "roster": tuple(values["roster"]),
            "schemas": specs,
            "config_sha256": bytes.fromhex(values["config_sha256"]),
        }
    )


class Player(World):
    """The sites and the server of a vector's run, between two of its messages."""

    def __init__(self, vector: Mapping[str, Any], *, stored: bool = False) -> None:
        params = params_of(vector["params"])
        values = {key: getattr(params, key) for key in Params.__dataclass_fields__}
        super().__init__(len(params.roster), stored=stored, **values)
        assert self.params == params
        self.vector = vector
        checked = Verifier(Anchor(bytes.fromhex(vector["root"])), {}, False, AT)
        for name, site in self.sites.items():
            given = vector["sites"][name]
            key = load_der_private_key(bytes.fromhex(given["private_key"]), None)
            site.signer = FixedSigner(key, bytes.fromhex(given["certificate"]))
            site.expected = replace(site.expected, sites=frozenset(params.roster))
            site.rules = SiteRules()
            random = Stream(bytes.fromhex(given["random"]))
            site.random, site.verifier = random, checked
            site.encapsulate = lambda key, random=random: mlkem.encapsulate(key, random(32))  # type: ignore[misc]
        self.enrolment = Enrolment(params, verifier=checked)
        self.shown: Advertisements | None = None
        self.total: Sum | None = None
        self.sums: list[Sum] = []
        self.opened: list[Opened] = []

    @property
    def current(self) -> Mapping[str, Any]:
        """The sum that is being collected."""
        slot = self.total.slot if self.total else 0
        found: Mapping[str, Any] = self.vector["sums"][slot]
        return found

    def deliver(self, task: str, sender: str, receiver: str, raw: bytes) -> bytes | None:
        """One message arrives; the answer, if a site got it."""
        if receiver == "server":
            self._server(task, sender, raw)
            return None
        site = self.sites[receiver]
        if task == "contribute":
            slot = self.total.slot if self.total else 0
            fields = self.params.schemas[self.current["schema"]]
            return site.mask(raw, fields, self.given(receiver, slot), bytes.fromhex(self.current["basis"]))
        handlers = {
            "enroll": site.advertise,
            "confirm": site.confirm,
            "agree": site.agree,
            "reveal": site.reveal,
        }
        return handlers[task](raw)

    def given(self, name: str, slot: int) -> dict[Group, bytes]:
        """A site's integers in the vector."""
        terms = self.vector["sites"][name]["terms"].get(str(slot), {"update": "", "static": ""})
        return {"update": bytes.fromhex(terms["update"]), "static": bytes.fromhex(terms["static"])}

    def advance(self, task: str) -> None:
        """What the server does before it sends the first message of a task."""
        if task == "confirm" and self.shown is None:
            self.shown = self.enrolment.relay()
            self.session = Session(self.params, self.shown)
        if task == "contribute" and (self.total is None or self.total.survivors):
            if self.total is not None:
                self.opened.append(self.finish(self.total))
            item = self.vector["sums"][len(self.sums)]
            self.total = Sum(
                self.session,
                slot=item["slot"],
                sum_id=SumId(*item["sum_id"]),
                schema=item["schema"],
                basis=bytes.fromhex(item["basis"]),
                spool=self.spool,
                rests_on=self.evidence,
            )
            self.sums.append(self.total)
        if task in ("agree", "reveal") and self.total and not self.total.survivors:
            self.total.close()

    def outgoing(self, task: str, receiver: str) -> bytes:
        """What the server sends to a site now."""
        if task == "enroll":
            return self.params.to_bytes()
        if task == "confirm":
            assert self.shown
            return self.shown.to_bytes()
        assert self.total
        if task == "contribute":
            return self.request(receiver, self.total, self.current["schema"])
        return (self.total.agreement_request() if task == "agree" else self.total.reveal_request()).to_bytes()

    def _server(self, task: str, sender: str, raw: bytes) -> None:
        if task == "enroll":
            return self.enrolment.add(sender, raw)
        if task == "confirm":
            return self.session.add(sender, raw)
        assert self.total
        if task == "contribute":
            return self.total.add(sender, raw)
        return (
            self.total.add_agreement(sender, raw) if task == "agree" else self.total.add_reveal(sender, raw)
        )


def play(
    vector: Mapping[str, Any], until: int | None = None, *, stored: bool = False
) -> tuple[Player, list[dict[str, Any]]]:
    """A run up to its message number ``until``; the messages as the package makes them.

    Without ``until`` and ``messages`` in the vector, the run is made anew.
    """
    player, seen = Player(vector, stored=stored), []
    for number, (task, name) in enumerate(order(vector)):
        player.advance(task)
        if until is not None and 2 * number >= until:
            break
        request = player.outgoing(task, name)
        seen.append({"task": task, "from": "server", "to": name, "bytes": request.hex()})
        answer = player.deliver(task, "server", name, request)
        assert answer is not None
        seen.append({"task": task, "from": name, "to": "server", "bytes": answer.hex()})
        if until is not None and 2 * number + 1 >= until:
            break
        player.deliver(task, name, "server", answer)
    else:
        assert player.total
        player.opened.append(player.finish(player.total))
    return player, seen


def order(vector: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Task and site of every exchange of a run."""
    roster = vector["params"]["roster"]
    found = [(task, name) for task in ("enroll", "confirm") for name in roster]
    for item in vector["sums"]:
        here = [name for name in roster if name not in item["missing"]]
        for task in ("contribute", "agree", "reveal") if item["missing"] else ("contribute", "reveal"):
            # A site that gave no shares of a total does not combine its term of it, which is then shown.
            away = item["silent"] if task == "reveal" else ()
            found += [(task, name) for name in here if name not in away]
    return found


__all__ = ["VERSION", "Player", "ProtocolError", "load", "order", "params_of", "play"]
