"""What must be refused, for `make_vectors`: how it is collected, and single steps; no test runs this."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import msgpack
from tests.support.securesum import bad_vectors_setup, bad_vectors_sums, certificates
from tests.support.securesum.bad_maker import Maker

from tightframe.securesum.primitives import Secret, seal


def bad_messages(run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All of them."""
    maker = Maker(run)
    for part in (*bad_vectors_setup.PARTS, *bad_vectors_sums.PARTS):
        part(maker)
    return list(maker.made)


def bad_steps(run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Inputs of single steps."""
    root = certificates.make_root("vectors")
    day = timedelta(days=1)
    at = certificates.AT
    leaf = certificates.issue(root, "z")
    issued = {
        "certificate_expired": certificates.issue(root, "clinic", end=at - day),
        "certificate_not_yet_valid": certificates.issue(root, "clinic", start=at + day),
        "certificate_of_an_admin": certificates.issue(root, "clinic", role="project_admin"),
        "certificate_of_the_server": certificates.issue(root, "clinic", role="server"),
        "certificate_without_a_role": certificates.issue(root, "clinic", role=None),
        "certificate_of_a_ca_itself": certificates.issue(
            root, "clinic", extensions=certificates.leaf_extensions(ca=True)
        ),
        "certificate_by_a_leaf": certificates.issue(leaf, "clinic"),
        "certificate_by_another_ca": certificates.issue(certificates.make_root("vectors"), "clinic"),
        "certificate_with_another_name": certificates.issue(root, "clinic-2"),
        "certificate_with_two_names": certificates.issue(root, "clinic", "z"),
        "certificate_with_a_weak_key": certificates.issue(root, "clinic", key="rsa-1024"),
    }
    made: list[dict[str, Any]] = [
        {
            "name": name,
            "step": "certificate",
            "root": root.certificate.hex(),
            "certificate": item.certificate.hex(),
            "site": "clinic",
            "error": "IdentityError",
        }
        for name, item in issued.items()
    ]
    key, nonce = hashlib.sha256(b"key").digest(), bytes(12)
    sealed = seal(key, nonce, b"shares", b"bound")
    box = {"step": "box", "key": key.hex(), "error": "ShareError"}
    made += [
        {
            **box,
            "name": "wrong_tag",
            "nonce": nonce.hex(),
            "bound": b"bound".hex(),
            "sealed": sealed[:-1].hex() + "00",
        },
        {**box, "name": "other_bound", "nonce": nonce.hex(), "bound": b"other".hex(), "sealed": sealed.hex()},
        {**box, "name": "other_nonce", "nonce": "01" * 12, "bound": b"bound".hex(), "sealed": sealed.hex()},
        {
            **box,
            "name": "shorter_than_a_tag",
            "nonce": nonce.hex(),
            "bound": b"bound".hex(),
            "sealed": "00" * 15,
        },
    ]
    private = Secret(key)
    made += [
        {
            "name": f"low_order_point_{number}",
            "step": "x25519",
            "private": private.expose().hex(),
            "public": point,
            "error": "KeyAgreementError",
        }
        for number, point in enumerate(
            (
                "00" * 32,
                "01" + "00" * 31,
                "ec" + "ff" * 30 + "7f",
                "e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800",
                "5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157",
                "ed" + "ff" * 30 + "7f",
                "ee" + "ff" * 31,
            )
        )
    ]
    field = {"step": "encode", "ring": 32, "bits": 25, "bound": 8.0}
    made += [
        {**field, "name": "not_a_number", "value": "nan", "error": "NotFiniteError"},
        {**field, "name": "infinite", "value": "inf", "error": "NotFiniteError"},
        {**field, "name": "minus_infinite", "value": "-inf", "error": "NotFiniteError"},
        {**field, "name": "over_bound", "value": "8.000000000000002", "error": "OverBoundError"},
        {**field, "name": "under_bound", "value": "-8.000000000000002", "error": "OverBoundError"},
        {"step": "ring", "name": "ring_that_could_wrap", "ring": 32, "bits": 28, "bound": 1.0, "sites": 8,
         "error": "RingOverflowError"},
    ]  # fmt: skip
    parsed = {
        "map_of_another_type": [],
        "text_for_bytes": {"name": "a", "slot": 1, "signature": "x" * 64},
        "bytes_for_text": {"name": b"a", "slot": 1, "signature": bytes(64)},
        "flag_for_integer": {"name": "a", "slot": True, "signature": bytes(64)},
        "float_for_integer": {"name": "a", "slot": 1.0, "signature": bytes(64)},
        "integer_out_of_range": {"name": "a", "slot": 256, "signature": bytes(64)},
        "negative_integer": {"name": "a", "slot": -1, "signature": bytes(64)},
        "empty_name": {"name": "", "slot": 1, "signature": bytes(64)},
        "long_name": {"name": "ä" * 33, "slot": 1, "signature": bytes(64)},
        "long_signature": {"name": "a", "slot": 1, "signature": bytes(65)},
        "missing_key": {"name": "a", "slot": 1},
    }
    raws = {name: bytes(msgpack.packb(value)) for name, value in parsed.items()} | {
        "empty_message": b"",
        "never_used_byte": b"\xc1",
        "nested_too_deep": b"\x91" * 5000,
        "declares_four_gigabytes": bytes.fromhex("81a46e616d65c6ffffffff"),
        "declares_four_billion_items": b"\xdd\xff\xff\xff\xff",
    }
    made += [
        {"name": f"agreement_{name}", "step": "agreement", "bytes": raw.hex(), "error": "MessageError"}
        for name, raw in raws.items()
    ]
    json.dumps(made)
    return made
