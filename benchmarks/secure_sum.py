"""Cost of the secure sum for a site and the server, compared with Flower's SecAgg+ on the same vectors.

    python benchmarks/secure_sum.py --json secure_sum.json
    python benchmarks/secure_sum.py --quick --no-peer

CPU time (user and system) of one thread, medians; ratios and shares are within one run, with the
AES-256-CTR rate beside each measurement. ``keystream`` is the generation and addition of all masks, in the
real handlers; its share is the streams' bytes over its time and the AES rate, i.e. the part of the
time that AES itself needs. ``round`` is a site's encoding, masking and answers. Memory is what Python and
numpy allocate. The peer's environment is created on first use (``peers/flower/requirements.txt``).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import secure_sum_peer
from secure_sum_ours import SLOTS, Federation, Keystream, Round, aes_rate, sha256_rate

SITES, SIZES = (6, 20, 100), (10_000, 1_000_000, 5_000_000, 25_000_000)
PEER_CASE, ROUND_CASE = (20, 1_000_000), (6, 4_000_000)
FULL_WORK = 10**10
"""Largest m n^2 at which all sites make masks; above it, only some sites do."""
KEPT_WORK = 10**9
"""Largest m n measured unless asked for: the sites of one process keep two terms each."""
PEER_WORK = 10**9
"""Largest m n at which the peer is measured: above it, it takes more than about ten minutes."""
LIGHT = 3


@dataclass(frozen=True)
class Gate:
    """A bound that a measurement must meet."""

    what: str
    value: float | None
    limit: float
    at_least: bool

    @property
    def passed(self) -> bool | None:
        """True if the bound is met; None if the case was not measured."""
        if self.value is None:
            return None
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def __str__(self) -> str:
        verdict = {True: "passed", False: "FAILED", None: "not measured"}[self.passed]
        value = "" if self.value is None else f"{self.value:.3f}, "
        return f"{verdict:<13} {self.what}: {value}{'at least' if self.at_least else 'at most'} {self.limit}"


def patterns(sites: int) -> list[int]:
    """Return the numbers of drop-outs: none, one, one in ten."""
    return sorted({0, 1, max(1, round(sites / 10))})


def repeats(sites: int, size: int) -> int:
    """Return the rounds of each pattern, so that all, a first one and two for memory fit the slots."""
    if sites > 50 or size * sites**2 > FULL_WORK // 10:
        return 2 if size * sites**2 < FULL_WORK else 1
    return 4


def measure(
    sites: int, size: int, *, seed: int = 0, rounds: int | None = None, weigh: bool = True
) -> dict[str, Any]:
    """Measure all costs of one case."""
    light = LIGHT if size * sites**2 > FULL_WORK else 0
    federation, keystream = Federation(sites, size, light=light, seed=seed), Keystream()
    setup = federation.set_up()
    measured: dict[int, list[Round]] = {drops: [] for drops in patterns(sites)}
    rates, hash_rates = [], []
    with keystream.watch():
        federation.run(0, keystream)  # the first sum rests on no total
        for _ in range(rounds or repeats(sites, size)):
            for drops, kept in measured.items():
                rates.append(aes_rate())
                hash_rates.append(sha256_rate())
                kept.append(federation.run(drops, keystream))
    result: dict[str, Any] = {
        "sites": sites,
        "size": size,
        "threshold": federation.params.threshold,
        "fraction_bits": federation.bits,
        "light": light,
        "rounds": len(measured[0]),
        "aes_gb_s": statistics.median(rates) / 1e9,
        "sha256_gb_s": statistics.median(hash_rates) / 1e9,
        "setup": asdict(setup),
        "memory_vectors": federation.weigh() if weigh else None,
        "drops": {str(drops): _folded(rounds_) for drops, rounds_ in measured.items()},
    }
    result["site"] = _site(measured[0])
    return result


def _site(rounds: list[Round]) -> dict[str, float]:
    """Return medians over sites and rounds without drop-outs, and the range of the masking."""
    names = ("encode_ms", "mask_ms", "keystream_ms", "keystream_share", "mask_share", "reveal_ms")
    values = {name: [item for one in rounds for item in getattr(one, name)] for name in names}
    result = {name: statistics.median(item) for name, item in values.items()}
    result["round_ms"] = result["encode_ms"] + result["mask_ms"] + result["reveal_ms"]
    result["mask_min_ms"], result["mask_max_ms"] = min(values["mask_ms"]), max(values["mask_ms"])
    return result


def _folded(rounds: list[Round]) -> dict[str, Any]:
    """Return medians, over rounds with equally many drop-outs, of the server's costs and of a site's."""
    names = (
        "receive_ms",
        "answers_ms",
        "open_ms",
        "open_keystream_ms",
        "open_share",
        "open_keystream_share",
        "decode_ms",
        "server_ms",
        "up_bytes",
        "down_bytes",
    )
    result: dict[str, Any] = {name: statistics.median(getattr(one, name) for one in rounds) for name in names}
    result["server_min_ms"] = min(one.server_ms for one in rounds)
    result["server_max_ms"] = max(one.server_ms for one in rounds)
    result["site_round_ms"] = _site(rounds)["round_ms"]
    errors = [one.error for one in rounds if one.error is not None]
    result["error"] = max(errors) if errors else None
    return result


def compare(
    sites: int, size: int, python: Path, *, seed: int = 0, turns: int | None = None
) -> dict[str, Any]:
    """Measure the peer in one case, with the ratios of its costs to ours, including our setup's share.

    Both sides take turns, because times drift on a shared machine; each turn gives its own ratio.
    """
    work, pairs = size * sites**2, []
    for _ in range(turns or (3 if work <= FULL_WORK // 20 else 1)):
        ours = measure(sites, size, seed=seed, rounds=1, weigh=False)
        theirs = secure_sum_peer.measure(
            python,
            sites=sites,
            size=size,
            threshold=ours["threshold"],
            drops=patterns(sites),
            repeats=1,
            light=LIGHT if work > FULL_WORK // 10 else 0,
            seed=seed,
        )
        pairs.append((ours, theirs))
    first = pairs[0][1]
    kept = {name: first[name] for name in ("versions", "light", "peak_client_bytes")}
    return kept | {"turns": len(pairs), "drops": {drops: _pair(pairs, drops) for drops in first["drops"]}}


def _pair(pairs: list[tuple[dict[str, Any], dict[str, Any]]], drops: str) -> dict[str, Any]:
    """Return minimum, median and maximum of each value over the turns."""
    values: dict[str, list[float]] = {"client": [], "server": [], "up_bytes": []}
    times: dict[str, list[float]] = {"client_ms": [], "server_ms": []}
    for ours, peer in pairs:
        own, setup, theirs = ours["drops"][drops], ours["setup"], peer["drops"][drops]
        client, server = (sum(theirs[name].values()) for name in ("client_ms", "server_ms"))
        times["client_ms"].append(client)
        times["server_ms"].append(server)
        values["client"].append(client / (own["site_round_ms"] + setup["site_ms"] / SLOTS))
        values["server"].append(server / (own["server_ms"] + setup["server_ms"] / SLOTS))
        values["up_bytes"].append(theirs["up_bytes"] / (own["up_bytes"] + setup["up_bytes"] / SLOTS))
    last = pairs[-1][1]["drops"][drops]
    spread = {name: [min(item), statistics.median(item), max(item)] for name, item in values.items()}
    medians = {name: statistics.median(item) for name, item in times.items()}
    return medians | {"up_bytes": last["up_bytes"], "error": last["error"], "ratios": spread}


def round_seconds(result: dict[str, Any]) -> float:
    """Return the CPU seconds of all sites and the server in a round without drop-outs, with setup's share."""
    setup, sites = result["setup"], result["sites"]
    shared = (sites * setup["site_ms"] + setup["server_ms"]) / SLOTS
    return (sites * result["site"]["round_ms"] + result["drops"]["0"]["server_ms"] + shared) / 1000


