"""The transcript of a run and its verification: one line for each sum, chained by hashes.

No line can be altered, removed or moved without changing all that follow. The chain itself is not
signed: whoever holds a file can rewrite it. A rewrite cannot forge the sites' signatures, and these
are what ``verify`` relies on: advertisements signed by provisioned keys, a signature of readiness of
every site over the whole session, and for each sum the receipts and, after a drop-out, the
agreements. All that is *not* signed rests on the writer's word: whose view it is, times, the name of
a schema, which groups were opened, their totals, who was blamed, why a sum failed or a run ended,
which receipts are listed for a sum that failed before it had a survivor set, and that no sum was
left out. ``docs/transcript.md`` explains the consequences.

``start``, ``session``, ``opened``, ``failed`` and ``end`` make the lines (``transcript.lines``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from cryptography import x509

from tightframe.securesum import rules
from tightframe.securesum.checks import Keys, read_advertisements, verify_advertisement, verify_receipt
from tightframe.securesum.checks import verify as check_signature
from tightframe.securesum.errors import IdentityError, ProtocolError
from tightframe.securesum.identity import Anchor, Verifier, public_key_hash
from tightframe.securesum.messages import (
    GROUPS,
    Advertisements,
    Group,
    Params,
    SumId,
    ready_signed,
    session_id,
    survivors_signed,
)
from tightframe.securesum.transcript.lines import (
    FIRST,
    MAX_LINE,
    SERVER,
    Chain,
    SumRecord,
    end,
    failed,
    line_hash,
    opened,
    parse,
    read_body,
    session,
    start,
)

__all__ = [
    "FIRST",
    "MAX_LINE",
    "SERVER",
    "SIMULATED",
    "Chain",
    "EpochReport",
    "Report",
    "SumRecord",
    "SumReport",
    "TranscriptError",
    "end",
    "failed",
    "opened",
    "session",
    "start",
    "verify",
]

SIMULATED = "SIMULATED IDENTITY"
"""Mark in the subject of a root certificate that the simulator generated."""


class TranscriptError(ProtocolError):
    """A transcript violates the rules, or a signature in it is wrong (TF-616).

    Args:
        line: the first invalid line, from 1.
        what, expected, found, blamed: as for ``ProtocolError``.
    """

    code = "TF-616"

    def __init__(self, line: int, what: str, *, expected: str, found: str, blamed: str | None = None) -> None:
        super().__init__(what, expected=expected, found=found, blamed=blamed)
        self.line = line

    def __str__(self) -> str:
        return f"Line {self.line}: {super().__str__()}"


@dataclass(frozen=True)
class EpochReport:
    """One epoch, with the parameters that every site signed.

    Attributes:
        params: the parameters of the epoch.
        time: when certificates were checked, according to the writer.
        keys: site -> SHA-256 (hex) of its provisioned public key, in the format of a pin.
    """

    params: Params
    time: datetime
    keys: Mapping[str, str]


@dataclass(frozen=True)
class SumReport:
    """One sum; if it was not opened, ``failure`` is the code and ``groups`` is empty."""

    epoch: int
    slot: int
    sum_id: SumId
    groups: tuple[Group, ...]
    missing: tuple[str, ...]
    failure: str | None
    blamed: Mapping[str, str]


@dataclass(frozen=True)
class Report:
    """The content of a valid transcript.

    Attributes:
        view, job, version, started: of the run, according to its writer.
        epochs, sums: in order.
        simulated: whether the subject of the root certificate is marked as a simulated identity.
        complete: whether the transcript has its end line.
        reason: why the run ended early, according to the writer.
        head: SHA-256 of the last line (hex), by which two copies can be compared.
    """

    view: str
    job: str
    version: str
    started: datetime
    epochs: tuple[EpochReport, ...]
    sums: tuple[SumReport, ...]
    simulated: bool
    complete: bool
    reason: str | None
    head: str

    @property
    def sites(self) -> tuple[str, ...]:
        """All sites of all epochs, sorted."""
        return tuple(sorted({site for epoch in self.epochs for site in epoch.params.roster}))

    @property
    def opened(self) -> tuple[SumReport, ...]:
        """The sums that were opened."""
        return tuple(item for item in self.sums if item.failure is None)

    @property
    def failed(self) -> tuple[SumReport, ...]:
        """The sums that were not opened."""
        return tuple(item for item in self.sums if item.failure is not None)

    @property
    def skipped(self) -> tuple[tuple[int, int], ...]:
        """(epoch, slot) without a line, below an epoch's last used slot: not used, or left out."""
        used = {(item.epoch, item.slot) for item in self.sums}
        last = {epoch: max(slot for at, slot in used if at == epoch) for epoch, _ in used}
        every = ((epoch, slot) for epoch in sorted(last) for slot in range(last[epoch]))
        return tuple(place for place in every if place not in used)


