"""Fixed-point encoding of real numbers in a ring, so that a sum does not depend on the order of its terms.

A value x is encoded as ``q = rint(x * 2**f) mod 2**w`` in a ring of w = 32 or 64 bits with f
fraction bits. Terms are added modulo ``2**w``; the total of n terms is read back as a signed
integer and divided by ``2**f``. Each term is rounded once, so the decoded total is within
``n * 2**-(f + 1)`` of the sum of the values. (Where a 64-bit total reaches ``2**53`` units,
reading it into a float64 rounds it once more, to the nearest representable number.)

The total is correct only if no sum can wrap around: ``n * (bound * 2**f + 1 + noise tail)`` must stay
below ``2**(w - 1)``. This is checked in exact arithmetic, because these numbers need more than the 53
bits in which float64 is exact.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

RingArray: TypeAlias = NDArray[np.unsignedinteger[Any]]

FRACTION_BITS_64 = 24
"""Fraction bits of the 64-bit ring."""

# Beyond this, 2**f or 2**-f would leave the normal range of float64 and scaling would not be exact.
_MAX_FRACTION_BITS = 960
_CHUNK = 1 << 15
"""Values encoded at a time, so that the intermediate arrays stay in the processor's cache."""
_UNSIGNED: dict[int, type[np.uint32] | type[np.uint64]] = {32: np.uint32, 64: np.uint64}
_SIGNED: dict[int, type[np.int32] | type[np.int64]] = {32: np.int32, 64: np.int64}


class EncodingError(Exception):
    """Base of this module's errors; ``code`` may leave the site, the message may not."""

    code: str


class NotFiniteError(EncodingError):
    """A value is NaN or infinite (TF-401)."""

    code = "TF-401"


class OverBoundError(EncodingError):
    """A value is larger than its field's bound (TF-402)."""

    code = "TF-402"


class RingOverflowError(EncodingError):
    """A sum could wrap around its ring (TF-404)."""

    code = "TF-404"


def fraction_bits(ring: int, bound: float, parties: int) -> int:
    """Return the fraction bits f for values up to ``bound`` in a sum over ``parties`` terms.

    24 for the 64-bit ring. For the 32-bit ring the largest f for which the sum cannot wrap, which is
    ``floor(log2((2**31 / parties - 1) / bound))``; if that quotient is exactly a power of two, one bit
    less, because the inequality of ``check_no_wrap`` is strict.

    >>> fraction_bits(64, 1e6, 100), fraction_bits(32, 1.0, 100), fraction_bits(32, 8.0, 6)
    (24, 24, 25)

    Raises:
        RingOverflowError: TF-404, if not even 1 fraction bit fits.
        ValueError: if an argument is out of range.
    """
    return _fraction_bits(ring, bound, parties)


@lru_cache(maxsize=4096, typed=True)
def _fraction_bits(ring: int, bound: float, parties: int) -> int:
    """Compute them once for a field: exact fractions take time, and each exchange asks again."""
    _check_arguments(ring, bound, parties)
    if ring == 64:
        check_no_wrap(ring, FRACTION_BITS_64, bound, parties)
        return FRACTION_BITS_64
    limit = (Fraction(2**31, parties) - 1) / Fraction(bound)
    bits = min(_floor_log2_below(limit), _MAX_FRACTION_BITS) if limit > 0 else 0
    if bits < 1:
        raise RingOverflowError(
            f"Expected a sum of {parties} terms with bound {bound:g} to leave at least 1 fraction bit "
            f"in the {ring}-bit ring, but got {bits}; lower the bound or use the 64-bit ring."
        )
    return bits


def check_no_wrap(ring: int, bits: int, bound: float, parties: int, noise_tail: int = 0) -> None:
    """Refuse a sum that could wrap around its ring.

    Args:
        ring: 32 or 64.
        bits: fraction bits f.
        bound: largest absolute value of a term.
        parties: number of terms.
        noise_tail: largest noise that a term may carry, in integer units of the ring.

    Raises:
        RingOverflowError: TF-404, unless ``parties * (bound * 2**bits + 1 + noise_tail) < 2**(ring - 1)``.
        ValueError: if an argument is out of range.
    """
    _check_arguments(ring, bound, parties)
    if not 0 <= bits <= _MAX_FRACTION_BITS:
        raise ValueError(f"Expected argument `bits` to be from 0 to {_MAX_FRACTION_BITS}, but got {bits}.")
    if noise_tail < 0:
        raise ValueError(f"Expected argument `noise_tail` to be at least 0, but got {noise_tail}.")
    largest = parties * (Fraction(bound) * 2**bits + 1 + noise_tail)
    if largest >= 2 ** (ring - 1):
        # As an integer, because the number may exceed the largest float.
        reached = math.log2(math.floor(largest))
        raise RingOverflowError(
            f"Expected a sum of {parties} terms with bound {bound:g}, {bits} fraction bits and noise tail "
            f"{noise_tail} to stay below 2**{ring - 1}, but it could reach 2**{reached:.2f}; "
            "lower the bound or use a larger ring."
        )


