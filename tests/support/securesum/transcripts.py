"""Transcripts with real signatures and combinations, right and wrong, without running the protocol.

``Run`` writes what it is told to; what does not fit the rules is then for ``verify`` to find.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from tests.support.securesum.certificates import AT, Issued, issue, make_root
from tests.support.securesum.protocol import add_integers

from tightframe.securesum import transcript
from tightframe.securesum.identity.certificate import MARK
from tightframe.securesum.messages import (
    GROUPS,
    NO_TOTAL,
    Advertisement,
    Agreement,
    FieldSpec,
    Group,
    Params,
    Receipt,
    SumId,
    Told,
    agreement_signed,
    challenge,
    ready_signed,
    receipts_digest,
    session_id,
)
from tightframe.securesum.primitives import Secret, ed25519_public, ed25519_sign, kem_public, x25519_public
from tightframe.securesum.proofs import Ground
from tightframe.securesum.transcript import SERVER, Chain, SumRecord
from tightframe.securesum.transcript.lines import line_hash

NAMES = ("site-1", "site-2", "site-3", "site-4")
SCHEMAS = {
    "train": (
        FieldSpec("weights", (3, 2), 32, 24, 1.0, "update"),
        FieldSpec("counts", (8,), 64, 24, 1e6, "static"),
    ),
    "closing": (FieldSpec("counts", (8,), 64, 24, 1e6, "static"),),
}
PARAMS = Params(
    job="job-7",
    lineage="job-7",
    epoch=0,
    roster=NAMES,
    threshold=3,
    colluders=1,
    slots=4,
    schemas=SCHEMAS,
    weights="power_of_two",
    trust="malicious",
    min_sites=3,
    static_open=True,
    config_sha256=hashlib.sha256(b"configuration").digest(),
    version="0.1.0",
)


def identities(root: Issued, names: Sequence[str] = NAMES) -> dict[str, Issued]:
    """A certificate for each name."""
    return {name: issue(root, name) for name in names}


@dataclass
class Epoch:
    """An epoch with all its keys."""

    params: Params
    advertisements: tuple[Advertisement, ...]
    session: bytes
    secrets: Mapping[str, Secret]

    @classmethod
    def make(cls, params: Params, sites: Mapping[str, Issued]) -> Epoch:
        secrets = {name: Secret(os.urandom(32)) for name in params.roster}
        items = tuple(advertise(params, name, sites[name], secrets[name]) for name in params.roster)
        return cls(params, items, session_id(params, items), secrets)

    def sign(self, name: str, message: bytes) -> bytes:
        return ed25519_sign(self.secrets[name], message)

    def ready(self) -> dict[str, bytes]:
        return {name: self.sign(name, ready_signed(self.session, name)) for name in self.params.roster}

    def receipt(
        self, name: str, slot: int, sum_id: SumId, basis: bytes, told: Told | None, **changes: Any
    ) -> Receipt:
        total = NO_TOTAL if told is None else told.digest()
        hashes = os.urandom(32), os.urandom(32), os.urandom(32)
        unsigned = Receipt(name, slot, sum_id, basis, total, {}, True, *hashes, b"")
        unsigned = replace(unsigned, **changes)
        return replace(unsigned, signature=self.sign(name, unsigned.signed(self.session)))

    def resigned(self, receipt: Receipt, **changes: Any) -> Receipt:
        """A receipt with something else in it, signed."""
        receipt = replace(receipt, **changes)
        return replace(receipt, signature=self.sign(receipt.name, receipt.signed(self.session)))

    def agreement(self, name: str, receipts: Sequence[Receipt], **changes: Any) -> Agreement:
        """An agreement; ``changes`` are of what is signed, too."""
        item = replace(Agreement(name, receipts[0].slot, b""), **changes)
        survivors = [receipt.name for receipt in receipts]
        digest = receipts_digest(self.session, receipts)
        signed = agreement_signed(self.session, item.slot, receipts[0].sum_id, survivors, digest)
        return replace(item, signature=self.sign(name, signed))


def advertise(params: Params, name: str, identity: Issued, secret: Secret, **changes: Any) -> Advertisement:
    """A signed advertisement; ``changes`` are made before it is signed."""
    item = Advertisement(
        name=name,
        certificate=identity.certificate,
        channel_key=x25519_public(Secret(os.urandom(32))),
        session_key=ed25519_public(secret),
        slots=os.urandom(128 * params.slots),
        application=b"weight",
        encapsulation_key=kem_public(Secret(os.urandom(64))),
        signature=b"",
    )
    item = replace(item, **changes)
    return replace(item, signature=identity.signer().sign(item.signed(params.digest())))


@dataclass(frozen=True)
class Opening:
    """The last total of a session, with what each silo knows of its own term in it."""

    told: Told
    terms: Mapping[str, Mapping[Group, bytes]]


@dataclass
class Run:
    """A transcript in the making; ``last`` by session, and ``totals``, the integers, by their digest."""

    root: Issued = field(default_factory=make_root)
    view: str = SERVER
    sites: dict[str, Issued] = field(default_factory=dict)
    lines: list[bytes] = field(default_factory=list)
    time: datetime = AT
    sessions: dict[int, bytes] = field(default_factory=dict)
    last: dict[bytes, Opening] = field(default_factory=dict)
    totals: dict[bytes, Mapping[Group, bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sites = self.sites or identities(self.root)
        self.lines.append(
            transcript.start(view=self.view, job=PARAMS.job, version=PARAMS.version, time=self.time)
        )

    @property
    def chain(self) -> Chain:
        return Chain.resume(self.lines[-1])

    def epoch(
        self, params: Params = PARAMS, *, ready: Mapping[str, bytes] | None = None, **changes: Any
    ) -> Epoch:
        """Write a session; ``changes`` are of the parameters."""
        return self.write(Epoch.make(replace(params, **changes), self.sites), ready)

    def write(self, epoch: Epoch, ready: Mapping[str, bytes] | None = None) -> Epoch:
        """Write the session of an epoch as it is."""
        self.lines.append(
            transcript.session(
                self.chain,
                params=epoch.params,
                advertisements=epoch.advertisements,
                ready=epoch.ready() if ready is None else ready,
                time=self.time,
            )
        )
        self.sessions[epoch.params.epoch] = epoch.session
        return epoch

    def record(
        self,
        epoch: Epoch,
        slot: int,
        *,
        missing: Sequence[str] = (),
        agreeing: Sequence[str] | None = None,
        silent: Sequence[str] = (),
        attempt: int = 0,
        **changes: Any,
    ) -> SumRecord:
        """What is recorded of a sum in which some were missing, and some sent no combinations."""
        sum_id = SumId.of("train", 10 * epoch.params.epoch + slot, 0, attempt)
        basis = hashlib.sha256(str(sum_id).encode()).digest()
        survivors = tuple(name for name in epoch.params.roster if name not in missing)
        last = self.last.get(epoch.session)
        told = None if last is None else last.told
        combined = {} if last is None else self.combinations(epoch, last)
        combined = {name: combined.get(name, {}) for name in survivors if name not in silent}
        receipts = tuple(
            epoch.receipt(name, slot, sum_id, basis, told, combinations=combined.get(name, {}))
            for name in survivors
        )
        signers = survivors if agreeing is None else agreeing
        if survivors == epoch.params.roster:
            signers = ()
        made = SumRecord(
            epoch=epoch.params.epoch,
            slot=slot,
            sum_id=sum_id,
            schema="train",
            basis=basis,
            rests_on=told,
            receipts=receipts,
            survivors=survivors,
            agreements=tuple(epoch.agreement(name, receipts) for name in signers),
        )
        gone = () if told is None else set(told.survivors) - {n for n, own in combined.items() if own}
        return replace(replace(made, proved=tuple(sorted(gone))), **changes)

    def combinations(self, epoch: Epoch, last: Opening) -> dict[str, dict[Group, bytes]]:
        """The true combinations of each silo's term of a total."""
        peers = {item.name: item for item in epoch.advertisements}
        ground, made = (
            Ground(epoch.session, epoch.params, peers, last.told),
            challenge(epoch.session, last.told),
        )
        return {name: ground.combine(made, term) for name, term in last.terms.items()}

    def opened(
        self,
        record: SumRecord,
        groups: Sequence[Group] = ("update",),
        blamed: Mapping[str, str] | None = None,
    ) -> None:
        """Write a sum that was opened; the next one of its session rests on its total."""
        params = replace(PARAMS, roster=record.survivors)
        fields = params.schemas[record.schema]
        terms = {name: {group: _random(fields, group) for group in groups} for name in record.survivors}
        total = {group: add_integers(fields, group, [*terms.values()]) for group in groups}
        self.lines.append(
            transcript.opened(
                self.chain,
                record,
                groups=groups,
                total={**total} if self.view == SERVER else None,
                blamed=blamed,
            )
        )
        hashes = {group: hashlib.sha256(data).digest() for group, data in total.items()}
        session = self.sessions[record.epoch]
        digest = receipts_digest(session, record.receipts)
        told = Told(record.slot, record.sum_id, record.schema, record.survivors, hashes, digest)
        self.last[session], self.totals[told.digest()] = Opening(told, terms), total

    def failed(
        self, record: SumRecord, code: str = "TF-613", blamed: Mapping[str, str] | None = None
    ) -> None:
        """Write a sum that was not opened."""
        shown = dict(blamed or {}) if self.view == SERVER else None
        self.lines.append(transcript.failed(self.chain, record, code=code, blamed=shown))

    def end(self, reason: str | None = None, sums: int | None = None) -> None:
        """Write the last line."""
        found = sum(json.loads(line)["line"] == "sum" for line in self.lines)
        self.lines.append(transcript.end(self.chain, reason=reason, sums=found if sums is None else sums))

    def verify(self, **options: Any) -> transcript.Report:
        """Check it against its own root."""
        return transcript.verify(self.lines, self.root.anchor(), **options)


