"""Makes the known-answer vectors, once. They are then only verified, and never made again by a test.

Run by hand, from the project's root, and only for a new version of the protocol::

    PYTHONPATH=custom:app:. python -m tests.support.securesum.make_vectors

It makes new provisioned keys and certificates, so each run gives other vectors. All keys in them are
for tests alone. ``run.json`` is one run with all its inputs, private keys and random bytes included:
an epoch of four slots; a sum with everybody, one that one site misses, one whose total must be shown to be
right without one site's own word, and a seal. ``refused.json`` are
messages that must be refused: each says after how many messages of ``run.json`` it arrives, where,
and the error; and inputs of single steps. ``primitives.json`` are known answers of single functions.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from tests.support.securesum import certificates, independent
from tests.support.securesum.bad_vectors import bad_messages, bad_steps
from tests.support.securesum.protocol import MIXED, seeded
from tests.support.securesum.replay import VECTORS, VERSION, play

from tightframe.securesum import encoding, masks, messages, primitives, shamir
from tightframe.securesum.primitives import Random
from tightframe.securesum.proofs import combinations

ROSTER = ("clinic", "clinic-2", "klinikum-süd", "z")
"""One name begins another; one is not ASCII."""
SCHEMAS = {
    "train": MIXED,
    "closing": (messages.FieldSpec("total", (3,), 64, 24, 8.0, "update"),),
    "seal": (),
}
SUMS: tuple[tuple[str, list[str], list[str]], ...] = (
    ("train", [], ["z"]),
    ("train", ["clinic-2"], []),
    ("train", ["z"], []),
    ("seal", [], []),
)
"""Schema, sites that do not contribute, sites that do not reveal: their terms of the last total are shown."""


def make_run() -> dict[str, Any]:
    """The inputs of a run, its messages, and what is computed on the way."""
    root = certificates.make_root("vectors")
    params = messages.Params(
        job="3f0a7a55-0000-4000-8000-000000000001",
        lineage="3f0a7a55-0000-4000-8000-000000000000",
        epoch=2,
        roster=ROSTER,
        threshold=3,
        colluders=1,
        slots=4,
        schemas=SCHEMAS,
        weights="exact",
        trust="malicious",
        min_sites=3,
        static_open=True,
        config_sha256=hashlib.sha256(b"configuration").digest(),
        version="1.2.3",
    )
    vector: dict[str, Any] = {
        "version": VERSION,
        "protocol": "tightframe/secure-sum/1, messages of version 3",
        "notes": [
            "All keys are for tests alone. Bytes are hexadecimal; messages are in the order of sending.",
            "Random bytes of a site, in the order of use: channel key, session key, 64-byte seed of "
            "ML-KEM-768; for each slot, for update and static: b, a; coefficients of all secrets in that "
            "order, that of x first; 16-byte salts for each holder of each share; for each other holder a "
            "nonce and the 32 bytes m of FIPS 203, algorithm 17.",
            "Signatures of provisioned keys are deterministic ECDSA (RFC 6979) with SHA-256.",
        ],
        "root": root.certificate.hex(),
        "params": {**params.as_value(), "config_sha256": params.config_sha256.hex()},
        "sites": {},
        "sums": [
            {
                "slot": slot,
                "sum_id": [slot, f"{schema}-{slot}", slot],
                "schema": schema,
                "basis": hashlib.sha256(f"state {slot}".encode()).hexdigest(),
                "missing": missing,
                "silent": silent,
            }
            for slot, (schema, missing, silent) in enumerate(SUMS)
        ],
    }
    sizes = {
        group: sum(item.size * item.ring // 8 for item in MIXED if item.group == group)
        for group in messages.GROUPS
    }
    for place, name in enumerate(ROSTER):
        issued = certificates.issue(root, name)
        random = seeded(("vectors", name))
        terms = np.random.default_rng([place, 7])
        vector["sites"][name] = {
            "certificate": issued.certificate.hex(),
            "private_key": issued.key.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption()).hex(),
            "application": f"weight of {name}".encode().hex(),
            "random": random(128 + 4 * 128 + 2 * 4 * 128 + 4 * 4 * 4 * 16 + 3 * 44).hex(),
            "terms": {
                str(slot): {group: terms.bytes(size).hex() for group, size in sizes.items()}
                for slot in range(3)
            },
        }
    player, vector["messages"] = play(vector)
    shown = [total.proved for total in player.sums]
    assert shown == [(), ("clinic-2", "z"), ("z",), ()], shown
    vector["totals"] = [
        {group: data.hex() for group, data in opened.evidence.total.groups.items()}
        for opened in player.opened
    ]
    made = independent.Run(vector)
    list(made.messages())
    vector["values"] = made.values()
    return vector


RUNS = (((32, 1),), ((64, 1),), ((32, 5), (64, 3), (32, 130)), ((64, 200),), ((32, 1000),))


def _combinations(challenge: bytes, runs: tuple[tuple[int, int], ...], random: Random) -> dict[str, Any]:
    layout = masks.Layout(runs)
    data = random(layout.nbytes)
    return {
        "challenge": challenge.hex(),
        "group": "update",
        "runs": runs,
        "integers": data.hex(),
        "combinations": combinations.combine(challenge, "update", layout, data).hex(),
    }


def make_primitives() -> dict[str, Any]:
    """Known answers of single functions; the values are the package's, checked by the independent code."""
    random = seeded("primitives")
    strings: list[tuple[str, list[Any]]] = [
        ("t", []),
        ("t", [1]),
        ("t", ["1"]),
        ("t", [True]),
        ("t", [1.0, -0.0]),
        ("t", [-1, 2**64, -(2**100)]),
        ("tä", ["a", "bc", ""]),
        ("t", ["ab", "c", []]),
        ("t", [{"b": 1, "a": [2, [3]]}, {}]),
    ]
    key, session, seed = random(32), random(32), random(32)
    coefficients = random(2 * 32)
    shares = shamir.split(seed, threshold=3, holders=5, random=lambda count: coefficients[:count])
    numbers = [0.0, -0.0, 0.5, -0.5, 1.5, 2.5, -1.0, 1.0, 0.1, 7.999999, -8.0, 8.0]
    return {
        "version": VERSION,
        "strings": [
            {
                "tag": tag,
                "values": values,
                "encoded": primitives.encode_fields(tag, *values).hex(),
                "digest": primitives.digest(tag, *values).hex(),
            }
            for tag, values in strings
        ],
        "keystream": {"key": key.hex(), "bytes": masks.keystream(key, 100).hex()},
        "combinations": [_combinations(random(32), runs, random) for runs in RUNS],
        "pair_key": {
            "secret": seed.hex(),
            "session": session.hex(),
            "slot": 255,
            "group": "static",
            "first": "a",
            "second": "b",
            "key": masks.pair_key(seed, session, 255, "static", "a", "b").hex(),
        },
        "self_key": {
            "seed": seed.hex(),
            "session": session.hex(),
            "slot": 0,
            "group": "update",
            "name": "a",
            "key": masks.self_key(seed, session, 0, "update", "a").hex(),
        },
        "shamir": {
            "secret": seed.hex(),
            "threshold": 3,
            "coefficients": coefficients.hex(),
            "shares": [item.hex() for item in shares],
        },
        "encoding": [
            {
                "ring": ring,
                "bits": bits,
                "bound": 8.0,
                "values": numbers,
                "integers": encoding.encode(
                    np.array(numbers), ring=ring, bits=bits, bound=8.0, name="x"
                ).tolist(),
            }
            for ring, bits in ((32, 25), (64, 24), (32, 0))
        ],
    }


def main() -> None:
    """Write all three files."""
    VECTORS.mkdir(exist_ok=True)
    run = make_run()
    write("run", run)
    write("primitives", make_primitives())
    messages_ = bad_messages(run)
    write(
        "refused",
        {
            "version": VERSION,
            "notes": [
                "messages: after so many messages of run.json, this one arrives in place of the next, or "
                "besides; its receiver must refuse it with this error and be as it was before.",
                "steps: a single step that must refuse these inputs.",
            ],
            "messages": messages_,
            "steps": bad_steps(run),
        },
    )


def write(name: str, value: object) -> None:
    """One file, one line a value where that stays readable."""
    text = json.dumps(value, indent=1, ensure_ascii=False)
    (VECTORS / f"{name}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