def verify(
    lines: Iterable[bytes],
    anchor: Anchor,
    *,
    pins: Mapping[str, frozenset[bytes]] | None = None,
    any_static_cohort: bool = False,
) -> Report:
    """Read a transcript and check everything that can be checked without a secret.

    Args:
        lines: the file's lines, with or without their newlines.
        anchor: the project's root.
        pins: site -> SHA-256 of the public keys that are accepted for it.
        any_static_cohort: accept that the static group was opened for more than one cohort, as the
            sites' rule of that name permits.

    Raises:
        TranscriptError: TF-616, at the first invalid line. A missing end line is not an error; see
            ``Report.complete``.
        IdentityError: TF-602, if the root is not a certificate.
    """
    simulated = _is_simulated(anchor.root)
    reading: _Reading | None = None
    for number, line in enumerate(lines, 1):
        try:
            value = parse(line.removesuffix(b"\n"))
            if reading is None:
                _demand(value["line"] == "run", "the first line", "a run line", repr(value["line"]))
                reading = _Reading(anchor, pins or {}, any_static_cohort, read_body(value, server=False))
            reading.take(value)
            reading.previous = line_hash(line)
        except ProtocolError as error:
            raise TranscriptError(
                number, error.what, expected=error.expected, found=error.found, blamed=error.blamed
            ) from error
    if reading is None:
        raise TranscriptError(1, "the first line", expected="a run line", found="an empty file")
    return Report(
        view=reading.view,
        job=reading.run["job"],
        version=reading.run["version"],
        started=reading.run["started"],
        epochs=tuple(reading.epochs),
        sums=tuple(reading.sums),
        simulated=simulated,
        complete=reading.last is not None,
        reason=reading.last["reason"] if reading.last else None,
        head=reading.previous,
    )


@dataclass
class _Session:
    """The current epoch: its parameters, session id (T), session keys by site, and the slots used so far."""

    params: Params
    identifier: bytes
    keys: Mapping[str, bytes]
    slots: set[int] = field(default_factory=set)


