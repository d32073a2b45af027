"""Certificates, good and bad: one good one of each kind, then everything that must be refused.

Certificates are made with ``cryptography``'s builder; those of the engine's own provisioning are
tried in ``tests/flare/test_identity.py``.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from hypothesis import given
from hypothesis import strategies as st
from nvflare.lighter.utils import sign_content
from tests.support.securesum.certificates import (
    AT,
    Issued,
    ca_extensions,
    certify,
    issue,
    leaf_extensions,
    make_key,
    make_root,
    subject,
)

from tightframe.securesum.errors import IdentityError, SignatureError
from tightframe.securesum.identity import (
    Anchor,
    KeySigner,
    Verifier,
    public_key_hash,
    verify_certificate,
    verify_signature,
)
from tightframe.securesum.identity.certificate import PublicKey
from tightframe.securesum.messages import Advertisement
from tightframe.securesum.primitives import PREFIX, encode_fields

ROOT = make_root("project")
MESSAGE = encode_fields("test", "message")
DAY = timedelta(days=1)


def check(der: bytes, name: str = "site-1", anchor: Anchor | None = None, **options: Any) -> PublicKey:
    given = {"pins": None, "pinned_only": False, "at": AT} | options
    return verify_certificate(der, name, anchor or ROOT.anchor(), **given)


def spki(issued: Issued) -> bytes:
    encoded = issued.key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    assert isinstance(encoded, bytes)
    return encoded


def sha256(data: bytes) -> bytes:
    digest = hashes.Hash(hashes.SHA256())
    digest.update(data)
    return digest.finalize()


# Good ones


@pytest.mark.parametrize("root_kind", ["ec", "rsa", "p384"])
@pytest.mark.parametrize("kind", ["ec", "rsa", "p384"])
def test_a_site_proves_who_it_is_and_signs(root_kind: Any, kind: Any) -> None:
    root = make_root("project", key=root_kind)
    site = issue(root, "site-1", key=kind)
    public = check(site.certificate, anchor=root.anchor())
    assert public.public_numbers() == site.key.public_key().public_numbers()

    signer = site.signer()
    signature = signer.sign(MESSAGE)
    verify_signature(signer.certificate, MESSAGE, signature, owner="site-1", what="a test")
    with pytest.raises(SignatureError) as caught:
        verify_signature(signer.certificate, MESSAGE + b"x", signature, owner="site-1", what="a test")
    assert str(caught.value) == (
        "Expected the signature of a test to be that of site-1, but found another or none."
    )


def test_a_root_with_an_organisation_issues_under_its_common_name_alone() -> None:
    # So does the engine's `cert init --org`: the issuer's name is then not the whole subject's.
    root = make_root("project", organisation="consortium")
    site = issue(root, "site-1")
    assert site.x509.issuer != root.x509.subject
    check(site.certificate, anchor=root.anchor())


def test_a_root_may_sign_with_pss() -> None:
    root = make_root("project", key="rsa")
    pss = padding.PSS(padding.MGF1(hashes.SHA256()), 32)
    check(issue(root, "site-1", rsa_padding=pss).certificate, anchor=root.anchor())


def test_extensions_are_not_required() -> None:
    check(issue(ROOT, "site-1", extensions=[]).certificate)


def test_both_ends_of_the_dates_are_valid() -> None:
    site = issue(ROOT, "site-1", start=AT - DAY, end=AT + DAY)
    for at in (AT - DAY, AT + DAY):
        check(site.certificate, at=at)


def test_a_name_need_not_be_ascii() -> None:
    check(issue(ROOT, "Universitätsklinikum 1").certificate, "Universitätsklinikum 1")


def test_without_a_role_only_if_the_anchor_says_so() -> None:
    site = issue(ROOT, "site-1", role=None)
    check(site.certificate, anchor=ROOT.anchor(missing_role=True))
    check(issue(ROOT, "site-1").certificate, anchor=ROOT.anchor(missing_role=True))
    with pytest.raises(IdentityError, match="'client', once, but found none"):
        check(site.certificate)


# Bad ones


def _of_another_root() -> bytes:
    return issue(make_root("project"), "site-1").certificate  # the same name, another key


def _by_a_leaf() -> bytes:
    return issue(issue(ROOT, "site-2"), "site-1").certificate


def _by_a_leaf_in_the_roots_name() -> bytes:
    leaf = issue(ROOT, "site-2")
    return issue(Issued(leaf.key, ROOT.certificate), "site-1").certificate


def _by_an_intermediate_ca() -> bytes:
    return issue(issue(ROOT, "unit", role=None, extensions=ca_extensions()), "site-1").certificate


def _self_signed() -> bytes:
    return make_root("site-1", extensions=leaf_extensions()).certificate


def _two_issuers() -> bytes:
    key = make_key()
    who = subject("site-1", roles=["client"])
    return certify(key.public_key(), who, subject("project", "project"), ROOT.key)


def _critical() -> bytes:
    unknown = x509.UnrecognizedExtension(x509.ObjectIdentifier("1.3.6.1.4.1.99999.1"), b"\x05\x00")
    return issue(ROOT, "site-1", extensions=[*leaf_extensions(), (unknown, True)]).certificate


def _unused_bits() -> bytes:
    """The signature's last bit declared unused: the same certificate in other bytes."""
    while True:
        good = issue(ROOT, "site-1")
        signature = good.x509.signature
        if signature[-1] & 1 == 0:  # an unused bit must be 0, so half of them will do
            assert good.certificate.endswith(b"\x00" + signature)
            bad = good.certificate[: -len(signature) - 1] + b"\x01" + signature
            assert x509.load_der_x509_certificate(bad).signature == signature
            return bad


