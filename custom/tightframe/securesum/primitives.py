"""The standard primitives, each with one fixed set of parameters, all from ``cryptography``.

Every string that is signed, hashed or used in a key derivation comes from ``encode_fields``: a fixed
prefix, a tag that is unique to the purpose, then the fields, each with its type and length. The
prefix begins with the byte FF, which no UTF-8 text contains, because a provisioned key also answers
the engine's login challenge by signing text of the server's choice: no signature of that login can
be valid for one of these strings.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NoReturn, TypeAlias, Union

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey, MLKEM768PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from tightframe.securesum.errors import KeyAgreementError, ShareError, SignatureError

PREFIX = b"\xff\x00tightframe/secure-sum/1\x00"
"""Of the encoding, which the ledger and job manifests use as well, and not of the protocol: what version 2 of
the protocol signs has other tags than version 1, or a session's id in it, which is another one."""
WORD = 64
"""Letters of the longest text whose encoding is kept."""
KEY_BYTES = 32
HASH_BYTES = 32
NONCE_BYTES = 12
SIGNATURE_BYTES = 64
KEM_SEED_BYTES = 64
KEM_KEY_BYTES = 1184
KEM_CIPHERTEXT_BYTES = 1088
"""Lengths of ML-KEM-768 (FIPS 203, table 3; the seed is d, then z)."""

Random: TypeAlias = Callable[[int], bytes]
"""Returns as many random bytes as asked for; ``os.urandom`` except in known-answer tests."""

Encapsulate: TypeAlias = Callable[[bytes], tuple[bytes, bytes]]
"""Encapsulation key -> shared secret, ciphertext; ``kem_encapsulate`` except in known-answer tests."""

Value: TypeAlias = Union[bool, int, float, str, bytes, Sequence["Value"], Mapping[str, "Value"]]  # noqa: UP007 - recursive


