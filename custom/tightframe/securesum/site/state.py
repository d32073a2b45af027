"""A site's states: explicit, frozen, each with one stored form.

    Advertised -> Confirmed -> Established, whose slots go Fresh -> Masked (-> Agreed) -> Revealed

A slot that was skipped or whose sum was abandoned is Abandoned. A state holds only the secrets that
later steps still need: a slot's own secrets are dropped when its term is masked, its shares when
they are revealed or a later slot is used, the keys of the boxes when all boxes are open.

The stored form contains secrets. A caller that has to store it (the simulator, in which every task
of a site is a process of its own) makes it readable by its owner only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar, Self, TypeAlias, assert_never, cast

import msgpack

from tightframe.securesum.errors import StateError
from tightframe.securesum.messages import (
    GROUPS,
    KINDS,
    SHARE_BYTES,
    Advertisement,
    Group,
    Kind,
    Params,
    Receipt,
    SumId,
    Told,
    share_offset,
)
from tightframe.securesum.primitives import KEY_BYTES, Secret
from tightframe.securesum.rules import minimum_survivors

VERSION = 3
SLOT_SHARES = len(GROUPS) * len(KINDS) * SHARE_BYTES
"""Bytes of one dealer's shares of one slot."""


def term_name(slot: int) -> str:
    """Return the name under which a site keeps its term of a slot."""
    return f"term-{slot}"


@dataclass(frozen=True)
class Epoch:
    """The values that stay constant at a site during an epoch.

    Attributes:
        params: the parameters that it accepted.
        dataset: its data set, for which the rule of the static group holds.
        minimum_cohort: of its own rules.
        any_static_cohort: of its own rules.
    """

    params: Params
    name: str
    dataset: str
    minimum_cohort: int
    any_static_cohort: bool

    @property
    def index(self) -> int:
        """This site's index in the roster."""
        return self.params.index(self.name)

    @property
    def least(self) -> int:
        """The smallest survivor set for which this site reveals anything."""
        return max(minimum_survivors(self.params), self.minimum_cohort)

    def _stored(self) -> list[Any]:
        return [
            self.params.to_bytes(),
            self.name,
            self.dataset,
            self.minimum_cohort,
            self.any_static_cohort,
        ]

    @classmethod
    def _restored(cls, value: list[Any]) -> Epoch:
        return cls(Params.from_bytes(value[0]), *value[1:])


@dataclass(frozen=True)
class Fresh:
    """A slot that was not used yet.

    Attributes:
        secrets: this site's own: for each group b and a.
        shares: every dealer's shares for this site.
        pair_secrets: for every dealer in roster order, for each group: the pair secret from it.
    """

    secrets: Secret
    shares: Secret
    pair_secrets: Secret


@dataclass(frozen=True)
class Masked:
    """A slot whose term was sent: its receipt and the shares."""

    schema: str
    receipt: Receipt
    shares: Secret


@dataclass(frozen=True)
class Agreed:
    """A slot for which this site signed a survivor set that is smaller than the roster.

    Attributes:
        schema, receipt, shares: as in ``Masked``.
        receipts: ``receipts_digest`` of the set.
    """

    schema: str
    receipt: Receipt
    shares: Secret
    survivors: tuple[str, ...]
    receipts: bytes


@dataclass(frozen=True)
class Revealed:
    """A slot whose shares of these groups were revealed for these survivors and are erased.

    ``receipts`` is the ``receipts_digest`` of the survivors.
    """

    schema: str
    sum_id: SumId
    survivors: tuple[str, ...]
    receipts: bytes
    groups: tuple[Group, ...]


@dataclass(frozen=True)
class Abandoned:
    """A slot that was skipped, or whose sum was abandoned: its secrets and shares are erased."""


SlotState: TypeAlias = Fresh | Masked | Agreed | Revealed | Abandoned


def slot_secret(secrets: Secret, group: Group, kind: Kind) -> Secret:
    """Return one of a slot's own secrets: b (``self``) or a (``pair``)."""
    start = share_offset(0, group, kind, KEY_BYTES)
    return Secret(secrets.expose()[start : start + KEY_BYTES])


def slot_share(shares: Secret, dealer: int, group: Group, kind: Kind) -> bytes:
    """Return one dealer's share in a slot: salt, then share, 48 bytes."""
    start = dealer * SLOT_SHARES + share_offset(0, group, kind, SHARE_BYTES)
    return shares.expose()[start : start + SHARE_BYTES]


def dealt_pair_secret(pair_secrets: Secret, dealer: int, group: Group) -> bytes:
    """Return the pair secret of a slot that one dealer sent: 32 bytes."""
    start = (dealer * len(GROUPS) + GROUPS.index(group)) * KEY_BYTES
    return pair_secrets.expose()[start : start + KEY_BYTES]


