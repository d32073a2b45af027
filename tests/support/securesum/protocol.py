"""Whole runs of the protocol in memory: a server, n sites, and whoever drops out at each stage.

Every message travels as bytes. With ``stored=True`` every site's state is written and read again
between all steps, as in the simulator. ``World.tamper`` may replace any message on its way.

    world = World(5, seed=1)
    world.set_up()
    total = world.run(slot=0, drop_term={"site-2"})
    assert total.groups["update"] == world.plain(total.survivors)["update"]
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from tests.support.securesum import certificates

from tightframe.securesum import rules
from tightframe.securesum.errors import ProtocolError
from tightframe.securesum.identity import Anchor, Verifier
from tightframe.securesum.messages import (
    GROUPS,
    Advertisements,
    AgreementRequest,
    FieldSpec,
    Group,
    Params,
    RevealRequest,
    SumId,
    TermRequest,
)
from tightframe.securesum.primitives import Encapsulate, Random, kem_encapsulate
from tightframe.securesum.rules import Expected, SiteRules
from tightframe.securesum.server import Enrolment, Evidence, MemorySpool, Opened, Session, Sum
from tightframe.securesum.site import (
    Advertised,
    Confirmed,
    Established,
    Step,
    advertise,
    agree,
    confirm,
    mask,
    reveal,
)
from tightframe.securesum.site.journal import Entry, History, Profile, entry_from_value

JOB, VERSION, CONFIG = "job-1", "1.2.3", hashlib.sha256(b"configuration").digest()
BASIS = hashlib.sha256(b"state").digest()
DATASET = "lesions"

MIXED = (
    FieldSpec("weight", (2, 3), 32, 8, 1.0, "update"),
    FieldSpec("mean", (5,), 64, 24, 1e3, "update"),
    FieldSpec("bias", (1,), 32, 8, 1.0, "update"),
    FieldSpec("counts", (3,), 64, 0, 1e6, "static"),
    FieldSpec("scale", (), 32, 8, 1.0, "update"),
    FieldSpec("flags", (2,), 32, 0, 1.0, "static"),
)
"""Both rings in both groups, interleaved."""

Tamper = Callable[[str, str, bytes], bytes]


def seeded(seed: object) -> Random:
    """A reproducible source of bytes; never the same bytes twice."""
    state = {"count": 0}

    def random(count: int) -> bytes:
        state["count"] += 1
        return hashlib.shake_256(f"{seed}/{state['count']}".encode()).digest(count)

    return random


@dataclass(frozen=True)
class FixedSigner:
    """Signs with deterministic ECDSA (RFC 6979), so that a run can be repeated bit for bit."""

    key: Any = field(repr=False)
    certificate: bytes

    def sign(self, message: bytes) -> bytes:
        return self.key.sign(message, ec.ECDSA(hashes.SHA256(), deterministic_signing=True))


@functools.cache
def root(name: str = "project") -> certificates.Issued:
    """The project's root, the same for all tests of a process."""
    return certificates.make_root(name)


@functools.cache
def signer(name: str) -> FixedSigner:
    """A site's provisioned key and certificate, the same for all tests of a process."""
    issued = certificates.issue(root(), name)
    return FixedSigner(issued.key, issued.certificate)


def verifier(**overrides: Any) -> Verifier:
    """What sites and server hold certificates against."""
    values = {"anchor": Anchor(root().certificate), "pins": {}, "pinned_only": False, "at": certificates.AT}
    return Verifier(**{**values, **overrides})


def names(sites: int) -> tuple[str, ...]:
    """A roster, sorted."""
    return tuple(f"site-{number:03}" for number in range(1, sites + 1))


def make_params(sites: int, **overrides: Any) -> Params:
    """Valid parameters for so many sites."""
    colluders = overrides.get("colluders", rules.default_colluders(sites))
    trust = overrides.get("trust", "malicious")
    values: dict[str, Any] = {
        "job": JOB,
        "lineage": JOB,
        "epoch": 0,
        "roster": names(sites),
        "threshold": rules.threshold(sites, colluders, trust),
        "colluders": colluders,
        "slots": 3,
        "schemas": {"train": MIXED, "seal": ()},
        "weights": "exact",
        "trust": trust,
        "min_sites": 3,
        "static_open": True,
        "config_sha256": CONFIG,
        "version": VERSION,
    }
    return Params(**{**values, **overrides})


