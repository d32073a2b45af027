"""The oracle is polynomial arithmetic on Python integers: no tables, no words of eight bytes."""

from __future__ import annotations

import functools
import itertools
import os
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tightframe.securesum import shamir
from tightframe.securesum.primitives import Random
from tightframe.securesum.shamir import recover, recover_many, split, split_many


def carryless(a: int, b: int) -> int:
    """Multiply polynomials over GF(2) column by column, then divide by that of AES, digit by digit."""
    product = 0
    for i, j in itertools.product(range(8), repeat=2):
        product ^= ((a >> i) & (b >> j) & 1) << (i + j)
    for degree in range(14, 7, -1):
        if product >> degree & 1:
            product ^= 0b100011011 << (degree - 8)
    return product


@functools.cache
def all_products() -> list[list[int]]:
    """Of every two bytes; not made on import, which every process of tests does, for a second."""
    return [[carryless(a, b) for b in range(256)] for a in range(256)]


@functools.cache
def inverses() -> list[int]:
    return [0] + [row.index(1) for row in all_products()[1:]]


def value_at(coefficients: list[int], x: int) -> int:
    """Sum of c_k x^k, each power by itself."""
    total = 0
    for degree, coefficient in enumerate(coefficients):
        for _ in range(degree):
            coefficient = all_products()[coefficient][x]
        total ^= coefficient
    return total


def interpolated(points: dict[int, int]) -> int:
    """The value at zero of the polynomial through (x, y), by Newton's divided differences."""
    xs = list(points)
    table = [points[x] for x in xs]
    for step in range(1, len(xs)):
        for row in range(len(xs) - 1, step - 1, -1):
            difference = xs[row] ^ xs[row - step]
            table[row] = all_products()[table[row] ^ table[row - 1]][inverses()[difference]]
    total = 0
    for row in range(len(xs) - 1, -1, -1):
        total = all_products()[total][xs[row]] ^ table[row]
    return total


def fixed(seed: int) -> Random:
    return np.random.default_rng(seed).bytes


@pytest.mark.many
def test_the_oracle_is_the_field_of_aes() -> None:
    """FIPS 197, section 4.2."""
    assert all_products()[0x57][0x83] == 0xC1
    assert all_products()[0x57][0x13] == 0xFE


@st.composite
def cases(draw: st.DrawFn) -> tuple[bytes, int, int, int, list[int]]:
    """(secret, threshold, holders, seed, the places of ``threshold`` holders)."""
    holders = draw(st.integers(2, 255))
    threshold = draw(st.integers(2, min(holders, 40)))
    secret = draw(st.binary(min_size=1, max_size=40))
    places = draw(st.lists(st.integers(0, holders - 1), min_size=threshold, max_size=threshold, unique=True))
    return secret, threshold, holders, draw(st.integers(0, 2**32)), places


@settings(deadline=None)
@given(cases())
@example((bytes(range(32)), 2, 255, 1, [254, 0]))
def test_any_t_of_n_shares_recover(case: tuple[bytes, int, int, int, list[int]]) -> None:
    secret, threshold, holders, seed, places = case
    shares = split(secret, threshold=threshold, holders=holders, random=fixed(seed))
    assert len(shares) == holders
    assert {len(share) for share in shares} == {len(secret)}
    assert recover({place: shares[place] for place in places}, threshold=threshold) == secret
    stacked = np.array([[list(shares[place])] for place in places], np.uint8)
    assert recover_many(places, stacked).tobytes() == secret
    assert bytes(interpolated({p + 1: shares[p][k] for p in places}) for k in range(len(secret))) == secret


def test_all_holders_of_the_largest_cohort() -> None:
    shares = split(b"secret", threshold=255, holders=255, random=fixed(1))
    assert recover(dict(enumerate(shares)), threshold=255) == b"secret"
    assert (
        bytes(interpolated({i + 1: share[k] for i, share in enumerate(shares)}) for k in range(6))
        == b"secret"
    )