def encode(values: NDArray[np.float64], *, ring: int, bits: int, bound: float, name: str) -> RingArray:
    """Encode values as ``rint(values * 2**bits) mod 2**ring``, halves rounded to even.

    Scaling by a power of two is exact in float64 and so is ``rint``, hence a value is rounded once.

    Args:
        values: float64, any shape.
        ring: 32 or 64.
        bits: fraction bits f.
        bound: largest absolute value that is accepted.
        name: the field's name, for messages.

    Returns:
        uint32 or uint64 array of the same shape.

    Raises:
        NotFiniteError: TF-401, if a value is NaN or infinite.
        OverBoundError: TF-402, if an absolute value is larger than ``bound``.
        RingOverflowError: TF-404, if even one term could leave the ring.
        TypeError: if ``values`` are not float64, because a conversion here could silently lose digits.
    """
    if values.dtype != np.float64:
        raise TypeError(f"Expected field `{name}` as a float64 array, but got {values.dtype}.")
    check_no_wrap(ring, bits, bound, 1)
    flat, out = values.reshape(-1), np.empty(values.size, _UNSIGNED[ring])
    scaled, whole = np.empty(min(_CHUNK, values.size)), np.empty(min(_CHUNK, values.size), np.int64)
    for start in range(0, values.size, _CHUNK):
        part = flat[start : start + _CHUNK]
        # A NaN makes both extremes NaN, so two comparisons are enough in the usual case.
        low, high = float(part.min()), float(part.max())
        if not (-bound <= low and high <= bound):
            raise _value_error(values, bound, name)
        np.multiply(part, 2.0**bits, out=scaled[: part.size])
        np.rint(scaled[: part.size], out=scaled[: part.size])
        # By check_no_wrap every |scaled| < 2**(ring - 1), so that the conversion to int64 is exact; the
        # conversion to an unsigned type is then, by definition, the remainder modulo 2**ring.
        whole[: part.size] = scaled[: part.size]
        np.copyto(out[start : start + _CHUNK], whole[: part.size], casting="unsafe")
    return out.reshape(values.shape)


def _value_error(values: NDArray[np.float64], bound: float, name: str) -> EncodingError:
    """Return the error for values of which some are not finite, or else over their bound."""
    not_finite = values.size - int(np.count_nonzero(np.isfinite(values)))
    if not_finite:
        return NotFiniteError(
            f"Expected field `{name}` to be finite, but got {not_finite} of {values.size} values "
            "that are NaN or infinite."
        )
    over = int(np.count_nonzero(np.abs(values) > bound))
    return OverBoundError(
        f"Expected the absolute values of field `{name}` to be at most {bound:g}, but got {over} "
        f"of {values.size} values that are larger."
    )


def decode(total: RingArray, *, ring: int, bits: int) -> NDArray[np.float64]:
    """Decode a total of encoded terms, signed integers in units of ``2**-bits``, to float64.

    >>> decode(np.array([2**32 - 3, 3], dtype=np.uint32), ring=32, bits=1).tolist()
    [-1.5, 1.5]

    Raises:
        TypeError: if ``total`` is not an array of the ring's unsigned type.
    """
    expected = np.dtype(_UNSIGNED[_check_ring(ring)])
    if total.dtype != expected:
        raise TypeError(f"Expected argument `total` to be a {expected} array, but got {total.dtype}.")
    values: NDArray[np.float64] = total.view(_SIGNED[ring]).astype(np.float64)
    values *= 2.0**-bits
    return values


def add_into(accumulator: RingArray, term: RingArray) -> None:
    """Add a term to an accumulator in place, modulo the ring.

    Raises:
        TypeError: if the two are not of the same unsigned type.
        ValueError: if their shapes differ, because broadcasting would add a term more than once.
    """
    if accumulator.dtype not in (np.uint32, np.uint64) or term.dtype != accumulator.dtype:
        raise TypeError(
            "Expected accumulator and term both to be uint32 or both uint64, "
            f"but got {accumulator.dtype} and {term.dtype}."
        )
    if term.shape != accumulator.shape:
        raise ValueError(f"Expected a term of shape {accumulator.shape}, but got {term.shape}.")
    np.add(accumulator, term, out=accumulator)


def _check_ring(ring: int) -> int:
    if ring not in _UNSIGNED:
        raise ValueError(f"Expected argument `ring` to be 32 or 64, but got {ring}.")
    return ring


def _check_arguments(ring: int, bound: float, parties: int) -> None:
    _check_ring(ring)
    if not (math.isfinite(bound) and bound > 0):
        raise ValueError(f"Expected argument `bound` to be positive and finite, but got {bound}.")
    if parties < 1:
        raise ValueError(f"Expected argument `parties` to be at least 1, but got {parties}.")


def _floor_log2_below(limit: Fraction) -> int:
    """Return the largest integer f with ``2**f < limit``, for ``limit`` > 0."""
    numerator, denominator = limit.numerator, limit.denominator
    exponent = numerator.bit_length() - denominator.bit_length()
    # 2**(exponent - 1) < limit < 2**(exponent + 1)
    return exponent if Fraction(2) ** exponent < limit else exponent - 1
