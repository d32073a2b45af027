"""The record of a run: what was signed for each sum, one line each, chained by hashes; and its check.

No line can be altered, removed or moved without all that follow. The chain itself is signed by
nobody: whoever holds a file can write it anew. What a rewrite cannot make is the sites' signatures,
and these are what ``verify`` goes by: advertisements by provisioned keys, one ``Ready`` of every
site over the whole session, and for each sum the receipts and, after a drop-out, agreements. What is
*not* signed is the writer's word alone: whose view it is, times, the name of a schema, which groups
were opened, their totals, who was blamed, why a sum failed or a run ended, which receipts it shows
of a sum that failed before its survivors were settled, and that no sum was left out.
``docs/transcript.md`` says what follows from this.

``start``, ``session``, ``opened``, ``failed`` and ``end`` make the lines (``transcript_lines``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
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
from tightframe.securesum.transcript_lines import (
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
from tightframe.securesum.transcript_report import EpochReport, Report, SumReport, TranscriptError

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
"""Stands in the subject of a root certificate that a simulator made for itself."""


def verify(
    lines: Iterable[bytes],
    anchor: Anchor,
    *,
    pins: Mapping[str, frozenset[bytes]] | None = None,
    any_static_cohort: bool = False,
) -> Report:
    """Read a transcript and check everything that can be checked without any secret.

    Args:
        lines: the file's lines, with or without their newlines.
        anchor: the project's root.
        pins: site -> SHA-256 of the public keys that are accepted for it.
        any_static_cohort: accept that the static group was opened for more than one cohort, as the
            sites' rule of that name permits.

    Raises:
        TranscriptError: TF-616, at the first line that is wrong. That the last line is missing is
            no error: ``Report.complete`` says it.
        IdentityError: TF-602, if the root is no certificate at all.
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
    """The current epoch: what its signatures are over, whose keys they are by, the slots used."""

    params: Params
    identifier: bytes
    keys: Mapping[str, bytes]
    slots: set[int] = field(default_factory=set)


