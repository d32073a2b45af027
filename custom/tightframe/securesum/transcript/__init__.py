"""The transcript of a run and its verification: one line for each sum, chained by hashes.

No line can be altered, removed or moved without changing all that follow. The chain itself is not
signed: whoever holds a file can rewrite it. A rewrite cannot forge the sites' signatures, and these
are what ``verify`` relies on: advertisements signed by provisioned keys, a signature of readiness of
every site over the whole session, and for each sum the receipts, and the agreements after a drop-out. A
receipt names the total that its sum rests on by its hash, and has the combinations by which the silos
checked that total. All that is *not* signed rests on the writer's word: whose view it is, times,
the name of a schema, which groups were opened, who was blamed, why a sum failed or a run ended, the
total of a sum on which no later one rests, which receipts are listed for a sum that failed before it
had a survivor set, and that no sum was left out. ``docs/transcript.md`` explains the consequences.

``start``, ``session``, ``opened``, ``failed`` and ``end`` make the lines (``transcript.lines``). A
transcript of format 1, from before totals were verified, or 2 is read by the rules of its time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeAlias

from cryptography import x509

from tightframe.securesum import rules
from tightframe.securesum.checks import (
    Keys,
    in_roster_order,
    read_advertisements,
    verify_advertisement,
    verify_receipt,
)
from tightframe.securesum.checks import verify as check_signature
from tightframe.securesum.errors import IdentityError, ProtocolError
from tightframe.securesum.identity import Anchor, Verifier, public_key_hash
from tightframe.securesum.identity.certificate import is_simulated
from tightframe.securesum.messages import (
    GROUPS,
    NO_TOTAL,
    Advertisement,
    Advertisements,
    Agreement,
    AnyAdvertisement,
    Group,
    Params,
    SumId,
    Told,
    agreement_signed,
    challenge,
    ready_signed,
    receipts_digest,
    session_id,
)
from tightframe.securesum.proofs import Ground
from tightframe.securesum.transcript import earlier_formats
from tightframe.securesum.transcript.lines import (
    FIRST,
    FORMAT,
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
    "Chain",
    "EpochReport",
    "Report",
    "SumRecord",
    "SumReport",
    "TotalReport",
    "Totals",
    "TranscriptError",
    "end",
    "failed",
    "opened",
    "session",
    "start",
    "verify",
]

Totals: TypeAlias = Callable[[int, Told], Mapping[Group, bytes] | None]
"""Returns the integers of a total of an epoch, for whoever has them; None for whoever has not."""


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
        time: when certificates were checked, according to the writer.
        keys: site -> SHA-256 (hex) of its provisioned public key, in the format of a pin.
    """

    params: Params
    time: datetime
    keys: Mapping[str, str]


@dataclass(frozen=True)
class SumReport:
    """One sum; if it was not opened, ``failure`` is the code and ``groups`` is empty.

    ``rests_on`` is the sum whose total was told with the requests; None where there was none.
    """

    epoch: int
    slot: int
    sum_id: SumId
    schema: str
    groups: tuple[Group, ...]
    missing: tuple[str, ...]
    failure: str | None
    blamed: Mapping[str, str]
    rests_on: SumId | None = None


@dataclass(frozen=True)
class TotalReport:
    """One total that the silos checked before they opened the sum that rests on it.

    Attributes:
        told: the total, as the receipts of the sum that rests on it name it.
        agreed: the silos that signed a receipt of the sum that rests on it; in format 2, the challenge.
        combined: the silos of the total whose own signed combinations are in the check.
        proved: the silos of the total whose term the server showed to the others instead.
        recomputed: whether the combinations were added up here and compared with those of the integers.
    """

    epoch: int
    told: Told
    agreed: tuple[str, ...]
    combined: tuple[str, ...]
    proved: tuple[str, ...]
    recomputed: bool


