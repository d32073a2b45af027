"""A site's states: explicit, frozen, each with one stored form.

    Advertised -> Confirmed -> Established, whose slots go Fresh -> Masked (-> Agreed) -> Revealed

A slot that was skipped or whose sum was abandoned is Abandoned. A state holds only the secrets that
later steps still need: a slot's own secrets are dropped when its term is masked, its shares when
they are revealed or a later slot is used, the keys of the boxes when all boxes are open.

The stored form contains secrets. A caller that has to store it (the simulator, in which every task
of a site is a process of its own) makes it readable by its owner only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Self, TypeAlias, TypeVar, cast, get_args, get_type_hints

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

T = TypeVar("T")

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

    params: Annotated[Params, Params.from_bytes]
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


@dataclass(frozen=True)
class Fresh:
    """A slot that was not used yet.

    Attributes:
        secrets: this site's own: for each group b and a.
        shares: every dealer's shares for this site.
        pair_secrets: for every dealer in roster order, for each group: the pair secret from it.
    """

    secrets: Annotated[Secret, _secret]
    shares: Annotated[Secret, _secret]
    pair_secrets: Annotated[Secret, _secret]


@dataclass(frozen=True)
class Masked:
    """A slot whose term was sent: its receipt and the shares."""

    schema: str
    receipt: Annotated[Receipt, _receipt]
    shares: Annotated[Secret, _secret]


@dataclass(frozen=True)
class Agreed:
    """A slot for which this site signed a survivor set that is smaller than the roster.

    Attributes:
        schema, receipt, shares: as in ``Masked``.
        receipts: ``receipts_digest`` of the set.
    """

    schema: str
    receipt: Annotated[Receipt, _receipt]
    shares: Annotated[Secret, _secret]
    survivors: Annotated[tuple[str, ...], tuple]
    receipts: bytes


@dataclass(frozen=True)
class Revealed:
    """A slot whose shares of these groups were revealed for these survivors and are erased.

    ``receipts`` is the ``receipts_digest`` of the survivors.
    """

    schema: str
    sum_id: Annotated[SumId, _sum_id]
    survivors: Annotated[tuple[str, ...], tuple]
    receipts: bytes
    groups: Annotated[tuple[Group, ...], tuple]


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


class _Stored:
    """The frame of a stored state: version, kind, then its parts."""

    _kind: ClassVar[str]

    def to_bytes(self) -> bytes:
        """Return the stored form, which contains secrets."""
        return cast(bytes, msgpack.packb([VERSION, self._kind, *_parts(self)], use_bin_type=True))

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
                return _restored(cls, parts)
        except Exception:  # any failure means that this is no such state; its text could show secrets
            raise StateError("a stored state", expected=expected, found="something else") from None
        raise StateError("a stored state", expected=expected, found="another version or kind")


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
    epoch: Annotated[Epoch, _epoch]
    advertisement: bytes = field(repr=False)
    channel: Annotated[Secret, _secret]
    decapsulation: Annotated[Secret, _secret]
    signing: Annotated[Secret, _secret]
    secrets: Annotated[tuple[Secret, ...], _each(_secret)]


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
    epoch: Annotated[Epoch, _epoch]
    session: bytes
    advertisements: Annotated[tuple[bytes, ...], tuple] = field(repr=False)
    channel: Annotated[Secret, _secret]
    decapsulation: Annotated[Secret, _secret]
    signing: Annotated[Secret, _secret]
    secrets: Annotated[tuple[Secret, ...], _each(_secret)]
    own_box: Annotated[Secret, _secret]
    digests: bytes


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
    epoch: Annotated[Epoch, _epoch]
    session: bytes
    advertisements: Annotated[tuple[bytes, ...], tuple] = field(repr=False)
    signing: Annotated[Secret, _secret]
    setup: bytes
    sums: Annotated[tuple[SumId, ...], _each(_sum_id)]
    slots: Annotated[tuple[SlotState, ...], _each(_slot)]
    told: Annotated[Told | None, _maybe_told]
    expected: Annotated[Mapping[Group, bytes], dict]

    def __post_init__(self) -> None:
        if not all(isinstance(item, SlotState) for item in self.slots):
            raise AssertionError("a slot has another state than those of slots")

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


_SLOTS: Mapping[str, type[SlotState]] = {kind.__name__.lower(): kind for kind in get_args(SlotState)}


def _parts(state: Any) -> list[Any]:
    """Return the fields of a value in their order, as msgpack has them; those of a slot behind its kind."""
    kind = [type(state).__name__.lower()] if isinstance(state, SlotState) else []
    return [*kind, *(_plain(getattr(state, item.name)) for item in fields(state))]


def _plain(value: Any) -> Any:
    match value:
        case Secret():
            return value.expose()
        case Params():
            return value.to_bytes()
        case SumId() | Receipt():
            return value.as_value()
        case Epoch() | Told() | Fresh() | Masked() | Agreed() | Revealed() | Abandoned():
            return _parts(value)
        case tuple():
            return [_plain(item) for item in value]
        case Mapping():
            return dict(value)
        case _:
            return value


def _restored(kind: type[T], parts: Sequence[Any]) -> T:
    """Return a value of which these are the ``_parts``."""
    return kind(*(read(part) for read, part in zip(_readers(cast(Any, kind)), parts, strict=True)))


@functools.cache
def _readers(kind: type[Any]) -> list[Callable[[Any], Any]]:
    """Return what reads each field of a class: the last part of its ``Annotated`` type, if it is of one."""
    hints = get_type_hints(kind, include_extras=True)
    return [getattr(hints[item.name], "__metadata__", (lambda value: value,))[-1] for item in fields(kind)]


def _each(read: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...]]:
    return lambda values: tuple(map(read, values))


def _secret(value: object) -> Secret:
    if not isinstance(value, bytes):  # bytes() of an integer would give that many zeros
        raise TypeError(f"Expected a stored secret as bytes, but got {type(value).__name__}.")
    return Secret(value)


def _sum_id(value: Sequence[Any]) -> SumId:
    return SumId(*value)


def _epoch(parts: Sequence[Any]) -> Epoch:
    return _restored(Epoch, parts)


def _slot(parts: Sequence[Any]) -> SlotState:
    return _restored(_SLOTS[parts[0]], parts[1:])


def _maybe_told(parts: Sequence[Any] | None) -> Told | None:
    if parts is None:
        return None
    slot, sum_id, schema, survivors, hashes, receipts = parts
    return Told(slot, SumId(*sum_id), schema, tuple(survivors), hashes, receipts)


def _receipt(value: Mapping[str, Any]) -> Receipt:
    return Receipt(**{**value, "sum_id": SumId(*value["sum_id"])})