class _Stored(ABC):
    """The frame of a stored state: version, kind, then its parts."""

    _kind: ClassVar[str]

    def to_bytes(self) -> bytes:
        """Return the stored form, which contains secrets."""
        return cast(bytes, msgpack.packb([VERSION, self._kind, *self._parts()], use_bin_type=True))

    @classmethod
    def from_bytes(cls, raw: bytes) -> Self:
        """Read a stored state.

        Raises:
            StateError: TF-609, if it is not of this kind and version.
        """
        expected = f"version {VERSION} of {cls._kind}"
        try:
            version, kind, *parts = cast("list[Any]", msgpack.unpackb(raw, raw=False, use_list=True))
            if (version, kind) == (VERSION, cls._kind):
                return cls._restored(parts)
        except Exception:  # any failure means that this is no such state; its text could show secrets
            raise StateError("a stored state", expected=expected, found="something else") from None
        raise StateError("a stored state", expected=expected, found="another version or kind")

    @abstractmethod
    def _parts(self) -> list[Any]: ...

    @classmethod
    @abstractmethod
    def _restored(cls, parts: list[Any]) -> Self: ...


@dataclass(frozen=True)
class Advertised(_Stored):
    """A site that has sent its advertisement: it holds its own secrets, and nothing of other sites.

    Attributes:
        epoch: the constants of the epoch.
        advertisement: its own advertisement as sent.
        channel, decapsulation: private keys of its boxes: X25519, and the seed of ML-KEM-768.
        signing: private key of its signatures in this epoch.
        secrets: for each slot, for each group: b and a.
    """

    _kind = "advertised"
    epoch: Epoch
    advertisement: bytes = field(repr=False)
    channel: Secret
    decapsulation: Secret
    signing: Secret
    secrets: tuple[Secret, ...]

    def _parts(self) -> list[Any]:
        return [
            self.epoch._stored(),
            self.advertisement,
            self.channel.expose(),
            self.decapsulation.expose(),
            self.signing.expose(),
            _exposed(self.secrets),
        ]

    @classmethod
    def _restored(cls, parts: list[Any]) -> Self:
        epoch, advertisement, channel, decapsulation, signing, secrets = parts
        return cls(
            Epoch._restored(epoch),
            advertisement,
            _secret(channel),
            _secret(decapsulation),
            _secret(signing),
            _hidden(secrets),
        )


class _Peers:
    """The peers of a site, once it has verified all advertisements."""

    epoch: Epoch
    advertisements: tuple[bytes, ...]

    @cached_property
    def peers(self) -> Mapping[str, Advertisement]:
        """Site -> its verified advertisement, in roster order."""
        slots = self.epoch.params.slots
        items = [Advertisement.from_bytes(raw, slots=slots) for raw in self.advertisements]
        return MappingProxyType({item.name: item for item in items})

    @property
    def applications(self) -> Mapping[str, bytes]:
        """Site -> application data of its verified advertisement."""
        return MappingProxyType({name: item.application for name, item in self.peers.items()})


@dataclass(frozen=True)
class Confirmed(_Stored, _Peers):
    """A site that has verified all advertisements and dealt its shares.

    Attributes:
        epoch, channel, decapsulation, signing, secrets: as in ``Advertised``.
        session: T.
        advertisements: all advertisements as sent, in roster order.
        own_box: what it would seal for itself: the shares that it keeps of its own secrets, and pair
            secrets that nobody uses.
        digests: ``hashes_digest`` of every holder, joined, as this site signed them.
    """

    _kind = "confirmed"
    epoch: Epoch
    session: bytes
    advertisements: tuple[bytes, ...] = field(repr=False)
    channel: Secret
    decapsulation: Secret
    signing: Secret
    secrets: tuple[Secret, ...]
    own_box: Secret
    digests: bytes

    def _parts(self) -> list[Any]:
        return [
            self.epoch._stored(),
            self.session,
            list(self.advertisements),
            self.channel.expose(),
            self.decapsulation.expose(),
            self.signing.expose(),
            _exposed(self.secrets),
            self.own_box.expose(),
            self.digests,
        ]

    @classmethod
    def _restored(cls, parts: list[Any]) -> Self:
        epoch, session, advertisements, channel, decapsulation, signing, secrets, own_box, digests = parts
        return cls(
            Epoch._restored(epoch),
            session,
            tuple(advertisements),
            _secret(channel),
            _secret(decapsulation),
            _secret(signing),
            _hidden(secrets),
            _secret(own_box),
            digests,
        )