def gates(results: list[dict[str, Any]]) -> list[Gate]:
    """Return the required bounds with the measured values."""
    large = [item for item in results if item["size"] >= 1_000_000]
    shares = [item["site"]["keystream_share"] for item in large]
    shares += [one["open_keystream_share"] for item in large for one in item["drops"].values()]
    memory = [item["memory_vectors"] for item in large if item["memory_vectors"]]
    masking = [item["masking"] for item in memory]
    by_case = {(item["sites"], item["size"]): item for item in results}
    peer = by_case.get(PEER_CASE, {}).get("peer")
    ratios = [one["ratios"] for one in peer["drops"].values()] if peer else []
    whole = by_case.get(ROUND_CASE)
    return [
        Gate("keystream and addition, lowest share of the AES rate (m >= 1e6)", _least(shares), 0.70, True),
        Gate(
            "a client of Flower / ours, n = 20, m = 1e6", _least(one["client"][1] for one in ratios), 4, True
        ),
        Gate("Flower's server / ours, n = 20, m = 1e6", _least(one["server"][1] for one in ratios), 4, True),
        Gate("round of 4M parameters, 6 silos, s", round_seconds(whole) if whole else None, 1, False),
        Gate("masking at a site, in vectors (m >= 1e6)", max(masking, default=None), 3, False),
    ]


def _least(values: Iterable[float]) -> float | None:
    return min(values, default=None)


