"""Project Wycheproof's vectors (C2SP/wycheproof, Apache-2.0) through our own wrappers.

The files are no part of the project: they are read from ``wycheproof/`` in the folder of test data.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tightframe.securesum import primitives
from tightframe.securesum.errors import KeyAgreementError, ShareError, SignatureError
from tightframe.securesum.primitives import Secret

Case = dict[str, Any]


@pytest.fixture(scope="module")
def vectors(real_data: Path) -> Path:
    path = real_data / "wycheproof"
    if not path.is_dir():
        pytest.skip(f"no Wycheproof vectors: {path} does not exist (set TIGHTFRAME_TEST_DATA)")
    return path


def cases(path: Path, name: str) -> Iterator[tuple[Case, Case]]:
    """(group, test) of a file; no more and no fewer than it says it has."""
    read = json.loads((path / name).read_text())
    found = [(group, test) for group in read["testGroups"] for test in group["tests"]]
    assert len(found) == read["numberOfTests"] > 0
    yield from found


def told(test: Case) -> str:
    return f"tcId {test['tcId']}: {test['comment']} {test['flags']}"


def test_x25519(vectors: Path) -> None:
    outcomes: Counter[str] = Counter()
    for _, test in cases(vectors, "x25519_test.json"):
        private, public, shared = (bytes.fromhex(test[key]) for key in ("private", "public", "shared"))
        if shared == bytes(32):
            assert "ZeroSharedSecret" in test["flags"], told(test)
            with pytest.raises(KeyAgreementError, match="of low order") as caught:
                primitives.x25519(Secret(private), public, owner="site-1")
            assert caught.value.code == "TF-606"
            outcomes["refused"] += 1
        else:
            # "acceptable" are points of the twist and coordinates beyond the prime, which RFC 7748
            # says to compute with; where they must not be, the protocol compares encodings.
            assert primitives.x25519(Secret(private), public, owner="site-1") == shared, told(test)
            outcomes["computed"] += 1
    assert outcomes == {"refused": 31, "computed": 487}


def test_ed25519(vectors: Path) -> None:
    outcomes: Counter[str] = Counter()
    for group, test in cases(vectors, "ed25519_test.json"):
        public = bytes.fromhex(group["publicKey"]["pk"])
        signature, message = bytes.fromhex(test["sig"]), bytes.fromhex(test["msg"])
        if test["result"] == "valid":
            primitives.ed25519_verify(public, signature, message, owner="site-1", what="a receipt")
        else:
            assert test["result"] == "invalid"
            with pytest.raises(SignatureError) as caught:
                primitives.ed25519_verify(public, signature, message, owner="site-1", what="a receipt")
                pytest.fail(told(test))
            assert caught.value.code == "TF-603"
        outcomes[test["result"]] += 1
    assert outcomes == {"valid": 88, "invalid": 63}


def test_aes_256_gcm(vectors: Path) -> None:
    outcomes: Counter[str] = Counter()
    for group, test in cases(vectors, "aes_gcm_test.json"):
        key, nonce, plain, bound, sealed, tag = (
            bytes.fromhex(test[name]) for name in ("key", "iv", "msg", "aad", "ct", "tag")
        )
        if group["keySize"] != 256:
            for call in (
                lambda key=key, nonce=nonce, sealed=sealed + tag, bound=bound: primitives.open_sealed(
                    key, nonce, sealed, bound, owner="site-1"
                ),
                lambda key=key, plain=plain, bound=bound: primitives.seal(key, bytes(12), plain, bound),
            ):
                with pytest.raises(ValueError, match=f"a key of 32 bytes, but got {len(key)}"):
                    call()
            outcomes["another key size"] += 1
        elif group["ivSize"] != 96:
            # Correct for the algorithm, but no nonce of ours.
            with pytest.raises(ShareError):
                primitives.open_sealed(key, nonce, sealed + tag, bound, owner="site-1")
            with pytest.raises(ValueError, match=f"a nonce of 12 bytes, but got {len(nonce)}"):
                primitives.seal(key, nonce, plain, bound)
            outcomes["another nonce size"] += 1
        elif test["result"] == "valid":
            assert primitives.seal(key, nonce, plain, bound) == sealed + tag, told(test)
            opened = primitives.open_sealed(key, nonce, sealed + tag, bound, owner="site-1")
            assert opened == plain, told(test)
            outcomes["valid"] += 1
        else:
            with pytest.raises(ShareError) as caught:
                primitives.open_sealed(key, nonce, sealed + tag, bound, owner="site-1")
                pytest.fail(told(test))
            assert caught.value.code == "TF-607"
            outcomes["invalid"] += 1
    assert outcomes.pop("another key size") + outcomes.pop("another nonce size") == 316 - 66
    assert outcomes == {"valid": 39, "invalid": 27}


def test_hkdf_sha256(vectors: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``derive`` itself, with the vector's info string and length in place of ours."""
    outcomes: Counter[str] = Counter()
    for _, test in cases(vectors, "hkdf_sha256_test.json"):
        secret, salt, info, okm = (bytes.fromhex(test[name]) for name in ("ikm", "salt", "info", "okm"))
        monkeypatch.setattr(primitives, "encode_fields", lambda tag, *fields, info=info: info)
        monkeypatch.setattr(primitives, "KEY_BYTES", test["size"])
        if test["result"] == "valid":
            assert primitives.derive(secret, salt=salt, tag="any") == okm, told(test)
            monkeypatch.setattr(primitives, "KEY_BYTES", 32)
            assert primitives.derive(secret, salt=salt, tag="any")[: len(okm)] == okm[:32], told(test)
        else:
            with pytest.raises(ValueError, match="derive"):
                primitives.derive(secret, salt=salt, tag="any")
        outcomes[test["result"]] += 1
    assert outcomes == {"valid": 83, "invalid": 3}
