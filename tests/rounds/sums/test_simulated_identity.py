"""Simulated identities pass the same checks as real ones, and never for real ones."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from tests.support.securesum.certificates import AT, issue, make_root

from tightframe.errors import SiteConfigError
from tightframe.rounds.sums.simulated_identity import simulated_anchor, simulated_identity, simulated_root_pem
from tightframe.securesum.errors import IdentityError
from tightframe.securesum.identity import Anchor, KeySigner, verify_certificate, verify_signature
from tightframe.securesum.identity.certificate import MARK, is_simulated
from tightframe.securesum.primitives import encode_fields

MESSAGE = encode_fields("test", "message")
# Of the root of the job called "job", computed apart with hashlib and the layout of `encode_fields`.
EXPECTED_X = "9f13b78a7285caf1c1dd830e22a546896947f67d2d18edd912bdf62d41971d00"


def check(signer: KeySigner, name: str, anchor: Anchor, at: datetime = AT) -> None:
    verify_certificate(signer.certificate, name, anchor, pins=None, pinned_only=False, at=at)


def root_of(anchor: Anchor) -> x509.Certificate:
    return x509.load_der_x509_certificate(anchor.root)


def test_sites_of_one_job_verify_each_other_whoever_made_the_anchor() -> None:
    one, anchor_one = simulated_identity("job", "site-1", production=False)
    two, anchor_two = simulated_identity("job", "site-2", production=False)
    for anchor in (anchor_one, anchor_two, simulated_anchor("job", production=False)):
        check(one, "site-1", anchor)
        check(two, "site-2", anchor)
    verify_signature(one.certificate, MESSAGE, one.sign(MESSAGE), owner="site-1", what="a test")
    with pytest.raises(IdentityError, match="'site-2', once, but found 'site-1'"):
        check(one, "site-2", anchor_one)


def test_the_roots_key_is_public_and_the_sites_keys_are_fresh() -> None:
    anchors = [simulated_anchor("job", production=False) for _ in range(2)]
    first, second = (root_of(anchor).public_key() for anchor in anchors)
    assert isinstance(first, ec.EllipticCurvePublicKey) and first == second
    # Fixed for ever, so that an old transcript can still be verified.
    assert f"{first.public_numbers().x:064x}" == EXPECTED_X
    keys = {simulated_identity("job", "site-1", production=False)[0].private_pem() for _ in range(3)}
    assert len(keys) == 3


def test_another_process_derives_the_same_root(root: Path) -> None:
    code = (
        "from tightframe.rounds.sums.simulated_identity import *\nimport sys\n"
        "signer, _ = simulated_identity('job', 'site-9', production=False)\n"
        "sys.stdout.buffer.write(signer.certificate)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root / "custom", capture_output=True, check=True, timeout=60
    )
    anchor = simulated_anchor("job", production=False)
    verify_certificate(done.stdout, "site-9", anchor, pins=None, pinned_only=False, at=AT)


def test_a_site_of_another_job_is_refused() -> None:
    signer, _ = simulated_identity("other", "site-1", production=False)
    with pytest.raises(IdentityError, match="a signature by another key"):
        check(signer, "site-1", simulated_anchor("job", production=False))


def test_it_says_what_it_is() -> None:
    signer, anchor = simulated_identity("job", "site-1", production=False)
    assert MARK == "SIMULATED IDENTITY - PROVES NOTHING"
    leaf = x509.load_der_x509_certificate(signer.certificate)
    for text in (leaf.subject.rfc4514_string(), leaf.issuer.rfc4514_string()):
        assert MARK in text
    assert is_simulated(root_of(anchor))
    assert not is_simulated(make_root("project").x509)


def test_it_is_refused_in_production() -> None:
    for refused in (
        lambda: simulated_identity("job", "site-1", production=True),
        lambda: simulated_anchor("job", production=True),
    ):
        with pytest.raises(SiteConfigError, match=r"^TF-615: .*proves nothing"):
            refused()


def test_a_provisioned_root_refuses_it_even_if_that_has_the_same_name() -> None:
    signer, _ = simulated_identity("job", "site-1", production=False)
    with pytest.raises(IdentityError, match=f"issuer '{MARK}'"):
        check(signer, "site-1", make_root("project").anchor(missing_role=True))
    with pytest.raises(IdentityError, match="a signature by another key"):
        check(signer, "site-1", make_root(MARK).anchor(missing_role=True))


def test_a_simulated_root_refuses_provisioned_sites() -> None:
    with pytest.raises(IdentityError, match="issued by the project's root itself"):
        check(
            issue(make_root("project"), "site-1").signer(),
            "site-1",
            simulated_anchor("job", production=False),
        )


def test_it_is_valid_whatever_the_clock_says() -> None:
    signer, anchor = simulated_identity("job", "site-1", production=False)
    for year in (2001, 2026, 2999):
        check(signer, "site-1", anchor, datetime(year, 1, 1, tzinfo=UTC))


def test_the_root_in_pem_verifies_what_the_run_made() -> None:
    signer, _ = simulated_identity("job", "site-1", production=False)
    pem = simulated_root_pem("job")
    check(signer, "site-1", Anchor(x509.load_pem_x509_certificate(pem).public_bytes(Encoding.DER)))


def test_kept_and_read_back_by_the_next_process_of_the_site() -> None:
    signer, anchor = simulated_identity("job", "site-1", production=False)
    again = KeySigner.from_pem(signer.private_pem(), signer.certificate)
    check(again, "site-1", anchor)
    verify_signature(signer.certificate, MESSAGE, again.sign(MESSAGE), owner="site-1", what="a test")