@dataclass
class _Reading:
    """The transcript read so far: every line is checked against it, then added to it."""

    anchor: Anchor
    pins: Mapping[str, frozenset[bytes]]
    any_static_cohort: bool
    run: Mapping[str, Any]
    previous: str = FIRST
    session: _Session | None = None
    epochs: list[EpochReport] = field(default_factory=list)
    sums: list[SumReport] = field(default_factory=list)
    identifiers: set[SumId] = field(default_factory=set)
    static_cohort: tuple[str, ...] = ()
    last: Mapping[str, Any] | None = None

    @property
    def view(self) -> str:
        return str(self.run["view"])

    def take(self, value: Mapping[str, Any]) -> None:
        kind = value["line"]
        _demand(self.last is None, "the transcript", "finished after its end line", f"a {kind} line")
        _demand(
            value["previous"] == self.previous,
            "the hash of the line before",
            self.previous,
            value["previous"],
        )
        body = read_body(value, server=self.view == SERVER)
        if kind == "session":
            self.take_session(body)
        elif kind == "sum":
            if self.session is None:
                raise ProtocolError(
                    "the line", expected="after a session line", found="a sum line before any"
                )
            self.take_sum(body, self.session)
        elif kind == "end":
            stated, counted = body["sums"], len(self.sums)
            _demand(stated == counted, "the number of sums", str(counted), str(stated))
            self.last = body
        else:
            _demand(self.previous == FIRST, "a run line", "the first line", "a later one")

    def take_session(self, body: Mapping[str, Any]) -> None:
        params = Params.from_bytes(body["params"])
        _demand(params.to_bytes() == body["params"], "session.params", "in canonical form", "another form")
        self.check_params(params)
        items = read_advertisements(params, Advertisements(body["advertisements"]))
        encoded = tuple(item.to_bytes() for item in items)
        canonical = encoded == body["advertisements"]
        _demand(canonical, "session.advertisements", "in canonical form", "another form")
        verifier, digest = Verifier(self.anchor, self.pins, False, body["time"]), params.digest()
        keys = Keys()
        for item in items:
            verify_advertisement(verifier, item, digest)
            keys.add(item)
        session_keys = {item.name: item.session_key for item in items}
        current, ready = _Session(params, session_id(params, items), session_keys), body["ready"]
        roster = params.roster
        _demand(set(ready) == set(roster), "session.ready", f"of {list(roster)}", str(sorted(ready)))
        for name in roster:
            signed = ready_signed(current.identifier, name)
            check_signature(
                session_keys[name], ready[name], signed, owner=name, what="readiness for this session"
            )
        self.session = current
        hashes = {item.name: public_key_hash(item.certificate).hex() for item in items}
        self.epochs.append(EpochReport(params, body["time"], hashes))

    def check_params(self, params: Params) -> None:
        """Check the rules that every site enforces whatever its policy, and that no epoch changes the job."""
        widest = rules.SiteRules(
            minimum_cohort=1,  # a site's own minimum is not known here; ``minimum_survivors`` is checked
            trust=frozenset({"malicious", "semi_honest"}),
            weights=frozenset({params.weights}),
        )
        expected = rules.Expected(
            name=params.roster[0] if self.view == SERVER else self.view,
            job=self.run["job"],
            lineage=params.lineage,
            sites=frozenset(params.roster),
            colluders=params.colluders,
            trust=params.trust,
            threshold=params.threshold,
            min_sites=params.min_sites,
            weights=params.weights,
            config_sha256=params.config_sha256,
            version=self.run["version"],
        )
        rules.check(params, widest, expected)
        if self.session is None:
            return
        before = self.session.params
        for holds, what, required, stated in (
            (params.epoch > before.epoch, "the epoch", f"above {before.epoch}", str(params.epoch)),
            (params.lineage == before.lineage, "the lineage", repr(before.lineage), repr(params.lineage)),
            (
                params.config_sha256 == before.config_sha256,
                "the SHA-256 of the job's configuration",
                before.config_sha256.hex(),
                params.config_sha256.hex(),
            ),
        ):
            _demand(holds, what, required, stated)

    def take_sum(self, body: Mapping[str, Any], current: _Session) -> None:
        record = SumRecord(
            epoch=body["epoch"],
            slot=body["slot"],
            sum_id=body["sum_id"],
            schema=body["schema"],
            broadcast=body["broadcast"],
            receipts=body["receipts"],
            survivors=body["survivors"],
            agreements=body["agreements"],
        )
        groups, roster = body.get("groups", ()), current.params.roster
        self.check_place(record, current)
        signers = _check_receipts(record, current)
        _check_agreed(record, current, signers, opened=bool(groups))
        if groups:
            self.check_opened(record, current, groups)
            total = body.get("total", groups)
            _demand(set(total) == set(groups), "sum.total", f"of {list(groups)}", str(sorted(total)))
        blamed = body.get("blamed", {})
        _demand(set(blamed) <= set(roster), "sum.blamed", f"sites of {list(roster)}", str(sorted(blamed)))
        current.slots.add(record.slot)
        self.identifiers.add(record.sum_id)
        # A site that was not shown the receipts does not know which other sites took part: none is missing.
        present = signers if self.view == SERVER else record.survivors or roster
        missing = tuple(name for name in roster if name not in present)
        failure = None if groups else body["failure"]["code"]
        self.sums.append(
            SumReport(record.epoch, record.slot, record.sum_id, groups, missing, failure, blamed)
        )

    def check_place(self, record: SumRecord, current: _Session) -> None:
        """Check that the epoch is current, the schema is one of its own, and slot and sum id are new."""
        params, slot, name = current.params, record.slot, str(record.sum_id)
        for holds, what, required, stated in (
            (record.epoch == params.epoch, "sum.epoch", str(params.epoch), str(record.epoch)),
            (slot < params.slots, "sum.slot", f"from 0 to {params.slots - 1}", str(slot)),
            (slot not in current.slots, "sum.slot", "used once in an epoch", f"{slot} again"),
            (record.sum_id not in self.identifiers, "sum.sum_id", "used once in a job", f"{name} again"),
            (
                record.schema in params.schemas,
                "sum.schema",
                f"one of {sorted(params.schemas)}",
                repr(record.schema),
            ),
        ):
            _demand(holds, what, required, stated)

    def check_opened(self, record: SumRecord, current: _Session, groups: tuple[Group, ...]) -> None:
        """Check the number of survivors, that the writer is one of them, and the rule of the static group."""
        params, survivors = current.params, record.survivors
        least = rules.minimum_survivors(params)
        _demand(len(survivors) >= least, "the number of survivors", f"at least {least}", str(len(survivors)))
        inside = self.view == SERVER or self.view in survivors
        _demand(
            inside, "the survivors", f"a set with {self.view}, which revealed shares", str(list(survivors))
        )
        in_order = [group for group in GROUPS if group in groups]
        _demand(list(groups) == in_order, "sum.groups", str(in_order), str(list(groups)))
        if "static" not in groups:
            return
        what = "the static group"
        _demand(params.static_open, what, "not opened in this epoch", "an opening")
        if not self.any_static_cohort:
            # The first opening fixes the cohort for the whole run, as it does in the sites' journals.
            cohort = self.static_cohort or params.roster
            _demand(
                survivors == params.roster, what, f"opened for {list(params.roster)}", str(list(survivors))
            )
            _demand(survivors == cohort, what, f"opened for {list(cohort)} only", str(list(survivors)))
            self.static_cohort = cohort


