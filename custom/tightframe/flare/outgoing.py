"""Checks of a silo's answers, task by task; separate from the engine, so that they are easy to audit.

Nothing here trusts the sender. A message is read by the protocol's own reader, must be the canonical
form of what was read, and must be in this site's name. A term that claims to be masked must look
random: that catches an unmasked term, however well-formed it is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import numpy as np
from cryptography import x509

from tightframe.config.job import NAME
from tightframe.rounds.context import NEEDS_STATE
from tightframe.rounds.declaration import Declaration
from tightframe.rounds.sums.common import SECURE
from tightframe.securesum import messages, reading
from tightframe.securesum.checks import masked_hash
from tightframe.securesum.rules import MAX_SITES, MAX_SLOTS

DECLARATION, TERM = "declaration", "term"
CHANCE = 1e-18
"""Bound on the probability of taking a masked term for an unmasked one."""
LANES = 4
_CHUNK = 2**22
_NAME = re.compile(NAME)
_PHASE = re.compile(r"[a-z_]{1,32}-[0-9]{1,4}")


class OutgoingError(Exception):
    """An answer is not one of the protocol's; the text shows none of its values."""


class _Sized(Protocol):
    def to_bytes(self) -> bytes: ...


def checked(task: str, message: object, site: str, *, plain: bool, max_bytes: int) -> dict[str, Any]:
    """Return the answer to a task, rebuilt from its checked parts.

    Args:
        message: the answer that the executor wants to send.
        site: name of the site that answers.
        plain: whether the site accepts plain sums, in which the server sees its term.
        max_bytes: the largest answer.

    Raises:
        OutgoingError: if it is anything other than an answer to that task.
    """
    if type(message) is not dict:
        raise OutgoingError("Expected a message, but got something else.")
    keys = list(message)
    if task == "baseline" and not keys:
        return {}
    if keys == [SECURE] and task in _SECURE:
        raw = _blob(message[SECURE], max_bytes)
        try:
            _SECURE[task](raw, site)
        except OutgoingError:
            raise
        except Exception as error:  # its type alone: the text of an unexpected error may show values
            kind = type(error).__name__
            raise OutgoingError(f"Expected the protocol's message, but reading it gave {kind}.") from None
        return {SECURE: raw}
    if keys == [NEEDS_STATE] and task == "contribute" and message[NEEDS_STATE] is True:
        return {NEEDS_STATE: True}
    if keys == [DECLARATION] and task == "enroll":
        _plain_only(plain)
        raw = _blob(message[DECLARATION], messages.MAX_APPLICATION)
        _declaration(raw, site)
        return {DECLARATION: raw}
    if keys == [TERM] and task == "contribute":
        _plain_only(plain)
        return {TERM: _term(message[TERM], max_bytes)}
    raise OutgoingError("Expected the answer of this task, but got other keys.")


def looks_masked(data: bytes) -> bool:
    """Check whether bytes can be a masked term, whose bytes are all uniformly random.

    An unmasked term consists of small integers, whose high bytes are all zeros or all ones. So the test
    looks for values that are too frequent among n bytes: any of the 256 values in one position of the
    32-bit words, and those two in all positions together. For a value of probability p, the Chernoff
    bound gives P(share of n >= q) <= exp(-n KL(q || p)); so a masked term is taken for an unmasked one
    with a probability below 1e-18, whatever its length. Below about 40 bytes the test cannot decide.

    >>> looks_masked(bytes(1000)), looks_masked(bytes(range(256)) * 8)
    (False, True)
    """
    counts = np.zeros((LANES, 256), np.int64)
    for start in range(0, len(data), _CHUNK):  # counting takes eight bytes of memory for each byte
        chunk = np.frombuffer(data, np.uint8, min(_CHUNK, len(data) - start), start)
        for lane in range(LANES):
            counts[lane] += np.bincount(chunk[lane::LANES], minlength=256)
    shares = [
        (most, total, 1 / 256)
        for most, total in zip(counts.max(axis=1).tolist(), counts.sum(axis=1).tolist(), strict=True)
    ]
    shares.append((int(counts[:, 0].sum() + counts[:, 255].sum()), len(data), 2 / 256))
    limit = math.log((256 * LANES + 1) / CHANCE)
    return all(
        total * _divergence(most / total, usual) <= limit
        for most, total, usual in shares
        if total and most / total > usual
    )


def _divergence(share: float, usual: float) -> float:
    """Return KL(share || usual) of two values in nats, for a share above the usual one."""
    rest = 0.0 if share == 1 else (1 - share) * math.log((1 - share) / (1 - usual))
    return share * math.log(share / usual) + rest


