"""Oracles: counter mode of ``cryptography`` over the whole group at once, known answers of NIST for
AES-256, and sums of Python's integers.
"""

from __future__ import annotations

import hashlib
import os
import tracemalloc
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from tightframe.securesum import masks
from tightframe.securesum.errors import MessageError
from tightframe.securesum.masks import BLOCK, Accumulator, Layout, keystream, pair_key, self_key
from tightframe.securesum.messages import FieldSpec

SESSION = bytes(range(32))
BLOCK_WORDS = BLOCK // 4
# Elements that end before, at and behind the end of a block, and runs that start anywhere in one.
AWKWARD = [
    ((32, 1),),
    ((32, 1), (64, 1)),
    ((32, 3), (64, 5), (32, 7), (64, 2)),
    ((64, 1), (32, 1), (64, 1), (32, 2), (64, 1)),
    ((32, BLOCK_WORDS),),
    ((32, BLOCK_WORDS - 1), (64, BLOCK_WORDS // 2 + 1), (32, 2)),
    ((64, BLOCK_WORDS + 1), (32, BLOCK_WORDS * 2 + 3), (64, 1)),
]
LAYOUTS = st.lists(st.tuples(st.sampled_from([32, 64]), st.integers(1, 9)), max_size=6).map(tuple)


def key_of(*parts: object) -> bytes:
    return hashlib.sha256(repr(parts).encode()).digest()


def joined(key: bytes, count: int) -> bytes:
    """AES-256-CTR of the library over one buffer."""
    encryptor = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    return encryptor.update(bytes(count)) + encryptor.finalize()


def integers(data: bytes, runs: Sequence[tuple[int, int]]) -> list[int]:
    """The elements of a term, read byte by byte."""
    found, start = [], 0
    for ring, count in runs:
        for _ in range(count):
            found.append(int.from_bytes(data[start : start + ring // 8], "little"))
            start += ring // 8
    assert start == len(data)
    return found


def rings(runs: Sequence[tuple[int, int]]) -> list[int]:
    return [ring for ring, count in runs for _ in range(count)]


def expected(
    runs: Sequence[tuple[int, int]], terms: Sequence[bytes], plus: Sequence[bytes], minus: Sequence[bytes]
) -> list[int]:
    size = Layout(tuple(runs)).nbytes
    added = [integers(term, runs) for term in [*terms, *(joined(key, size) for key in plus)]]
    taken = [integers(joined(key, size), runs) for key in minus]
    return [
        (sum(row[place] for row in added) - sum(row[place] for row in taken)) % 2**ring
        for place, ring in enumerate(rings(runs))
    ]


def field(name: str, shape: tuple[int, ...], ring: int) -> FieldSpec:
    return FieldSpec(name, shape, ring, 8, 1.0, "update")


# Known answers.


@pytest.mark.parametrize(
    ("key", "block"),
    [
        # NIST AESAVS, KeySbox and VarKey for 256 bits: the encryption of zero, our first block.
        (
            "c47b0294dbbbee0fec4757f22ffeee3587ca4730c3d33b691df38bab076bc558",
            "46f2fb342d6f0ab477476fc501242c5f",
        ),
        (
            "8000000000000000000000000000000000000000000000000000000000000000",
            "e35a6dcb19b201a01ebcfa8aa22b5759",
        ),
    ],
)
def test_the_first_block_is_nists_encryption_of_zero(key: str, block: str) -> None:
    assert keystream(bytes.fromhex(key), 16).hex() == block
    total = Accumulator(Layout(((32, 4),)))
    total.add_streams([bytes.fromhex(key)], [])
    assert total.to_bytes().hex() == block


def test_the_stream_of_nists_counter_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """SP 800-38A, F.5.5, with its first counter instead of ours."""
    key = bytes.fromhex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4")
    plain = bytes.fromhex(
        "6bc1bee22e409f96e93d7e117393172aae2d8a571e03ac9c9eb76fac45af8e51"
        "30c81c46a35ce411e5fbc1191a0a52eff69f2445df4f9b17ad2b417be66c3710"
    )
    sealed = bytes.fromhex(
        "601ec313775789a5b7a7f504bbf3d228f443e3ca4d62b59aca84e990cacaf5c5"
        "2b0930daa23de94ce87017ba2d84988ddfc9c58db67aada613c2dd08457941a6"
    )
    stream = bytes(a ^ b for a, b in zip(plain, sealed, strict=True))
    monkeypatch.setattr(masks, "_MODE", modes.CTR(bytes.fromhex("f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff")))
    assert keystream(key, 64) == stream
    total = Accumulator(Layout(((32, 5), (64, 1), (32, 9))))
    total.add_streams([key], [])
    assert total.to_bytes() == stream


def test_the_stream_is_the_encryption_of_a_counter_of_16_bytes() -> None:
    key = key_of("counter")
    encryptor = Cipher(algorithms.AES(key), modes.ECB()).encryptor()  # noqa: S305 - one block at a time
    blocks = [encryptor.update(counter.to_bytes(16, "big")) for counter in range(300)]
    assert keystream(key, 300 * 16 - 5) == b"".join(blocks)[:-5]
    assert keystream(key, 0) == b""


# The sum.


@settings(deadline=None)
@given(LAYOUTS, st.integers(0, 4), st.integers(0, 4), st.integers(0, 3), st.integers(0, 2**32))
def test_sums_are_exact_for_any_mixture_of_rings(
    runs: tuple[tuple[int, int], ...], plus: int, minus: int, terms: int, seed: int
) -> None:
    layout = Layout(runs)
    random = np.random.default_rng(seed)
    data = [random.bytes(layout.nbytes) for _ in range(terms)]
    added, taken = [random.bytes(32) for _ in range(plus)], [random.bytes(32) for _ in range(minus)]
    total = Accumulator(layout)
    for term in data:
        total.add(term)
    total.add_streams(added, taken)
    assert integers(total.to_bytes(), runs) == expected(runs, data, added, taken)


@pytest.mark.parametrize("runs", AWKWARD)
def test_a_key_gives_one_stream_for_the_whole_group(runs: tuple[tuple[int, int], ...]) -> None:
    """Wherever a run or a block starts, the stream goes on at the byte where it stopped."""
    layout, key = Layout(runs), key_of("one stream")
    for plus, minus in (([key], []), ([], [key])):
        total = Accumulator(layout)
        total.add_streams(plus, minus)
        found = total.to_bytes()
        if plus:
            assert found == joined(key, layout.nbytes) == keystream(key, layout.nbytes)
        negated = Accumulator(layout)
        negated.add(found)
        negated.add_streams(minus, plus)
        assert negated.to_bytes() == bytes(layout.nbytes)


@pytest.mark.parametrize("runs", AWKWARD)
def test_many_streams_at_once_are_the_same_as_one_after_the_other(runs: tuple[tuple[int, int], ...]) -> None:
    layout, keys = Layout(runs), [key_of("many", place) for place in range(7)]
    together, apart = Accumulator(layout), Accumulator(layout)
    together.add_streams(keys[:4], keys[4:])
    for key in keys[:4]:
        apart.add(joined(key, layout.nbytes))
    for key in keys[4:]:
        apart.add_streams([], [key])
    assert together.to_bytes() == apart.to_bytes()


def test_the_carry_stays_in_its_element() -> None:
    total = Accumulator(Layout(((32, 2), (64, 2))))
    total.add(b"\xff" * 24)
    total.add((1).to_bytes(4, "little") + bytes(4) + (1).to_bytes(8, "little") + bytes(8))
    assert total.to_bytes() == bytes(4) + b"\xff" * 4 + bytes(8) + b"\xff" * 8


@settings(deadline=None)
@given(st.integers(2, 7), st.integers(0, 2**32), st.data())
@example(3, 0, None)
def test_masks_of_all_sites_cancel_but_for_the_self_masks(
    sites: int, seed: int, data: st.DataObject | None
) -> None:
    """The protocol's sum in small: any part of the sites drops out after masking."""
    random = np.random.default_rng(seed)
    layout, names = Layout(((32, 5), (64, 3), (32, 1))), [f"site-{place}" for place in range(sites)]
    shared = {(a, b): random.bytes(32) for a in names for b in names if a < b}
    pairs = {(a, b): pair_key(secret, SESSION, 3, "update", a, b) for (a, b), secret in shared.items()}
    selves = {name: self_key(random.bytes(32), SESSION, 3, "update", name) for name in names}
    terms = {name: random.bytes(layout.nbytes) for name in names}
    survivors = data.draw(st.sets(st.sampled_from(names), min_size=1)) if data else set(names)

    server = Accumulator(layout)
    for name in sorted(survivors):
        masked = Accumulator(layout)
        masked.add(terms[name])
        after = [key for (first, _), key in pairs.items() if first == name]
        before = [key for (_, second), key in pairs.items() if second == name]
        masked.add_streams([selves[name], *after], before)
        assert masked.to_bytes() != terms[name]
        server.add(masked.to_bytes())
    taken = [selves[name] for name in survivors]
    taken += [key for (a, b), key in pairs.items() if a in survivors and b not in survivors]
    added = [key for (a, b), key in pairs.items() if b in survivors and a not in survivors]
    server.add_streams(added, taken)
    assert integers(server.to_bytes(), layout.runs) == expected(
        layout.runs, [terms[name] for name in survivors], [], []
    )


# What a server sees.


def masked(values: bytes, layout: Layout, slot: int, *, seed: bytes = b"b" * 32) -> bytes:
    total = Accumulator(layout)
    total.add(values)
    own = self_key(seed, SESSION, slot, "update", "a")
    total.add_streams([own, pair_key(seed, SESSION, slot, "update", "a", "b")], [])
    return total.to_bytes()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("values", ["zeros", "ones", "small"])
def test_masked_bytes_look_uniform(seed: int, values: str) -> None:
    layout = Layout(((32, 50_000), (64, 25_000)))
    plain = {
        "zeros": bytes(layout.nbytes),
        "ones": b"\xff" * layout.nbytes,
        "small": np.random.default_rng(seed).integers(0, 9, layout.nbytes // 4, np.uint32).tobytes(),
    }[values]
    data = np.frombuffer(masked(plain, layout, slot=0, seed=key_of("uniform", seed)), np.uint8)
    assert chisquare(np.bincount(data, minlength=256)).pvalue > 1e-4
    # Pairs of neighbours too: 65536 cells with about 3 pairs in each.
    pairs = data[0::2].astype(int) * 256 + data[1::2]
    assert chisquare(np.bincount(pairs, minlength=65536)).pvalue > 1e-4


def test_the_chi_square_test_would_see_what_is_not_masked() -> None:
    plain = np.random.default_rng(0).integers(0, 2**24, 100_000, np.uint32).view(np.uint8)
    assert chisquare(np.bincount(plain, minlength=256)).pvalue < 1e-4


def test_two_slots_of_one_vector_differ_in_every_block() -> None:
    layout = Layout(((32, BLOCK_WORDS), (64, BLOCK_WORDS)))
    plain = bytes(layout.nbytes)
    one, two = (np.frombuffer(masked(plain, layout, slot), np.uint8).reshape(-1, 16) for slot in (0, 1))
    assert (one != two).any(axis=1).all()
    # And no block of one occurs anywhere in either again.
    blocks = [row.tobytes() for row in np.concatenate([one, two])]
    assert len(set(blocks)) == len(blocks)


def test_mixed_rings_share_no_keystream() -> None:
    """Masks of zero vectors: nothing of one run's bytes occurs in another's, at any place."""
    layout = Layout(((32, 4096), (64, 2048), (32, 4096), (64, 2048)))
    total = Accumulator(layout)
    total.add_streams([key_of("mixed")], [])
    data = total.to_bytes()
    quarters = [data[start : start + 16384] for start in range(0, layout.nbytes, 16384)]
    windows = [{part[start : start + 8] for start in range(len(part) - 7)} for part in quarters]
    assert len(set.union(*windows)) == sum(map(len, windows)) == 4 * (16384 - 7)


# Layouts.


def test_neighbours_of_one_ring_are_merged_and_empty_fields_take_no_place() -> None:
    fields = [
        field("a", (2, 3), 32),
        field("none", (0,), 64),
        field("b", (), 32),
        field("c", (4,), 64),
        field("also none", (3, 0), 64),
        field("d", (5,), 64),
        field("e", (1,), 32),
    ]
    layout = Layout.of(fields)
    assert layout == Layout(((32, 7), (64, 9), (32, 1)))
    assert layout.nbytes == 7 * 4 + 9 * 8 + 4


def test_how_fields_are_cut_does_not_change_the_stream() -> None:
    key, found = key_of("cut"), set()
    for runs in (((32, 6), (64, 2)), ((32, 1), (32, 2), (32, 3), (64, 1), (64, 1))):
        total = Accumulator(Layout(runs))
        total.add_streams([key], [])
        found.add(total.to_bytes())
    assert len(found) == 1


def test_a_group_without_fields() -> None:
    layout = Layout.of([])
    assert (layout.runs, layout.nbytes) == ((), 0)
    total = Accumulator(layout)
    total.add(b"")
    total.add_streams([key_of("any")], [])
    assert total.to_bytes() == b""


@pytest.mark.parametrize("run", [(16, 1), (0, 1), (33, 1), (128, 1), (32, 0), (64, -1)])
def test_other_rings_and_empty_runs_are_refused(run: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"each run to be \(32 or 64"):
        Layout(((32, 1), run))
    if run[1] == 1:
        with pytest.raises(ValueError, match=r"each run to be \(32 or 64"):
            Layout.of([field("a", (1,), run[0])])


# Refusals.


@pytest.mark.parametrize("size", [0, 1, 23, 25, 48])
@pytest.mark.parametrize("form", [bytes, memoryview])
def test_a_term_of_another_length_is_refused_before_anything_is_added(
    size: int, form: Callable[[bytes], bytes | memoryview]
) -> None:
    total = Accumulator(Layout(((32, 2), (64, 2))))
    total.add(b"\x07" * 24)
    with pytest.raises(MessageError, match=f"a term to be 24 bytes, but found {size} bytes") as caught:
        total.add(form(b"\x01" * size))
    assert caught.value.code == "TF-604"
    assert total.to_bytes() == b"\x07" * 24


def test_starting_from_a_term_is_adding_it_to_zero_and_leaves_it_as_it_was() -> None:
    layout = Layout(((32, 3), (64, 2), (32, 1)))
    term = bytearray(hashlib.shake_256(b"term").digest(layout.nbytes))
    before = bytes(term)
    started, added = Accumulator(layout, memoryview(term)), Accumulator(layout)
    added.add(before)
    for total in (started, added):
        total.add_streams([key_of("a")], [key_of("b")])
    assert started.to_bytes() == added.to_bytes() != before
    assert bytes(term) == before
    with pytest.raises(MessageError):
        Accumulator(layout, before[1:])


def test_terms_come_in_any_contiguous_buffer() -> None:
    layout = Layout(((32, 3), (64, 1)))
    values = np.arange(20, dtype=np.uint8)
    # One byte before it: nothing that is added is aligned.
    forms = [
        values.tobytes(),
        values.data,
        memoryview(b"?" + values.tobytes())[1:],
        values.view(np.uint32).data,
    ]
    for form in forms:
        total = Accumulator(layout)
        total.add(form)
        assert total.to_bytes() == values.tobytes()
    total = Accumulator(layout)
    with pytest.raises(TypeError):
        total.add(memoryview(bytes(40))[::2])
    assert total.to_bytes() == bytes(20)


@pytest.mark.parametrize("size", [0, 16, 24, 31, 33, 64])
def test_keys_of_another_length_are_refused_before_anything_is_added(size: int) -> None:
    """16 and 24 bytes would be AES-128 and AES-192, without a word."""
    total = Accumulator(Layout(((32, 2),)))
    good, bad = key_of("good"), bytes(size)
    for plus, minus in (([good, bad], []), ([good], [good, bad])):
        with pytest.raises(ValueError, match=f"a key of 32 bytes, but got {size}"):
            total.add_streams(plus, minus)
    assert total.to_bytes() == bytes(8)
    with pytest.raises(ValueError, match="a key of 32 bytes"):
        keystream(bad, 16)


@pytest.mark.parametrize("size", [0, 16, BLOCK - 1])
def test_zeros_shorter_than_a_block_are_refused(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would leave the previous stream's bytes where this one's belong."""
    monkeypatch.setattr(masks, "_ZEROS", bytes(size))
    total = Accumulator(Layout(((32, 1),)))
    with pytest.raises(RuntimeError, match=f"at least {BLOCK} zero bytes, but found {size}"):
        total.add_streams([key_of("any")], [])
    assert total.to_bytes() == bytes(4)


def test_the_zeros_are_zeros_and_cannot_be_written_to() -> None:
    assert bytes(BLOCK) == masks._ZEROS
    assert isinstance(masks._ZEROS, bytes)


def test_a_cipher_that_gives_too_little_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Short:
        def update_into(self, data: memoryview, buffer: memoryview) -> int:
            return len(data) - 1

    monkeypatch.setattr(masks, "_stream", lambda key: Short())
    total = Accumulator(Layout(((64, 2),)))
    with pytest.raises(RuntimeError, match="16 bytes of keystream, but found 15"):
        total.add_streams([key_of("any")], [])
    assert total.to_bytes() == bytes(16)


def test_nothing_of_the_content_is_shown() -> None:
    total = Accumulator(Layout(((32, 1),)))
    total.add(b"\x39\x30\x00\x00")
    assert repr(total) == "Accumulator(Layout(runs=((32, 1),)))"


# Memory.


@pytest.mark.parametrize("runs", [((32, 8_000_000),), ((32, 4_000_001), (64, 2_000_000))])
def test_memory_is_one_vector_and_a_few_blocks(runs: tuple[tuple[int, int], ...]) -> None:
    layout = Layout(runs)
    term, keys = os.urandom(layout.nbytes), [os.urandom(32) for _ in range(12)]
    total = Accumulator(layout)
    total.add(term)
    for work in (lambda: total.add(term), lambda: total.add_streams(keys[:6], keys[6:])):
        tracemalloc.start()
        try:
            work()
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 3 * BLOCK < layout.nbytes / 9
    tracemalloc.start()
    try:
        kept = Accumulator(layout)
        data = kept.to_bytes()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(data) == layout.nbytes
    assert peak < 2 * layout.nbytes + BLOCK


# Keys.


def test_keys_are_hkdf_of_fields_that_name_their_one_purpose() -> None:
    """RFC 5869 through ``cryptography``, with the info string written out."""

    def sized(kind: bytes, data: bytes) -> bytes:
        return kind + len(data).to_bytes(8, "big") + data

    def info(tag: str, slot: int, *texts: str) -> bytes:
        start = b"\xff\x00tightframe/secure-sum/1\x00" + sized(b"t", tag.encode())
        return (
            start + b"i" + slot.to_bytes(16, "big") + b"".join(sized(b"s", text.encode()) for text in texts)
        )

    secret = key_of("shared")
    pair = info("pair mask", 7, "static", "site-1", "site-2")
    own = info("self mask", 7, "static", "site-1")
    assert pair_key(secret, SESSION, 7, "static", "site-1", "site-2") == HKDF(
        SHA256(), 32, SESSION, pair
    ).derive(secret)
    assert self_key(secret, SESSION, 7, "static", "site-1") == HKDF(SHA256(), 32, SESSION, own).derive(secret)


def test_every_argument_changes_the_key() -> None:
    base = (key_of("s"), SESSION, 1, "update", "a", "b")
    others = (key_of("t"), key_of("T"), 2, "static", "A", "c")
    keys = {pair_key(*base), self_key(*base[:5])}
    for place, other in enumerate(others):
        changed = (*base[:place], other, *base[place + 1 :])
        keys.add(pair_key(*changed))
        if place < 5:
            keys.add(self_key(*changed[:5]))
    assert len(keys) == 2 + 6 + 5
    assert {len(key) for key in keys} == {32}


@pytest.mark.parametrize(("first", "second"), [("b", "a"), ("a", "a"), ("site-2", "site-10")])
def test_names_out_of_the_rosters_order_are_refused(first: str, second: str) -> None:
    with pytest.raises(ValueError, match="in the roster's order"):
        pair_key(bytes(32), SESSION, 0, "update", first, second)