@dataclass(frozen=True)
class Report:
    """The content of a valid transcript.

    Attributes:
        view, job, version, started: of the run, according to its writer.
        form: the format of the transcript; totals are verified from format 2 on.
        epochs, sums: in order.
        totals: the totals that were checked, in order.
        unchecked: the opened sums of any content on whose total no later opened sum rests, in order.
        simulated: whether the subject of the root certificate is marked as a simulated identity.
        complete: whether the transcript has its end line.
        reason: why the run ended early, according to the writer.
        head: SHA-256 of the last line (hex), by which two copies can be compared.
    """

    view: str
    job: str
    version: str
    started: datetime
    form: int
    epochs: tuple[EpochReport, ...]
    sums: tuple[SumReport, ...]
    totals: tuple[TotalReport, ...]
    unchecked: tuple[SumReport, ...]
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
    totals: Totals = lambda epoch, told: None,
) -> Report:
    """Read a transcript and check everything that can be checked without a secret.

    Args:
        lines: the file's lines, with or without their newlines.
        anchor: the project's root.
        pins: site -> SHA-256 of the public keys that are accepted for it.
        any_static_cohort: accept that the static group was opened for more than one cohort, as the
            sites' rule of that name permits.
        totals: gives the integers of totals; where it does, the silos' check of them is made anew.

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
                run = read_body(value, server=False)
                reading = _Reading(anchor, pins or {}, any_static_cohort, totals, run)
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
        form=reading.form,
        epochs=tuple(reading.epochs),
        sums=tuple(reading.sums),
        totals=tuple(reading.checked),
        unchecked=reading.unchecked(),
        simulated=simulated,
        complete=reading.last is not None,
        reason=reading.last["reason"] if reading.last else None,
        head=reading.previous,
    )


@dataclass
class _Session:
    """The current epoch.

    Attributes:
        identifier: the session's id, T.
        peers: site -> its advertisement; empty in format 1.
        keys: site -> its session key.
        slots: slot -> the sum in it, so far.
        last: the last total that the server says it opened; None if none, and in a site's view.
    """

    params: Params
    identifier: bytes
    peers: Mapping[str, Advertisement]
    keys: Mapping[str, bytes]
    slots: dict[int, _Place] = field(default_factory=dict)
    last: Told | None = None


_Place: TypeAlias = tuple[SumId, str, tuple[str, ...], bytes, tuple[Group, ...]]
"""Sum, schema, survivors, digest of their receipts (empty before format 3) and opened groups of a line."""


@dataclass
class _Reading:
    """The transcript read so far: every line is checked against it, then added to it."""

    anchor: Anchor
    pins: Mapping[str, frozenset[bytes]]
    any_static_cohort: bool
    totals: Totals
    run: Mapping[str, Any]
    previous: str = FIRST
    session: _Session | None = None
    epochs: list[EpochReport] = field(default_factory=list)
    sums: list[SumReport] = field(default_factory=list)
    checked: list[TotalReport] = field(default_factory=list)
    identifiers: set[SumId] = field(default_factory=set)
    static_cohort: tuple[str, ...] = ()
    last: Mapping[str, Any] | None = None

    @property
    def view(self) -> str:
        return str(self.run["view"])

    @property
    def form(self) -> int:
        return int(self.run["format"])

    def unchecked(self) -> tuple[SumReport, ...]:
        """Return the opened sums with fields that no later opened sum of their epoch rests on."""
        checked = {(item.epoch, item.told.slot) for item in self.checked}
        schemas = {item.params.epoch: item.params.schemas for item in self.epochs}
        return tuple(
            item
            for item in self.sums
            if item.groups and schemas[item.epoch][item.schema] and (item.epoch, item.slot) not in checked
        )

    def take(self, value: Mapping[str, Any]) -> None:
        kind = value["line"]
        _demand(self.last is None, "the transcript", "finished after its end line", f"a {kind} line")
        _demand(
            value["previous"] == self.previous,
            "the hash of the line before",
            self.previous,
            value["previous"],
        )
        body = read_body(value, server=self.view == SERVER, form=self.form)
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
        items, peers, identifier = _advertised(params, body["advertisements"], self.form)
        encoded = tuple(item.to_bytes() for item in items)
        canonical = encoded == body["advertisements"]
        _demand(canonical, "session.advertisements", "in canonical form", "another form")
        verifier, digest = Verifier(self.anchor, self.pins, False, body["time"]), params.digest()
        keys = Keys()
        for item in items:
            verify_advertisement(verifier, item, digest)
            keys.add(item)
        session_keys = {item.name: item.session_key for item in items}
        current, ready = _Session(params, identifier, peers, session_keys), body["ready"]
        roster = params.roster
        _demand(set(ready) == set(roster), "session.ready", f"of {list(roster)}", str(sorted(ready)))
        for name in roster:
            signed = ready_signed(current.identifier, name)
            check_signature(
                current.keys[name], ready[name], signed, owner=name, what="readiness for this session"
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
        if self.form > 1:
            keys = set(SumRecord.__dataclass_fields__)
            record = SumRecord(**{key: part for key, part in body.items() if key in keys})
        else:
            same = {key: body[key] for key in ("epoch", "slot", "sum_id", "schema", "receipts", "survivors")}
            record = SumRecord(**same, basis=body["broadcast"], rests_on=None, agreements=())
        groups, roster = body.get("groups", ()), current.params.roster
        self.check_place(record, current)
        signers = _check_receipts(record, current, self.form)
        _check_survivors(record, signers, opened=bool(groups))
        if self.form > 1:
            self.check_rests_on(record, current)
            (_check_agreed if self.form == FORMAT else _check_agreed_2)(record, current, opened=bool(groups))
            if groups:
                _check_followers(record, current)
                self.check_totals(record, current)
        else:
            _check_agreed_1(record, current, body["agreements"], opened=bool(groups))
        receipts = receipts_digest(current.identifier, record.receipts) if self.form == FORMAT else b""
        if groups:
            self.check_opened(record, current, groups)
            total = body.get("total", groups)
            _demand(set(total) == set(groups), "sum.total", f"of {list(groups)}", str(sorted(total)))
            if self.view == SERVER and current.params.schemas[record.schema]:  # no sum rests on a seal
                place = record.slot, record.sum_id, record.schema, record.survivors
                current.last = Told(*place, total, receipts)
        blamed = body.get("blamed", {})
        _demand(set(blamed) <= set(roster), "sum.blamed", f"sites of {list(roster)}", str(sorted(blamed)))
        own = record.sum_id, record.schema, record.survivors, receipts, groups
        current.slots[record.slot] = own
        self.identifiers.add(record.sum_id)
        # A site that was not shown the receipts does not know which other sites took part: none is missing.
        present = signers if self.view == SERVER else record.survivors or roster
        missing = tuple(name for name in roster if name not in present)
        failure = None if groups else body["failure"]["code"]
        told = None if record.rests_on is None else record.rests_on.sum_id
        of_sum = record.epoch, record.slot, record.sum_id, record.schema
        self.sums.append(SumReport(*of_sum, groups, missing, failure, blamed, told))

    def check_rests_on(self, record: SumRecord, current: _Session) -> None:
        """Check the total that a sum rests on against the lines before; its digest stands in each receipt."""
        told, params = record.rests_on, current.params
        if self.view == SERVER:
            stated, last = _named(told, self.form), _named(current.last, self.form)
            _demand(told == current.last, "sum.rests_on", f"the last opened total, {last}", stated)
        proved = list(record.proved)
        if told is None:
            _demand(not proved, "sum.proved", "empty without a total", str(proved))
            return
        place = current.slots.get(told.slot)
        for holds, what, required, found in (
            (told.slot < record.slot, "slot", f"below {record.slot}", str(told.slot)),
            (told.schema in params.schemas, "schema", f"one of {sorted(params.schemas)}", repr(told.schema)),
            (
                list(told.survivors) == [name for name in params.roster if name in told.survivors],
                "survivors",
                f"sites of {list(params.roster)}, sorted, each once",
                str(list(told.survivors)),
            ),
            (
                place is None or place[:4] == (told.sum_id, told.schema, told.survivors, told.receipts),
                "sum",
                f"that of the line of slot {told.slot}",
                "another",
            ),
            (
                place is None or set(told.groups) <= set(place[4]),
                "groups",
                f"opened in slot {told.slot}",
                str(list(told.groups)),
            ),
        ):
            _demand(holds, f"sum.rests_on.{what}", required, found)
        in_order = [name for name in told.survivors if name in proved]
        _demand(proved == in_order, "sum.proved", f"of {list(told.survivors)}, each once", str(proved))

    def check_totals(self, record: SumRecord, current: _Session) -> None:
        """Check the combinations by which the silos verified a total before they opened this sum."""
        told = record.rests_on
        if told is None:
            return
        ground = Ground(current.identifier, current.params, current.peers, told)
        signers: Sequence[Any] = record.receipts if self.form == FORMAT else record.agreements
        parts = {item.name: item.combinations for item in signers if item.combinations}
        survivors = list(told.survivors)
        sites = {*parts, *record.proved}
        _demand(sites == set(survivors), "the parts of the check", f"of {survivors}", str(sorted(sites)))
        for name, combined in parts.items():
            form = ground.has_form(combined)
            _demand(form, f"the combinations of {name}", f"of {list(told.groups)}", "of another form")
        integers = None if record.proved else self.totals(current.params.epoch, told)
        if integers is not None:
            hashes = {group: hashlib.sha256(data).digest() for group, data in integers.items()}
            _demand(hashes == told.hashes, "the total that was given", "the one with these hashes", "another")
            ground.check_sum(ground.combine(_challenge(record, told, current, self.form), integers), parts)
        self.checked.append(
            TotalReport(
                current.params.epoch,
                told,
                tuple(item.name for item in signers),
                tuple(name for name in survivors if name not in record.proved),
                tuple(record.proved),
                integers is not None,
            )
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


def _named(told: Told | None, form: int) -> str:
    if told is None:
        return "none"
    return f"that of sum {told.sum_id} with the digest {_total_digest(told, form).hex()}"


def _total_digest(told: Told, form: int) -> bytes:
    return told.digest() if form == FORMAT else earlier_formats.total_digest(told)


def _challenge(record: SumRecord, told: Told, current: _Session, form: int) -> bytes:
    """Return the challenge that the combinations in a sum's line were made with."""
    receipts: Any = record.receipts
    if form == FORMAT:
        return challenge(current.identifier, told)
    return earlier_formats.challenge(current.identifier, receipts)