def _check_receipts(record: SumRecord, current: _Session) -> tuple[str, ...]:
    """Check that every receipt is its site's, for this sum and this broadcast; return the signers."""
    signers = tuple(item.name for item in record.receipts)
    _demand(list(signers) == sorted(set(signers)), "sum.receipts", "sorted, one a site", str(list(signers)))
    for item in record.receipts:
        name, what = item.name, f"the receipt of {item.name}"
        for holds, part, required, stated in (
            (name in current.keys, "the site", f"one of {list(current.keys)}", repr(name)),
            (item.slot == record.slot, "the slot", str(record.slot), str(item.slot)),
            (item.sum_id == record.sum_id, "the sum id", str(record.sum_id), str(item.sum_id)),
            (
                item.broadcast == record.broadcast,
                "the broadcast",
                record.broadcast.hex(),
                item.broadcast.hex(),
            ),
        ):
            _demand(holds, f"{part} in {what}", required, stated)
        verify_receipt(item, current.identifier, current.keys[name])
    return signers


def _check_agreed(record: SumRecord, current: _Session, signers: tuple[str, ...], *, opened: bool) -> None:
    """Check that the survivors are the signers of the receipts and, after a drop-out, that enough agreed."""
    params, survivors, agreed = current.params, record.survivors, record.agreements
    _demand(
        survivors == signers or not (survivors or opened),
        "sum.survivors",
        f"the signers of the receipts {list(signers)}",
        str(list(survivors)),
    )
    everyone = survivors == params.roster
    allowed = [] if everyone else list(survivors)
    _demand(set(agreed) <= set(allowed), "sum.agreements", f"of sites of {allowed}", str(sorted(agreed)))
    signed = survivors_signed(current.identifier, record.slot, record.sum_id, survivors)
    for name, signature in agreed.items():
        check_signature(current.keys[name], signature, signed, owner=name, what="a survivor set")
    _demand(
        everyone or not opened or len(agreed) >= params.threshold,
        "the number of agreements on the survivors",
        f"at least {params.threshold}",
        str(len(agreed)),
    )


def _is_simulated(root: bytes) -> bool:
    try:
        return SIMULATED in x509.load_der_x509_certificate(root).subject.rfc4514_string()
    except ValueError:
        raise IdentityError(
            "the project's root certificate",
            expected="a well-formed X.509 certificate",
            found="something else",
        ) from None


def _demand(holds: bool, what: str, expected: str, found: str) -> None:
    """Raise unless the condition holds; ``verify`` adds the line's number and the code."""
    if not holds:
        raise ProtocolError(what, expected=expected, found=found)
