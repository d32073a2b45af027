"""The server's half of the secure sum: it adds masked terms and removes the masks from their total.

Setup (``Enrolment``, ``Session``) is in ``server.setup``. A ``Sum`` holds one accumulator for each
group, whatever the number of sites. An upload is added when it arrives; its bytes go to the caller's
``Spool`` until the sum's total is verified, because a site may be gone by then (``server.evidence``).
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from tightframe.securesum.checks import (
    commitment,
    dropped_masks,
    dropped_secrets,
    group_layout,
    masked_hash,
    verify,
    verify_receipt,
)
from tightframe.securesum.errors import (
    InconsistencyError,
    MessageError,
    ParametersError,
    ProtocolError,
    RecoveryError,
    ShareError,
    StateError,
    SurvivorsError,
    VerificationError,
)
from tightframe.securesum.masks import Accumulator, self_key
from tightframe.securesum.messages import (
    GROUPS,
    NO_TOTAL,
    SALT_BYTES,
    Agreement,
    AgreementRequest,
    Group,
    Kind,
    Masked,
    Receipt,
    Reveal,
    RevealRequest,
    SumId,
    TermProof,
    TermRequest,
    Total,
    agreement_signed,
    challenge,
    links_of,
    pair_secret_hash,
    pairs_digest,
    receipts_digest,
    share_hash,
)
from tightframe.securesum.primitives import KEY_BYTES, Secret
from tightframe.securesum.rules import minimum_survivors
from tightframe.securesum.server.evidence import Evidence, MemorySpool, Spool
from tightframe.securesum.server.setup import Enrolment, Session, check_name, check_sender
from tightframe.securesum.shamir import recover_many

__all__ = ["Enrolment", "Evidence", "MemorySpool", "Opened", "Session", "Spool", "Sum"]


@dataclass(frozen=True)
class Opened:
    """One opened sum.

    Attributes:
        survivors: the sites whose terms are in it, in roster order.
        groups: group -> its total, integers of the ring, little-endian in schema order; without
            ``static`` if that was not opened.
        blamed: site -> code, for sites whose reveal was refused, or whose combinations were false.
        evidence: of its total, for the sum that rests on it.
    """

    survivors: tuple[str, ...]
    groups: Mapping[Group, bytes] = field(repr=False)
    blamed: Mapping[str, str]
    evidence: Evidence


class Sum:
    """One sum in one slot: collect terms, close, agree if a site is missing, reveal, open.

    A message that an ``add`` method refuses leaves the sum unchanged, and the sum continues without it.

    Args:
        session: complete.
        slot: the slot whose one-time secrets are used.
        schema: name of the schema in the epoch's parameters.
        basis: SHA-256 of the state that the terms rest on.
        spool: keeps masked terms.
        rests_on: evidence of the epoch's last total; None if there is none yet.
    """

    def __init__(
        self,
        session: Session,
        *,
        slot: int,
        sum_id: SumId,
        schema: str,
        basis: bytes,
        spool: Spool,
        rests_on: Evidence | None = None,
    ) -> None:
        session.require_complete()
        params = session.params
        if not 0 <= slot < params.slots:
            raise ParametersError("the slot", expected=f"from 0 to {params.slots - 1}", found=str(slot))
        if schema not in params.schemas:
            raise ParametersError(
                "the schema", expected=f"one of {sorted(params.schemas)}", found=repr(schema)
            )
        self._session, self._params = session, params
        self.slot, self.sum_id, self.schema, self.basis = slot, sum_id, schema, basis
        self.rests_on, self._spool = rests_on, spool
        self.told = NO_TOTAL if rests_on is None else rests_on.ground.told.digest()
        self._layouts = {group: group_layout(params.schemas[schema], group) for group in GROUPS}
        self._receipts: dict[str, Receipt] = {}
        self._links: dict[str, bytes] = {}
        self._survivors: tuple[str, ...] | None = None
        self._agreements: dict[str, Agreement] = {}
        self._proved: dict[str, TermProof] | None = (
            None  # instead of combinations; None before they are checked
        )
        self._reveals: dict[str, Reveal] = {}
        self._blamed: dict[str, str] = {}
        self._opened = False

    @cached_property
    def _totals(self) -> dict[Group, Accumulator]:
        """The sum of each group, made for the first term, once the request with the last total is sent."""
        return {group: Accumulator(self._layouts[group]) for group in GROUPS}

    @property
    def epoch(self) -> int:
        """The epoch of the slot."""
        return self._params.epoch

    @property
    def receipts(self) -> tuple[Receipt, ...]:
        """The receipts of the terms added so far, in roster order."""
        return tuple(self._receipts[name] for name in self._params.roster if name in self._receipts)

    @property
    def survivors(self) -> tuple[str, ...]:
        """The survivor set; empty before ``close``."""
        return self._survivors or ()

    @property
    def agreements(self) -> tuple[Agreement, ...]:
        """The survivors' agreements so far, in roster order."""
        return tuple(self._agreements[name] for name in self._params.roster if name in self._agreements)

    @property
    def proved(self) -> tuple[str, ...]:
        """The sites for which the server shows a proof instead of combinations, in roster order."""
        return tuple(name for name in self._params.roster if name in (self._proved or {}))

    @property
    def revealers(self) -> tuple[str, ...]:
        """The sites whose valid reveals have arrived, in roster order."""
        return tuple(name for name in self._params.roster if name in self._reveals)

    @property
    def full(self) -> bool:
        """True if the terms of all sites have arrived."""
        return len(self._receipts) == len(self._params.roster)

    def term_request(self, setup: bytes = b"") -> TermRequest:
        """Return the request for a term, with the total that it rests on."""
        if self.rests_on is None:
            return TermRequest(self.slot, self.sum_id, self.schema, setup)
        seeds, total = self.rests_on.seeds_of_survivors(), self.rests_on.total.to_bytes()
        return TermRequest(self.slot, self.sum_id, self.schema, setup, total, seeds)

    def add(self, site: str, raw: bytes) -> None:
        """Check one site's masked term, then add it.

        Raises:
            StateError: TF-609, after ``close``.
            ProtocolError: of the kind that fits, with ``blamed`` set to ``site``; nothing was added.
        """
        if self._survivors is not None:
            raise StateError(
                f"the term of {site}", expected="sent before the sum was closed", found="a late one"
            )
        check_sender(site, self._params, self._receipts)
        try:
            masked = Masked.from_bytes(raw)
            self._check_masked(site, masked)
        except ProtocolError as error:
            error.blamed = site
            raise
        terms: Mapping[Group, bytes] = {"update": masked.update, "static": masked.static}
        for group, data in terms.items():  # first, since a disk may be full
            self._spool.keep(self.slot, site, group, data)
        for group, data in terms.items():
            self._totals[group].add(data)
        self._receipts[site], self._links[site] = masked.receipt, masked.links

    def close(self) -> tuple[str, ...]:
        """Stop accepting terms and return the survivors, in roster order.

        Raises:
            SurvivorsError: TF-611, if they are too few for any site to reveal its shares.
        """
        least = minimum_survivors(self._params)
        if len(self._receipts) < least:
            raise SurvivorsError(
                f"the number of terms in sum {self.sum_id}",
                expected=f"at least {least}",
                found=str(len(self._receipts)),
            )
        self._survivors = tuple(name for name in self._params.roster if name in self._receipts)
        return self._survivors

    def agreement_request(self) -> AgreementRequest:
        """Return the request to sign the survivor set; nobody signs it if it is the whole roster.

        Raises:
            StateError: TF-609, before ``close``.
        """
        self._closed()
        return AgreementRequest(self.slot, self.receipts)

    def add_agreement(self, site: str, raw: bytes) -> None:
        """Add one survivor's signature of the survivor set and its receipts.

        Raises:
            StateError: TF-609, before ``close``, or once the request to reveal was made.
            ProtocolError: of the kind that fits, with ``blamed`` set to ``site``.
        """
        survivors = self._closed()
        if self._proved is not None:
            raise StateError(
                f"the agreement of {site}", expected="sent before shares were asked for", found="a late one"
            )
        check_sender(site, self._params, self._agreements)
        try:
            item = Agreement.from_bytes(raw)
            self._check_answer("an agreement", site, item.name, item.slot)
            verify(
                self._session.peers[site].session_key,
                item.signature,
                agreement_signed(
                    self._session.session, self.slot, self.sum_id, survivors, self._receipts_digest
                ),
                owner=site,
                what="a survivor set",
            )
        except ProtocolError as error:
            error.blamed = site
            raise
        self._agreements[site] = item

    def reveal_request(self) -> RevealRequest:
        """Return the request to reveal shares, with everything that a survivor checks first.

        Where a site sent no combinations, or false ones, the server shows its term instead; who sent false
        ones is named by ``open``.

        Raises:
            RecoveryError: TF-613, with fewer than t signatures where a site is missing: no site would reveal.
            VerificationError: TF-623, if the total that this sum rests on is not the sum of its terms.
        """
        self._closed()
        needed = 0 if self.full else self._params.threshold
        if len(self._agreements) < needed:
            raise RecoveryError(
                f"the number of signatures under the survivor set of sum {self.sum_id}",
                expected=f"at least {needed}",
                found=str(len(self._agreements)),
            )
        if self._proved is None:
            self._proved = {} if self.rests_on is None else self._settle(self.rests_on)
        dropped = {} if self.rests_on is None or not self._proved else self.rests_on.seeds_of_dropped()
        return RevealRequest(self.slot, self.receipts, self.agreements, self._proved, dropped)

    def add_reveal(self, site: str, raw: bytes) -> None:
        """Add one survivor's shares, each checked against the hash that its dealer signed.

        A holder checks its shares when they are dealt, so a holder that reveals a different one is at
        fault, and not the dealer.

        Raises:
            ProtocolError: of the kind that fits, with ``blamed`` set to ``site``. The reveal is not used,
                and ``open`` names the site as well; t valid reveals are enough to open the sum.
        """
        self._closed()
        check_sender(site, self._params, self._reveals)
        try:
            item = Reveal.from_bytes(raw)
            self._check_answer("a reveal", site, item.name, item.slot)
            verify(
                self._session.peers[site].session_key,
                item.signature,
                item.signed(self._session.session),
                owner=site,
                what="a reveal",
            )
            self._check_shares(item, "update", item.update)
            if item.static:
                self._check_shares(item, "static", item.static)
        except ProtocolError as error:
            error.blamed = site
            self._blamed[site] = error.code
            raise
        self._reveals[site] = item

    def open(self) -> Opened:
        """Recover b of the survivors and a of the dropped sites, and remove their masks from the totals.

        Raises:
            RecoveryError: TF-613, with fewer than t valid reveals; or naming the dealer whose secret is
                not the one that it committed to, although it signed every share, or the site whose link
                is not of the pair secrets that both sites signed.
            StateError: TF-609, before ``close`` or a second time.
        """
        survivors = self._closed()
        if self._opened:
            raise StateError(f"sum {self.sum_id}", expected="opened once", found="an earlier opening")
        usable: dict[Group, Mapping[str, Reveal]] = {"update": self._reveals}
        # A site vouches only for a total of groups for which it gave shares, so one that keeps counts shut
        # keeps them shut for all.
        if all(item.static for item in self._reveals.values()):
            usable["static"] = self._reveals
        # All secrets are recovered and checked before any mask is removed, so that after an error the
        # totals are still masked and another reveal can be added.
        secrets = {group: self._recover(group, reveals) for group, reveals in usable.items()}
        streams = {group: self._streams(group, recovered) for group, recovered in secrets.items()}
        for group, (plus, minus) in streams.items():
            self._totals[group].add_streams(plus, minus)
        self._opened = True
        groups = {group: self._totals[group].to_bytes() for group in secrets}
        opened = MappingProxyType(groups)
        total = Total(self.slot, self.sum_id, self.schema, survivors, opened, self._receipts_digest)
        evidence = Evidence(
            self._session,
            total,
            MappingProxyType(self._receipts),
            MappingProxyType(self._links),
            secrets,
            self._spool,
        )
        if not self._layouts["static"].nbytes:
            groups = {**groups, "static": b""}
        blamed = MappingProxyType(dict(sorted(self._blamed.items())))
        return Opened(survivors, MappingProxyType(groups), blamed, evidence)

    def _closed(self) -> tuple[str, ...]:
        if self._survivors is None:
            raise StateError(f"sum {self.sum_id}", expected="closed", found="a sum that still accepts terms")
        return self._survivors

    def _check_masked(self, site: str, masked: Masked) -> None:
        receipt = masked.receipt
        check_name("a receipt", site, receipt.name)
        verify_receipt(receipt, self._session.session, self._session.peers[site].session_key)
        hashes = {
            "update": masked_hash(masked.update, masked.links),
            "static": masked_hash(masked.static, masked.links),
        }
        keyed = self._session.keyed_hashes(site, self.slot)
        for part, expected, received in (
            ("slot", str(self.slot), str(receipt.slot)),
            ("sum", str(self.sum_id), str(receipt.sum_id)),
            ("basis", self.basis.hex(), receipt.basis.hex()),
            ("total", self.told.hex(), receipt.total.hex()),
            ("update group's hash", hashes["update"].hex(), receipt.update.hex()),
            ("static group's hash", hashes["static"].hex(), receipt.static.hex()),
            ("pair secrets' hash", pairs_digest(keyed).hex(), receipt.pairs.hex()),
        ):
            if expected != received:
                raise InconsistencyError(
                    f"the {part} in the receipt of {site}", expected=expected, found=received
                )
        sizes: Mapping[Group, int] = {"update": len(masked.update), "static": len(masked.static)}
        for group, size in sizes.items():
            needed = self._layouts[group].nbytes
            if size != needed:
                raise MessageError(f"the {group} term of {site}", expected=f"{needed} bytes", found=str(size))
            links_of(masked.links, group, self._params.roster, site)
        self._check_combinations(site, receipt.combinations)

    @cached_property
    def _receipts_digest(self) -> bytes:
        """The digest of the survivors' receipts; after ``close``."""
        return receipts_digest(self._session.session, self.receipts)

    def _check_combinations(self, site: str, combined: Mapping[Group, bytes]) -> None:
        """Check the form of a site's combinations; it may send none."""
        if not combined:
            return
        ground = None if self.rests_on is None else self.rests_on.ground
        if ground is None or site not in ground.told.survivors or not ground.has_form(combined):
            raise MessageError(
                f"the combinations of {site}",
                expected="none, or those of the groups of a total that its term is in",
                found=f"{ {group: len(data) for group, data in combined.items()} }",
            )

    def _settle(self, evidence: Evidence) -> dict[str, TermProof]:
        """Check the total that this sum rests on; return a proof for each of its sites without combinations.

        Raises:
            VerificationError: TF-623, if it is false.
        """
        ground = evidence.ground
        coefficients = challenge(ground.session, ground.told)
        expected = ground.combine(coefficients, evidence.total.groups)
        given = {name: item.combinations for name, item in self._receipts.items() if item.combinations}
        proofs = {name: evidence.proof(name) for name in ground.told.survivors if name not in given}
        shown = {name: ground.combine(coefficients, evidence.term(proof)) for name, proof in proofs.items()}
        try:
            ground.check_sum(expected, {**given, **shown})
        except VerificationError as error:
            for name in given:
                proof = evidence.proof(name)
                right = ground.combine(coefficients, evidence.term(proof))
                if right != given[name]:
                    self._blamed[name] = error.code
                    proofs[name], shown[name] = proof, right
            ground.check_sum(expected, {**given, **shown})
        return proofs

    def _check_answer(self, what: str, site: str, name: str, slot: int) -> None:
        check_name(what, site, name)
        if site not in self._receipts:
            raise SurvivorsError(f"the sender of {what}", expected="a survivor", found=site)
        if slot != self.slot:
            raise InconsistencyError(
                f"the slot in {what} of {site}", expected=str(self.slot), found=str(slot)
            )

    def _check_shares(self, item: Reveal, group: Group, shares: Mapping[str, bytes]) -> None:
        session, roster = self._session, self._params.roster
        if set(shares) != set(roster):
            raise MessageError(
                f"the dealers in the {group} shares of {item.name}",
                expected=f"the roster {list(roster)}",
                found=str(sorted(shares)),
            )
        for dealer, salted in shares.items():
            kind = self._kind(dealer)
            hashed = share_hash(session.session, dealer, item.name, self.slot, group, kind, salted)
            if hashed != session.signed_hash(dealer, item.name, self.slot, group, kind):
                raise ShareError(
                    f"the {group} share of {dealer} that {item.name} revealed",
                    expected="the one whose hash its dealer signed",
                    found="a different one",
                )

    def _kind(self, dealer: str) -> Kind:
        return "self" if dealer in self._receipts else "pair"

    def _recover(self, group: Group, reveals: Mapping[str, Reveal]) -> dict[str, Secret]:
        """Return site -> its secret of this slot, each checked against the site's commitment."""
        roster, needed = self._params.roster, self._params.threshold
        holders = [name for name in roster if name in reveals][:needed]
        if len(holders) < needed:
            raise RecoveryError(
                f"the number of valid reveals of sum {self.sum_id}",
                expected=f"at least {needed}",
                found=str(len(holders)),
            )
        revealed = {name: item.update if group == "update" else item.static for name, item in reveals.items()}
        joined = b"".join(revealed[holder][dealer][SALT_BYTES:] for holder in holders for dealer in roster)
        shares: NDArray[np.uint8] = np.frombuffer(joined, np.uint8).reshape(needed, len(roster), KEY_BYTES)
        recovered = recover_many([self._params.index(name) for name in holders], shares)
        secrets = {dealer: Secret(recovered[place].tobytes()) for place, dealer in enumerate(roster)}
        for dealer, secret in secrets.items():
            self._check_secret(dealer, group, secret)
        return secrets

    def _check_secret(self, dealer: str, group: Group, secret: Secret) -> None:
        kind = self._kind(dealer)
        derived = commitment(dealer, self.slot, group, kind, secret.expose())
        if not hmac.compare_digest(derived, self._session.peers[dealer].commitment(self.slot, group, kind)):
            raise RecoveryError(
                f"the {group} secret of {dealer} in slot {self.slot}",
                expected="the one that it committed to",
                found="a different one, from shares that it signed",
                blamed=dealer,
            )

    def _streams(self, group: Group, secrets: Mapping[str, Secret]) -> tuple[list[bytes], list[bytes]]:
        """Return the keys of the streams to add and to subtract, so that no mask is left in the total.

        Raises:
            RecoveryError: TF-613, as ``_check_pair_secrets`` raises.
        """
        session, slot = self._session.session, self.slot
        plus: list[bytes] = []
        minus: list[bytes] = []
        for site in self._closed():
            minus.append(self_key(secrets[site].expose(), session, slot, group, site))
        seeds = {name: secret for name, secret in secrets.items() if name not in self._receipts}
        for site in self._closed():
            links = links_of(self._links[site], group, self._params.roster, site)
            pair_secrets = dropped_secrets(session, slot, group, site, seeds, links)
            self._check_pair_secrets(group, site, pair_secrets)
            added, taken = dropped_masks(session, slot, group, site, pair_secrets)
            plus += added
            minus += taken
        return plus, minus

    def _check_pair_secrets(
        self, group: Group, survivor: str, secrets: Mapping[str, tuple[bytes, bytes]]
    ) -> None:
        """Check the pair secrets between a survivor and the dropped sites against their signed hashes.

        The survivor checked what it was dealt, and each hash is signed by the dealer of its secret: no third
        site can be at fault.
        """
        for dropped, (dealt, keyed) in secrets.items():
            self._check_pair_secret(group, dropped, survivor, dealt, "its pair seed")
            if survivor < dropped:
                self._check_pair_secret(group, survivor, dropped, keyed, "its link")

    def _check_pair_secret(self, group: Group, dealer: str, holder: str, secret: bytes, source: str) -> None:
        session, slot = self._session, self.slot
        hashed = pair_secret_hash(session.session, dealer, holder, slot, group, secret)
        if not hmac.compare_digest(hashed, session.signed_pair_secret_hash(dealer, holder, slot, group)):
            raise RecoveryError(
                f"the {group} pair secret from {dealer} to {holder} in slot {slot}",
                expected=f"the one whose hash {dealer} signed",
                found=f"a different one from {source}",
                blamed=dealer,
            )