def _advertised(
    params: Params, raws: tuple[bytes, ...], form: int
) -> tuple[Sequence[AnyAdvertisement], Mapping[str, Advertisement], bytes]:
    """Read an epoch's advertisements; return them, those from version 2 on by site, and the session's id."""
    if form > 1:
        items = read_advertisements(params, Advertisements(raws))
        return items, {item.name: item for item in items}, session_id(params, items)
    old = [earlier_formats.Advertisement1.from_bytes(raw, slots=params.slots) for raw in raws]
    return in_roster_order(params, old), {}, earlier_formats.session_id(params, old)


def _check_receipts(record: SumRecord, current: _Session, form: int) -> tuple[str, ...]:
    """Check that every receipt is its site's, for this sum, basis and total; return the signers."""
    signers = tuple(item.name for item in record.receipts)
    _demand(list(signers) == sorted(set(signers)), "sum.receipts", "sorted, one a site", str(list(signers)))
    told = NO_TOTAL if record.rests_on is None else _total_digest(record.rests_on, form)
    for item in record.receipts:
        name, what = item.name, f"the receipt of {item.name}"
        total = item.total if form > 1 else told
        for holds, part, required, stated in (
            (name in current.keys, "the site", f"one of {list(current.keys)}", repr(name)),
            (item.slot == record.slot, "the slot", str(record.slot), str(item.slot)),
            (item.sum_id == record.sum_id, "the sum id", str(record.sum_id), str(item.sum_id)),
            (item.basis == record.basis, "the basis", record.basis.hex(), item.basis.hex()),
            (total == told, "the total", told.hex(), total.hex()),
        ):
            _demand(holds, f"{part} in {what}", required, stated)
        verify_receipt(item, current.identifier, current.keys[name])
    return signers


