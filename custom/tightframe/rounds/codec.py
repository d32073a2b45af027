"""Fixed-point encoding of a contribution's tensors as integers, and decoding of totals.

The order of steps at a silo is fixed: rescale to the norm, multiply by the weight, refuse values that are not
finite or exceed their bound, encode. Plain and secure sums share this encoding, so that a total does not
depend on the order of arrival and both agree bit for bit.

A term is the integers of a contribution, as two byte strings: the *update* group (changed by training) and
the *static* group (counts, evaluation).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from tightframe.errors import ContributionError
from tightframe.phases import RING_DTYPE, Field, Group, Schema, Tensors, Totals
from tightframe.securesum import encoding
from tightframe.securesum.messages import FieldSpec

Term = Mapping[Group, bytes]
IntegerTotals = Mapping[str, NDArray[np.unsignedinteger]]


def bits_of(item: Field, parties: int) -> int:
    """Return the fraction bits of a field's fixed-point encoding for a sum over ``parties`` silos."""
    most = encoding.fraction_bits(item.ring, item.effective_bound, parties)
    return most if item.bits is None else min(most, item.bits)


def specs(schema: Schema, parties: int) -> tuple[FieldSpec, ...]:
    """Return the fields in the form of the secure sum's protocol."""
    return tuple(
        FieldSpec(item.name, item.shape, item.ring, bits_of(item, parties), item.effective_bound, item.group)
        for item in schema.fields
    )


def check_schema(schema: Schema, parties: int) -> None:
    """Refuse a schema whose sum could wrap around its ring.

    Args:
        parties: number of silos.

    Raises:
        ContributionError: TF-404, naming the field.
    """
    for item in schema.fields:
        try:
            bits = bits_of(item, parties)
            encoding.check_no_wrap(item.ring, bits, item.effective_bound, parties)
        except encoding.EncodingError as error:
            raise ContributionError(f"field {item.name}: {error}", code=error.code) from None


def encode(schema: Schema, tensors: Tensors, *, share: float, parties: int) -> dict[Group, bytes]:
    """Encode one silo's term.

    Args:
        tensors: a tensor for every field, by name.
        share: the silo's public weight over the largest weight, in (0, 1].
        parties: number of silos enrolled; fixes the fraction bits of 32-bit fields.

    Returns:
        The integers of each group, as little-endian bytes.

    Raises:
        ContributionError: TF-401 not finite, TF-402 over its bound, TF-403 not as declared.
    """
    values = _as_float64(schema, tensors)
    _rescale(schema, values)
    arrays: dict[str, NDArray[np.unsignedinteger]] = {}
    for item in schema.fields:
        value = values.pop(item.name)
        if item.weighted:
            value = value * share
        try:
            arrays[item.name] = encoding.encode(
                value.reshape(-1),
                ring=item.ring,
                bits=bits_of(item, parties),
                bound=item.effective_bound,
                name=item.name,
            )
        except encoding.EncodingError as error:
            raise ContributionError(str(error), code=error.code, field=item.name) from None
    groups: tuple[Group, ...] = ("update", "static")
    return {group: pack(schema, group, arrays) for group in groups}


def pack(schema: Schema, group: Group, arrays: Mapping[str, NDArray[np.unsignedinteger]]) -> bytes:
    """Return one group's integers as little-endian bytes, fields in schema order."""
    return b"".join(
        arrays[item.name].astype(np.dtype(RING_DTYPE[item.ring]).newbyteorder("<"), copy=False).tobytes()
        for item in schema.group(group)
    )


def unpack(schema: Schema, group: Group, data: bytes) -> dict[str, NDArray[np.unsignedinteger]]:
    """Invert ``pack``; the arrays are flat, read-only views of ``data``.

    Raises:
        ContributionError: TF-403 if the length is not the schema's.
    """
    expected = sum(item.bytes for item in schema.group(group))
    if len(data) != expected:
        raise ContributionError(
            f"Expected {expected} bytes for the {group} group, but got {len(data)}; "
            "the silo runs another job configuration or package version."
        )
    arrays: dict[str, NDArray[np.unsignedinteger]] = {}
    offset = 0
    for item in schema.group(group):
        dtype = np.dtype(RING_DTYPE[item.ring]).newbyteorder("<")
        arrays[item.name] = np.frombuffer(data, dtype, count=item.size, offset=offset)
        offset += item.bytes
    return arrays


def integer_totals(schema: Schema, groups: Mapping[Group, bytes]) -> IntegerTotals:
    """Return the integer total of every field of the groups that were opened, each in its field's shape.

    Raises:
        ContributionError: TF-403 if a group does not have the schema's size.
    """
    shapes = {item.name: item.shape for item in schema.fields}
    return {
        name: total.reshape(shapes[name])
        for group, data in groups.items()
        for name, total in unpack(schema, group, data).items()
    }


def decode(schema: Schema, totals: IntegerTotals, *, parties: int) -> Totals:
    """Decode the totals that were opened: float64, by field name, in each field's shape."""
    return {
        item.name: encoding.decode(totals[item.name], ring=item.ring, bits=bits_of(item, parties))
        for item in schema.fields
        if item.name in totals
    }


def _as_float64(schema: Schema, tensors: Tensors) -> dict[str, NDArray[np.float64]]:
    expected = {item.name: item.shape for item in schema.fields}
    if set(tensors) != set(expected):
        missing, strange = sorted(set(expected) - set(tensors)), sorted(set(tensors) - set(expected))
        raise ContributionError(
            f"Expected exactly the fields of the schema, but {missing[:5]} are missing "
            f"and {strange[:5]} are unknown."
        )
    values: dict[str, NDArray[np.float64]] = {}
    for name, shape in expected.items():
        array = np.asarray(tensors[name].detach().cpu().numpy(), dtype=np.float64)
        if array.shape != shape:
            raise ContributionError(f"Expected field {name} of shape {shape}, but got {array.shape}.")
        values[name] = array
    return values


def _rescale(schema: Schema, values: dict[str, NDArray[np.float64]]) -> None:
    """Scale all fields with a norm, in place and together, until they are within it and their bounds."""
    normed: Mapping[str, float] = {item.name: item.norm for item in schema.fields if item.norm is not None}
    if not normed:
        return
    limits = set(normed.values())
    if len(limits) != 1:
        raise ContributionError(f"Expected one norm for all fields of a phase, but got {sorted(limits)}.")
    limit = limits.pop()
    if not all(np.isfinite(values[name]).all() for name in normed):
        return  # `encode` refuses the field by name
    length = math.sqrt(math.fsum(float(np.vdot(values[name], values[name])) for name in normed))
    factor = limit / length if length > limit else 1.0
    for name in normed:
        bound, largest = schema[name].bound, float(np.abs(values[name]).max(initial=0.0))
        if largest * factor > bound:
            factor = bound / largest * (1 - 2.0**-50)  # so that no rounding lifts it over the bound again
    if factor < 1.0:
        for name in normed:
            values[name] = values[name] * factor