@dataclass
class Site:
    """A site and all that it keeps: state, journal, the caller's part of the protocol."""

    name: str
    signer: Any
    rules: SiteRules
    expected: Expected
    verifier: Verifier
    random: Random
    stored: bool = False
    dataset: str = DATASET
    profile: Profile | None = None
    encapsulate: Encapsulate = kem_encapsulate
    follows: bool = True
    state: Any = None
    entries: list[Entry] = field(default_factory=list)
    kept: dict[str, bytes] = field(default_factory=dict)

    @property
    def history(self) -> History:
        """Read anew from the journal's plain values, as after a restart."""
        return History(entry_from_value(item.as_value()) for item in self.entries)

    def take(self, step: Step[Any, Any]) -> bytes:
        """What a caller does with a step: journal, state, reply."""
        self.entries += step.entries
        self.state = step.state
        for name, data in step.kept.items():
            if data is None:
                self.kept.pop(name, None)
            else:
                self.kept[name] = data
        if self.stored:
            kind: Any = type(step.state)
            self.state = kind.from_bytes(step.state.to_bytes())
            assert self.state == step.state
        return step.reply.to_bytes()

    def advertise(self, raw: bytes) -> bytes:
        return self.take(
            advertise(
                Params.from_bytes(raw),
                rules=self.rules,
                expected=self.expected,
                signer=self.signer,
                history=self.history,
                dataset=self.dataset,
                application=f"weight of {self.name}".encode(),
                profile=self.profile,
                previous=self.state if isinstance(self.state, Established) else None,
                random=self.random,
            )
        )

    def confirm(self, raw: bytes) -> bytes:
        message = Advertisements.from_bytes(raw)
        return self.take(
            confirm(
                self.state,
                message,
                verifier=self.verifier,
                random=self.random,
                encapsulate=self.encapsulate,
            )
        )

    def mask(
        self,
        raw: bytes,
        fields: tuple[FieldSpec, ...],
        term: Mapping[Group, bytes],
        basis: bytes = BASIS,
    ) -> bytes:
        request = TermRequest.from_bytes(raw)
        return self.take(
            mask(
                self.state,
                request,
                fields=fields,
                basis=basis,
                follows=self.follows,
                term=term,
                history=self.history,
                kept=self.kept.get,
                profile=self.profile,
            )
        )

    def agree(self, raw: bytes) -> bytes:
        request = AgreementRequest.from_bytes(raw)
        return self.take(agree(self.state, request, history=self.history))

    def reveal(self, raw: bytes) -> bytes:
        request = RevealRequest.from_bytes(raw)
        return self.take(reveal(self.state, request, history=self.history, kept=self.kept.get))