@dataclass
class _Reading:
    """What has been read so far: every line is held against it, then added to it."""

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
        _demand(self.last is None, "the transcript", "at its end after its end line", f"a {kind} line")
        _demand(
            value["previous"] == self.previous,
            "the hash of the line before",
            self.previous,
            value["previous"],
        )
        read = read_body(value, server=self.view == SERVER)
        if kind == "session":
            self.take_session(read)
        elif kind == "sum":
            if self.session is None:
                raise ProtocolError("the line", expected="after a session line", found="a sum before any")
            self.take_sum(read, self.session)
        elif kind == "end":
            found, wanted = read["sums"], len(self.sums)
            _demand(found == wanted, "the number of sums", str(wanted), str(found))
            self.last = read
        else:
            _demand(self.previous == FIRST, "a run line", "the first line", "a later one")

    def take_session(self, read: Mapping[str, Any]) -> None:
        params = Params.from_bytes(read["params"])
        _demand(params.to_bytes() == read["params"], "session.params", "in canonical form", "in another")
        self.check_params(params)
        shown = read_advertisements(params, Advertisements(read["advertisements"]))
        again = tuple(item.to_bytes() for item in shown)
        _demand(again == read["advertisements"], "session.advertisements", "in canonical form", "in another")
        verifier, digest = Verifier(self.anchor, self.pins, False, read["time"]), params.digest()
        keys = Keys(params.slots)
        for item in shown:
            verify_advertisement(verifier, item, digest)
            keys.add(item)
        session_keys = {item.name: item.session_key for item in shown}
        current, ready = _Session(params, session_id(params, shown), session_keys), read["ready"]
        roster = params.roster
        _demand(set(ready) == set(roster), "session.ready", f"of {list(roster)}", str(sorted(ready)))
        for name in roster:
            signed = ready_signed(current.identifier, name)
            check_signature(session_keys[name], ready[name], signed, owner=name, what="a Ready")
        self.session = current
        hashes = {item.name: public_key_hash(item.certificate).hex() for item in shown}
        self.epochs.append(EpochReport(params, read["time"], hashes))

    def check_params(self, params: Params) -> None:
        """The rules that every site enforces whatever its own policy is, and one job throughout."""
        widest = rules.SiteRules(
            minimum_cohort=1,  # the epoch's own minimum is not judged, but ``minimum_survivors`` is
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
        for holds, what, wanted, found in (
            (params.epoch > before.epoch, "the epoch", f"above {before.epoch}", str(params.epoch)),
            (params.lineage == before.lineage, "the lineage", repr(before.lineage), repr(params.lineage)),
            (
                params.config_sha256 == before.config_sha256,
                "the SHA-256 of the job's configuration",
                before.config_sha256.hex(),
                params.config_sha256.hex(),
            ),
        ):
            _demand(holds, what, wanted, found)

    def take_sum(self, read: Mapping[str, Any], current: _Session) -> None:
        record = SumRecord(
            epoch=read["epoch"],
            slot=read["slot"],
            sum_id=read["sum_id"],
            schema=read["schema"],
            broadcast=read["broadcast"],
            receipts=read["receipts"],
            survivors=read["survivors"],
            agreements=read["agreements"],
        )
        groups, roster = read.get("groups", ()), current.params.roster
        self.check_place(record, current)
        signers = _check_receipts(record, current)
        _check_agreed(record, current, signers, opened=bool(groups))
        if groups:
            self.check_opened(record, current, groups)
            total = read.get("total", groups)
            _demand(set(total) == set(groups), "sum.total", f"of {list(groups)}", str(sorted(total)))
        blamed = read.get("blamed", {})
        _demand(set(blamed) <= set(roster), "sum.blamed", f"sites of {list(roster)}", str(sorted(blamed)))
        current.slots.add(record.slot)
        self.identifiers.add(record.sum_id)
        # Before it is shown the receipts, a site does not know who else was there: nobody counts as missing.
        present = signers if self.view == SERVER else record.survivors or roster
        missing = tuple(name for name in roster if name not in present)
        failure = None if groups else read["failure"]["code"]
        self.sums.append(
            SumReport(record.epoch, record.slot, record.sum_id, groups, missing, failure, blamed)
        )

    def check_place(self, record: SumRecord, current: _Session) -> None:
        """The current epoch; a schema of it; a slot and a sum id that were not used before."""
        params, slot, name = current.params, record.slot, str(record.sum_id)
        for holds, what, wanted, found in (
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
            _demand(holds, what, wanted, found)

    def check_opened(self, record: SumRecord, current: _Session, groups: tuple[Group, ...]) -> None:
        """Enough survivors, the writer among them; and the rule of the static group."""
        params, survivors = current.params, record.survivors
        least = rules.minimum_survivors(params)
        _demand(len(survivors) >= least, "the number of survivors", f"at least {least}", str(len(survivors)))
        inside = self.view == SERVER or self.view in survivors
        _demand(inside, "the survivors", f"with {self.view}, who revealed shares", str(list(survivors)))
        in_order = [group for group in GROUPS if group in groups]
        _demand(list(groups) == in_order, "sum.groups", str(in_order), str(list(groups)))
        if "static" not in groups:
            return
        what = "the static group"
        _demand(params.static_open, what, "shut in this epoch", "opened")
        if not self.any_static_cohort:
            # The first opening settles the cohort for the whole run, as it does in the sites' journals.
            cohort = self.static_cohort or params.roster
            _demand(
                survivors == params.roster, what, f"opened for {list(params.roster)}", str(list(survivors))
            )
            _demand(survivors == cohort, what, f"opened for {list(cohort)} only", str(list(survivors)))
            self.static_cohort = cohort


def _check_receipts(record: SumRecord, current: _Session) -> tuple[str, ...]:
    """Every receipt is its site's, for this sum and this broadcast; returns who signed."""
    signers = tuple(item.name for item in record.receipts)
    _demand(list(signers) == sorted(set(signers)), "sum.receipts", "sorted, one a site", str(list(signers)))
    for item in record.receipts:
        name, what = item.name, f"the receipt of {item.name}"
        for holds, part, wanted, found in (
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
            _demand(holds, f"{part} in {what}", wanted, found)
        verify_receipt(item, current.identifier, current.keys[name])
    return signers


def _check_agreed(record: SumRecord, current: _Session, signers: tuple[str, ...], *, opened: bool) -> None:
    """The survivors are those who signed receipts; where somebody is missing, enough of them agreed."""
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
    """Refuse; ``verify`` adds the line's number and the code."""
    if not holds:
        raise ProtocolError(what, expected=expected, found=found)