def _random(fields: Sequence[FieldSpec], group: Group) -> bytes:
    return os.urandom(sum(item.size * item.ring // 8 for item in fields if item.group == group))


def short_run(view: str = SERVER) -> Run:
    """One epoch; a sum of everybody, one of three, one that failed early; an end."""
    run = Run(view=view)
    epoch = run.epoch()
    run.opened(run.record(epoch, 0), GROUPS)
    run.opened(run.record(epoch, 1, missing=["site-2"]), blamed={"site-3": "a share is not the one signed"})
    early = run.record(epoch, 2, missing=["site-2", "site-3"], agreeing=[], survivors=(), proved=())
    run.failed(early, "TF-611", blamed={"site-4": "silent"})
    run.end("too few silos")
    return run


def whole_run(view: str = SERVER, *, simulated: bool = False) -> Run:
    """As ``short_run``, with a sum that failed late, too, and a second epoch with fewer sites."""
    run = Run(make_root(MARK) if simulated else make_root(), view)
    epoch = run.epoch()
    run.opened(run.record(epoch, 0), GROUPS)
    run.opened(run.record(epoch, 1, missing=["site-2"]), blamed={"site-3": "a share is not the one signed"})
    late = run.record(epoch, 2, missing=["site-2"], agreeing=["site-1"], proved=())
    run.failed(late, blamed={"site-4": "silent"})
    early = run.record(epoch, 3, missing=["site-2", "site-3"], agreeing=[], survivors=(), proved=())
    run.failed(early, "TF-611")
    epoch = run.epoch(epoch=2, roster=NAMES[:3], static_open=False)
    run.opened(run.record(epoch, 1))
    run.end("too few silos")
    return run


def rechained(lines: Sequence[bytes]) -> list[bytes]:
    """The same lines with every hash made anew, as somebody who rewrites a file would."""
    made: list[bytes] = []
    for line in lines:
        value = json.loads(line)
        if "previous" in value:
            value["previous"] = line_hash(made[-1]) if made else transcript.FIRST
        made.append(dumped(value))
    return made


def dumped(value: object) -> bytes:
    """A line in canonical form."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def edited(line: bytes, change: Callable[[Any], None]) -> bytes:
    """A line with a change to its content, in canonical form."""
    value = json.loads(line)
    change(value)
    return dumped(value)
