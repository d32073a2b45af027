"""Secure sums through NVFlare: a silo lost at the reveal, transcripts, and where secrets lie.

Silos lost during the setup and the training are in ``test_faults.py``. More silos than the threshold can
spare, lost at the reveal, are in ``tests/rounds/secure``: to the engine they are late, like any other.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.engine.simulation import Run, assert_equal, export_job, run_alone, simulate_job, verify

from tightframe.rounds.sums.vault import restore
from tightframe.securesum.messages import GROUPS, KINDS, SALT_BYTES
from tightframe.securesum.site.state import (
    Advertised,
    Confirmed,
    Established,
    Fresh,
    Revealed,
    dealt_pair_secret,
    slot_secret,
    slot_share,
)

SITES = [f"site-{number}" for number in range(1, 5)]
PATIENCE = {"site_timeout": 20, "fetch_timeout": 120}
"""Seconds; a round of a silo takes less than one of a core, and none of it is imports."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("silent")


@pytest.fixture(scope="module")
def silent(folder: Path) -> Run:
    """Three rounds; site-4 does not answer `reveal` of the first, after it has sent its term."""
    fault = {
        "site": ["site-4"],
        "task": "reveal",
        "round": 1,
        "kind": "late",
        "seconds": PATIENCE["site_timeout"] + 2,
        "watch": str(folder / "watch"),
    }
    job = export_job(folder, sites=len(SITES), fault=fault, changes={**PATIENCE, "rounds": 3})
    return simulate_job(job, folder, threads=len(SITES))


def test_a_silo_that_is_lost_after_its_term_is_in_the_sum(silent: Run) -> None:
    assert silent.code == 0, silent.output
    assert silent.outcome["trained"] is True and silent.outcome["dropped"] == []
    train = [row for row in silent.rows if row["kind"] == "train"]
    assert [row["silos"] for row in train] == [SITES] * 3
    assert all(row["static_opened"] for row in silent.rows), "its term counts, so it was no drop-out"
    assert train[0]["seconds"] > PATIENCE["site_timeout"], "it was waited for"
    assert "site-4: its term is in the sum, but it gave no share: TF-502" in silent.output


def test_and_the_run_equals_the_plain_one_bit_for_bit(silent: Run, folder: Path) -> None:
    """Three rounds, so that the last one trains with prototypes from class sums."""
    changes = {**PATIENCE, "rounds": 3, "summation": "plain"}
    plain = export_job(folder / "plain", sites=len(SITES), changes=changes)
    assert_equal(silent.server, run_alone(plain, folder / "plain"))


def test_the_transcripts_of_the_run_are_valid(silent: Run, tmp_path: Path) -> None:
    """The server's and those of three sites, site-4's among them, which gave no share in round 1."""
    root = silent.server / "simulated_root.pem"
    code, said = verify(silent.server / "transcript.jsonl", root)
    assert code == 0, said
    assert "written by the server" in said and "SIMULATED" in said and "complete yes" in said
    assert "5 opened, 0 failed, 0 with missing sites" in said
    for site in ("site-1", "site-3", "site-4"):
        code, said = verify(silent.workspace / site / "simulate_job" / "transcript.jsonl", root)
        assert code == 0, said
        assert f"written by site {site}" in said
    lines = (silent.server / "transcript.jsonl").read_text().splitlines(keepends=True)
    assert len(lines) == 8, "start, one setup, four sums, a seal, end"
    forged = json.loads(lines[2])
    forged["slot"] = forged["slot"] + 1
    (tmp_path / "forged.jsonl").write_text("".join([*lines[:2], json.dumps(forged) + "\n", *lines[3:]]))
    code, said = verify(tmp_path / "forged.jsonl", root)
    assert code == 1 and "TF-616" in said


def _secrets(state: Advertised | Confirmed | Established) -> Iterator[tuple[str, bytes]]:
    """Every secret in a stored state that nobody else may have, or only the holder of a share."""
    yield "signing key", state.signing.expose()
    own: list[Any] = []
    if isinstance(state, Established):
        for number, slot in enumerate(state.slots):
            if isinstance(slot, Fresh):
                own.append(slot.secrets)
                for dealer, name in enumerate(state.epoch.params.roster):
                    for group in GROUPS:
                        dealt = dealt_pair_secret(slot.pair_secrets, dealer, group)
                        yield f"dealt by {name}, slot {number}, {group}", dealt
            if hasattr(slot, "shares"):
                for dealer, name in enumerate(state.epoch.params.roster):
                    for group in GROUPS:
                        for kind in KINDS:
                            share = slot_share(slot.shares, dealer, group, kind)
                            yield f"{kind} share of {name}, slot {number}, {group}", share[SALT_BYTES:]
    else:
        yield "channel key", state.channel.expose()
        yield "first half of the decapsulation key's seed", state.decapsulation.expose()[:32]
        yield "second half of it", state.decapsulation.expose()[32:]
        own = list(state.secrets)
    for number, secrets in enumerate(own):
        for group in GROUPS:
            for kind in KINDS:
                yield f"{kind} secret, slot {number}, {group}", slot_secret(secrets, group, kind).expose()


