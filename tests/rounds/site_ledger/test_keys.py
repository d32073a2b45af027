"""Whose signatures in a site's ledger count: the site's own, under the roots that it trusts for this."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import Encoding
from tests.support.securesum.certificates import AT, Issued, issue, make_root

from tightframe.config.site import SiteEntry
from tightframe.errors import SiteConfigError
from tightframe.rounds.site_ledger import keys
from tightframe.rounds.site_ledger.keys import read_root, signature_check, trusted_roots
from tightframe.rounds.sums.simulated_identity import simulated_root_pem
from tightframe.securesum.errors import IdentityError, SignatureError
from tightframe.securesum.primitives import encode_fields

DAY = timedelta(days=1)
LINE, OTHER_LINE = encode_fields("a line", b""), encode_fields("another line", b"")


@pytest.fixture(scope="module")
def root() -> Issued:
    return make_root()


def pem(*issued: Issued) -> bytes:
    return b"".join(item.x509.public_bytes(Encoding.PEM) for item in issued)


def test_a_line_counts_if_its_certificate_was_in_date_then(
    root: Issued, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At both ends of its dates; they are held against each line, and the certificate once."""
    checked: list[object] = []
    verify = keys.verify_certificate
    monkeypatch.setattr(keys, "verify_certificate", lambda *a, **k: (checked.append(a), verify(*a, **k)))
    own = issue(root, "site-1", start=AT - 2 * DAY, end=AT + 2 * DAY)
    signature = own.signer().sign(LINE)
    check = signature_check([root.anchor()], name="site-1")
    check(own.certificate, LINE, signature, AT)
    for time in (AT - 2 * DAY, AT + 2 * DAY, AT):
        check(own.certificate, LINE, signature, time)
    assert len(checked) == 1
    for time in (AT - 3 * DAY, AT + 3 * DAY):
        with pytest.raises(IdentityError):
            check(own.certificate, LINE, signature, time)
    with pytest.raises(SignatureError):
        check(own.certificate, OTHER_LINE, signature, AT)


def test_only_a_reader_of_a_ledger_takes_any_sites(root: Issued) -> None:
    other = issue(root, "site-2")
    signature = other.signer().sign(LINE)
    signature_check([root.anchor()])(other.certificate, LINE, signature, AT)
    with pytest.raises(IdentityError):
        signature_check([root.anchor()], name="site-1")(other.certificate, LINE, signature, AT)


def test_a_refusal_names_the_projects_own_root(root: Issued, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of the roots; without any nothing is checked."""
    own = issue(root, "site-1")

    def refuse(certificate: bytes, signer: str, anchor: str, **_: object) -> None:
        raise IdentityError("the root", expected=anchor, found="another", blamed=signer)

    monkeypatch.setattr(keys, "verify_certificate", refuse)
    with pytest.raises(IdentityError, match="first"):
        signature_check(["first", "second"])(own.certificate, LINE, b"", AT)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="at least one trust anchor"):
        signature_check([])(own.certificate, LINE, b"", AT)


Written = Callable[[Issued], bytes | None]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (lambda root: pem(root, make_root("other")), "something else"),
        (lambda root: pem(issue(root, "site-1")), "something else"),
        (lambda root: pem(issue(root, "site-1", extensions=())), "something else"),
        (lambda root: b"no certificate", "something else"),
        (lambda root: simulated_root_pem("job"), "a simulated one"),
        (lambda root: None, "No such file"),
    ],
    ids=["two", "a site's", "bare", "none", "simulated", "missing"],
)
def test_a_trusted_root_is_one_authority_that_not_everybody_can_sign_with(
    root: Issued, tmp_path: Path, content: Written, problem: str
) -> None:
    path, raw = tmp_path / "root.pem", content(root)
    if raw is not None:
        path.write_bytes(raw)
    with pytest.raises(SiteConfigError, match=rf"^TF-202: [\s\S]*{problem}"):
        trusted_roots(SiteEntry(ledger_roots=[str(path)]), root.anchor())


def test_roots_of_other_projects_are_trusted_beside_the_own(root: Issued, tmp_path: Path) -> None:
    other, path = make_root("other"), tmp_path / "root.pem"
    path.write_bytes(pem(other))
    assert read_root(path) == other.x509
    anchors = trusted_roots(SiteEntry(ledger_roots=[str(path)]), root.anchor(missing_role=True))
    assert [anchor.root for anchor in anchors] == [root.certificate, other.certificate]
    assert [anchor.missing_role for anchor in anchors] == [True, True]
