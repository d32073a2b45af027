"""Known answers of the RFCs and of NIST; the encoding of fields against a reader that undoes it."""

from __future__ import annotations

import copy
import hashlib
import hmac
import json
import math
import pickle
import struct
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.support.securesum import mlkem

from tightframe.securesum import primitives
from tightframe.securesum.errors import KeyAgreementError, ProtocolError, ShareError, SignatureError
from tightframe.securesum.primitives import (
    Secret,
    derive,
    digest,
    ed25519_public,
    ed25519_sign,
    ed25519_verify,
    encode_fields,
    kem_check,
    kem_decapsulate,
    kem_encapsulate,
    kem_public,
    open_sealed,
    seal,
    x25519,
    x25519_public,
)

PRIME = 2**255 - 19


# What is signed and hashed.


def values() -> st.SearchStrategy[object]:
    plain = (
        st.booleans()
        | st.integers(-(2**127), 2**127 - 1)
        | st.floats(allow_nan=False)
        | st.text()
        | st.binary()
    )
    return st.recursive(
        plain,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
        max_leaves=12,
    )


class Word(str):
    """A text of another type."""


class Number(int):
    """A number of another type."""


class Reader:
    """Reads back what ``encode_fields`` wrote. What can be read back is the encoding of one thing only."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def take(self, count: int) -> bytes:
        assert len(self.data) >= count
        taken, self.data = self.data[:count], self.data[count:]
        return taken

    def size(self) -> int:
        return int.from_bytes(self.take(8), "big")

    def value(self) -> object:
        kind = self.take(1)
        if kind == b"?":
            return {b"\x00": False, b"\x01": True}[self.take(1)]
        if kind == b"i":
            return int.from_bytes(self.take(16), "big", signed=True)
        if kind == b"f":
            return struct.unpack(">d", self.take(8))[0]
        if kind in (b"s", b"b"):
            data = self.take(self.size())
            return data.decode() if kind == b"s" else data
        if kind == b"l":
            return [self.value() for _ in range(self.size())]
        assert kind == b"m"
        found: dict[str, object] = {}
        for _ in range(self.size()):
            assert self.take(1) == b"s"
            key = self.take(self.size()).decode()
            assert not found or key > max(found)
            found[key] = self.value()
        return found

    def all(self) -> tuple[str, list[object]]:
        assert self.take(len(primitives.PREFIX)) == b"\xff\x00tightframe/secure-sum/1\x00"
        assert self.take(1) == b"t"
        tag, found = self.take(self.size()).decode(), []
        while self.data:
            found.append(self.value())
        return tag, found


def same(a: object, b: object) -> bool:
    """Equality that tells 1, 1.0 and True apart, and 0.0 from -0.0."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return a == b and math.copysign(1, a) == math.copysign(1, b)
    return type(a) is type(b) and a == b


@given(st.text(), st.lists(values(), max_size=5))
@example("", [])
@example("t", ["", b"", [], {}, 0, 0.0, -0.0, False])
def test_fields_can_be_read_back_so_no_two_lists_have_one_encoding(tag: str, fields: list[object]) -> None:
    read_tag, read = Reader(encode_fields(tag, *fields)).all()
    assert read_tag == tag
    assert same(read, fields)


@given(st.text(), st.lists(values(), max_size=3), st.text(), st.lists(values(), max_size=3))
@example("a", ["b"], "ab", [])
@example("a", ["bc"], "a", ["b", "c"])
@example("a", [["b"]], "a", ["b"])
@example("a", [1], "a", [True])
@example("a", ["x"], "a", [b"x"])
@example("a", [{"k": 1}], "a", [["k", 1]])
def test_other_fields_have_another_encoding(
    tag: str, fields: list[object], other_tag: str, other: list[object]
) -> None:
    differ = tag != other_tag or not same(fields, other)
    assert (encode_fields(tag, *fields) != encode_fields(other_tag, *other)) == differ
    assert (digest(tag, *fields) != digest(other_tag, *other)) == differ