def _check_survivors(record: SumRecord, signers: tuple[str, ...], *, opened: bool) -> None:
    """Check that the survivors are the signers of the receipts."""
    survivors = record.survivors
    _demand(
        survivors == signers or not (survivors or opened),
        "sum.survivors",
        f"the signers of the receipts {list(signers)}",
        str(list(survivors)),
    )


def _check_followers(record: SumRecord, current: _Session) -> None:
    """Check that more sites computed the state by themselves than are assumed to collude."""
    following, needed = sum(item.follows for item in record.receipts), current.params.colluders + 1
    what = "the number of sites that computed the state by themselves"
    _demand(following >= needed, what, f"at least {needed}", str(following))


def _check_agreed(record: SumRecord, current: _Session, *, opened: bool) -> None:
    """Check that the agreements are survivors', on their receipts, and enough; none if no site is missing."""
    survivors = record.survivors
    everyone = survivors == current.params.roster
    _check_signers(record, () if everyone else survivors)
    receipts = receipts_digest(current.identifier, record.receipts)
    for item in record.agreements:
        signed = agreement_signed(current.identifier, item.slot, record.sum_id, survivors, receipts)
        _check_agreement(record, current, item, signed)
    if not everyone:
        _demand_threshold(len(record.agreements), current.params.threshold, opened=opened)


