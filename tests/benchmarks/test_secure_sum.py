"""The secure sum's benchmark at toy size: what it counts and what it concludes. No time is looked at."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import secure_sum

    return secure_sum


def test_every_pattern_of_drop_outs_is_opened_and_right(benchmark: ModuleType) -> None:
    found = benchmark.measure(6, 50, rounds=1)
    assert set(found["drops"]) == {"0", "1"}
    for one in found["drops"].values():
        # The mean of terms that were rounded once each, so at most half a step off.
        assert 0 < one["error"] <= 2.0 ** -found["fraction_bits"] / 2
        assert one["up_bytes"] > 4 * 50


def test_the_opened_sum_is_held_against_the_plain_one(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    import secure_sum_ours

    federation, keystream = secure_sum_ours.Federation(3, 10), secure_sum_ours.Keystream()
    federation.set_up()
    honest = federation._mask
    monkeypatch.setattr(
        federation, "_mask", lambda site, request, term: honest(site, request, bytes(4) + term[4:])
    )
    with keystream.watch(), pytest.raises(AssertionError, match="plaintext sum"):
        federation.run(0, keystream)


def test_all_keystream_is_counted(benchmark: ModuleType) -> None:
    import secure_sum_ours

    federation, keystream = secure_sum_ours.Federation(4, 10), secure_sum_ours.Keystream()
    federation.set_up()
    with keystream.watch():
        federation.run(1, keystream)
    # Since the last clearing: three self masks, and the missing site's masks with three others.
    assert keystream.bytes == (3 + 3) * 40


def test_ratios_are_the_peer_over_ours_with_our_share_of_the_setup(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    import secure_sum_peer

    client = iter([10.0, 40.0, 20.0])
    ours = {
        "threshold": 14,
        "setup": {"site_ms": 16 * 1.0, "server_ms": 16 * 5.0, "up_bytes": 16 * 10},
        "drops": {"0": {"site_round_ms": 1.0, "server_ms": 10.0, "up_bytes": 40}},
    }

    def theirs(*_: Any, **__: Any) -> dict[str, Any]:
        times = {"client_ms": {"a": next(client), "b": 2.0}, "server_ms": {"a": 30.0, "b": 60.0}}
        drops = {"0": times | {"up_bytes": 100, "error": None}}
        return {"versions": {}, "light": 0, "peak_client_bytes": None, "drops": drops}

    monkeypatch.setattr(secure_sum_peer, "measure", theirs)
    monkeypatch.setattr(benchmark, "measure", lambda *_, **__: ours)
    found = benchmark.compare(20, 1000, Path("python"))
    assert found["turns"] == 3
    assert found["drops"]["0"]["ratios"] == {
        "client": [6.0, 11.0, 21.0],
        "server": [6.0] * 3,
        "up_bytes": [2.0] * 3,
    }


@pytest.mark.parametrize(
    ("place", "keys", "value"),
    [
        (0, ("site", "keystream_share"), 0.69),
        (0, ("drops", "0", "open_keystream_share"), 0.69),
        (1, ("peer", "drops", "0", "ratios", "client"), [5.0, 3.9, 5.0]),
        (2, ("peer", "drops", "0", "ratios", "server"), [5.0, 3.9, 5.0]),
        (3, ("site", "round_ms"), 200.0),
        (4, ("memory_vectors", "masking"), 3.1),
    ],
)
def test_each_gate_fails_for_what_it_guards_and_for_nothing_else(
    benchmark: ModuleType, place: int, keys: tuple[str, ...], value: Any
) -> None:
    results = [_result(20, 1_000_000), _result(6, 4_000_000)]
    assert [gate.passed for gate in benchmark.gates(results)] == [True] * 5
    part: Any = results[1 if keys[-1] == "round_ms" else 0]
    for key in keys[:-1]:
        part = part[key]
    part[keys[-1]] = value
    assert [gate.passed for gate in benchmark.gates(results)] == [gate != place for gate in range(5)]


def test_without_the_masks_of_most_sites_sums_are_right_and_verified(benchmark: ModuleType) -> None:
    import secure_sum_ours

    federation, keystream = secure_sum_ours.Federation(4, 50, light=2), secure_sum_ours.Keystream()
    federation.set_up()
    with keystream.watch():
        rounds = [federation.run(drops, keystream) for drops in (0, 0, 1, 0)]
    assert [len(one.mask_ms) for one in rounds] == [2] * 4
    assert [bool(one.checks_ms) for one in rounds] == [False, True, True, True]
    assert all(one.error <= 2.0**-federation.bits / 2 for one in rounds)


def test_what_was_not_measured_is_said_so(benchmark: ModuleType) -> None:
    assert [gate.passed for gate in benchmark.gates([])] == [None] * 5


def _result(sites: int, size: int) -> dict[str, Any]:
    return {
        "sites": sites,
        "size": size,
        "site": {"keystream_share": 0.8, "round_ms": 100.0},
        "setup": {"site_ms": 16.0, "server_ms": 16.0},
        "memory_vectors": {"masking": 2.0, "site": 5.0, "server": 4.0},
        "drops": {"0": {"open_keystream_share": 0.8, "server_ms": 100.0}},
        "peer": {"drops": {"0": {"ratios": {"client": [3.0, 5.0, 6.0], "server": [3.0, 5.0, 6.0]}}}},
    }
