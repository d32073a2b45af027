"""What an answer of a silo may be, task by task; apart from the engine, so that it is plain to read.

Nothing here trusts who made the answer. A message is read by the protocol's own reader, must be the
only form of what was read, and must speak of this site. A term that claims to be masked must look
random: that finds a term that nobody masked, whatever else is right with it.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import numpy as np
from cryptography import x509

from tightframe.rounds.sums.common import SECURE
from tightframe.rounds.sums.declaration import Declaration
from tightframe.securesum import messages, reading
from tightframe.securesum.primitives import HASH_BYTES, KEY_BYTES
from tightframe.securesum.rules import MAX_SITES, MAX_SLOTS

DECLARATION, TERM = "declaration", "term"
CHANCE = 1e-18
"""How likely it is that a term which was masked is taken for one that was not."""
LANES = 4
_CHUNK = 2**22
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_PHASE = re.compile(r"[a-z_]{1,32}-[0-9]{1,4}")


class OutgoingError(Exception):
    """An answer is none of the protocol's; the text shows no value of it."""


class _Sized(Protocol):
    def to_bytes(self) -> bytes: ...


def checked(task: str, message: object, site: str, *, plain: bool, max_bytes: int) -> dict[str, Any]:
    """An answer of a task, built anew from its checked parts.

    Args:
        task: which it answers.
        message: what the executor wants to send.
        site: whose answer it is.
        plain: whether the site accepts plain sums, in which the server sees its term.
        max_bytes: the largest answer.

    Raises:
        OutgoingError: if it is anything else than an answer of that task.
    """
    if type(message) is not dict:
        raise OutgoingError("Expected a message, but got something else.")
    found = list(message)
    if task == "baseline" and not found:
        return {}
    if found == [SECURE] and task in _SECURE:
        raw = _blob(message[SECURE], max_bytes)
        try:
            _SECURE[task](raw, site)
        except OutgoingError:
            raise
        except Exception as error:  # of the protocol's readers, which show no values, and of others
            kind = type(error).__name__
            raise OutgoingError(f"Expected the protocol's message, but reading it gave {kind}.") from None
        return {SECURE: raw}
    if found == [DECLARATION] and task == "enroll":
        _plain_only(plain)
        raw = _blob(message[DECLARATION], messages.MAX_APPLICATION)
        _declaration(raw, site)
        return {DECLARATION: raw}
    if found == [TERM] and task == "contribute":
        _plain_only(plain)
        return {TERM: _term(message[TERM], max_bytes)}
    raise OutgoingError("Expected the answer of this task, but got other keys.")


def looks_masked(data: bytes) -> bool:
    """Whether bytes can be those of a masked term, every one of which is uniformly random.

    A term that nobody masked is small integers, whose high bytes are all zeros or all ones. So what is
    too frequent among n bytes is looked for: any of 256 values in one place of the 32-bit words, and
    those two in all places together. P(share of n >= q) <= exp(-n KL(q || p)) (Chernoff) for what has
    probability p; so a masked term is taken for another with a chance below 1e-18, whatever its length.
    Under about 40 bytes nothing can be told.

    >>> looks_masked(bytes(1000)), looks_masked(bytes(range(256)) * 8)
    (False, True)
    """
    counts = np.zeros((LANES, 256), np.int64)
    for start in range(0, len(data), _CHUNK):  # counting makes each byte eight
        chunk = np.frombuffer(data, np.uint8, min(_CHUNK, len(data) - start), start)
        for lane in range(LANES):
            counts[lane] += np.bincount(chunk[lane::LANES], minlength=256)
    found = [
        (most, total, 1 / 256)
        for most, total in zip(counts.max(axis=1).tolist(), counts.sum(axis=1).tolist(), strict=True)
    ]
    found.append((int(counts[:, 0].sum() + counts[:, 255].sum()), len(data), 2 / 256))
    limit = math.log((256 * LANES + 1) / CHANCE)
    return all(
        total * _divergence(most / total, usual) <= limit
        for most, total, usual in found
        if total and most / total > usual
    )


