"""The search for private values finds what is planted, in every form in which it could lie somewhere."""

from __future__ import annotations

import base64
import gzip
import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from tests.support.production.private import Search

DRAW = np.random.default_rng(7)
NOISE = DRAW.bytes(1001)
VECTOR = DRAW.normal(0, 0.05, 400).astype(np.float32)
SECRET = DRAW.bytes(32)
CLASSES = ("MEL", "NV", "BCC", "AK")


def zipped(content: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("workspace/kept.bin", content)
    return stream.getvalue()


def in_json(text: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    return lambda content: json.dumps({"value": text(content).decode()}).encode()


FORMS: dict[str, Callable[[bytes], bytes]] = {
    "as it is": bytes,
    "zip": zipped,
    "zip in a zip": lambda content: zipped(zipped(content)),
    "gzip": gzip.compress,
    "hexadecimal": in_json(lambda content: content.hex().encode()),
    "base64": in_json(base64.b64encode),
    "base64 in lines": in_json(base64.encodebytes),
    "base64 for addresses": in_json(base64.urlsafe_b64encode),
    "zip of hexadecimal": lambda content: zipped(content.hex().encode()),
}


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kit") / "client.key"
    made = rsa.generate_private_key(65537, 2048)
    path.write_bytes(made.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption()))
    return path


@pytest.fixture(scope="module")
def search(key: Path) -> Search:
    made = Search()
    assert made.parts("vector", VECTOR.tobytes()) == 50
    assert made.parts("secret", SECRET) == 1
    assert made.numbers("numbers", VECTOR) == 40
    made.key("key", key)
    made.counts("counts", [21, 9, 4, 0], CLASSES)
    made.text("path", "/data/hospital-1/records")
    return made


@pytest.mark.parametrize("form", FORMS)
def test_a_part_of_a_vector_is_found(search: Search, form: str) -> None:
    part = VECTOR.tobytes()[101:164]  # 63 bytes that begin anywhere
    assert search.within(FORMS[form](NOISE + part + NOISE)) == {"vector"}
    assert search.within(FORMS[form](NOISE + NOISE)) == set()


@pytest.mark.parametrize("form", FORMS)
def test_a_secret_that_stands_alone_is_found(search: Search, form: str) -> None:
    """It is no longer than what is looked for, so that no byte of it may be lost."""
    assert search.within(FORMS[form](SECRET)) == {"secret"}


@pytest.mark.parametrize("kind", ["<f8", "<f2", ">f4"])
def test_a_vector_is_found_in_other_formats(search: Search, kind: str) -> None:
    assert search.within(NOISE + VECTOR[100:164].astype(kind).tobytes()) == {"numbers"}


def test_what_only_begins_like_an_archive_is_no_error(search: Search) -> None:
    assert search.within(b"\x1f\x8b" + NOISE) == set()
    assert search.within(gzip.compress(VECTOR.tobytes())[:-100]) == {"vector"}, "nor one that was cut off"
    assert search.within(gzip.compress(NOISE) + gzip.compress(VECTOR.tobytes())) == {"vector"}


def test_a_key_is_found_in_every_form(search: Search, key: Path) -> None:
    read = load_pem_private_key(key.read_bytes(), None)
    assert isinstance(read, rsa.RSAPrivateKey)
    numbers = read.private_numbers()
    pkcs8 = read.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    for content in (
        key.read_bytes(),
        json.dumps({"key": key.read_text()}).encode(),
        pkcs8,
        read.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption()),
        numbers.q.to_bytes(128, "big"),
        numbers.p.to_bytes(128, "little"),
        str(numbers.d).encode(),
        f"{numbers.d:0512x}".encode(),
        key.read_bytes().splitlines()[9],
        key.read_bytes().splitlines()[-3],
    ):
        assert search.within(b"before " + content + b" after") == {"key"}, content
    public = read.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    assert search.within(public) == set(), "what everybody may know is not taken for it"


@pytest.mark.parametrize(
    "content",
    [
        b'{"counts": [21, 9, 4, 0]}',
        b"MEL 21, NV 9, BCC 4, AK 0",
        json.dumps(dict(zip(CLASSES, [21, 9, 4, 0], strict=True))).encode(),
        b"{'MEL': 21, 'NV': 9, 'BCC': 4}",
        np.array([1, 21, 9, 4, 0, 7]).tobytes(),
        np.array([21, 9, 4, 0], np.float32).tobytes(),
    ],
)
def test_class_counts_are_found(search: Search, content: bytes) -> None:
    assert search.within(NOISE + content) == {"counts"}


def test_numbers_and_paths_are_found_and_others_are_not(search: Search, tmp_path: Path) -> None:
    for name, content in (
        ("numbers", json.dumps([float(value) for value in VECTOR[:20]]).encode()),
        ("numbers too", " ".join(map(str, VECTOR[:40])).encode()),
        ("rounded", json.dumps([round(float(value), 6) for value in VECTOR[:20]]).encode()),
        ("path", b"cannot read /data/hospital-1/records/image.jpg"),
        ("nothing", json.dumps([float(value) for value in VECTOR[:20] * 1.001]).encode()),
    ):
        (tmp_path / name).write_bytes(content)
    found, searched = search.files(sorted(tmp_path.iterdir()))
    assert found == {
        "numbers": {str(tmp_path / name) for name in ("numbers", "numbers too", "rounded")},
        "path": {str(tmp_path / "path")},
    }
    assert searched == 5
