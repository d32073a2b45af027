"""What reads a run's measures from outside: a UDP socket, and TensorBoard's own reader of event files."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LINE = re.compile(r"(?P<name>[^:|]+):(?P<value>[^|]+)\|(?P<kind>\w+)(\|#(?P<tags>.+))?")


@dataclass
class Daemon:
    """Every line that came to a socket of loopback, as a StatsD daemon would get it."""

    port: int
    lines: list[str] = field(default_factory=list)

    def own(self) -> list[tuple[str, str, float, dict[str, str]]]:
        """(name, kind, value, tags) of each line but those that the client library sends of itself."""
        found = []
        for line in self.lines:
            match = LINE.fullmatch(line)
            assert match is not None, line
            if match["name"].startswith("datadog.dogstatsd."):
                continue
            tags = dict(tag.split(":", 1) for tag in (match["tags"] or "").split(",") if tag)
            found.append((match["name"], match["kind"], match["value"], tags))
        assert all(kind == "g" for _, kind, _, _ in found)
        return [(name, kind, float(value), tags) for name, kind, value, tags in found]

    def gauges(self) -> dict[tuple[str, str | None], float]:
        """(name, class) -> value, as the protocol says: a sign makes a difference of it."""
        values: dict[tuple[str, str | None], float] = {}
        for line in self.lines:
            match = LINE.fullmatch(line)
            assert match is not None, line
            tags = dict(tag.split(":", 1) for tag in (match["tags"] or "").split(",") if tag)
            key = (match["name"], tags.get("class"))
            before = values.get(key, 0.0) if match["value"][0] in "+-" else 0.0
            values[key] = before + float(match["value"])
        return {key: value for key, value in values.items() if key[0].startswith("tightframe")}


@contextmanager
def listening() -> Iterator[Daemon]:
    """A daemon on a free port; when the block ends, all that was sent until then has come."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        daemon = Daemon(server.getsockname()[1])

        def read() -> None:
            while (datagram := server.recv(65536)) != b"end":
                daemon.lines.extend(datagram.decode().splitlines())

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        try:
            yield daemon
        finally:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as last:
                last.sendto(b"end", ("127.0.0.1", daemon.port))
            reader.join(10)
    assert not reader.is_alive()


def read_events(folder: Path) -> dict[tuple[str, int], float]:
    """(tag, step) -> value of all event files below a folder, by TensorBoard's own reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    points: dict[tuple[str, int], float] = {}
    files = sorted({path.parent for path in folder.rglob("events.out.tfevents.*")})
    assert files, f"no event file in {folder}"
    for path in files:
        read = EventAccumulator(str(path), size_guidance={"scalars": 0})
        read.Reload()
        for tag in read.Tags()["scalars"]:
            for event in read.Scalars(tag):
                assert (tag, event.step) not in points, "each point is written once"
                points[tag, event.step] = event.value
    return points


def expected_points(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[str, int], float]:
    """What the events have to say, from the lines of ``metrics.jsonl`` of a method with one phase a round."""
    points: dict[tuple[str, int], float | None] = {}
    for row in rows:
        number, codes = row["round"], [*row["dropped"].values()]
        if row["kind"] == "train":
            told = (row["privacy"] or {}).get("range")
            points |= {
                ("tightframe/loss", number): row["training"].get("loss"),
                ("tightframe/epsilon", number): told[1] if told else None,
                ("tightframe/silos_answered", number): len(row["silos"]),
                ("tightframe/silos_late", number): codes.count("TF-502"),
                ("tightframe/silos_dropped", number): len(codes) - codes.count("TF-502"),
                ("tightframe/round_seconds", number): row["seconds"],
                ("tightframe/round_bytes_down", number): row["bytes_down"],
                ("tightframe/round_bytes_up", number): row["bytes_up"],
            }
        ending = "_noisy" if row["noisy"] else ""
        if row["evaluation"] is None:
            continue
        for name in ("accuracy", "balanced_accuracy", "auroc", "average_precision"):
            points["tightframe/" + name + ending, number] = row[name]
        for name, value in row["recall"].items():
            points[f"tightframe/recall{ending}/{name}", number] = value
        points["tightframe/one_answer", number] = float(row["one_answer"] is not None)
        assert not ending, "a noisy run has limits, too"
    return {key: value for key, value in points.items() if value is not None}