def test_the_encoding_byte_by_byte() -> None:
    found = encode_fields("tag", True, -2, 1.5, "é", b"\x00", {"b": [], "a": ()})
    assert found == (
        b"\xff\x00tightframe/secure-sum/1\x00"
        b"t\x00\x00\x00\x00\x00\x00\x00\x03tag"
        b"?\x01"
        b"i" + b"\xff" * 15 + b"\xfe"
        b"f\x3f\xf8\x00\x00\x00\x00\x00\x00"
        b"s\x00\x00\x00\x00\x00\x00\x00\x02\xc3\xa9"
        b"b\x00\x00\x00\x00\x00\x00\x00\x01\x00"
        b"m\x00\x00\x00\x00\x00\x00\x00\x02"
        b"s\x00\x00\x00\x00\x00\x00\x00\x01a"
        + b"l"
        + bytes(8)
        + b"s\x00\x00\x00\x00\x00\x00\x00\x01b"
        + b"l"
        + bytes(8)
    )
    assert digest("tag", 1) == hashlib.sha256(encode_fields("tag", 1)).digest()


def test_forms_of_one_value_have_one_encoding() -> None:
    assert (
        encode_fields("t", b"ab")
        == encode_fields("t", bytearray(b"ab"))
        == encode_fields("t", memoryview(b"ab"))
    )
    assert encode_fields("t", [1, 2]) == encode_fields("t", (1, 2)) == encode_fields("t", range(1, 3))
    assert encode_fields("t", "two", 2) == encode_fields("t", Word("two"), Number(2))
    assert encode_fields("t", {"a": 1, "b": 2}) == encode_fields("t", {"b": 2, "a": 1})


@given(st.text(), st.lists(values(), max_size=3))
def test_no_text_is_ever_such_a_string(tag: str, fields: list[object]) -> None:
    """The engine's login challenge has a key sign text; that can never be one of our messages."""
    with pytest.raises(UnicodeDecodeError):
        encode_fields(tag, *fields).decode("utf-8")


@pytest.mark.parametrize("value", [None, {1, 2}, object(), 1j, Secret(b"secret")])
def test_what_is_not_plain_is_refused_without_showing_it(value: object) -> None:
    for given_value in (value, [value], {"k": value}):
        with pytest.raises(TypeError, match=f"plain value, but got {type(value).__name__}"):
            encode_fields("t", given_value)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [2**127, -(2**127) - 1])
def test_integers_that_do_not_fit_are_refused(value: int) -> None:
    with pytest.raises(OverflowError):
        encode_fields("t", value)


# Secrets.


@dataclass(frozen=True)
class Holder:
    key: Secret


def test_a_secret_is_never_shown() -> None:
    secret = Secret(b"attack at dawn")
    shown = [
        repr(secret),
        str(secret),
        f"{secret}",
        f"{secret!r:>40}",
        "{}".format(secret),  # noqa: UP032 - another way to the text than the ones above
        repr(Holder(secret)),
        repr([secret]),
    ]
    for text in shown:
        assert "attack" not in text
        assert "Secret(14 bytes)" in text
    assert secret.expose() == b"attack at dawn"
    assert not hasattr(secret, "__dict__")


def test_a_secret_is_never_pickled_nor_copied_nor_hashed() -> None:
    secret = Secret(b"attack at dawn")
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(TypeError, match="never pickled"):
            pickle.dumps(secret, protocol)
    for way in (copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="never pickled"):
            way(Holder(secret)) if way is copy.deepcopy else way(secret)
    with pytest.raises(TypeError, match="no hash"):
        hash(secret)


def test_secrets_are_equal_by_their_bytes_alone() -> None:
    assert Secret(b"one") == Secret(bytearray(b"one")) == Secret(memoryview(b"one"))
    assert Secret(b"one") != Secret(b"two")
    assert Secret(b"one") != Secret(b"one ")
    assert Secret(b"one") != b"one"


def test_a_secret_is_a_copy_of_what_it_was_made_of() -> None:
    source = bytearray(b"one")
    secret = Secret(source)
    source[:] = b"two"
    assert secret.expose() == b"one"


@pytest.mark.parametrize("value", [32, None, "text", [1, 2], Secret(b"one")])
def test_a_secret_is_made_of_bytes_only(value: object) -> None:
    """``bytes(32)`` is 32 zeros: a length in place of a secret would be a key that everybody knows."""
    with pytest.raises(TypeError, match=f"the bytes of a secret, but got {type(value).__name__}"):
        Secret(value)  # type: ignore[arg-type]


# Key derivation.


def test_derive_is_rfc_5869_written_out() -> None:
    secret, salt = b"\x0b" * 22, bytes(range(13))
    info = encode_fields("box", "a", "b")
    extracted = hmac.digest(salt, secret, "sha256")
    expected = hmac.digest(extracted, info + b"\x01", "sha256")
    assert derive(secret, salt=salt, tag="box", fields=("a", "b")) == expected
    assert len(expected) == 32