def show(result: dict[str, Any]) -> None:
    """Print one case."""
    site, setup, memory = result["site"], result["setup"], result["memory_vectors"]
    print(
        f"\nn = {result['sites']}, m = {result['size']:.3g}, t = {result['threshold']}, "
        f"{result['rounds']} rounds of each kind"
        + (f", {LIGHT} sites make masks" if result["light"] else "")
        + ", sums exact"
        + f"; AES {result['aes_gb_s']:.2f} GB/s, SHA-256 {result['sha256_gb_s']:.2f} GB/s"
    )
    print(
        f"  setup, {SLOTS} slots: site {setup['site_ms']:.1f} ms, server {setup['server_ms']:.1f} ms, "
        f"{setup['up_bytes'] / 1e3:.1f} KB up, {setup['down_bytes'] / 1e3:.1f} KB down"
    )
    print(
        f"  site: encode {site['encode_ms']:.2f}, mask {site['mask_ms']:.2f} "
        f"({site['mask_min_ms']:.2f} to {site['mask_max_ms']:.2f}), of it keystream "
        f"{site['keystream_ms']:.2f}, answers {site['reveal_ms']:.2f} ms; share of AES: "
        f"keystream {site['keystream_share']:.0%}, whole mask {site['mask_share']:.0%}"
    )
    for drops, one in result["drops"].items():
        print(
            f"  server, {drops} drop-outs: receive {one['receive_ms']:.1f}, answers {one['answers_ms']:.1f}, "
            f"open {one['open_ms']:.1f}, decode {one['decode_ms']:.1f}, in all {one['server_ms']:.1f} ms "
            f"({one['server_min_ms']:.1f} to {one['server_max_ms']:.1f}); open's share of AES "
            f"{one['open_share']:.0%}, its keystream's {one['open_keystream_share']:.0%}; "
            f"a site's round {one['site_round_ms']:.1f} ms, {one['up_bytes'] / 1e6:.3f} MB up"
        )
    print(f"  whole round, all sites and server: {round_seconds(result):.3f} s")
    if memory and result["size"] >= 1_000_000:  # below, shares and receipts outweigh the vector
        print(
            "  peak memory in vectors: " + ", ".join(f"{name} {value:.2f}" for name, value in memory.items())
        )
    peer = result.get("peer")
    if peer:
        weight = peer["peak_client_bytes"]
        print(
            f"  Flower {peer['versions']['flwr']}, {peer['turns']} turns each"
            + (f", {peer['light']} clients really mask" if peer["light"] else "")
            + (f"; a client's peak memory {weight / 4 / result['size']:.1f} vectors" if weight else "")
        )
        for drops, one in peer["drops"].items():
            ratio = {
                name: "{1:.1f} x ours ({0:.1f} to {2:.1f})".format(*one["ratios"][name])
                for name in one["ratios"]
            }
            print(
                f"    {drops} drop-outs: client {one['client_ms']:.1f} ms, {ratio['client']}; "
                f"server {one['server_ms']:.1f} ms, {ratio['server']}; "
                f"{one['up_bytes'] / 1e6:.3f} MB up, {ratio['up_bytes']}"
                + (f"; error {one['error']:.1e}" if one["error"] is not None else "")
            )
    sys.stdout.flush()


def cases(arguments: argparse.Namespace) -> list[tuple[int, int]]:
    """Return cases (n, m), cheapest first, with the gate's round except in a quick run."""
    sites, sizes = arguments.sites or SITES, arguments.sizes or SIZES
    if arguments.quick:
        sites, sizes = [item for item in sites if item <= 20], [item for item in sizes if item <= 1_000_000]
    named = bool(arguments.sites or arguments.sizes)
    chosen = {(n, m) for n in sites for m in sizes if named or n * m <= KEPT_WORK}
    if not (arguments.quick or named):
        chosen.add(ROUND_CASE)
    return sorted(chosen, key=lambda case: case[1] * case[0] ** 2)


def main() -> None:
    """Measure, print, write, and exit with 1 if a gate fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="m up to 1e6 and n up to 20 only")
    parser.add_argument("--sizes", type=lambda text: int(float(text)), nargs="+", help="coordinates m")
    parser.add_argument("--sites", type=int, nargs="+", help="sites n, from 3")
    parser.add_argument("--json", type=Path, help="file to write the results to, after each case")
    parser.add_argument("--no-peer", action="store_true", help="do not measure Flower")
    parser.add_argument(
        "--peer-env",
        type=Path,
        default=secure_sum_peer.default_environment(),
        help="folder of Flower's environment",
    )
    arguments = parser.parse_args()
    python = None
    if not arguments.no_peer:
        try:
            python = secure_sum_peer.make_environment(arguments.peer_env)
        except secure_sum_peer.PeerError as error:
            sys.exit(f"{error}\nTo measure without the peer, give --no-peer.")
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    print(f"{machine}; CPU time of one thread in ms, medians")
    results: list[dict[str, Any]] = []
    for sites, size in cases(arguments):
        start = time.perf_counter()
        print(f"... n = {sites}, m = {size:.3g}", end="", file=sys.stderr, flush=True)
        result = measure(sites, size)
        if python and size * sites <= PEER_WORK:
            print(", peer", end="", file=sys.stderr, flush=True)
            result["peer"] = compare(sites, size, python)
        print(f", {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
        show(result)
        results.append(result)
        if arguments.json:
            report = {"machine": machine, "results": results, "gates": [str(gate) for gate in gates(results)]}
            arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    print()
    verdicts = gates(results)
    for gate in verdicts:
        print(gate)
    sys.exit(int(any(gate.passed is False for gate in verdicts)))


if __name__ == "__main__":
    main()