def _duplicate_extension() -> bytes:
    """The builder makes none, so one OID is written over another of the same length."""
    first, second = (x509.ObjectIdentifier(f"1.3.6.1.4.1.99999.{last}") for last in (1, 2))
    extensions = [(x509.UnrecognizedExtension(oid, b"\x05\x00"), False) for oid in (first, second)]
    site = issue(ROOT, "site-1", extensions=extensions)
    head = bytes.fromhex("06092b06010401868d1f")
    assert site.certificate.count(head) == 2
    return site.certificate.replace(head + b"\x02", head + b"\x01")


ATTACKS: dict[str, tuple[Callable[[], bytes], str]] = {
    "another CA of the same name": (_of_another_root, "issued by the project's root itself"),
    "another CA": (lambda: issue(make_root("other"), "site-1").certificate, "but found issuer 'other'"),
    "issued by a site's leaf": (_by_a_leaf, "but found issuer 'site-2'"),
    "issued by a site's leaf in the root's name": (
        _by_a_leaf_in_the_roots_name,
        "a signature by another key",
    ),
    "issued by an intermediate CA": (_by_an_intermediate_ca, "but found issuer 'unit'"),
    "self-signed": (_self_signed, "but found issuer 'site-1'"),
    "two issuers' names": (_two_issuers, "but found issuer 'project' and 'project'"),
    "another site's": (lambda: issue(ROOT, "site-2").certificate, "'site-1', once, but found 'site-2'"),
    "in another case": (lambda: issue(ROOT, "Site-1").certificate, "'site-1', once, but found 'Site-1'"),
    "with a blank": (lambda: issue(ROOT, "site-1 ").certificate, "'site-1', once, but found 'site-1 '"),
    "with a longer name": (lambda: issue(ROOT, "site-10").certificate, "once, but found 'site-10'"),
    "without a name": (lambda: issue(ROOT).certificate, "'site-1', once, but found none"),
    "with two names": (
        lambda: issue(ROOT, "site-1", "site-2").certificate,
        "'site-1', once, but found 'site-1' and 'site-2'",
    ),
    "with its name twice": (
        lambda: issue(ROOT, "site-1", "site-1").certificate,
        "'site-1', once, but found 'site-1' and 'site-1'",
    ),
    "expired": (lambda: issue(ROOT, "site-1", end=AT - DAY).certificate, "to 2030-05-31T12:00:00"),
    "not yet valid": (
        lambda: issue(ROOT, "site-1", start=AT + DAY).certificate,
        "valid from 2030-06-02T12:00:00",
    ),
    "without a role": (
        lambda: issue(ROOT, "site-1", role=None).certificate,
        "'client', once, but found none",
    ),
    **{
        f"of role {role}": (
            lambda role=role: issue(ROOT, "site-1", role=role).certificate,  # type: ignore[misc]
            f"once, but found '{role}'",
        )
        for role in ("project_admin", "org_admin", "lead", "member", "server", "relay", "Client")
    },
    "of two roles": (
        lambda: issue(ROOT, "site-1", roles=["client", "lead"]).certificate,
        "'client', once, but found 'client' and 'lead'",
    ),
    "a CA's": (
        lambda: issue(ROOT, "site-1", extensions=leaf_extensions(ca=True)).certificate,
        "a site's, but found a CA certificate",
    ),
    "a CA's by its key usage": (
        lambda: issue(ROOT, "site-1", extensions=leaf_extensions(certifies=True)).certificate,
        "a site's, but found a CA certificate",
    ),
    "the root's": (lambda: ROOT.certificate, "a site's, but found a CA certificate"),
    "not for signatures": (
        lambda: issue(ROOT, "site-1", extensions=leaf_extensions(signs=False)).certificate,
        "for signatures, but found another key usage",
    ),
    "not for clients": (
        lambda: issue(ROOT, "site-1", extensions=leaf_extensions(client=False)).certificate,
        "for clients, but found another extended key usage",
    ),
    "with an unknown critical extension": (_critical, "but found 1.3.6.1.4.1.99999.1"),
    "of a weak RSA key": (
        lambda: issue(ROOT, "site-1", key="rsa-1024").certificate,
        "RSA of 2048 to 8192 bits, but found 1024 bits",
    ),
    "of a weak curve": (
        lambda: issue(ROOT, "site-1", key="p224").certificate,
        "but found on secp224r1",
    ),
    "of another type of key": (lambda: issue(ROOT, "site-1", key="ed25519").certificate, "RSA or EC"),
    "signed with a weak hash": (
        lambda: issue(ROOT, "site-1", hash_algorithm=hashes.SHA224()).certificate,
        "signed with sha256 or sha384 or sha512, but found sha224",
    ),
    "signed without a hash": (
        lambda: (
            issue(Issued(make_key("ed25519"), ROOT.certificate), "site-1", hash_algorithm=None).certificate
        ),
        "signed with sha256 or sha384 or sha512, but found no hash",
    ),
    "signed by RSA where the root is EC": (
        lambda: issue(Issued(make_key("rsa"), ROOT.certificate), "site-1").certificate,
        "a signature by another key",
    ),
    "with its signature in other bytes": (_unused_bits, "a well-formed X.509 certificate"),
    "with an extension twice": (_duplicate_extension, "a well-formed X.509 certificate"),
    "empty": (lambda: b"", "a well-formed X.509 certificate"),
    "in PEM": (
        lambda: issue(ROOT, "site-1").x509.public_bytes(Encoding.PEM),
        "a well-formed X.509 certificate",
    ),
    "with a byte too many": (lambda: issue(ROOT, "site-1").certificate + b"\0", "a well-formed X.509"),
    "with a byte too few": (lambda: issue(ROOT, "site-1").certificate[:-1], "a well-formed X.509"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_certificate_is_refused(attack: str) -> None:
    make, expected = ATTACKS[attack]
    with pytest.raises(IdentityError) as caught:
        check(make())
    assert expected in str(caught.value)
    assert caught.value.code == "TF-602"
    assert caught.value.blamed == "site-1"


@pytest.mark.parametrize("attack", ["of role lead", "of role server", "of role Client", "of two roles"])
def test_tolerating_a_missing_role_tolerates_no_other(attack: str) -> None:
    with pytest.raises(IdentityError, match="'client', once, or none, but found"):
        check(ATTACKS[attack][0](), anchor=ROOT.anchor(missing_role=True))


def test_signed_by_ec_where_the_root_is_rsa_is_refused() -> None:
    root = make_root("project", key="rsa")
    site = issue(Issued(make_key("ec"), root.certificate), "site-1")
    with pytest.raises(IdentityError, match="a signature by another key"):
        check(site.certificate, anchor=root.anchor())


@pytest.mark.parametrize("rsa_padding", [None, padding.PSS(padding.MGF1(hashes.SHA256()), 32)])
def test_another_rsa_ca_of_the_same_name_is_refused(rsa_padding: Any) -> None:
    root = make_root("project", key="rsa")
    other = Issued(make_key("rsa", "another CA"), root.certificate)
    with pytest.raises(IdentityError, match="a signature by another key"):
        check(issue(other, "site-1", rsa_padding=rsa_padding).certificate, anchor=root.anchor())


def test_the_servers_certificate_is_no_sites_even_if_the_roster_has_its_name() -> None:
    anchor = ROOT.anchor(missing_role=True, not_sites=frozenset({"server.example.org"}))
    server = issue(ROOT, "server.example.org", role=None)
    with pytest.raises(IdentityError, match=r"but found that of 'server.example.org', the server"):
        check(server.certificate, "server.example.org", anchor)
    check(issue(ROOT, "site-1").certificate, anchor=anchor)


@pytest.mark.filterwarnings("ignore:Parsed a serial number")
@pytest.mark.parametrize("root_kind", ["ec", "rsa"])
def test_every_altered_bit_is_noticed(root_kind: Any) -> None:
    root = make_root("project", key=root_kind)
    good, anchor = issue(root, "site-1").certificate, root.anchor()
    check(good, anchor=anchor)
    for place in range(len(good)):
        for bit in (0x01, 0x80):
            bad = bytearray(good)
            bad[place] ^= bit
            with pytest.raises(IdentityError):
                check(bytes(bad), anchor=anchor)


@given(st.binary(max_size=400))
def test_random_bytes_are_refused_with_the_named_error(raw: bytes) -> None:
    with pytest.raises(IdentityError):
        check(raw)
    with pytest.raises(IdentityError):
        public_key_hash(raw)


def test_a_time_without_a_zone_is_refused() -> None:
    with pytest.raises(ValueError, match="time zone"):
        check(issue(ROOT, "site-1").certificate, at=datetime(2030, 6, 1))


# The root


def test_a_root_that_is_no_ca_is_refused() -> None:
    for extensions in ([], leaf_extensions()):
        root = make_root("project", extensions=extensions)
        with pytest.raises(IdentityError, match="root certificate to be a CA certificate") as caught:
            check(issue(root, "site-1").certificate, anchor=root.anchor())
        assert caught.value.blamed is None  # not the site's fault


def test_an_expired_root_is_refused() -> None:
    root = make_root("project", end=AT - DAY)
    with pytest.raises(IdentityError, match="the project's root certificate to be valid at 2030-06-01"):
        check(issue(root, "site-1").certificate, anchor=root.anchor())


@pytest.mark.parametrize("kind", ["rsa-1024", "ed25519"])
def test_a_root_with_a_weak_or_another_key_is_refused(kind: Any) -> None:
    root = make_root("project", key=kind, hash_algorithm=None if kind == "ed25519" else hashes.SHA256())
    with pytest.raises(IdentityError, match="the key of the project's root certificate"):
        check(issue(ROOT, "site-1").certificate, anchor=root.anchor())


def test_a_root_that_is_no_certificate_is_refused() -> None:
    with pytest.raises(IdentityError, match="the project's root certificate to be a well-formed"):
        check(issue(ROOT, "site-1").certificate, anchor=Anchor(b"root"))


# Pins


def test_a_pin_is_the_sha256_of_the_public_key() -> None:
    for kind in ("ec", "rsa"):
        site = issue(ROOT, "site-1", key=kind)
        assert public_key_hash(site.certificate) == sha256(spki(site))


def test_a_site_minted_with_the_ca_key_passes_without_pins_and_fails_with() -> None:
    honest = issue(ROOT, "site-1")
    minted = issue(ROOT, "site-1")  # the very root, another key: what who holds the CA's key can do
    check(minted.certificate)
    pins = frozenset({public_key_hash(honest.certificate)})
    check(honest.certificate, pins=pins, pinned_only=True)
    with pytest.raises(IdentityError) as caught:
        check(minted.certificate, pins=pins)
    assert caught.value.what == "the SHA-256 of the public key of site-1"
    assert caught.value.expected == public_key_hash(honest.certificate).hex()
    assert caught.value.found == public_key_hash(minted.certificate).hex()
    assert caught.value.blamed == "site-1"


def test_while_a_key_is_renewed_the_old_and_the_new_pin_pass() -> None:
    old, new, other = (issue(ROOT, "site-1") for _ in range(3))
    pins = frozenset(public_key_hash(site.certificate) for site in (old, new))
    for site in (old, new):
        check(site.certificate, pins=pins)
    with pytest.raises(IdentityError, match=" or "):
        check(other.certificate, pins=pins)


def test_a_certificate_renewed_for_the_same_key_keeps_its_pin() -> None:
    old = issue(ROOT, "site-1", end=AT - DAY)
    new = issue(ROOT, "site-1", key=old.key)
    assert old.certificate != new.certificate
    check(new.certificate, pins=frozenset({public_key_hash(old.certificate)}), pinned_only=True)


def test_a_pin_does_not_replace_the_other_checks() -> None:
    stranger = issue(make_root("project"), "site-1")
    with pytest.raises(IdentityError, match="a signature by another key"):
        check(stranger.certificate, pins=frozenset({public_key_hash(stranger.certificate)}))


def test_pinned_only_refuses_who_has_no_pin_and_an_empty_list_refuses_everybody() -> None:
    site = issue(ROOT, "site-1")
    with pytest.raises(IdentityError, match="pinned at this site, but found no pin"):
        check(site.certificate, pinned_only=True)
    with pytest.raises(IdentityError, match="the list of pins is empty"):
        check(site.certificate, pins=frozenset())


# Signatures


@pytest.mark.parametrize("kind", ["ec", "rsa"])
def test_a_signature_by_another_key_or_altered_is_refused(kind: Any) -> None:
    site, other = issue(ROOT, "site-1", key=kind), issue(ROOT, "site-2", key="p384")
    signature = site.signer().sign(MESSAGE)
    altered = bytes([*signature[:-1], signature[-1] ^ 1])
    for bad in (other.signer().sign(MESSAGE), altered, signature[:-1], signature + b"\0", b""):
        with pytest.raises(SignatureError) as caught:
            verify_signature(site.certificate, MESSAGE, bad, owner="site-1", what="a test")
        assert caught.value.code == "TF-603"
    with pytest.raises(SignatureError):
        verify_signature(other.certificate, MESSAGE, signature, owner="site-2", what="a test")


def test_rsa_signatures_are_pss_with_a_salt_of_32_bytes() -> None:
    site = issue(ROOT, "site-1", key="rsa")
    key = site.key.public_key()
    assert isinstance(key, rsa.RSAPublicKey)
    pss = padding.PSS(padding.MGF1(hashes.SHA256()), 32)
    key.verify(site.signer().sign(MESSAGE), MESSAGE, pss, hashes.SHA256())
    for other in (
        padding.PKCS1v15(),
        padding.PSS(padding.MGF1(hashes.SHA256()), padding.PSS.MAX_LENGTH),
        padding.PSS(padding.MGF1(hashes.SHA256()), 0),
    ):
        signature = site.key.sign(MESSAGE, other, hashes.SHA256())
        with pytest.raises(SignatureError):
            verify_signature(site.certificate, MESSAGE, signature, owner="site-1", what="a test")


def test_a_signature_is_not_checked_with_a_key_that_would_be_refused() -> None:
    weak = issue(ROOT, "site-1", key="rsa-1024")
    pss = padding.PSS(padding.MGF1(hashes.SHA256()), 32)
    signature = weak.key.sign(MESSAGE, pss, hashes.SHA256())
    with pytest.raises(IdentityError, match="1024 bits") as caught:
        verify_signature(weak.certificate, MESSAGE, signature, owner="site-1", what="a test")
    assert caught.value.blamed == "site-1"


# The engine's login signs text of the server's choice with the same key


@given(st.text())
def test_no_text_is_one_of_the_protocols_strings(text: str) -> None:
    assert not text.encode().startswith(PREFIX[:1])


def test_none_of_the_protocols_strings_is_text() -> None:
    with pytest.raises(UnicodeDecodeError):
        PREFIX.decode()
    assert MESSAGE.startswith(PREFIX)


def test_what_the_engines_login_signs_never_verifies() -> None:
    site = issue(ROOT, "site-1", key="rsa")
    # The server chooses the nonce; its best choice is our string as text, which it can only mimic.
    texts = [
        "site-1nonce",
        PREFIX.decode("latin-1"),
        MESSAGE.decode("latin-1"),
        MESSAGE.decode("utf-8", "replace"),
    ]
    pss = padding.PSS(padding.MGF1(hashes.SHA256()), 32)
    for text in texts:
        engine = sign_content(text, site.key, return_str=False)
        ours = site.key.sign(text.encode(), pss, hashes.SHA256())  # as if the padding were the same
        for signature in (engine, ours):
            with pytest.raises(SignatureError):
                verify_signature(site.certificate, MESSAGE, signature, owner="site-1", what="a test")


@pytest.mark.parametrize(
    "message", [b"", b"site-1nonce", b" " * 64 + b"TLS 1.3, client CertificateVerify\0", PREFIX[1:]]
)
def test_our_signer_signs_and_verifies_nothing_but_the_protocols_strings(message: bytes) -> None:
    signer = issue(ROOT, "site-1").signer()
    with pytest.raises(ValueError, match="one of the protocol's strings"):
        signer.sign(message)
    with pytest.raises(ValueError, match="one of the protocol's strings"):
        verify_signature(signer.certificate, message, b"", owner="site-1", what="a test")


# Signers


def test_a_signer_needs_the_certificates_own_key() -> None:
    for kind in ("ec", "rsa"):
        with pytest.raises(IdentityError, match="the certificate's, but found a different key"):
            KeySigner(make_key(kind, "other"), issue(ROOT, "site-1", key=kind).certificate)


@pytest.mark.parametrize(
    ("kind", "found"), [("ed25519", "Ed25519PrivateKey"), ("rsa-1024", "1024 bits"), ("p224", "secp224r1")]
)
def test_a_signer_refuses_weak_and_other_keys(kind: Any, found: str) -> None:
    with pytest.raises(IdentityError, match=found):
        KeySigner(make_key(kind), issue(ROOT, "site-1", key=kind).certificate)


@pytest.mark.parametrize("kind", ["ec", "rsa"])
def test_a_signer_can_be_kept_and_read_back(kind: Any) -> None:
    signer = issue(ROOT, "site-1", key=kind).signer()
    again = KeySigner.from_pem(signer.private_pem(), signer.certificate)
    assert again.certificate == signer.certificate
    verify_signature(signer.certificate, MESSAGE, again.sign(MESSAGE), owner="site-1", what="a test")


def test_a_key_file_that_is_none_or_encrypted_is_refused_without_showing_it() -> None:
    site = issue(ROOT, "site-1")
    encrypted = site.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    for raw in (b"", b"hunter2", site.signer().private_pem()[:-40], encrypted):
        with pytest.raises(IdentityError, match="an unencrypted private key in PEM") as caught:
            KeySigner.from_pem(raw, site.certificate)
        assert caught.value.__cause__ is None and caught.value.__suppress_context__


@pytest.mark.parametrize("kind", ["ec", "rsa"])
def test_a_signer_shows_no_secret_and_is_not_pickled(kind: Any) -> None:
    site = issue(ROOT, "site-1", key=kind)
    signer = site.signer()
    numbers = site.key.private_numbers()
    secret = numbers.private_value if kind == "ec" else numbers.d
    assert repr(signer) == f"KeySigner(certificate sha256 {sha256(site.certificate).hex()[:16]})"
    assert str(secret) not in repr(signer) and f"{secret:x}" not in repr(signer)
    assert not hasattr(signer, "__dict__")
    with pytest.raises(TypeError, match="never pickled"):
        pickle.dumps(signer)


def test_engine_style_traditional_pem_is_read() -> None:
    site = issue(ROOT, "site-1", key="rsa")
    pem = site.key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
    assert KeySigner.from_pem(pem, site.certificate).certificate == site.certificate


# Advertisements


def advertise(site: Issued, name: str = "site-1", params: bytes = b"p" * 32) -> Advertisement:
    keys = {"channel_key": b"c" * 32, "session_key": b"s" * 32, "encapsulation_key": b"e" * 1184}
    draft = Advertisement(
        name=name,
        certificate=site.certificate,
        slots=b"k" * 128,
        application=b"weight",
        signature=b"",
        **keys,
    )
    return dataclasses.replace(draft, signature=site.signer().sign(draft.signed(params)))


@pytest.mark.parametrize("kind", ["ec", "rsa"])
def test_an_advertisement_is_held_against_certificate_pins_and_signature(kind: Any) -> None:
    site = issue(ROOT, "site-1", key=kind)
    pins = {"site-1": frozenset({public_key_hash(site.certificate)})}
    Verifier(ROOT.anchor(), pins, True, AT).check(advertise(site), b"p" * 32)
    Verifier(ROOT.anchor(), {}, False, AT).check(advertise(site), b"p" * 32)


@pytest.mark.parametrize(
    "change",
    [
        {"channel_key": b"C" * 32},
        {"session_key": b"S" * 32},
        {"encapsulation_key": b"E" * 1184},
        {"slots": b"K" * 128},
        {"application": b"Weight"},
        {"signature": b"\0"},
    ],
)
def test_an_altered_advertisement_is_refused(change: dict[str, bytes]) -> None:
    good = advertise(issue(ROOT, "site-1"))
    with pytest.raises(SignatureError, match="the signature of an advertisement to be that of site-1"):
        Verifier(ROOT.anchor(), {}, False, AT).check(dataclasses.replace(good, **change), b"p" * 32)  # type: ignore[arg-type]


def test_an_advertisement_for_other_parameters_is_refused() -> None:
    with pytest.raises(SignatureError):
        Verifier(ROOT.anchor(), {}, False, AT).check(advertise(issue(ROOT, "site-1")), b"q" * 32)


def test_an_advertisement_under_a_renewed_certificate_needs_a_new_signature() -> None:
    old = issue(ROOT, "site-1")
    new = issue(ROOT, "site-1", key=old.key)
    swapped = dataclasses.replace(advertise(old), certificate=new.certificate)
    with pytest.raises(SignatureError):  # the certificate is part of what is signed
        Verifier(ROOT.anchor(), {}, False, AT).check(swapped, b"p" * 32)


def test_a_site_cannot_advertise_for_another_nor_unpinned_nor_too_late() -> None:
    site = issue(ROOT, "site-2")
    verifier = Verifier(ROOT.anchor(), {"site-2": frozenset({b"0" * 32})}, True, AT)
    with pytest.raises(IdentityError, match="'site-1', once, but found 'site-2'"):
        verifier.check(advertise(site), b"p" * 32)
    with pytest.raises(IdentityError, match="SHA-256 of the public key of site-2"):
        verifier.check(advertise(site, "site-2"), b"p" * 32)
    with pytest.raises(IdentityError, match="pinned at this site"):
        verifier.check(advertise(issue(ROOT, "site-3"), "site-3"), b"p" * 32)
    late = Verifier(ROOT.anchor(), {}, False, datetime(2031, 6, 1, tzinfo=UTC))
    with pytest.raises(IdentityError, match="valid at 2031-06-01"):
        late.check(advertise(site, "site-2"), b"p" * 32)


def test_curves_are_checked_by_name() -> None:
    brainpool = ec.generate_private_key(ec.BrainpoolP256R1())
    with pytest.raises(IdentityError, match="brainpoolP256r1"):
        check(issue(ROOT, "site-1", key=brainpool).certificate)