def test_every_argument_of_a_derivation_changes_the_key() -> None:
    keys = {
        derive(b"s" * 32, salt=b"t", tag="box"),
        derive(b"S" * 32, salt=b"t", tag="box"),
        derive(b"s" * 32, salt=b"T", tag="box"),
        derive(b"s" * 32, salt=b"t", tag="Box"),
        derive(b"s" * 32, salt=b"t", tag="box", fields=("",)),
        derive(b"s" * 32, salt=b"t", tag="box", fields=(b"",)),
        derive(b"s" * 32, salt=b"t", tag="box", fields=(1,)),
    }
    assert len(keys) == 7


# X25519.

ALICE = Secret(bytes.fromhex("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a"))
BOB = Secret(bytes.fromhex("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb"))
# The u-coordinates of order 1, 2, 4 and 8 on the curve and its twist.
LOW_ORDER = [
    0,
    1,
    PRIME - 1,
    0x00B8495F16056286FDB1329CEB8D09DA6AC49FF1FAE35616AEB8413B7C7AEBE0,
    0x57119FD0DD4E22D8868E1C58C45C44045BEF839C55B1D0B1248C50A3BC959C5F,
]


def ladder(private: bytes, public: bytes) -> bytes:
    """X25519 on Python's integers, after the pseudocode of RFC 7748, section 5, without its swaps."""
    scalar = int.from_bytes(private, "little") & ~7 & ~(1 << 255) | (1 << 254)
    u = int.from_bytes(public, "little") % 2**255 % PRIME
    low, high = (1, 0), (u, 1)
    for bit in reversed(range(255)):
        (x2, z2), (x3, z3) = (high, low) if scalar >> bit & 1 else (low, high)
        da, cb = (x3 - z3) * (x2 + z2), (x3 + z3) * (x2 - z2)
        square, other = (x2 + z2) ** 2, (x2 - z2) ** 2
        difference = square - other
        total = ((da + cb) ** 2 % PRIME, u * (da - cb) ** 2 % PRIME)
        double = (square * other % PRIME, difference * (square + 121665 * difference) % PRIME)
        low, high = (total, double) if scalar >> bit & 1 else (double, total)
    return (low[0] * pow(low[1], PRIME - 2, PRIME) % PRIME).to_bytes(32, "little")


def test_x25519_of_rfc_7748() -> None:
    """Section 6.1."""
    of_alice, of_bob = x25519_public(ALICE), x25519_public(BOB)
    assert of_alice.hex() == "8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a"
    assert of_bob.hex() == "de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f"
    shared = "4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742"
    assert x25519(ALICE, of_bob, owner="bob").hex() == shared
    assert x25519(BOB, of_alice, owner="alice").hex() == shared


@settings(max_examples=25, deadline=None)
@given(st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32))
def test_x25519_is_the_ladder_on_integers(private: bytes, public: bytes) -> None:
    assert x25519_public(Secret(private)) == ladder(private, (9).to_bytes(32, "little"))
    shared = ladder(private, public)
    if shared != bytes(32):  # hypothesis is fond of small numbers
        assert x25519(Secret(private), public, owner="peer") == shared
        return
    with pytest.raises(KeyAgreementError):
        x25519(Secret(private), public, owner="peer")


@pytest.mark.parametrize("point", LOW_ORDER)
@pytest.mark.parametrize("private", [ALICE, BOB])
def test_points_of_low_order_are_refused_in_every_encoding(point: int, private: Secret) -> None:
    # RFC 7748, section 5: the top bit is ignored, and what is not reduced is taken modulo the prime.
    encodings = {point + PRIME * times + top for times in (0, 1) for top in (0, 2**255)}
    usable = [value for value in encodings if value % 2**255 % PRIME == point and value < 2**256]
    assert len(usable) >= 2
    for value in usable:
        public = value.to_bytes(32, "little")
        assert ladder(private.expose(), public) == bytes(32)
        with pytest.raises(
            KeyAgreementError, match=r"of site-2 to be a point of full order, .* low order"
        ) as caught:
            x25519(private, public, owner="site-2")
        assert caught.value.code == "TF-606"
        assert caught.value.__cause__ is None


