"""A second implementation of the protocol's good path, from the specification and nothing of ours.

It imports no module of the package: strings are put together by hand, HKDF is RFC 5869 written out
with ``hmac``, the field of Shamir's sharing is multiplied bit by bit, rings are Python's integers.
ML-KEM-768 is ``mlkem``. Only X25519, Ed25519, ECDSA, AES-CTR and AES-GCM are the library's. What it
makes of a vector's inputs must be, byte for byte, what the package makes of them.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import msgpack
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR
from cryptography.hazmat.primitives.serialization import load_der_private_key
from tests.support.securesum import mlkem

GROUPS = ("update", "static")


# Strings -----------------------------------------------------------------------------------------


def fields(tag: str, *values: Any) -> bytes:
    """Prefix, tag, then each value with its type and length."""
    return b"\xff\x00tightframe/secure-sum/1\x00" + _sized("t", tag.encode()) + b"".join(map(_value, values))


def sha(tag: str, *values: Any) -> bytes:
    return hashlib.sha256(fields(tag, *values)).digest()


def _sized(kind: str, data: bytes) -> bytes:
    return kind.encode() + struct.pack(">Q", len(data)) + data


def _value(value: Any) -> bytes:
    if value is True or value is False:
        return b"?" + bytes([value])
    if isinstance(value, int):
        return b"i" + struct.pack(">qQ", value >> 64, value & (2**64 - 1))
    if isinstance(value, float):
        return b"f" + struct.pack(">d", value)
    if isinstance(value, str):
        return _sized("s", value.encode())
    if isinstance(value, bytes):
        return _sized("b", value)
    if isinstance(value, dict):
        parts = [_sized("s", key.encode()) + _value(value[key]) for key in sorted(value)]
        return b"m" + struct.pack(">Q", len(value)) + b"".join(parts)
    return b"l" + struct.pack(">Q", len(value)) + b"".join(map(_value, value))


# Primitives --------------------------------------------------------------------------------------


def hkdf(secret: bytes, salt: bytes, info: bytes) -> bytes:
    """RFC 5869 for one block of output."""
    extracted = hmac.digest(salt, secret, "sha256")
    return hmac.digest(extracted, info + b"\x01", "sha256")


def stream(key: bytes, count: int) -> bytes:
    return Cipher(AES256(key), CTR(bytes(16))).encryptor().update(bytes(count))


def x25519_public(private: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def x25519(private: bytes, public: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))


def sign(private: bytes, message: bytes) -> bytes:
    return Ed25519PrivateKey.from_private_bytes(private).sign(message)


def times(a: int, b: int) -> int:
    """Multiplication in GF(2^8) modulo x^8 + x^4 + x^3 + x + 1."""
    product = 0
    while b:
        product ^= a if b & 1 else 0
        a = (a << 1) ^ (0x11B if a & 0x80 else 0)
        b >>= 1
    return product


def share(polynomials: list[bytes], at: int) -> bytes:
    """The values at one place of polynomials given by their coefficients, the secret first."""
    total = bytes(len(polynomials[0]))
    for row in reversed(polynomials):  # Horner's rule
        total = bytes(times(value, at) ^ more for value, more in zip(total, row, strict=True))
    return total


def secret_of(shares: Mapping[int, bytes]) -> bytes:
    """Lagrange at zero; the keys are the places, from 1."""
    total = bytes(len(next(iter(shares.values()))))
    for place, data in shares.items():
        weight = 1
        for other in set(shares) - {place}:
            inverse = next(item for item in range(1, 256) if times(item, other ^ place) == 1)
            weight = times(weight, times(other, inverse))
        total = bytes(a ^ times(weight, b) for a, b in zip(total, data, strict=True))
    return total


def ring_sum(specs: list[Any], group: str, plus: list[bytes], minus: list[bytes]) -> bytes:
    """Terms and streams added and subtracted, element by element."""
    total, start = b"", 0
    for item in specs:
        width = item["ring"] // 8
        for _ in range(_size(item) if item["group"] == group else 0):
            part = slice(start, start + width)
            value = sum(int.from_bytes(data[part], "little") for data in plus)
            value -= sum(int.from_bytes(data[part], "little") for data in minus)
            total += (value % 2 ** item["ring"]).to_bytes(width, "little")
            start += width
    return total


def combined(specs: list[Any], group: str, challenge: bytes, data: bytes) -> bytes:
    """128 sums of elements, picked by shifts of one stream of bits, for each ring."""
    elements: dict[int, list[int]] = {32: [], 64: []}
    start = 0
    for item in specs:
        width = item["ring"] // 8
        for _ in range(_size(item) if item["group"] == group else 0):
            elements[item["ring"]].append(int.from_bytes(data[start : start + width], "little"))
            start += width
    made = b""
    for ring, values in elements.items():
        if values:
            key = hkdf(challenge, b"", fields("combinations", group, ring))
            bits = int.from_bytes(stream(key, (len(values) + 134) // 8), "little")
            for shift in range(128):
                total = sum(value for place, value in enumerate(values) if bits >> (place + shift) & 1)
                made += (total % 2**ring).to_bytes(ring // 8, "little")
    return made


def _size(item: Any) -> int:
    size = 1
    for length in item["shape"]:
        size *= length
    return size


# A run -------------------------------------------------------------------------------------------


class Stream:
    """A vector's random bytes, in the order in which they are used."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __call__(self, count: int) -> bytes:
        assert count <= len(self.data)
        taken, self.data = self.data[:count], self.data[count:]
        return taken