@pytest.mark.parametrize(("threshold", "holders"), [(2, 2), (3, 5), (7, 10), (14, 20)])
@pytest.mark.parametrize(("count", "length"), [(1, 1), (3, 5), (2, 32), (70, 33)])
def test_shares_are_the_values_of_the_random_polynomials(
    threshold: int, holders: int, count: int, length: int
) -> None:
    secrets = np.random.default_rng(0).integers(0, 256, (count, length), np.uint8)
    size = count * length
    used = fixed(1)((threshold - 1) * size)
    shares = split_many(secrets, threshold=threshold, holders=holders, random=fixed(1))
    assert shares.shape == (holders, count, length)
    assert shares.dtype == np.uint8
    for position in {0, size // 2, size - 1}:
        coefficients = [int(secrets.reshape(-1)[position]), *used[position::size]]
        found = shares.reshape(holders, size)[:, position].tolist()
        assert found == [value_at(coefficients, place + 1) for place in range(holders)]


def test_many_secrets_are_split_and_recovered_like_single_ones() -> None:
    """Longer than the columns that are worked on at a time, and no multiple of a word."""
    secrets = np.random.default_rng(0).integers(0, 256, (131, 33), np.uint8)
    assert secrets.size > 2 * 8 * shamir._COLUMNS
    shares = split_many(secrets, threshold=5, holders=7, random=fixed(3))
    places = [6, 1, 4, 0, 3]
    np.testing.assert_array_equal(recover_many(places, shares[places]), secrets)
    # More shares than needed lie on the same polynomials.
    np.testing.assert_array_equal(recover_many(range(7), shares), secrets)
    for row in (0, 64, 130):
        alone = {place: shares[place, row].tobytes() for place in range(7)}
        assert recover(alone, threshold=5) == secrets[row].tobytes()


def test_every_multiple_of_every_byte() -> None:
    every = np.arange(256, dtype=np.uint8)
    products = shamir._product(every.reshape(256, 1), every.reshape(1, 256))
    assert products.tolist() == all_products()


def test_the_first_shares_by_place_are_used() -> None:
    shares = dict(enumerate(split(b"secret", threshold=3, holders=5, random=fixed(0))))
    assert recover({4: b"wrong!", 2: shares[2], 0: shares[0], 1: shares[1]}, threshold=3) == b"secret"
    assert recover({4: shares[4], 2: b"wrong!", 0: shares[0], 1: shares[1]}, threshold=3) != b"secret"


def test_two_shares_of_three_fit_every_secret_exactly_once() -> None:
    """One byte, t = 2: of all 256 polynomials of a secret, one goes through a share, whatever it is."""
    every = bytes(range(256))
    for place in range(4):
        seen = np.zeros((256, 256), int)
        for secret in range(256):
            secrets = np.full((256, 1), secret, np.uint8)
            shares = split_many(secrets, threshold=2, holders=4, random=lambda count: every[:count])
            np.add.at(seen[secret], shares[place, :, 0], 1)
        assert (seen == 1).all()


@pytest.mark.parametrize("places", [(0, 1), (1, 3), (254, 100)])
def test_two_shares_of_t_3_are_uniform_whatever_the_secret(places: tuple[int, int]) -> None:
    """One byte, t = 3: all 65536 polynomials of a secret give all 65536 pairs of shares, each once."""
    first, second = np.divmod(np.arange(65536), 256)
    every = np.concatenate([first, second]).astype(np.uint8).tobytes()
    for secret in (0, 1, 0x53, 255):
        secrets = np.full((65536, 1), secret, np.uint8)
        shares = split_many(secrets, threshold=3, holders=255, random=lambda count: every[:count])
        pairs = shares[places[0], :, 0].astype(int) * 256 + shares[places[1], :, 0]
        assert (np.bincount(pairs, minlength=65536) == 1).all()


def test_fewer_shares_recover_each_candidate_with_a_share_of_ones_choice() -> None:
    """t = 4, three real shares: for each candidate secret there is one last share that gives it."""
    real = dict(enumerate(split(b"\x2a", threshold=4, holders=6, random=fixed(5))))
    known = {place: real[place] for place in (0, 2, 5)}
    recovered = [recover({**known, 3: bytes([last])}, threshold=4)[0] for last in range(256)]
    assert sorted(recovered) == list(range(256))


def test_coefficients_are_not_reused_between_secrets_or_bytes() -> None:
    secrets = np.zeros((3, 4), np.uint8)
    shares = split_many(secrets, threshold=2, holders=3, random=lambda count: bytes(range(1, count + 1)))
    # Of zero secrets the share at x = 1 is the coefficient itself.
    assert shares[0].reshape(-1).tolist() == list(range(1, 13))


def test_randomness_is_taken_once_and_is_new_each_time() -> None:
    asked: Counter[int] = Counter()

    def counting(count: int) -> bytes:
        asked[count] += 1
        return os.urandom(count)

    one = split(bytes(32), threshold=3, holders=4, random=counting)
    two = split(bytes(32), threshold=3, holders=4, random=counting)
    assert asked == {64: 2}
    assert one != two


def test_the_secrets_are_left_as_they_are_and_results_can_be_written_to() -> None:
    secrets = np.arange(10, dtype=np.uint8).reshape(2, 5)
    shares = split_many(secrets, threshold=2, holders=2, random=fixed(0))
    shares[:] = 0
    assert secrets.reshape(-1).tolist() == list(range(10))
    again = split_many(secrets, threshold=2, holders=2, random=fixed(0))
    np.testing.assert_array_equal(recover_many([0, 1], again), secrets)
    strided = np.repeat(secrets, 2, axis=1)[:, ::2]
    np.testing.assert_array_equal(split_many(strided, threshold=2, holders=2, random=fixed(0)), again)


@pytest.mark.parametrize(
    ("threshold", "holders"), [(0, 3), (1, 3), (-1, 3), (4, 3), (3, 256), (256, 256), (1, 1)]
)
def test_thresholds_and_cohorts_out_of_range_are_refused(threshold: int, holders: int) -> None:
    def never(count: int) -> bytes:
        raise AssertionError("asked before the arguments were checked")

    with pytest.raises(ValueError, match=f"2 <= `threshold` <= `holders` <= 255, but got {threshold} and"):
        split(b"secret", threshold=threshold, holders=holders, random=never)


@pytest.mark.parametrize("given", [0, 11, 13, 24])
def test_a_source_that_gives_another_number_of_bytes_is_refused(given: int) -> None:
    with pytest.raises(ValueError, match=f"`random` to give 12 bytes, but got {given}"):
        split(b"secret", threshold=3, holders=3, random=lambda _: bytes(given))


def test_secrets_of_another_shape_or_type_are_refused() -> None:
    wrong = [
        np.zeros(4, np.uint8),
        np.zeros((1, 2, 3), np.uint8),
        np.zeros((2, 0), np.uint8),
        np.zeros((0, 2), np.uint8),
        np.zeros((2, 2), np.int64),
    ]
    for secrets in wrong:
        with pytest.raises(ValueError, match="`secrets` to be a uint8 array of 2 dimensions"):
            split_many(secrets, threshold=2, holders=2, random=os.urandom)
    with pytest.raises(ValueError, match="not empty"):
        split(b"", threshold=2, holders=2, random=os.urandom)


def test_shares_that_make_no_sense_are_refused() -> None:
    shares = dict(enumerate(split(b"secret", threshold=3, holders=5, random=fixed(0))))
    for threshold in (0, 1, 6):
        with pytest.raises(ValueError, match=f"from 2 to the 5 shares given, but got {threshold}"):
            recover(shares, threshold=threshold)
    with pytest.raises(ValueError, match=r"one length, but got \[5, 6\]"):
        recover({**shares, 4: b"short"}, threshold=3)
    for place in (-1, 255):
        with pytest.raises(ValueError, match="indices from 0 to 254"):
            recover({0: shares[0], 1: shares[1], place: shares[2]}, threshold=3)
    with pytest.raises(ValueError, match="not empty"):
        recover({0: b"", 1: b""}, threshold=2)


def test_stacked_shares_that_make_no_sense_are_refused() -> None:
    shares = split_many(np.zeros((2, 3), np.uint8), threshold=2, holders=3, random=fixed(0))
    for places in ([0, 0, 1], [0, 1, 255], [-1, 0, 1]):
        with pytest.raises(ValueError, match="distinct indices from 0 to 254"):
            recover_many(places, shares)
    for places, some in (([0, 1], shares), ([0, 1, 2, 3], shares), ([0], shares[:1])):
        with pytest.raises(ValueError, match=f"got {len(places)} indices and {len(some)} shares"):
            recover_many(places, some)
    for wrong in (shares[0], shares.astype(np.int16), shares[:, :, :0]):
        with pytest.raises(ValueError, match="`shares` to be a uint8 array of 3 dimensions"):
            recover_many([0, 1, 2], wrong)


def test_no_message_shows_a_secret() -> None:
    shares = dict(
        enumerate(split(b"\x01" * 32, threshold=3, holders=5, random=lambda count: b"\x41" * count))
    )
    with pytest.raises(ValueError) as caught:
        recover({**shares, 4: b"\x41" * 31}, threshold=3)
    text = repr(caught.value)
    for share in shares.values():
        assert repr(share)[2:10] not in text
        assert share.hex()[:8] not in text
