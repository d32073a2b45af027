"""The server's half of the secure sum: it adds masked terms and removes the masks from their total.

Setup (``Enrolment``, ``Session``) is in ``server.setup``. A ``Sum`` holds one accumulator for each
group, whatever the number of sites; an upload is added when it arrives, and not kept.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from tightframe.securesum.checks import (
    commitment,
    group_layout,
    link,
    masked_hash,
    pair_secret,
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
)
from tightframe.securesum.masks import Accumulator, pair_key, self_key
from tightframe.securesum.messages import (
    GROUPS,
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
    links_of,
    pair_secret_hash,
    share_hash,
    survivors_signed,
)
from tightframe.securesum.primitives import KEY_BYTES, Secret
from tightframe.securesum.rules import minimum_survivors
from tightframe.securesum.server.setup import Enrolment, Session, check_name, check_sender
from tightframe.securesum.shamir import recover_many

__all__ = ["Enrolment", "Opened", "Session", "Sum"]


@dataclass(frozen=True)
class Opened:
    """One opened sum.

    Attributes:
        survivors: the sites whose terms are in it, in roster order.
        groups: group -> its total, integers of the ring, little-endian in schema order; without
            ``static`` if that was not opened.
        blamed: site -> code, for sites whose reveal was refused.
    """

    survivors: tuple[str, ...]
    groups: Mapping[Group, bytes] = field(repr=False)
    blamed: Mapping[str, str]


class Sum:
    """One sum in one slot: collect terms, close, agree after a drop-out, reveal, open.

    A message that an ``add`` method refuses leaves the sum unchanged, and the sum continues without it.

    Args:
        session: complete.
        slot: the slot whose one-time secrets are used.
        sum_id: the sum's id.
        schema: name of the schema in the epoch's parameters.
        broadcast: SHA-256 of the broadcast's canonical tensor bytes.
    """

    def __init__(self, session: Session, *, slot: int, sum_id: SumId, schema: str, broadcast: bytes) -> None:
        session.require_complete()
        params = session.params
        if not 0 <= slot < params.slots:
            raise ParametersError("the slot", expected=f"from 0 to {params.slots - 1}", found=str(slot))
        if schema not in params.schemas:
            raise ParametersError(
                "the schema", expected=f"one of {sorted(params.schemas)}", found=repr(schema)
            )
        self._session, self._params = session, params
        self.slot, self.sum_id, self.schema, self.broadcast = slot, sum_id, schema, broadcast
        self._layouts = {group: group_layout(params.schemas[schema], group) for group in GROUPS}
        self._totals = {group: Accumulator(self._layouts[group]) for group in GROUPS}
        self._receipts: dict[str, Receipt] = {}
        self._links: dict[str, dict[Group, dict[str, bytes]]] = {}
        self._survivors: tuple[str, ...] | None = None
        self._agreements: dict[str, bytes] = {}
        self._reveals: dict[str, Reveal] = {}
        self._blamed: dict[str, str] = {}
        self._opened = False

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
    def agreements(self) -> Mapping[str, bytes]:
        """Site -> its signature of the survivor set, so far."""
        return MappingProxyType(dict(sorted(self._agreements.items())))

    @property
    def revealers(self) -> tuple[str, ...]:
        """The sites whose valid reveals have arrived, in roster order."""
        return tuple(name for name in self._params.roster if name in self._reveals)

    @property
    def full(self) -> bool:
        """True if the terms of all sites have arrived."""
        return len(self._receipts) == len(self._params.roster)

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
            links = {group: links_of(masked.links, group, self._params.roster, site) for group in GROUPS}
        except ProtocolError as error:
            error.blamed = site
            raise
        self._totals["update"].add(masked.update)
        self._totals["static"].add(masked.static)
        self._receipts[site], self._links[site] = masked.receipt, links

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
        """Return the request to sign the survivor set, after a drop-out.

        Raises:
            StateError: TF-609, before ``close`` or if no site dropped out.
        """
        survivors = self._closed()
        if self.full:
            raise StateError("the survivors", expected="fewer than the roster", found="the whole roster")
        return AgreementRequest(self.slot, tuple(self._receipts[name] for name in survivors))

    def add_agreement(self, site: str, raw: bytes) -> None:
        """Add one survivor's signature of the survivor set.

        Raises:
            ProtocolError: of the kind that fits, with ``blamed`` set to ``site``.
        """
        survivors = self._closed()
        check_sender(site, self._params, self._agreements)
        try:
            item = Agreement.from_bytes(raw)
            self._check_answer("an agreement", site, item.name, item.slot)
            verify(
                self._session.peers[site].session_key,
                item.signature,
                survivors_signed(self._session.session, self.slot, self.sum_id, survivors),
                owner=site,
                what="the survivor set",
            )
        except ProtocolError as error:
            error.blamed = site
            raise
        self._agreements[site] = item.signature

    def reveal_request(self) -> RevealRequest:
        """Return the request to reveal shares, with everything that a survivor checks first.

        Raises:
            RecoveryError: TF-613, after a drop-out with fewer than t signatures: no site would reveal.
        """
        survivors, needed = self._closed(), self._params.threshold
        if not self.full and len(self._agreements) < needed:
            raise RecoveryError(
                f"the number of signatures under the survivor set of sum {self.sum_id}",
                expected=f"at least {needed}",
                found=str(len(self._agreements)),
            )
        receipts = tuple(self._receipts[name] for name in survivors)
        return RevealRequest(self.slot, receipts, dict(sorted(self._agreements.items())))

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
        with_static = {site: item for site, item in self._reveals.items() if item.static}
        usable: dict[Group, Mapping[str, Reveal]] = {"update": self._reveals}
        if self._layouts["static"].nbytes and len(with_static) >= self._params.threshold:
            usable["static"] = with_static
        # All secrets are recovered and checked before any mask is removed, so that after an error the
        # totals are still masked and another reveal can be added.
        streams = {
            group: self._streams(group, self._recover(group, reveals)) for group, reveals in usable.items()
        }
        for group, (plus, minus) in streams.items():
            self._totals[group].add_streams(plus, minus)
        self._opened = True
        groups = {group: self._totals[group].to_bytes() for group in streams}
        if not self._layouts["static"].nbytes:
            groups["static"] = b""
        return Opened(
            survivors, MappingProxyType(groups), MappingProxyType(dict(sorted(self._blamed.items())))
        )

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
        for part, expected, received in (
            ("slot", str(self.slot), str(receipt.slot)),
            ("sum", str(self.sum_id), str(receipt.sum_id)),
            ("broadcast", self.broadcast.hex(), receipt.broadcast.hex()),
            ("update group's hash", hashes["update"].hex(), receipt.update.hex()),
            ("static group's hash", hashes["static"].hex(), receipt.static.hex()),
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
            RecoveryError: TF-613, as ``_mask_secret`` raises.
        """
        session, slot = self._session.session, self.slot
        plus: list[bytes] = []
        minus: list[bytes] = []
        for site in self._closed():
            minus.append(self_key(secrets[site].expose(), session, slot, group, site))
        for dropped in sorted(set(self._params.roster) - set(self._receipts)):
            for site in self._closed():
                first, second = sorted((site, dropped))  # the roster is sorted
                secret = self._mask_secret(group, dropped, secrets[dropped], site)
                key = pair_key(secret, session, slot, group, first, second)
                # The survivor added this stream if the dropped site comes after it, else it subtracted it.
                (minus if site == first else plus).append(key)
        return plus, minus

    def _mask_secret(self, group: Group, dropped: str, seed: Secret, survivor: str) -> bytes:
        """Return the pair secret that keys the mask between a dropped site and a survivor.

        If the dropped site comes first, it is its own. Otherwise it is the survivor's, which the
        survivor's link and the dropped site's own give.

        Raises:
            RecoveryError: TF-613, naming the dropped site if it dealt another pair secret than its seed
                gives, or the survivor if its link is wrong. The survivor checked what it was dealt, and
                the dealer's signature is under both hashes: no third site can be at fault.
        """
        own = pair_secret(seed.expose(), self._session.session, self.slot, group, dropped, survivor)
        self._check_pair_secret(group, dropped, survivor, own, "its pair seed")
        if dropped < survivor:
            return own
        other = link(self._links[survivor][group][dropped], own)
        self._check_pair_secret(group, survivor, dropped, other, "its link")
        return other

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
