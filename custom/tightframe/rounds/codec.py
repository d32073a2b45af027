"""Fixed-point encoding of a contribution's tensors as integers, and decoding of totals.

The order of steps at a silo is fixed: rescale to the norm, multiply by the weight, refuse values that are not
finite or exceed their bound, encode. Plain and secure sums share this encoding, so that a total does not
depend on the order of arrival and both agree bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from tightframe.errors import ContributionError
from tightframe.phases import Field, Group, Schema, Tensors, Totals
from tightframe.rounds.sums.plain import IntegerTotals, pack
from tightframe.securesum import encoding
from tightframe.securesum.messages import FieldSpec


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
        schema: of a phase.
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