@pytest.mark.parametrize("size", [0, 31, 33, 64])
def test_public_keys_of_another_length_are_refused(size: int) -> None:
    with pytest.raises(KeyAgreementError, match=f"of site-2 to be 32 bytes, but found {size} bytes"):
        x25519(ALICE, b"\x09" * size, owner="site-2")


# Encapsulation.


@settings(max_examples=5)
@given(seed=st.binary(min_size=64, max_size=64), m=st.binary(min_size=32, max_size=32))
def test_ml_kem_768_is_that_of_the_standard(seed: bytes, m: bytes) -> None:
    """The library and FIPS 203 in Python's integers: keys, both directions, and implicit rejection."""
    public, private = mlkem.keys(seed)
    assert kem_public(Secret(seed)) == public
    kem_check(public, owner="site-1")
    shared, ciphertext = mlkem.encapsulate(public, m)
    assert kem_decapsulate(Secret(seed), ciphertext, owner="site-2") == shared
    shared, ciphertext = kem_encapsulate(public)
    assert (len(shared), len(ciphertext)) == (32, 1088)
    assert mlkem.decapsulate(private, ciphertext) == shared
    for place in (0, 959, 960, 1087):  # of u and of v
        altered = ciphertext[:place] + bytes([ciphertext[place] ^ 1]) + ciphertext[place + 1 :]
        rejected = kem_decapsulate(Secret(seed), altered, owner="site-2")
        assert rejected == mlkem.decapsulate(private, altered) != shared


def test_implicit_rejection_of_project_wycheproof() -> None:
    case = json.loads((Path(__file__).parent / "vectors" / "mlkem_768_wycheproof.json").read_text())
    seed, ciphertext = bytes.fromhex(case["seed"]), bytes.fromhex(case["c"])
    assert kem_decapsulate(Secret(seed), ciphertext, owner="site-2").hex() == case["K"]
    assert mlkem.decapsulate(mlkem.keys(seed)[1], ciphertext).hex() == case["K"]


def test_every_encapsulation_is_fresh() -> None:
    public = kem_public(Secret(bytes(64)))
    made = [kem_encapsulate(public) for _ in range(20)]
    assert len({shared for shared, _ in made}) == len({ciphertext for _, ciphertext in made}) == 20


def test_malformed_encapsulation_keys_are_refused_and_named() -> None:
    good = kem_public(Secret(bytes(64)))
    # Coefficient 3329, the prime, in the first and in the last place; 3328 is the greatest.
    first, last = b"\x01" + bytes([good[1] & 0xF0 | 0x0D]) + good[2:], (3329 << 4).to_bytes(2, "little")
    greatest = b"\x00" + bytes([good[1] & 0xF0 | 0x0D]) + good[2:]
    kem_check(greatest, owner="site-2")
    for wrong in (b"", good[:-1], good + b"\x00", first, good[:1150] + last + good[1152:]):
        with pytest.raises(KeyAgreementError, match="the ML-KEM-768 key of site-2") as caught:
            kem_check(wrong, owner="site-2")
        assert (caught.value.code, caught.value.blamed) == ("TF-606", "site-2")
        assert caught.value.__cause__ is None
        with pytest.raises(ValueError, match="ML-KEM-768"):
            kem_encapsulate(wrong)


@pytest.mark.parametrize("size", [0, 1087, 1089])
def test_ciphertexts_of_another_length_are_refused(size: int) -> None:
    with pytest.raises(KeyAgreementError, match=f"of site-2 to be 1088 bytes, but found {size} bytes"):
        kem_decapsulate(Secret(bytes(64)), bytes(size), owner="site-2")


@pytest.mark.parametrize("size", [0, 32, 63, 65])
def test_a_seed_of_another_length_is_not_the_peers_fault(size: int) -> None:
    seed = Secret(bytes(size))
    for call in (lambda: kem_decapsulate(seed, bytes(1088), owner="site-2"), lambda: kem_public(seed)):
        with pytest.raises(ValueError, match="64 bytes"):
            call()


@pytest.mark.parametrize("size", [0, 31, 33])
def test_a_private_key_of_another_length_is_not_the_peers_fault(size: int) -> None:
    private = Secret(bytes(size))
    for call in (lambda: x25519(private, x25519_public(BOB), owner="bob"), lambda: x25519_public(private)):
        with pytest.raises(ValueError, match="32 bytes"):
            call()


# Ed25519.

SIGNER = Secret(bytes.fromhex("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb"))