class World:
    """n sites and a server.

    Args:
        sites: n.
        seed: of everything random, the terms' integers included.
        stored: whether states are written and read between all steps.
        site_rules: every site's rules.
        tamper: (stage, site, message) -> the message that arrives instead. Stages: ``params``,
            ``advertisement``, ``advertisements``, ``confirmation``, ``request``, ``masked``,
            ``agreement_request``, ``agreement``, ``reveal_request``, ``reveal``.
        overrides: of the parameters.
    """

    def __init__(
        self,
        sites: int,
        *,
        seed: object = 0,
        stored: bool = False,
        site_rules: SiteRules | None = None,
        tamper: Tamper = lambda stage, site, raw: raw,
        **overrides: Any,
    ) -> None:
        self.params = make_params(sites, **overrides)
        self.stored, self.tamper, self.seed = stored, tamper, seed
        expected = Expected(
            name="",
            job=self.params.job,
            lineage=self.params.lineage,
            sites=frozenset(names(sites)),
            colluders=self.params.colluders,
            trust=self.params.trust,
            threshold=self.params.threshold,
            min_sites=self.params.min_sites,
            weights=self.params.weights,
            config_sha256=CONFIG,
            version=VERSION,
        )
        self.sites = {
            name: Site(
                name=name,
                signer=signer(name),
                rules=site_rules or SiteRules(trust=frozenset({"malicious", "semi_honest"})),
                expected=replace(expected, name=name),
                verifier=verifier(),
                random=seeded((seed, name)),
                stored=stored,
            )
            for name in self.params.roster
        }
        self.enrolment = Enrolment(self.params, verifier=verifier())
        self.session: Session
        self.spool = MemorySpool()
        self.evidence: Evidence | None = None
        self.refused: dict[str, ProtocolError] = {}

    # Setup -----------------------------------------------------------------------------------

    def enroll(self) -> Advertisements:
        """Exchange 1."""
        for name, site in self.sites.items():
            raw = site.advertise(self.tamper("params", name, self.params.to_bytes()))
            self.enrolment.add(name, self.tamper("advertisement", name, raw))
        return self.enrolment.relay()

    def confirm(self, shown: Advertisements) -> Session:
        """Exchange 2."""
        self.session = Session(self.params, shown)
        for name, site in self.sites.items():
            raw = site.confirm(self.tamper("advertisements", name, shown.to_bytes()))
            self.session.add(name, self.tamper("confirmation", name, raw))
        return self.session

    def set_up(self) -> Session:
        """Both."""
        return self.confirm(self.enroll())

    # Sums ------------------------------------------------------------------------------------

    def term(self, name: str, schema: str = "train") -> dict[Group, bytes]:
        """A site's integers, uniform over the whole ring so that every carry and wrap occurs."""
        random = np.random.default_rng(list(hashlib.sha256(f"{self.seed}/{name}/{schema}".encode()).digest()))
        fields = self.params.schemas[schema]
        return {
            group: b"".join(
                random.bytes(item.size * item.ring // 8) for item in fields if item.group == group
            )
            for group in GROUPS
        }

    def plain(self, survivors: Iterable[str], schema: str = "train") -> dict[Group, bytes]:
        """The total in Python's own integers, by which nothing of ours was computed."""
        terms = [self.term(name, schema) for name in survivors]
        return {group: add_integers(self.params.schemas[schema], group, terms) for group in GROUPS}

    def start(self, slot: int, schema: str = "train", sum_id: SumId | None = None) -> Sum:
        return Sum(
            self.session,
            slot=slot,
            sum_id=sum_id or SumId(slot, "train-0"),
            schema=schema,
            basis=BASIS,
            spool=self.spool,
            rests_on=self.evidence,
        )

    def finish(self, total: Sum) -> Opened:
        """Open a sum; its total is what the next one rests on."""
        opened = total.open()
        if self.evidence is not None:
            self.spool.erase(self.evidence.total.slot)
        self.evidence = opened.evidence
        return opened

    def request(self, name: str, total: Sum, schema: str = "train") -> bytes:
        """The server's request for a term; with a setup if it is the site's first."""
        first = isinstance(self.sites[name].state, Confirmed)
        setup = self.session.setup_for(name).to_bytes() if first else b""
        return replace(total.term_request(setup), schema=schema).to_bytes()

    def contribute(self, total: Sum, sites: Iterable[str], schema: str = "train") -> None:
        """Exchange 3: terms from these sites."""
        for name in sites:
            raw = self.tamper("request", name, self.request(name, total, schema))
            raw = self.sites[name].mask(raw, self.params.schemas[schema], self.term(name, schema))
            self._arrive(total.add, "masked", name, raw)

    def agree(self, total: Sum, sites: Iterable[str]) -> None:
        """Exchange 4, after a drop-out."""
        if total.full:
            return
        request = total.agreement_request().to_bytes()
        for name in sites:
            raw = self.sites[name].agree(self.tamper("agreement_request", name, request))
            self._arrive(total.add_agreement, "agreement", name, raw)

    def reveal(self, total: Sum, sites: Iterable[str]) -> None:
        """Exchange 5."""
        request = total.reveal_request().to_bytes()
        for name in sites:
            raw = self.sites[name].reveal(self.tamper("reveal_request", name, request))
            self._arrive(total.add_reveal, "reveal", name, raw)

    def run(
        self,
        slot: int,
        *,
        schema: str = "train",
        sum_id: SumId | None = None,
        drop_term: Iterable[str] = (),
        drop_agree: Iterable[str] = (),
        drop_reveal: Iterable[str] = (),
    ) -> Opened:
        """One whole sum. A site that drops out at one stage is away for the stages that follow.

        What the server refuses is kept in ``refused``: site -> error, and the sum goes on.
        """
        total = self.start(slot, schema, sum_id)
        here = [name for name in self.params.roster if name not in set(drop_term)]
        self.contribute(total, here, schema)
        survivors = total.close()
        here = [name for name in survivors if name not in set(drop_agree)]
        self.agree(total, here)
        self.reveal(total, [name for name in here if name not in set(drop_reveal)])
        return self.finish(total)

    def seal(self, slot: int, **options: Any) -> Opened:
        """A sum without fields, in which the last total is verified."""
        return self.run(slot, schema="seal", sum_id=SumId(0, "seal-0"), **options)

    def _arrive(self, add: Callable[[str, bytes], None], stage: str, name: str, raw: bytes) -> None:
        try:
            add(name, self.tamper(stage, name, raw))
        except ProtocolError as error:
            self.refused[name] = error


def add_integers(fields: Iterable[FieldSpec], group: Group, terms: list[dict[Group, bytes]]) -> bytes:
    """The sum of terms, element by element, modulo each field's ring, in Python's integers."""
    total, start = b"", 0
    for item in fields:
        if item.group == group:
            width = item.ring // 8
            for _ in range(item.size):
                values = [int.from_bytes(term[group][start : start + width], "little") for term in terms]
                total += (sum(values) % 2**item.ring).to_bytes(width, "little")
                start += width
    return total


__all__ = [
    "BASIS",
    "CONFIG",
    "DATASET",
    "JOB",
    "MIXED",
    "VERSION",
    "Advertised",
    "Confirmed",
    "Established",
    "FixedSigner",
    "Site",
    "World",
    "add_integers",
    "make_params",
    "names",
    "root",
    "seeded",
    "signer",
    "verifier",
]
