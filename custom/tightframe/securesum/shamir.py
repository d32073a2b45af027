"""Shamir's secret sharing, byte by byte over GF(2^8).

Every byte of a secret is the value at zero of its own polynomial of degree t - 1 with random
coefficients; holder i has the values at x = i + 1. Any t shares give the secret; t - 1 shares are
uniform, whatever the secret is (Shamir, How to Share a Secret, CACM 1979). The field is that of AES,
with the polynomial x^8 + x^4 + x^3 + x + 1.

Splitting and recovering are both the product of a public matrix (powers of the holders' points, or
Lagrange coefficients) with secret vectors. A vector's eight multiples by 1, 2, 4, ... 128 are
computed by shifts and XOR, eight bytes at a time, and the bits of the matrix select which of them
are added. So no branch, no address and no table look-up depends on a secret byte; tables of
logarithms are used for the public matrix only. Constant time is still not claimed, because it is
not guaranteed for the instructions that numpy's loops are compiled to.

Shares have no checksum of their own: the protocol compares each with a hash that its dealer signed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tightframe.securesum.primitives import Random

MAX_HOLDERS = 255
"""Points of the field other than zero, where the secret is."""
MIN_THRESHOLD = 2
"""Smallest t: with a threshold of 1 every share would be the secret itself."""

Bytes = NDArray[np.uint8]
Words = NDArray[np.uint64]

_MODULUS = 0x11B
_COLUMNS = 256
"""Words of each vector processed at a time, so that all multiples stay in the processor's cache."""

_HIGH_BIT = np.uint64(7)
_ONE = np.uint64(1)
_EACH_BYTE = np.uint64(0x0101010101010101)
_BELOW_HIGH_BIT = np.uint64(0x7F7F7F7F7F7F7F7F)
_REDUCTION = np.uint64(_MODULUS & 0xFF)


def split(secret: bytes, *, threshold: int, holders: int, random: Random) -> list[bytes]:
    """Split one secret into shares; share i is the value at x = i + 1.

    >>> import os
    >>> shares = split(b"secret", threshold=3, holders=5, random=os.urandom)
    >>> recover({4: shares[4], 0: shares[0], 2: shares[2]}, threshold=3)
    b'secret'

    Args:
        secret: at least one byte.
        threshold: t, shares that give the secret, from 2.
        holders: shares to make, from t to 255.
        random: source of the coefficients.

    Raises:
        ValueError: if an argument is out of range.
    """
    secrets = np.frombuffer(secret, np.uint8).reshape(1, -1)
    shares = split_many(secrets, threshold=threshold, holders=holders, random=random)
    return [share.tobytes() for share in shares]


def split_many(secrets: Bytes, *, threshold: int, holders: int, random: Random) -> Bytes:
    """Split many secrets of one length, each with coefficients of its own.

    Args:
        secrets: (m, L).
        threshold: t, shares that give a secret, from 2.
        holders: shares to make of each, from t to 255.
        random: source of the coefficients; called once, for ``(t - 1) * m * L`` bytes.

    Returns:
        (holders, m, L).

    Raises:
        ValueError: if an argument is out of range, or ``random`` returns another number of bytes.
    """
    if not MIN_THRESHOLD <= threshold <= holders <= MAX_HOLDERS:
        raise ValueError(
            f"Expected {MIN_THRESHOLD} <= `threshold` <= `holders` <= {MAX_HOLDERS}, "
            f"but got {threshold} and {holders}."
        )
    _check_array(secrets, "secrets", dimensions=2)
    size = secrets.size
    # The leading coefficient may be zero: if it could not, t - 1 shares would rule one secret out.
    coefficients = np.frombuffer(random((threshold - 1) * size), np.uint8)
    if coefficients.size != (threshold - 1) * size:
        raise ValueError(
            f"Expected argument `random` to give {(threshold - 1) * size} bytes, but got {coefficients.size}."
        )
    polynomials = np.concatenate([secrets.reshape(1, size), coefficients.reshape(-1, size)])
    shares = _product(_powers(holders, threshold), polynomials)
    return shares.reshape(holders, *secrets.shape)


def recover(shares: Mapping[int, bytes], *, threshold: int) -> bytes:
    """Recover a secret from the ``threshold`` shares of the lowest indices.

    Args:
        shares: holder's index, from 0 -> its share.
        threshold: t of the splitting.

    Raises:
        ValueError: if there are fewer shares, or indices or lengths are invalid. Shares that are wrong,
            or of another t, give a wrong secret and no error.
    """
    if not MIN_THRESHOLD <= threshold <= len(shares):
        raise ValueError(
            f"Expected argument `threshold` to be from {MIN_THRESHOLD} to the {len(shares)} shares given, "
            f"but got {threshold}."
        )
    lengths = {len(share) for share in shares.values()}
    if len(lengths) > 1:
        raise ValueError(f"Expected shares of one length, but got {sorted(lengths)}.")
    used = sorted(shares)[:threshold]
    rows = np.frombuffer(b"".join(shares[index] for index in used), np.uint8)
    return recover_many(used, rows.reshape(threshold, 1, -1)).tobytes()


