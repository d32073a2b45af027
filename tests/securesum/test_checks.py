"""Session keys under which any message would pass are refused, in every encoding."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from tests.support.securesum.certificates import issue, make_root

from tightframe.securesum.checks import LOW_ORDER_SIGNING, Keys
from tightframe.securesum.errors import KeyAgreementError
from tightframe.securesum.messages import Advertisement
from tightframe.securesum.primitives import Secret, kem_public, x25519_public

PRIME = 2**255 - 19
D = -121665 * pow(121666, PRIME - 2, PRIME) % PRIME
SIGN = 2**255


def _advertisement(session_key: bytes) -> Advertisement:
    channel, kem = x25519_public(Secret(bytes([1]) * 32)), kem_public(Secret(bytes(64)))
    certificate = issue(make_root(), "site-1").certificate
    return Advertisement("site-1", certificate, channel, session_key, bytes(128), b"", kem, b"s")


def test_the_points_are_those_of_order_1_2_4_and_8() -> None:
    """By the curve's own equations: doubling thrice gives the identity, y = 1."""

    def double(y: int) -> int:
        # On -x^2 + y^2 = 1 + d x^2 y^2: x^2 from y, then the y of 2P.
        x2 = (y * y - 1) * pow(D * y * y + 1, PRIME - 2, PRIME) % PRIME
        return (y * y + x2) * pow(2 - (y * y - x2), PRIME - 2, PRIME) % PRIME

    for y in LOW_ORDER_SIGNING:
        assert double(double(double(y))) == 1
    for other in (2, 3, 4, 5, 7):
        assert double(double(double(other))) != 1


@pytest.mark.parametrize("sign", [0, SIGN])
@pytest.mark.parametrize("y", sorted({*LOW_ORDER_SIGNING, *(PRIME + y for y in (0, 1, 5))}))
def test_a_session_key_of_low_order_or_in_a_second_encoding_is_refused(y: int, sign: int) -> None:
    with pytest.raises(KeyAgreementError) as caught:
        Keys().add(_advertisement((y + sign).to_bytes(32, "little")))
    assert caught.value.blamed == "site-1"


def test_the_library_would_have_taken_one() -> None:
    """Why the check is there: under the identity point a made-up signature passes for any message."""
    identity = (1).to_bytes(32, "little")
    Ed25519PublicKey.from_public_bytes(identity).verify(identity + bytes(32), b"any message at all")


def test_a_proper_key_is_taken() -> None:
    Keys().add(_advertisement(Ed25519PrivateKey.generate().public_key().public_bytes_raw()))