def _advertisement(raw: bytes, site: str) -> None:
    if len(raw) > messages.MAX_ADVERTISEMENT:
        raise OutgoingError(
            f"Expected an advertisement of at most {messages.MAX_ADVERTISEMENT} bytes, but got {len(raw)}."
        )
    slots = _slots(raw, "Advertisement", "slots", messages.ADVERTISED_SLOT)
    message = messages.Advertisement.from_bytes(raw, slots=slots)
    _only_form(message, raw)
    _check_own(message.name, site)
    _declaration(message.application, site)
    x509.load_der_x509_certificate(message.certificate)


def _confirmation(raw: bytes, site: str) -> None:
    slots = _slots(raw, "Confirmation", "hashes", messages.HASHED_SLOT)
    message = messages.Confirmation.from_bytes(raw, slots=slots)
    _only_form(message, raw)
    _check_own(message.name, site)
    _names([*message.boxes, *message.hashes])


def _masked(raw: bytes, site: str) -> None:
    message = messages.Masked.from_bytes(raw)
    _only_form(message, raw)
    _check_own(message.receipt.name, site)
    if not _PHASE.fullmatch(message.receipt.sum_id.phase):
        raise OutgoingError("Expected a phase's name in the receipt, but got something else.")
    for data, signed in ((message.update, message.receipt.update), (message.static, message.receipt.static)):
        if masked_hash(data, message.links) != signed:
            raise OutgoingError("Expected the term that the receipt was signed for, but got another one.")
        if not looks_masked(data):
            raise OutgoingError("Expected a masked term, but its bytes are not random: it is not masked.")
    if not looks_masked(message.links):
        raise OutgoingError("Expected links, which are random, but their bytes are not.")


def _agreement(raw: bytes, site: str) -> None:
    message = messages.Agreement.from_bytes(raw)
    _only_form(message, raw)
    _check_own(message.name, site)


def _reveal(raw: bytes, site: str) -> None:
    message = messages.Reveal.from_bytes(raw)
    _only_form(message, raw)
    _check_own(message.name, site)
    _names([*message.update, *message.static])


_SECURE: Mapping[str, Callable[[bytes, str], None]] = {
    "enroll": _advertisement,
    "confirm": _confirmation,
    "contribute": _masked,
    "agree": _agreement,
    "reveal": _reveal,
}


def _slots(raw: bytes, what: str, key: str, width: int) -> int:
    """Return the number of slots that a setup message covers, from the length of one of its parts."""
    value = reading.unpack(raw, what, lambda fields, _: fields)
    part = value.get(key)
    if isinstance(part, dict) and part:
        part = next(iter(part.values()))
    slots, rest = divmod(len(part) if isinstance(part, bytes) else 0, width)
    if rest or not 1 <= slots <= MAX_SLOTS:
        raise OutgoingError("Expected a whole number of slots, but got another length.")
    return slots


def _only_form(message: _Sized, raw: bytes) -> None:
    """Refuse another encoding of the same values: the choice between encodings could carry a message."""
    if message.to_bytes() != raw:
        raise OutgoingError("Expected the canonical form of this message, but got another one.")


def _check_own(name: str, site: str) -> None:
    if name != site:
        raise OutgoingError("Expected a message in this site's own name, but got another name.")


def _names(sites: Iterable[str]) -> None:
    names = list(sites)
    if len(names) > 2 * MAX_SITES or not all(_NAME.fullmatch(name) for name in names):
        raise OutgoingError("Expected names of sites, but got something else.")


def _declaration(raw: bytes, site: str) -> None:
    try:
        declared = Declaration.from_bytes(raw, site)
    except Exception:
        raise OutgoingError("Expected this site's declaration, but got something else.") from None
    _only_form(declared, raw)


def _plain_only(plain: bool) -> None:
    if not plain:
        raise OutgoingError("Expected a secure sum, as this site's policy requires, but got a plain answer.")


def _term(groups: object, max_bytes: int) -> dict[str, bytes]:
    if type(groups) is not dict or not set(groups) <= set(messages.GROUPS):
        raise OutgoingError("Expected the groups of a term, but got something else.")
    term = {group: _blob(data, max_bytes) for group, data in groups.items()}
    if sum(len(data) for data in term.values()) > max_bytes:
        raise OutgoingError(f"Expected at most {max_bytes} bytes, but got more.")
    return term


def _blob(value: object, most: int) -> bytes:
    if type(value) is not bytes:
        raise OutgoingError("Expected bytes, but got something else.")
    if len(value) > most:
        raise OutgoingError(f"Expected at most {most} bytes, but got {len(value)}.")
    return value