class Run:
    """All messages of a vector's run, computed from its inputs alone."""

    def __init__(self, vector: Mapping[str, Any]) -> None:
        self.vector = vector
        self.params = dict(vector["params"], config_sha256=bytes.fromhex(vector["params"]["config_sha256"]))
        self.roster: list[str] = self.params["roster"]
        self.slots: int = self.params["slots"]
        self.digest = sha("params", self.params)
        self.random = {name: Stream(bytes.fromhex(vector["sites"][name]["random"])) for name in self.roster}
        self.channel: dict[str, bytes] = {}
        self.signing: dict[str, bytes] = {}
        self.seeds: dict[str, bytes] = {}  # of ML-KEM-768
        self.encapsulated: dict[
            tuple[str, str], tuple[bytes, bytes]
        ] = {}  # dealer, holder -> secret, ciphertext
        self.secrets: dict[str, list[bytes]] = {}  # for slot, group: b, a
        self.advertised: dict[str, dict[str, Any]] = {}
        self.salted: dict[tuple[str, str], list[bytes]] = {}  # dealer, holder -> salts and shares
        self.sealed: dict[tuple[str, str], bytes] = {}  # and all that is in a box
        self.session = b""
        self.total: dict[str, Any] = {}  # the last one
        self.told = bytes(32)
        self.revealed: list[str] = []  # who gave shares for it
        self.receipts: dict[str, Any] = {}  # of its survivors
        self.masked: dict[tuple[str, int], dict[str, bytes]] = {}
        self.links: dict[tuple[str, int], bytes] = {}

    def messages(self) -> Iterator[tuple[str, str, str, bytes]]:
        """Task, sender, receiver, bytes."""
        for name in self.roster:
            yield "enroll", "server", name, pack(self.params)
            yield "enroll", name, "server", pack(self._advertisement(name))
        shown = [self.advertised[name] for name in self.roster]
        signed = [[self._advertised_string(item), item["signature"]] for item in shown]
        self.session = sha("session 2", self.digest, signed)
        confirmed = {}
        for name in self.roster:
            yield "confirm", "server", name, pack({"items": [pack(item) for item in shown]})
            confirmed[name] = self._confirmation(name)
            yield "confirm", name, "server", pack(confirmed[name])
        for number, item in enumerate(self.vector["sums"]):
            yield from self._sum(item, confirmed if number == 0 else None)

    def values(self) -> dict[str, str]:
        """What an implementation computes on the way, by name; after ``messages``."""
        found = {"params digest": self.digest, "session": self.session}
        for name in self.roster:
            found[f"advertisement signed/{name}"] = self._advertised_string(self.advertised[name])
            found[f"ready signed/{name}"] = fields("ready", self.session, name)
        for dealer in self.roster:
            for holder in self.roster:
                if dealer != holder:
                    found[f"box key/{dealer}/{holder}"] = self._box_key(dealer, holder)
        for slot in range(self.slots):
            for group in GROUPS:
                for name in self.roster:
                    place = f"{slot}/{group}/{name}"
                    for kind in (0, 1):
                        label = f"commitment to {'ba'[kind]}/{place}"
                        found[label] = self._commitment(name, slot, group, kind)
                    found[f"self key/{place}"] = self._self_key(name, slot, group)
                    for other in self.roster:
                        if name != other:
                            secret = self._pair_secret(name, other, slot, group)
                            found[f"pair secret/{place}/{other}"] = secret
                        if name < other:
                            found[f"pair key/{place}/{other}"] = self._pair_key(name, other, slot, group)
        return {key: value.hex() for key, value in found.items()}

    def _secret(self, name: str, slot: int, group: str, kind: int) -> bytes:
        return self.secrets[name][(slot * 2 + GROUPS.index(group)) * 2 + kind]

    def _commitment(self, name: str, slot: int, group: str, kind: int) -> bytes:
        secret = self._secret(name, slot, group, kind)
        return sha("commitment", name, slot, group, ("self", "pair")[kind], secret)

    def _pair_secret(self, dealer: str, holder: str, slot: int, group: str) -> bytes:
        info = fields("pair secret", slot, group, dealer, holder)
        return hkdf(self._secret(dealer, slot, group, 1), self.session, info)

    def _self_key(self, name: str, slot: int, group: str) -> bytes:
        return hkdf(self._secret(name, slot, group, 0), self.session, fields("self mask", slot, group, name))

    def _pair_key(self, first: str, second: str, slot: int, group: str) -> bytes:
        secret = self._pair_secret(first, second, slot, group)
        return hkdf(secret, self.session, fields("pair mask", slot, group, first, second))

    def _key_hashes(self, name: str, slot: int) -> bytes:
        pairs = [(min(name, other), max(name, other)) for other in self.roster if other != name]
        return b"".join(
            sha("pair secret hash", self.session, *pair, slot, group, self._pair_secret(*pair, slot, group))
            for group in GROUPS
            for pair in pairs
        )

    def _box_key(self, dealer: str, holder: str) -> bytes:
        agreed = x25519(self.channel[dealer], x25519_public(self.channel[holder]))
        encapsulated, ciphertext = self.encapsulated[dealer, holder]
        return hkdf(encapsulated + agreed, self.session, fields("box", dealer, holder, ciphertext))

    def _advertised_string(self, item: Mapping[str, Any]) -> bytes:
        keys = ("name", "certificate", "channel_key", "session_key", "slots", "application")
        values = [item[key] for key in (*keys, "encapsulation_key")]
        return fields("advertisement 2", self.digest, *values)

    def _advertisement(self, name: str) -> dict[str, Any]:
        random, given = self.random[name], self.vector["sites"][name]
        self.channel[name], self.signing[name], self.seeds[name] = random(32), random(32), random(64)
        self.secrets[name] = [random(32) for _ in range(self.slots * 4)]
        commitments = b"".join(
            self._commitment(name, slot, group, kind)
            for slot in range(self.slots)
            for group in GROUPS
            for kind in (0, 1)
        )
        item = {
            "name": name,
            "certificate": bytes.fromhex(given["certificate"]),
            "channel_key": x25519_public(self.channel[name]),
            "session_key": Ed25519PrivateKey.from_private_bytes(self.signing[name])
            .public_key()
            .public_bytes_raw(),
            "slots": commitments,
            "application": bytes.fromhex(given["application"]),
            "encapsulation_key": mlkem.keys(self.seeds[name])[0],
        }
        key: Any = load_der_private_key(bytes.fromhex(given["private_key"]), None)
        rfc6979 = ec.ECDSA(hashes.SHA256(), deterministic_signing=True)
        item["signature"] = key.sign(self._advertised_string(item), rfc6979)
        self.advertised[name] = item
        return item

    def _confirmation(self, name: str) -> dict[str, Any]:
        random, session = self.random[name], self.session
        joined = b"".join(self.secrets[name])
        coefficients = random((self.params["threshold"] - 1) * len(joined))
        rows = [
            joined,
            *(coefficients[i : i + len(joined)] for i in range(0, len(coefficients), len(joined))),
        ]
        hashes_of = {}
        salts = random(len(self.roster) * self.slots * 4 * 16)
        for place, holder in enumerate(self.roster):
            data = share(rows, place + 1)
            own = salts[place * self.slots * 64 :]
            parts = [own[i * 16 : i * 16 + 16] + data[i * 32 : i * 32 + 32] for i in range(self.slots * 4)]
            self.salted[name, holder] = parts
            secrets = [
                (slot, group, self._pair_secret(name, holder, slot, group))
                for slot in range(self.slots)
                for group in GROUPS
            ]
            self.sealed[name, holder] = b"".join(parts) + b"".join(secret for *_, secret in secrets)
            hashes_of[holder] = b"".join(
                sha(
                    "share",
                    session,
                    name,
                    holder,
                    i // 4,
                    GROUPS[i // 2 % 2],
                    ("self", "pair")[i % 2],
                    part,
                )
                for i, part in enumerate(parts)
            ) + b"".join(sha("pair secret hash", session, name, holder, *secret) for secret in secrets)
        boxes = {}
        for holder in self.roster:
            if holder != name:
                nonce, m = random(12), random(32)
                encapsulated = mlkem.encapsulate(self.advertised[holder]["encapsulation_key"], m)
                self.encapsulated[name, holder] = encapsulated
                bound, plain = fields("box", session, name, holder), self.sealed[name, holder]
                sealed = AESGCM(self._box_key(name, holder)).encrypt(nonce, plain, bound)
                boxes[holder] = encapsulated[1] + nonce + sealed
        digests = [sha("share-hashes-of-one", hashes_of[holder]) for holder in self.roster]
        return {
            "name": name,
            "boxes": boxes,
            "hashes": hashes_of,
            "hashes_signature": sign(self.signing[name], fields("share-hashes", session, name, digests)),
            "ready": sign(self.signing[name], fields("ready", session, name)),
        }

    def _setup(self, holder: str, confirmed: Mapping[str, Mapping[str, Any]]) -> bytes:
        return pack(
            {
                "dealt": {
                    dealer: {
                        "box": item["boxes"].get(holder, b""),
                        "hashes": item["hashes"][holder],
                        "digests": b"".join(
                            sha("share-hashes-of-one", item["hashes"][name]) for name in self.roster
                        ),
                        "signature": item["hashes_signature"],
                        "ready": item["ready"],
                    }
                    for dealer, item in confirmed.items()
                }
            }
        )

    def _sum(self, item: Mapping[str, Any], confirmed: Any) -> Iterator[tuple[str, str, str, bytes]]:
        here = [name for name in self.roster if name not in item["missing"]]
        slot, sum_id, receipts = item["slot"], item["sum_id"], []
        total = pack(self.total) if self.total else b""
        self.told = self._total_digest() if self.total else bytes(32)
        for name in here:
            setup = self._setup(name, confirmed) if confirmed else b""
            seeds = {
                other: {
                    group: self._secret(other, self.total["slot"], group, 0) for group in self.total["groups"]
                }
                for other in (self.total["survivors"] if self.total else [])
            }
            request = {
                "slot": slot,
                "sum_id": sum_id,
                "schema": item["schema"],
                "setup": setup,
                "total": total,
                "seeds": seeds,
            }
            yield "contribute", "server", name, pack(request)
            masked = self._masked(name, item)
            receipts.append(masked["receipt"])
            yield "contribute", name, "server", pack(masked)
        agreements: list[dict[str, Any]] = []
        for name in here if here != self.roster else []:
            yield "agree", "server", name, pack({"slot": slot, "receipts": receipts})
            signed = fields("agreement 3", self.session, slot, sum_id, here, self._receipts_digest(receipts))
            agreements.append({"name": name, "slot": slot, "signature": sign(self.signing[name], signed)})
            yield "agree", name, "server", pack(agreements[-1])
        missing, dropped = self._proofs([one["name"] for one in receipts if one["combinations"]])
        awake = [name for name in here if name not in item["silent"]]
        for name in awake:
            asked = {
                "slot": slot,
                "receipts": receipts,
                "agreements": agreements,
                "missing": missing,
                "dropped": dropped,
            }
            yield "reveal", "server", name, pack(asked)
            yield "reveal", name, "server", pack(self._reveal(name, slot, here))
        self._open(item, here, awake, receipts)

    def _open(self, item: Mapping[str, Any], here: list[str], awake: list[str], receipts: list[Any]) -> None:
        """The total is the sum of the terms themselves."""
        specs = self.params["schemas"][item["schema"]]
        groups = ["update"]
        if here == self.roster and any(spec["group"] == "static" and _size(spec) for spec in specs):
            groups.append("static")
        terms = {name: self._term(name, item) for name in here}
        self.total = {
            "slot": item["slot"],
            "sum_id": item["sum_id"],
            "schema": item["schema"],
            "survivors": here,
            "groups": {
                group: ring_sum(specs, group, [term[group] for term in terms.values()], [])
                for group in groups
            },
            "receipts": self._receipts_digest(receipts),
        }
        self.revealed, self.receipts = awake, {receipt["name"]: receipt for receipt in receipts}

    def _total_digest(self) -> bytes:
        total = self.total
        hashes_of = {group: hashlib.sha256(data).digest() for group, data in total["groups"].items()}
        place = (total["slot"], total["sum_id"], total["schema"], list(total["survivors"]))
        return sha("total 3", *place, hashes_of, total["receipts"])

    def _receipts_digest(self, receipts: list[Any]) -> bytes:
        return sha("receipts", [self._receipt_string(receipt) for receipt in receipts])

    def _receipt_string(self, receipt: Mapping[str, Any]) -> bytes:
        keys = ("name", "slot", "sum_id", "basis", "total", "combinations", "follows", *GROUPS, "pairs")
        return fields("receipt 3", self.session, *(receipt[key] for key in keys))

    def _between(self, name: str, group: str) -> bytes:
        """A site's term of the last total with its masks between survivors, and no other."""
        total, specs = self.total, self.params["schemas"][self.total["schema"]]
        slot = total["slot"]
        plus = [self._term(name, {"slot": slot})[group]]
        minus: list[bytes] = []
        for other in total["survivors"]:
            if other != name:
                first, second = min(name, other), max(name, other)
                mask = stream(self._pair_key(first, second, slot, group), len(plus[0]))
                (plus if name == first else minus).append(mask)
        return ring_sum(specs, group, plus, minus)

    def _combined(self, name: str) -> dict[str, bytes]:
        if not self.total or name not in self.revealed:
            return {}
        challenge = sha("challenge 3", self.session, self.told)
        specs = self.params["schemas"][self.total["schema"]]
        return {
            group: combined(specs, group, challenge, self._between(name, group))
            for group in self.total["groups"]
        }

    def _proofs(self, given: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        if not self.total:
            return {}, {}
        slot, groups = self.total["slot"], list(self.total["groups"])
        missing = {
            name: {
                "receipt": self.receipts[name],
                "masked": {group: self.masked[name, slot][group] for group in groups},
                "links": self.links[name, slot],
                "pairs": self._key_hashes(name, slot),
                "seeds": {group: self._secret(name, slot, group, 0) for group in groups},
            }
            for name in self.total["survivors"]
            if name not in given
        }
        dropped = {
            name: {group: self._secret(name, slot, group, 1) for group in groups}
            for name in self.roster
            if missing and name not in self.total["survivors"]
        }
        return missing, dropped

    def _term(self, name: str, item: Mapping[str, Any]) -> dict[str, bytes]:
        given = self.vector["sites"][name]["terms"].get(str(item["slot"]), {"update": "", "static": ""})
        return {group: bytes.fromhex(data) for group, data in given.items()}

    def _masked(self, name: str, item: Mapping[str, Any]) -> dict[str, Any]:
        slot, specs = item["slot"], self.params["schemas"][item["schema"]]
        masked: dict[str, Any] = {}
        for group in GROUPS:
            term = self._term(name, item)[group]
            plus = [term, stream(self._self_key(name, slot, group), len(term))]
            minus: list[bytes] = []
            for other in self.roster:
                if other != name:
                    first, second = min(name, other), max(name, other)
                    mask = stream(self._pair_key(first, second, slot, group), len(term))
                    (plus if name == first else minus).append(mask)
            masked[group] = ring_sum(specs, group, plus, minus)
        links = b"".join(
            bytes(
                one ^ two
                for one, two in zip(
                    self._pair_secret(name, other, slot, group),
                    self._pair_secret(other, name, slot, group),
                    strict=True,
                )
            )
            for group in GROUPS
            for other in self.roster[self.roster.index(name) + 1 :]
        )
        self.masked[name, slot] = dict(masked)
        self.links[name, slot] = links
        receipt = {
            "name": name,
            "slot": slot,
            "sum_id": item["sum_id"],
            "basis": bytes.fromhex(item["basis"]),
            "total": self.told,
            "combinations": self._combined(name),
            "follows": True,
            **{group: hashlib.sha256(links + masked[group]).digest() for group in GROUPS},
            "pairs": sha("pair secrets of a term", self._key_hashes(name, slot)),
        }
        receipt["signature"] = sign(self.signing[name], self._receipt_string(receipt))
        return {**masked, "receipt": receipt, "links": links}

    def _reveal(self, name: str, slot: int, here: list[str]) -> dict[str, Any]:
        shares: dict[str, Any] = {"update": {}, "static": {}}
        item = self.vector["sums"][slot]
        counted = any(spec["group"] == "static" for spec in self.params["schemas"][item["schema"]])
        for group in GROUPS if here == self.roster and counted else GROUPS[:1]:
            for dealer in self.roster:
                place = slot * 4 + GROUPS.index(group) * 2 + (dealer not in here)
                shares[group][dealer] = self.salted[dealer, name][place]
        signed = fields("reveal", self.session, name, slot, shares["update"], shares["static"])
        return {"name": name, "slot": slot, **shares, "signature": sign(self.signing[name], signed)}


def pack(value: Mapping[str, Any]) -> bytes:
    return bytes(msgpack.packb(value, use_bin_type=True))