def _written(secret: bytes) -> list[bytes]:
    """How bytes could be written into a file: as they are, in digits, in a message of Python's."""
    return [
        secret,
        secret.hex().encode(),
        secret.hex().upper().encode(),
        base64.b64encode(secret).rstrip(b"="),
        repr(secret)[2:-1].encode(),
        ", ".join(map(str, secret)).encode(),
    ]


class Needles:
    """Finds many byte strings in files at once, by their first eight bytes."""

    def __init__(self, named: dict[bytes, str]) -> None:
        self._named = named
        self._heads = np.array([int.from_bytes(needle[:8], "little") for needle in named], dtype=np.uint64)

    def found_in(self, data: bytes) -> set[str]:
        if len(data) < 8:
            return set()
        windows = np.lib.stride_tricks.sliding_window_view(np.frombuffer(data, np.uint8), 8)
        heads = np.ascontiguousarray(windows).view("<u8")[:, 0]
        places = np.flatnonzero(np.isin(heads, self._heads))
        return {
            name
            for place in places.tolist()
            for needle, name in self._named.items()
            if data.startswith(needle, place)
        }


def test_a_silos_secrets_are_nowhere_but_in_its_own_folder(silent: Run, folder: Path) -> None:
    """Every key, mask secret and share that a silo ever held, in all files of the run and its output."""
    seen: dict[str, dict[bytes, str]] = {}
    dealers = len(SITES)
    for site in SITES:
        named: dict[bytes, str] = {}
        for path in sorted((folder / "watch" / site).iterdir()):
            for what, secret in _secrets(restore(path.read_bytes())):
                assert len(secret) == 32
                named[secret] = f"{site}: {what}"
        # Keys of channel (two of 32 bytes for ML-KEM-768) and session; for each of eight slots (four sums,
        # two retries, a seal and its retry) b and a of both groups, and of those a share from each
        # dealer; and a pair secret from each for both groups, but of the first slot, whose are used at once.
        assert len([name for name in named.values() if "secret" in name]) == 8 * 4
        assert len([name for name in named.values() if "share" in name]) == 8 * dealers * 4
        assert len([name for name in named.values() if "dealt by" in name]) == 7 * dealers * 2
        assert len(named) == 4 + 8 * 4 + 8 * dealers * 4 + 7 * dealers * 2
        seen[site] = named
    for site, named in seen.items():
        needles = Needles({text: name for secret, name in named.items() for text in _written(secret)})
        states = b"".join(path.read_bytes() for path in (folder / "watch" / site).iterdir())
        assert needles.found_in(states) == set(named.values()), "the search itself finds what is there"
        some, name = next(iter(named.items()))
        for text in _written(some):
            assert needles.found_in(b"said: " + text + b".") == {name}, "in whatever form"
        own = silent.workspace / site / "simulate_job" / "secure_sum"
        files = [p for p in silent.workspace.rglob("*") if p.is_file() and not p.is_relative_to(own)]
        assert {"log.txt", "log.json", "transcript.jsonl", "checkpoint.safetensors", "reply-reveal"} <= {
            path.name for path in files
        }
        for path in files:
            found = needles.found_in(path.read_bytes())
            assert not found, f"{path}: {sorted(found)[:3]}"
        assert not needles.found_in(silent.output.encode())


def test_what_is_kept_at_the_end_is_the_owners_alone_and_of_no_use(silent: Run) -> None:
    for site in SITES:
        kept = silent.workspace / site / "simulate_job" / "secure_sum"
        for path in kept.iterdir():
            assert path.stat().st_mode & 0o077 == 0, path
        state = restore((kept / "state").read_bytes())
        assert isinstance(state, Established)
        assert all(isinstance(slot, Revealed) for slot in state.slots[:4]), "used slots hold nothing"
