"""The server's half of an epoch's setup: collect advertisements, then the dealt shares.

The server checks every message that it relays, so that a site that sends an invalid one is named at
once. No site relies on these checks: each makes its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from tightframe.securesum.checks import Keys, read_advertisements, verify, verify_advertisement
from tightframe.securesum.errors import MessageError, ProtocolError, ReplayError, RosterError, StateError
from tightframe.securesum.identity import Verifier
from tightframe.securesum.messages import (
    GROUPS,
    Advertisement,
    Advertisements,
    Confirmation,
    Dealt,
    Group,
    Kind,
    Params,
    Setup,
    hashes_digest,
    hashes_signed,
    pair_secret_offset,
    ready_signed,
    session_id,
    share_offset,
)
from tightframe.securesum.primitives import HASH_BYTES


class Enrolment:
    """Collects the advertisements of an epoch.

    Args:
        verifier: checks identities for the server.
    """

    def __init__(self, params: Params, *, verifier: Verifier) -> None:
        self.params = params
        self._verifier = verifier
        self._digest = params.digest()
        self._keys = Keys()
        self._raw: dict[str, bytes] = {}
        self._items: dict[str, Advertisement] = {}

    @property
    def missing(self) -> list[str]:
        """The sites that have not advertised, in roster order."""
        return [name for name in self.params.roster if name not in self._raw]

    @property
    def applications(self) -> Mapping[str, bytes]:
        """Site -> application data of its verified advertisement, so far."""
        return MappingProxyType({name: item.application for name, item in sorted(self._items.items())})

    def add(self, site: str, raw: bytes) -> None:
        """Add one site's advertisement; ``site`` is the sender as the engine authenticated it.

        Raises:
            ProtocolError: of the kind that fits, with ``blamed`` set to ``site``; nothing was added.
        """
        check_sender(site, self.params, self._raw)
        try:
            item = Advertisement.from_bytes(raw, slots=self.params.slots)
            check_name("an advertisement", site, item.name)
            verify_advertisement(self._verifier, item, self._digest)
            self._keys.add(item)
        except ProtocolError as error:
            error.blamed = site
            raise
        self._raw[site], self._items[site] = raw, item

    def relay(self) -> Advertisements:
        """Return all advertisements as received, in roster order.

        Raises:
            StateError: TF-609, if some are missing.
        """
        if self.missing:
            raise StateError("the advertisements", expected="complete", found=f"none from {self.missing}")
        return Advertisements(tuple(self._raw[name] for name in self.params.roster))


class Session:
    """Collects the confirmations of an epoch, and gives each site the shares dealt to it.

    Args:
        advertisements: those of ``Enrolment.relay``.
    """

    def __init__(self, params: Params, advertisements: Advertisements) -> None:
        items = read_advertisements(params, advertisements)
        self.params = params
        self.session = session_id(params, items)
        self.peers: Mapping[str, Advertisement] = MappingProxyType({item.name: item for item in items})
        self._confirmed: dict[str, Confirmation] = {}
        self._digests: dict[str, bytes] = {}

    @property
    def missing(self) -> list[str]:
        """The sites that have not confirmed, in roster order."""
        return [name for name in self.params.roster if name not in self._confirmed]

    @property
    def ready(self) -> Mapping[str, bytes]:
        """Site -> its signature of readiness for this session, so far."""
        return MappingProxyType({name: item.ready for name, item in sorted(self._confirmed.items())})

    def add(self, site: str, raw: bytes) -> None:
        """Add one site's confirmation.

        Raises:
            ProtocolError: of the kind that fits, with ``blamed`` set to ``site``; nothing was added.
        """
        check_sender(site, self.params, self._confirmed)
        try:
            item = Confirmation.from_bytes(raw, slots=self.params.slots)
            check_name("a confirmation", site, item.name)
            self._check(item)
        except ProtocolError as error:
            error.blamed = site
            raise
        self._confirmed[site] = item
        self._digests[site] = b"".join(hashes_digest(item.hashes[name]) for name in self.params.roster)

    def setup_for(self, site: str) -> Setup:
        """Return the shares that all sites dealt to one site.

        Raises:
            StateError: TF-609, if confirmations are missing.
        """
        self.require_complete()
        return Setup(
            {
                dealer: Dealt(
                    box=item.boxes.get(site, b""),
                    hashes=item.hashes[site],
                    digests=self._digests[dealer],
                    signature=item.hashes_signature,
                    ready=item.ready,
                )
                for dealer, item in sorted(self._confirmed.items())
            }
        )

    def require_complete(self) -> None:
        """Check that all sites have confirmed.

        Raises:
            StateError: TF-609.
        """
        if self.missing:
            raise StateError("the confirmations", expected="complete", found=f"none from {self.missing}")

    def signed_hash(self, dealer: str, holder: str, slot: int, group: Group, kind: Kind) -> bytes:
        """Return the hash of one share, as its dealer signed it: 32 bytes."""
        start = share_offset(slot, group, kind, HASH_BYTES)
        return self._confirmed[dealer].hashes[holder][start : start + HASH_BYTES]

    def signed_pair_secret_hash(self, dealer: str, holder: str, slot: int, group: Group) -> bytes:
        """Return the hash of the pair secret from a dealer to a holder, as the dealer signed it: 32 bytes."""
        start = pair_secret_offset(slot, group, self.params.slots, HASH_BYTES)
        return self._confirmed[dealer].hashes[holder][start : start + HASH_BYTES]

    def keyed_hashes(self, site: str, slot: int) -> bytes:
        """Return the hashes of the pair secrets that key a site's masks with all others (``pairs_of``).

        Each is signed by its dealer, the first of the two in the roster.
        """
        pairs = [tuple(sorted((site, other))) for other in self.params.roster if other != site]
        return b"".join(
            self.signed_pair_secret_hash(first, second, slot, group)
            for group in GROUPS
            for first, second in pairs
        )

    def _check(self, item: Confirmation) -> None:
        roster, key = self.params.roster, self.peers[item.name].session_key
        for part, holders, expected in (
            ("hashes", set(item.hashes), set(roster)),
            ("boxes", set(item.boxes), set(roster) - {item.name}),
        ):
            if holders != expected:
                raise MessageError(
                    f"the holders of the {part} of {item.name}",
                    expected=str(sorted(expected)),
                    found=str(sorted(holders)),
                )
        digests = [hashes_digest(item.hashes[name]) for name in roster]
        verify(
            key,
            item.hashes_signature,
            hashes_signed(self.session, item.name, digests),
            owner=item.name,
            what="the hashes of shares",
        )
        verify(
            key,
            item.ready,
            ready_signed(self.session, item.name),
            owner=item.name,
            what="readiness for this session",
        )


def check_sender(site: str, params: Params, received: Mapping[str, object]) -> None:
    """Check that ``site`` is in the roster and has sent no message of this kind before.

    Raises:
        RosterError: TF-605.
        ReplayError: TF-608.
    """
    if site not in params.roster:
        raise RosterError("the sender", expected=f"in the roster {list(params.roster)}", found=repr(site))
    if site in received:
        raise ReplayError(
            f"the messages of {site}", expected="one of each kind", found="a second one", blamed=site
        )


def check_name(what: str, site: str, name: str) -> None:
    """Check that a message names the site that sent it.

    Raises:
        RosterError: TF-605.
    """
    if name != site:
        raise RosterError(f"the name in {what}", expected=site, found=repr(name), blamed=site)
