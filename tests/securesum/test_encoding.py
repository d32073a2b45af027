"""The oracle is arithmetic on Python's own integers and fractions, which never round or wrap."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tightframe.securesum import encoding

RINGS = st.sampled_from([32, 64])
PARTIES = st.integers(1, 250)
BOUNDS = st.floats(1e-6, 1e5)


@pytest.fixture(autouse=True, scope="module")
def _no_silent_overflow() -> Iterator[None]:
    with warnings.catch_warnings(), np.errstate(all="raise", under="ignore"):
        warnings.simplefilter("error")
        yield


def centred(value: int, ring: int) -> int:
    value %= 2**ring
    return value - 2**ring if value >= 2 ** (ring - 1) else value


def rounded(value: float, bits: int) -> int:
    return round(Fraction(value) * 2**bits)  # exact, halves to even


@st.composite
def cohorts(draw: st.DrawFn) -> tuple[int, float, np.ndarray]:
    """(ring, bound, values (parties, size)), with the extremes at the bound well represented."""
    ring, parties, bound = draw(RINGS), draw(PARTIES), draw(BOUNDS)
    if ring == 32:
        bound = min(bound, (2**31 / parties - 1) / 2)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    values = rng.uniform(-bound, bound, (parties, 5))
    values[:, 0], values[:, 1], values[:, 2] = bound, -bound, np.nextafter(bound, 0)
    return ring, bound, values


@pytest.mark.many
@given(cohorts())
def test_sum_is_pythons_integer_sum_and_within_the_stated_error(
    case: tuple[int, float, np.ndarray],
) -> None:
    ring, bound, values = case
    parties = len(values)
    bits = encoding.fraction_bits(ring, bound, parties)
    encoding.check_no_wrap(ring, bits, bound, parties)
    total = np.zeros(values.shape[1], np.uint32 if ring == 32 else np.uint64)
    for row in values:
        encoding.add_into(total, encoding.encode(row, ring=ring, bits=bits, bound=bound, name="x"))

    integers = [sum(rounded(float(x), bits) for x in column) for column in values.T]
    assert [int(q) for q in total] == [q % 2**ring for q in integers]
    assert [centred(int(q), ring) for q in total] == integers

    decoded = encoding.decode(total, ring=ring, bits=bits)
    assert decoded.tolist() == [float(Fraction(q, 2**bits)) for q in integers]
    for got, column in zip(decoded, values.T, strict=True):
        exact = sum((Fraction(float(x)) for x in column), Fraction(0))
        reading = Fraction(math.ulp(float(got))) / 2 if abs(got) * 2.0**bits >= 2.0**53 else 0
        assert abs(Fraction(float(got)) - exact) <= Fraction(parties, 2 ** (bits + 1)) + reading


@given(st.floats(-1e6, 1e6), RINGS)
def test_round_trip_of_one_value(value: float, ring: int) -> None:
    bound = 1e6
    bits = encoding.fraction_bits(ring, bound, 1)
    encoded = encoding.encode(np.array([value]), ring=ring, bits=bits, bound=bound, name="x")
    assert abs(encoding.decode(encoded, ring=ring, bits=bits)[0] - value) <= 2.0 ** -(bits + 1)


@given(PARTIES, st.floats(1e-9, 2e6))
def test_fraction_bits_are_the_most_that_cannot_wrap(parties: int, bound: float) -> None:
    limit = (Fraction(2**31, parties) - 1) / Fraction(bound)
    if limit <= 2:
        with pytest.raises(encoding.RingOverflowError):
            encoding.fraction_bits(32, bound, parties)
        return
    bits = encoding.fraction_bits(32, bound, parties)
    encoding.check_no_wrap(32, bits, bound, parties)
    with pytest.raises(encoding.RingOverflowError):
        encoding.check_no_wrap(32, bits + 1, bound, parties)


@pytest.mark.many
@pytest.mark.parametrize("parties", range(1, 251))
def test_fraction_bits_of_the_specification(parties: int) -> None:
    assert encoding.fraction_bits(64, 1e6, parties) == 24
    for bound in (1.0, 8.0, 3.3, 1 + 2.0**-10):
        assert encoding.fraction_bits(32, bound, parties) == math.floor(
            math.log2((2**31 / parties - 1) / bound)
        )


def test_a_quotient_that_is_a_power_of_two_loses_one_bit() -> None:
    bound = (2**31 - 1) / 4  # exact in float64, so that (2**31 - 1) / bound is 4
    assert encoding.fraction_bits(32, bound, 1) == 1
    with pytest.raises(encoding.RingOverflowError):
        encoding.check_no_wrap(32, 2, bound, 1)


def test_no_wrap_is_exact_beyond_the_53_bits_of_float64() -> None:
    # (2**39 - 2**-24) * 2**24 + 1 is 2**63 in exact arithmetic, where float64 sees 2**63 either way.
    largest = float(np.nextafter(2.0**39, 0))  # 2**39 - 2**-14
    encoding.check_no_wrap(64, 24, largest, 1)
    encoding.check_no_wrap(64, 24, largest, 1, noise_tail=2**10 - 2)
    with pytest.raises(encoding.RingOverflowError):
        encoding.check_no_wrap(64, 24, largest, 1, noise_tail=2**10 - 1)
    with pytest.raises(encoding.RingOverflowError):
        encoding.check_no_wrap(64, 24, 2.0**39, 1)


def test_extremes_of_the_64_bit_ring() -> None:
    bound = float(np.nextafter(2.0**39, 0))
    values = np.array([bound, -bound, np.nextafter(bound, 0), 0.0, -0.0, 2.0**-25, 3 * 2.0**-25, 5e-324])
    encoded = encoding.encode(values, ring=64, bits=24, bound=bound, name="x")
    expected = [rounded(float(x), 24) for x in values]
    assert [centred(int(q), 64) for q in encoded] == expected
    assert expected[5:] == [0, 2, 0]  # halves go to the even neighbour
    assert encoding.decode(encoded, ring=64, bits=24)[:3].tolist() == values[:3].tolist()


@pytest.mark.parametrize("ring", [32, 64])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)])
def test_shapes_and_types_are_kept(ring: int, shape: tuple[int, ...]) -> None:
    values = np.full(shape, -1.5)
    encoded = encoding.encode(values, ring=ring, bits=10, bound=2.0, name="x")
    assert encoded.shape == shape
    assert encoded.dtype == f"uint{ring}"
    total = np.zeros_like(encoded)
    encoding.add_into(total, encoded)
    decoded = encoding.decode(total, ring=ring, bits=10)
    assert decoded.dtype == np.float64
    np.testing.assert_array_equal(decoded, values)
    assert np.all(values == -1.5)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("ring", [32, 64])
def test_what_is_not_finite_is_refused(bad: float, ring: int) -> None:
    with pytest.raises(encoding.NotFiniteError, match=r"model/head\.weight.*1 of 3") as caught:
        encoding.encode(np.array([0.0, bad, 9.0]), ring=ring, bits=4, bound=1.0, name="model/head.weight")
    assert caught.value.code == "TF-401"


@pytest.mark.parametrize("sign", [1, -1])
def test_over_the_bound_is_refused_without_telling_the_value(sign: int) -> None:
    just_over = float(np.nextafter(8.0, 9.0))
    encoding.encode(np.array([sign * 8.0]), ring=32, bits=20, bound=8.0, name="x")
    with pytest.raises(encoding.OverBoundError, match=r"`x`.*at most 8.*1 of 2") as caught:
        encoding.encode(np.array([sign * just_over, 0.0]), ring=32, bits=20, bound=8.0, name="x")
    assert caught.value.code == "TF-402"
    with pytest.raises(encoding.OverBoundError) as caught:
        encoding.encode(np.array([sign * 12345.678]), ring=32, bits=20, bound=8.0, name="x")
    assert "12345" not in str(caught.value)


def test_a_ring_that_could_wrap_is_refused() -> None:
    for call in (
        lambda: encoding.fraction_bits(32, 1e9, 6),
        lambda: encoding.fraction_bits(32, 2.0**40, 1),
        lambda: encoding.fraction_bits(32, 1.0, 2**31),
        lambda: encoding.fraction_bits(64, 2.0**38, 2),
        lambda: encoding.check_no_wrap(32, 24, 1.0, 128),
        lambda: encoding.check_no_wrap(32, 24, 1.0, 100, noise_tail=2**23),
        lambda: encoding.encode(np.zeros(1), ring=32, bits=31, bound=1.0, name="x"),
    ):
        with pytest.raises(encoding.RingOverflowError) as caught:
            call()
        assert caught.value.code == "TF-404"
        assert isinstance(caught.value, encoding.EncodingError)
    encoding.check_no_wrap(32, 24, 1.0, 100, noise_tail=2**22)


def test_tiny_bounds_stay_in_the_range_of_float64() -> None:
    bits = encoding.fraction_bits(32, 1e-300, 6)
    encoded = encoding.encode(np.array([1e-300]), ring=32, bits=bits, bound=1e-300, name="x")
    assert encoding.decode(encoded, ring=32, bits=bits)[0] == pytest.approx(1e-300, abs=2.0 ** -(bits + 1))


@pytest.mark.parametrize(
    ("ring", "bound", "parties"),
    [(16, 1.0, 3), (32, 0.0, 3), (32, -1.0, 3), (64, math.nan, 3), (64, math.inf, 3), (64, 1.0, 0)],
)
def test_senseless_arguments(ring: int, bound: float, parties: int) -> None:
    with pytest.raises(ValueError, match="Expected argument"):
        encoding.fraction_bits(ring, bound, parties)
    with pytest.raises(ValueError, match="Expected argument"):
        encoding.check_no_wrap(ring, 4, bound, parties)


def test_senseless_bits_noise_and_types() -> None:
    with pytest.raises(ValueError, match="`bits`"):
        encoding.check_no_wrap(64, -1, 1.0, 3)
    with pytest.raises(ValueError, match="`noise_tail`"):
        encoding.check_no_wrap(64, 24, 1.0, 3, noise_tail=-1)
    with pytest.raises(TypeError, match="float64"):
        encoding.encode(np.zeros(2, np.float32), ring=64, bits=24, bound=1.0, name="x")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="uint32"):
        encoding.decode(np.zeros(2, np.uint64), ring=32, bits=4)
    with pytest.raises(ValueError, match="`ring`"):
        encoding.decode(np.zeros(2, np.uint64), ring=16, bits=4)


def test_adding_wraps_silently_and_takes_read_only_terms() -> None:
    for dtype, top in ((np.uint32, 2**32 - 1), (np.uint64, 2**64 - 1)):
        total = np.array([top, 5], dtype)
        term = np.frombuffer(np.array([3, 1], dtype).tobytes(), dtype)
        encoding.add_into(total, term)
        assert total.tolist() == [2, 6]
    with pytest.raises(TypeError, match="uint64"):
        encoding.add_into(np.zeros(2, np.uint64), np.zeros(2, np.uint32))
    with pytest.raises(TypeError, match="int64"):
        encoding.add_into(np.zeros(2, np.int64), np.zeros(2, np.int64))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="shape"):
        encoding.add_into(np.zeros((2, 2), np.uint64), np.zeros(2, np.uint64))