def test_ed25519_of_rfc_8032() -> None:
    """Section 7.1, test 2."""
    public, signature = ed25519_public(SIGNER), ed25519_sign(SIGNER, b"\x72")
    assert public.hex() == "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c"
    assert signature.hex() == (
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
        "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
    )
    ed25519_verify(public, signature, b"\x72", owner="site-1", what="a receipt")


def test_signatures_that_do_not_hold_are_refused_and_named() -> None:
    public, message = ed25519_public(SIGNER), b"message"
    signature = ed25519_sign(SIGNER, message)
    other = ed25519_public(ALICE)
    order = 2**252 + 27742317777372353535851937790883648493
    malleable = signature[:32] + (int.from_bytes(signature[32:], "little") + order).to_bytes(32, "little")
    wrong = [
        (other, signature, message),
        (public, signature, b"massage"),
        (public, signature[:-1], message),
        (public, signature + b"\x00", message),
        (public, b"", message),
        (public, bytes(64), message),
        (public, malleable, message),
        (public[:-1], signature, message),
        (b"", signature, message),
        (b"\xff" * 32, signature, message),
    ]
    for place in range(64):
        flipped = bytearray(signature)
        flipped[place] ^= 1
        wrong.append((public, bytes(flipped), message))
    for case in wrong:
        with pytest.raises(SignatureError, match="the signature of a receipt to be that of site-1") as caught:
            ed25519_verify(*case, owner="site-1", what="a receipt")
        assert caught.value.code == "TF-603"
        assert isinstance(caught.value, ProtocolError)


# AES-256-GCM.

NONCE = bytes(12)


@pytest.mark.parametrize(
    ("plain", "sealed"),
    [
        # McGrew and Viega, The Galois/Counter Mode of Operation, test cases 13 and 14.
        ("", "530f8afbc74536b9a963b4f1c4cb738b"),
        ("00" * 16, "cea7403d4d606b6e074ec5d3baf39d18d0d1c8a799996bf0265b98b5d48ab919"),
    ],
)
def test_aes_256_gcm_known_answers(plain: str, sealed: str) -> None:
    assert seal(bytes(32), NONCE, bytes.fromhex(plain), b"").hex() == sealed
    assert open_sealed(bytes(32), NONCE, bytes.fromhex(sealed), b"", owner="site-1").hex() == plain


@given(st.binary(max_size=100), st.binary(max_size=100), st.data())
def test_a_box_opens_only_as_it_was_sealed(plain: bytes, bound: bytes, data: st.DataObject) -> None:
    key, nonce = b"k" * 32, b"n" * 12
    sealed = seal(key, nonce, plain, bound)
    assert open_sealed(key, nonce, sealed, bound, owner="site-1") == plain
    place = data.draw(st.integers(0, len(sealed) * 8 - 1))
    flipped = (int.from_bytes(sealed, "big") ^ 1 << place).to_bytes(len(sealed), "big")
    for wrong in (
        (key, nonce, flipped, bound),
        (key, nonce, sealed[:-1], bound),
        (key, nonce, sealed + b"\x00", bound),
        (key, nonce, sealed, bound + b"\x00"),
        (key, b"N" * 12, sealed, bound),
        (b"K" * 32, nonce, sealed, bound),
        (key, nonce, b"", bound),
    ):
        with pytest.raises(ShareError, match="the box from site-1") as caught:
            open_sealed(*wrong, owner="site-1")
        assert caught.value.code == "TF-607"


@pytest.mark.parametrize("size", [0, 8, 11, 13, 16])
def test_nonces_of_another_length_are_refused(size: int) -> None:
    sealed = seal(bytes(32), NONCE, b"plain", b"")
    with pytest.raises(ValueError, match=f"a nonce of 12 bytes, but got {size}"):
        seal(bytes(32), bytes(size), b"plain", b"")
    # A nonce comes with the box, so a wrong one is the sender's.
    with pytest.raises(ShareError):
        open_sealed(bytes(32), bytes(size), sealed, b"", owner="site-1")


@pytest.mark.parametrize("size", [0, 16, 24, 31, 33])
def test_keys_of_another_length_are_refused(size: int) -> None:
    """16 and 24 bytes would be AES-128 and AES-192, without a word."""
    with pytest.raises(ValueError, match=f"a key of 32 bytes, but got {size}"):
        seal(bytes(size), NONCE, b"plain", b"")
    with pytest.raises(ValueError, match=f"a key of 32 bytes, but got {size}"):
        open_sealed(bytes(size), NONCE, bytes(20), b"", owner="site-1")