def _divergence(share: float, usual: float) -> float:
    """KL(share || usual) of two values in nats, for shares above the usual one."""
    rest = 0.0 if share == 1 else (1 - share) * math.log((1 - share) / (1 - usual))
    return share * math.log(share / usual) + rest


def _advertisement(raw: bytes, site: str) -> None:
    if len(raw) > messages.MAX_ADVERTISEMENT:
        raise OutgoingError("Expected an advertisement, but got more bytes than any has.")
    slots = _slots(raw, "Advertisement", "slots", len(messages.GROUPS) * (KEY_BYTES + HASH_BYTES))
    message = messages.Advertisement.from_bytes(raw, slots=slots)
    _only_form(message, raw)
    _own(message.name, site)
    _declaration(message.application, site)
    x509.load_der_x509_certificate(message.certificate)


def _confirmation(raw: bytes, site: str) -> None:
    width = len(messages.GROUPS) * len(messages.KINDS) * HASH_BYTES
    slots = _slots(raw, "Confirmation", "hashes", width)
    message = messages.Confirmation.from_bytes(raw, slots=slots)
    _only_form(message, raw)
    _own(message.name, site)
    _names([*message.boxes, *message.hashes])


def _masked(raw: bytes, site: str) -> None:
    message = messages.Masked.from_bytes(raw)
    _only_form(message, raw)
    _own(message.receipt.name, site)
    if not _PHASE.fullmatch(message.receipt.sum_id.phase):
        raise OutgoingError("Expected a phase's name in the receipt, but got something else.")
    for data, signed in ((message.update, message.receipt.update), (message.static, message.receipt.static)):
        if hashlib.sha256(data).digest() != signed:
            raise OutgoingError("Expected the term that the receipt was signed for, but got another one.")
        if not looks_masked(data):
            raise OutgoingError("Expected a masked term, but its bytes are not random: it is not masked.")


def _agreement(raw: bytes, site: str) -> None:
    message = messages.Agreement.from_bytes(raw)
    _only_form(message, raw)
    _own(message.name, site)


def _reveal(raw: bytes, site: str) -> None:
    message = messages.Reveal.from_bytes(raw)
    _only_form(message, raw)
    _own(message.name, site)
    _names([*message.update, *message.static])


_SECURE: Mapping[str, Callable[[bytes, str], None]] = {
    "enroll": _advertisement,
    "confirm": _confirmation,
    "contribute": _masked,
    "agree": _agreement,
    "reveal": _reveal,
}


def _slots(raw: bytes, what: str, key: str, width: int) -> int:
    """How many slots a message of the setup is for, from the length of one of its parts."""
    value = reading.unpack(raw, what, lambda found, _: found)
    part = value.get(key)
    if isinstance(part, dict) and part:
        part = next(iter(part.values()))
    slots, rest = divmod(len(part) if isinstance(part, bytes) else 0, width)
    if rest or not 1 <= slots <= MAX_SLOTS:
        raise OutgoingError("Expected a whole number of slots, but got another length.")
    return slots


def _only_form(message: _Sized, raw: bytes) -> None:
    """The same values can be written in more than one way, and which one was chosen would be a message."""
    if message.to_bytes() != raw:
        raise OutgoingError("Expected the one form of this message, but got another one.")


def _own(name: str, site: str) -> None:
    if name != site:
        raise OutgoingError("Expected a message in this site's own name, but it bears another one.")


def _names(found: Iterable[str]) -> None:
    names = list(found)
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


def _term(found: object, max_bytes: int) -> dict[str, bytes]:
    if type(found) is not dict or not set(found) <= set(messages.GROUPS):
        raise OutgoingError("Expected the groups of a term, but got something else.")
    term = {group: _blob(data, max_bytes) for group, data in found.items()}
    if sum(len(data) for data in term.values()) > max_bytes:
        raise OutgoingError(f"Expected at most {max_bytes} bytes, but got more.")
    return term


def _blob(found: object, most: int) -> bytes:
    if type(found) is not bytes:
        raise OutgoingError("Expected bytes, but got something else.")
    if len(found) > most:
        raise OutgoingError(f"Expected at most {most} bytes, but got {len(found)}.")
    return found
