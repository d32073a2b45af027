"""The server's half of an epoch's setup: collect advertisements, then what the sites deal.

The server checks what it relays, so that a site that sends rubbish is named at once, by itself. No
site relies on these checks: each makes its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from tightframe.securesum.checks import Keys, read_advertisements, verify, verify_advertisement
from tightframe.securesum.errors import MessageError, ProtocolError, ReplayError, RosterError, StateError
from tightframe.securesum.identity import Verifier
from tightframe.securesum.messages import (
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
    ready_signed,
    session_id,
    share_offset,
)
from tightframe.securesum.primitives import HASH_BYTES


class Enrolment:
    """Collects the advertisements of an epoch.

    Args:
        params: of the epoch.
        verifier: the server's own view of identities.
    """

    def __init__(self, params: Params, *, verifier: Verifier) -> None:
        self.params = params
        self._verifier = verifier
        self._digest = params.digest()
        self._keys = Keys(params.slots)
        self._raw: dict[str, bytes] = {}
        self._items: dict[str, Advertisement] = {}

    @property
    def missing(self) -> list[str]:
        """The sites of the roster that have not advertised, in its order."""
        return [name for name in self.params.roster if name not in self._raw]

    @property
    def applications(self) -> Mapping[str, bytes]:
        """Site -> the application's bytes in its verified advertisement, so far."""
        return MappingProxyType({name: item.application for name, item in sorted(self._items.items())})

    def add(self, site: str, raw: bytes) -> None:
        """Take one site's advertisement; ``site`` is who sent it, by the engine's word.

        Raises:
            ProtocolError: of the kind that fits, with ``blamed`` set to ``site``; nothing was taken.
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
        """All advertisements, as they came, in roster order.

        Raises:
            StateError: TF-609, if some are missing.
        """
        if self.missing:
            raise StateError("the advertisements", expected="all", found=f"none from {self.missing}")
        return Advertisements(tuple(self._raw[name] for name in self.params.roster))


class Session:
    """Collects what the sites dealt, and hands each its part.

    Args:
        params: of the epoch.
        advertisements: what ``Enrolment.relay`` returned.
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
        """The sites of the roster that have not confirmed, in its order."""
        return [name for name in self.params.roster if name not in self._confirmed]

    @property
    def ready(self) -> Mapping[str, bytes]:
        """Site -> its signature under this session, so far."""
        return MappingProxyType({name: item.ready for name, item in sorted(self._confirmed.items())})

    def add(self, site: str, raw: bytes) -> None:
        """Take one site's confirmation.

        Raises:
            ProtocolError: of the kind that fits, with ``blamed`` set to ``site``; nothing was taken.
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
        """What everybody dealt to one site.

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
        """Return if everybody has confirmed.

        Raises:
            StateError: TF-609.
        """
        if self.missing:
            raise StateError("the confirmations", expected="all", found=f"none from {self.missing}")

    def signed_hash(self, dealer: str, holder: str, slot: int, group: Group, kind: Kind) -> bytes:
        """The hash that a dealer signed of one share."""
        start = share_offset(slot, group, kind, HASH_BYTES)
        return self._confirmed[dealer].hashes[holder][start : start + HASH_BYTES]

    def _check(self, item: Confirmation) -> None:
        roster, key = self.params.roster, self.peers[item.name].session_key
        for what, found, expected in (
            ("hashes", set(item.hashes), set(roster)),
            ("boxes", set(item.boxes), set(roster) - {item.name}),
        ):
            if found != expected:
                raise MessageError(
                    f"the holders of the {what} of {item.name}",
                    expected=str(sorted(expected)),
                    found=str(sorted(found)),
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


def check_sender(site: str, params: Params, taken: Mapping[str, object]) -> None:
    """Return if ``site`` is of the roster and has sent nothing of this kind before.

    Raises:
        RosterError: TF-605.
        ReplayError: TF-608.
    """
    if site not in params.roster:
        raise RosterError("the sender", expected=f"of the roster {list(params.roster)}", found=repr(site))
    if site in taken:
        raise ReplayError(f"the messages of {site}", expected="one of a kind", found="a second", blamed=site)


def check_name(what: str, site: str, name: str) -> None:
    """Return if a message says that it is of the site that sent it.

    Raises:
        RosterError: TF-605.
    """
    if name != site:
        raise RosterError(f"the name in {what}", expected=site, found=repr(name), blamed=site)