class Secret:
    """Bytes that must never be shown: no repr, no pickling, compared in constant time.

    Python cannot guarantee that a copy is erased from memory. The protocol's states drop their
    references as early as possible, which is all that can be done.
    """

    __slots__ = ("_value",)

    def __init__(self, value: bytes) -> None:
        if not isinstance(value, bytes | bytearray | memoryview):
            # bytes(32) would silently be a secret of 32 zeros.
            raise TypeError(f"Expected the bytes of a secret, but got {type(value).__name__}.")
        self._value = bytes(value)

    def expose(self) -> bytes:
        """Return the bytes; callers keep them as briefly as possible."""
        return self._value

    def __repr__(self) -> str:
        return f"Secret({len(self._value)} bytes)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and hmac.compare_digest(self._value, other._value)

    def __hash__(self) -> int:
        raise TypeError(
            "a Secret has no hash, because a hash table's comparison stops at the first difference"
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Secret is never pickled")


def encode_fields(tag: str, *values: Value) -> bytes:
    """Encode a tag and its fields injectively: different arguments give different bytes.

    Each value is a type byte, its length or count as 8 bytes (big-endian), then its bytes. Mappings
    are sorted by key; integers are 16 bytes signed; floats are IEEE 754 binary64.

    >>> encode_fields("t", 1) == encode_fields("t", "1")
    False
    """
    parts = [PREFIX, _tag(tag)]
    _encode(values, parts)
    return b"".join(parts)


def digest(tag: str, *values: Value) -> bytes:
    """Return the SHA-256 of ``encode_fields``: 32 bytes."""
    return hashlib.sha256(encode_fields(tag, *values)).digest()


def derive(secret: bytes, *, salt: bytes, tag: str, fields: Sequence[Value] = ()) -> bytes:
    """Derive a 32-byte key for one purpose by HKDF-SHA256 (RFC 5869)."""
    return HKDF(SHA256(), KEY_BYTES, salt, encode_fields(tag, *fields)).derive(secret)


def x25519_public(private: Secret) -> bytes:
    """Return the public key of 32 private bytes (RFC 7748)."""
    return X25519PrivateKey.from_private_bytes(private.expose()).public_key().public_bytes_raw()


def x25519(private: Secret, public: bytes, *, owner: str) -> bytes:
    """Return the X25519 shared secret (RFC 7748), 32 bytes.

    Raises:
        KeyAgreementError: TF-606 if the result is all zero, as for points of low order, or if the
            public key is not 32 bytes.
        ValueError: if the private key, which is not the peer's, is not 32 bytes.
    """
    own = X25519PrivateKey.from_private_bytes(private.expose())
    if len(public) != KEY_BYTES:
        raise KeyAgreementError(
            f"an X25519 key of {owner}", expected=f"{KEY_BYTES} bytes", found=f"{len(public)} bytes"
        )
    try:
        return own.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise KeyAgreementError(
            f"an X25519 key of {owner}", expected="a point of full order", found="one of low order"
        ) from None


def kem_public(private: Secret) -> bytes:
    """Return the ML-KEM-768 encapsulation key of a 64-byte seed (FIPS 203): 1184 bytes."""
    return _kem_private(private).public_key().public_bytes_raw()


def kem_check(public: bytes, *, owner: str) -> None:
    """Check an ML-KEM-768 encapsulation key: its length and that it is reduced (FIPS 203, section 7.2).

    Raises:
        KeyAgreementError: TF-606, naming its owner.
    """
    try:
        MLKEM768PublicKey.from_public_bytes(public)
    except ValueError:
        raise KeyAgreementError(
            f"the ML-KEM-768 key of {owner}",
            expected=f"{KEM_KEY_BYTES} bytes with all coefficients below the prime",
            found=f"{len(public)} bytes that are no such key",
            blamed=owner,
        ) from None


def kem_encapsulate(public: bytes) -> tuple[bytes, bytes]:
    """Return a fresh ML-KEM-768 shared secret (32 bytes) and its ciphertext (1088 bytes).

    Its randomness is the library's own, because ``cryptography`` accepts none.

    Raises:
        ValueError: if the key is one that ``kem_check`` refuses.
    """
    return MLKEM768PublicKey.from_public_bytes(public).encapsulate()


def kem_decapsulate(private: Secret, ciphertext: bytes, *, owner: str) -> bytes:
    """Return the ML-KEM-768 shared secret of a ciphertext: 32 bytes.

    A ciphertext of the right length that was made for another key, or altered, gives another secret and
    no error (implicit rejection, FIPS 203, section 6.3): the box that it comes with does not open then.

    Raises:
        KeyAgreementError: TF-606, if the ciphertext, which ``owner`` sent, has another length.
        ValueError: if the seed, which is not the peer's, is not 64 bytes.
    """
    key = _kem_private(private)
    if len(ciphertext) != KEM_CIPHERTEXT_BYTES:
        raise KeyAgreementError(
            f"an ML-KEM-768 ciphertext of {owner}",
            expected=f"{KEM_CIPHERTEXT_BYTES} bytes",
            found=f"{len(ciphertext)} bytes",
        )
    return key.decapsulate(ciphertext)


def _kem_private(private: Secret) -> MLKEM768PrivateKey:
    return MLKEM768PrivateKey.from_seed_bytes(private.expose())


def ed25519_public(private: Secret) -> bytes:
    """Return the public key of 32 private bytes (RFC 8032)."""
    return Ed25519PrivateKey.from_private_bytes(private.expose()).public_key().public_bytes_raw()


def ed25519_sign(private: Secret, message: bytes) -> bytes:
    """Sign a message with Ed25519 (RFC 8032): 64 bytes, deterministic."""
    return Ed25519PrivateKey.from_private_bytes(private.expose()).sign(message)


def ed25519_verify(public: bytes, signature: bytes, message: bytes, *, owner: str, what: str) -> None:
    """Check an Ed25519 signature.

    Raises:
        SignatureError: TF-603, naming the owner of the key and the signed message.
    """
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except (InvalidSignature, ValueError):
        raise SignatureError(
            f"the signature of {what}", expected=f"that of {owner}", found="another or none"
        ) from None


def seal(key: bytes, nonce: bytes, plain: bytes, bound: bytes) -> bytes:
    """Encrypt with AES-256-GCM; ``bound`` is the associated data.

    Raises:
        ValueError: if the key is not 32 bytes or the nonce not 12; the library accepts other sizes.
    """
    if len(nonce) != NONCE_BYTES:
        raise ValueError(f"Expected a nonce of {NONCE_BYTES} bytes, but got {len(nonce)}.")
    return _aes_256_gcm(key).encrypt(nonce, plain, bound)


def open_sealed(key: bytes, nonce: bytes, sealed: bytes, bound: bytes, *, owner: str) -> bytes:
    """Decrypt what ``seal`` encrypted.

    Raises:
        ShareError: TF-607 if any part of it was altered.
        ValueError: if the key, which never comes from the sender, is not 32 bytes.
    """
    cipher = _aes_256_gcm(key)
    try:
        if len(nonce) != NONCE_BYTES:
            raise InvalidTag
        return cipher.decrypt(nonce, sealed, bound)
    except InvalidTag:
        raise ShareError(
            f"the box from {owner}", expected="sealed for this site in this session", found="something else"
        ) from None


def _aes_256_gcm(key: bytes) -> AESGCM:
    # A shorter key would silently select AES-128 or AES-192.
    if len(key) != KEY_BYTES:
        raise ValueError(f"Expected a key of {KEY_BYTES} bytes, but got {len(key)}.")
    return AESGCM(key)


def _sized(kind: bytes, data: bytes) -> bytes:
    return kind + len(data).to_bytes(8, "big") + data


# Names and words, which are no secrets, come thousands of times while a session is set up.
@functools.lru_cache(maxsize=1024)
def _tag(tag: str) -> bytes:
    return _sized(b"t", tag.encode())


@functools.lru_cache(maxsize=4096)
def _word(text: str) -> bytes:
    return _sized(b"s", text.encode())


def _encode(values: Iterable[Value], parts: list[bytes]) -> None:
    append = parts.append
    for value in values:
        # The most frequent types first, and those that Python compares at once before the abstract ones.
        if type(value) is str:
            append(_word(value) if len(value) <= WORD else _sized(b"s", value.encode()))
        elif type(value) is bytes:
            append(b"b" + len(value).to_bytes(8, "big"))
            append(value)
        elif type(value) is int:
            append(b"i" + value.to_bytes(16, "big", signed=True))
        elif isinstance(value, (list, tuple)):
            append(b"l" + len(value).to_bytes(8, "big"))
            _encode(value, parts)
        elif isinstance(value, bool):  # before int, of which it is a subclass
            append(b"?" + (b"\x01" if value else b"\x00"))
        elif isinstance(value, float):
            append(b"f" + struct.pack(">d", value))
        elif isinstance(value, (dict, Mapping)):
            append(b"m" + len(value).to_bytes(8, "big"))
            _encode([part for key in sorted(value) for part in (key, value[key])], parts)
        elif isinstance(value, str):
            append(_sized(b"s", value.encode()))
        elif isinstance(value, int):
            append(b"i" + value.to_bytes(16, "big", signed=True))
        elif isinstance(value, (bytes, bytearray, memoryview)):
            append(_sized(b"b", bytes(value)))
        elif isinstance(value, Sequence):
            append(b"l" + len(value).to_bytes(8, "big"))
            _encode(value, parts)
        else:
            raise TypeError(f"Expected a plain value, but got {type(value).__name__}.")