@dataclass(frozen=True)
class Established(_Stored, _Peers):
    """A site that has checked every share dealt to it, and can take part in sums.

    Attributes:
        epoch, session, advertisements, signing: as in ``Confirmed``.
        setup: ``setup_digest`` of the setup that it checked.
        sums: the sums for which it masked a term.
        slots: the state of each slot.
        told: the total that the last request for a term rested on; None if none did.
        expected: group -> combinations of that total.
    """

    _kind = "established"
    epoch: Epoch
    session: bytes
    advertisements: tuple[bytes, ...] = field(repr=False)
    signing: Secret
    setup: bytes
    sums: tuple[SumId, ...]
    slots: tuple[SlotState, ...]
    told: Told | None
    expected: Mapping[Group, bytes]

    @property
    def last_revealed(self) -> int:
        """The last slot of a sum with fields for which this site gave its shares; -1 if there is none."""
        schemas = self.epoch.params.schemas
        revealed = (
            slot
            for slot, item in enumerate(self.slots)
            if isinstance(item, Revealed) and schemas[item.schema]
        )
        return max(revealed, default=-1)

    def with_slot(self, slot: int, state: SlotState) -> Established:
        """Return this state with one slot's state replaced."""
        return replace(self, slots=(*self.slots[:slot], state, *self.slots[slot + 1 :]))

    def _parts(self) -> list[Any]:
        return [
            self.epoch._stored(),
            self.session,
            list(self.advertisements),
            self.signing.expose(),
            self.setup,
            [item.as_value() for item in self.sums],
            [_slot_stored(item) for item in self.slots],
            None if self.told is None else _told_stored(self.told),
            dict(self.expected),
        ]

    @classmethod
    def _restored(cls, parts: list[Any]) -> Self:
        epoch, session, advertisements, signing, setup, sums, slots, told, expected = parts
        return cls(
            Epoch._restored(epoch),
            session,
            tuple(advertisements),
            _secret(signing),
            setup,
            tuple(SumId(*item) for item in sums),
            tuple(_slot_restored(item) for item in slots),
            None if told is None else _told_restored(told),
            dict(expected),
        )


def _secret(value: object) -> Secret:
    if not isinstance(value, bytes):  # bytes() of an integer would give that many zeros
        raise TypeError(f"Expected a stored secret as bytes, but got {type(value).__name__}.")
    return Secret(value)


def _exposed(secrets: Sequence[Secret]) -> list[bytes]:
    return [item.expose() for item in secrets]


def _hidden(values: Sequence[bytes]) -> tuple[Secret, ...]:
    return tuple(_secret(item) for item in values)


def _slot_stored(slot: SlotState) -> list[Any]:
    match slot:
        case Fresh(secrets, shares, pair_secrets):
            return ["fresh", secrets.expose(), shares.expose(), pair_secrets.expose()]
        case Masked(schema, receipt, shares):
            return ["masked", schema, receipt.as_value(), shares.expose()]
        case Agreed(schema, receipt, shares, survivors, receipts):
            return ["agreed", schema, receipt.as_value(), shares.expose(), list(survivors), receipts]
        case Revealed(schema, sum_id, survivors, receipts, groups):
            return ["revealed", schema, sum_id.as_value(), list(survivors), receipts, list(groups)]
        case Abandoned():
            return ["abandoned"]
        case _:
            assert_never(slot)


def _slot_restored(value: list[Any]) -> SlotState:
    match value:
        case ["fresh", secrets, shares, pair_secrets]:
            return Fresh(_secret(secrets), _secret(shares), _secret(pair_secrets))
        case ["masked", schema, receipt, shares]:
            return Masked(schema, _receipt_restored(receipt), _secret(shares))
        case ["agreed", schema, receipt, shares, survivors, receipts]:
            return Agreed(schema, _receipt_restored(receipt), _secret(shares), tuple(survivors), receipts)
        case ["revealed", schema, sum_id, survivors, receipts, groups]:
            return Revealed(schema, SumId(*sum_id), tuple(survivors), receipts, tuple(groups))
        case ["abandoned"]:
            return Abandoned()
        case _:
            raise ValueError("Expected a stored slot state, but got another value.")


def _told_stored(told: Told) -> list[Any]:
    return list(told.as_value().values())


def _told_restored(value: list[Any]) -> Told:
    slot, sum_id, schema, survivors, hashes, receipts = value
    return Told(slot, SumId(*sum_id), schema, tuple(survivors), hashes, receipts)


def _receipt_restored(value: dict[str, Any]) -> Receipt:
    return Receipt(**{**value, "sum_id": SumId(*value["sum_id"])})