def _check_agreed_2(record: SumRecord, current: _Session, *, opened: bool) -> None:
    """Check that the agreements are survivors', on this set and this challenge, and enough of them."""
    receipts: Any = record.receipts
    agreements: Any = record.agreements
    _check_signers(record, record.survivors)
    for item in agreements:
        signed = earlier_formats.agreement_signed(
            current.identifier, item.slot, record.sum_id, receipts, item.combinations
        )
        _check_agreement(record, current, item, signed)
    _demand_threshold(len(agreements), current.params.threshold, opened=opened)


def _check_signers(record: SumRecord, allowed: Sequence[str]) -> None:
    """Check that the agreements are of some of these sites, in their order, each once."""
    names = [item.name for item in record.agreements]
    in_order = [name for name in allowed if name in names]
    _demand(names == in_order, "sum.agreements", f"of sites of {list(allowed)}, sorted", str(names))


def _check_agreement(record: SumRecord, current: _Session, item: Agreement, signed: bytes) -> None:
    """Check an agreement's signature over ``signed``, and its slot."""
    check_signature(current.keys[item.name], item.signature, signed, owner=item.name, what="a survivor set")
    of_slot = item.slot == record.slot
    _demand(of_slot, f"the slot in the agreement of {item.name}", str(record.slot), str(item.slot))


def _check_agreed_1(
    record: SumRecord, current: _Session, agreed: Mapping[str, bytes], *, opened: bool
) -> None:
    """Check the agreements of a sum of version 1: after a drop-out only, on the survivors alone."""
    params, survivors = current.params, record.survivors
    everyone = survivors == params.roster
    allowed = [] if everyone else list(survivors)
    _demand(set(agreed) <= set(allowed), "sum.agreements", f"of sites of {allowed}", str(sorted(agreed)))
    signed = earlier_formats.survivors_signed(current.identifier, record.slot, record.sum_id, survivors)
    for name, signature in agreed.items():
        check_signature(current.keys[name], signature, signed, owner=name, what="a survivor set")
    if not everyone:
        _demand_threshold(len(agreed), params.threshold, opened=opened)


def _demand_threshold(count: int, threshold: int, *, opened: bool) -> None:
    enough = not opened or count >= threshold
    _demand(enough, "the number of agreements on the survivors", f"at least {threshold}", str(count))


def _is_simulated(root: bytes) -> bool:
    try:
        return is_simulated(x509.load_der_x509_certificate(root))
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