def recover_many(indices: Sequence[int], shares: Bytes) -> Bytes:
    """Recover many secrets from the shares of the same holders, using all of them.

    Args:
        indices: the holders' indices, from 0; as many as t of the splitting, or more.
        shares: (len(indices), m, L).

    Returns:
        (m, L).

    Raises:
        ValueError: if indices repeat or are out of range, or the shapes do not fit. Shares that are
            wrong, or fewer than t, give wrong secrets and no error.
    """
    _check_array(shares, "shares", dimensions=3)
    if not MIN_THRESHOLD <= len(indices) == len(shares):
        raise ValueError(
            f"Expected one share of each of at least {MIN_THRESHOLD} holders, "
            f"but got {len(indices)} indices and {len(shares)} shares."
        )
    if len(set(indices)) < len(indices) or not all(0 <= index < MAX_HOLDERS for index in indices):
        raise ValueError(f"Expected distinct indices from 0 to {MAX_HOLDERS - 1}, but got {list(indices)}.")
    weights = _weights_at_zero(np.array(indices) + 1)
    return _product(weights.reshape(1, -1), shares.reshape(len(indices), -1)).reshape(shares.shape[1:])


def _check_array(values: Bytes, name: str, *, dimensions: int) -> None:
    if values.dtype != np.uint8 or values.ndim != dimensions or not values.size:
        raise ValueError(
            f"Expected argument `{name}` to be a uint8 array of {dimensions} dimensions that is not empty, "
            f"but got {values.dtype} of shape {values.shape}."
        )


def _product(matrix: Bytes, vectors: Bytes) -> Bytes:
    """Multiply a public matrix (r, k) by secret vectors (k, size) over GF(2^8): (r, size)."""
    count, size = vectors.shape
    padded = np.zeros((count, -(-size // 8)), np.uint64)
    padded.view(np.uint8)[:, :size] = vectors
    bits = np.unpackbits(matrix[:, :, None], axis=2, bitorder="little").reshape(len(matrix), -1)
    selected = [np.flatnonzero(row) for row in bits]
    result = np.empty((len(matrix), padded.shape[1]), np.uint64)
    for start in range(0, padded.shape[1], _COLUMNS):
        columns = slice(start, start + _COLUMNS)
        multiples = _multiples(padded[:, columns])
        for row, terms in zip(result[:, columns], selected, strict=True):
            np.bitwise_xor.reduce(multiples[terms], axis=0, out=row)
    return result.view(np.uint8)[:, :size]


def _multiples(vectors: Words) -> Words:
    """Multiply each of (k, words) by 1, 2, 4, ... 128, byte by byte: (8k, words)."""
    multiples = np.empty((len(vectors), 8, vectors.shape[1]), np.uint64)
    multiples[:, 0] = vectors
    for bit in range(1, 8):
        last = multiples[:, bit - 1]
        # The bit that is shifted out of a byte is reduced by the field's polynomial.
        carry = (last >> _HIGH_BIT) & _EACH_BYTE
        multiples[:, bit] = ((last & _BELOW_HIGH_BIT) << _ONE) ^ (carry * _REDUCTION)
    return multiples.reshape(-1, vectors.shape[1])


def _exponentials() -> Bytes:
    """Return the powers of 3, a generator of the field: entry i is 3^i, for i from 0 to 254."""
    powers, value = np.empty(MAX_HOLDERS, np.uint8), 1
    for exponent in range(MAX_HOLDERS):
        powers[exponent] = value
        value ^= value << 1
        value ^= _MODULUS if value & 0x100 else 0
    return powers


_EXP = _exponentials()
_LOG = np.zeros(256, np.int64)
_LOG[_EXP] = np.arange(MAX_HOLDERS)


@lru_cache(maxsize=8)
def _powers(holders: int, threshold: int) -> Bytes:
    """Return x^k for x = 1 to holders, (holders, threshold); by tables, because it is public."""
    logs = _LOG[1 : holders + 1, None] * np.arange(threshold)
    powers: Bytes = _EXP[logs % MAX_HOLDERS]
    powers.flags.writeable = False
    return powers


def _weights_at_zero(points: NDArray[np.int64]) -> Bytes:
    """Return the Lagrange coefficients, the product over j != i of x_j / (x_j - x_i) for each i; public."""
    differences = points[:, None] ^ points[None, :]
    # The table's logarithm of zero, on the diagonal, is that of one, so that i itself drops out.
    logs = _LOG[points].sum() - _LOG[points] - _LOG[differences].sum(axis=1)
    weights: Bytes = _EXP[logs % MAX_HOLDERS]
    return weights
