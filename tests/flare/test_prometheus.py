"""The board's queries, asked of a real Prometheus that scrapes what a run has told StatsD.

Between them stands statsd_exporter if it is installed, which Debian 12 does not have; else what the mapping
says, written out here.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
import yaml
from tests.flare import test_board
from tests.flare.test_board import FOLDER, mapped

PROMETHEUS = shutil.which("prometheus")
EXPORTER = shutil.which("statsd_exporter") or shutil.which("prometheus-statsd-exporter")
pytestmark = [
    pytest.mark.whole,
    pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed: apt-get install prometheus"),
]
lines = test_board.lines


def free(kind: socket.SocketKind = socket.SOCK_STREAM) -> int:
    with socket.socket(socket.AF_INET, kind) as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def running(*command: object) -> Iterator[None]:
    process = subprocess.Popen(
        [str(part) for part in command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    try:
        yield
    finally:
        process.terminate()
        process.communicate(timeout=60)


def until(found: Callable[[], Any]) -> Any:
    """What a question answers once it answers; a minute at most."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            if answer := found():
                return answer
        except OSError:
            pass
        time.sleep(0.1)
    raise AssertionError("nothing within a minute")


def exposition(lines: list[str]) -> str:
    """What the exporter makes of gauges, by the mapping."""
    mapping = yaml.safe_load((FOLDER / "statsd_mapping.yml").read_text())
    values: dict[str, str] = {}
    for line in lines:
        name, _, rest = line.partition(":")
        value, _, tags = rest.partition("|g|#")
        if (told := mapped(mapping, name)) is not None:
            labels = ",".join(
                f"{key}={json.dumps(text)}" for key, _, text in (t.partition(":") for t in tags.split(","))
            )
            values[f"{told}{{{labels}}}"] = value
    return "".join(f"{series} {value}\n" for series, value in values.items())


@contextmanager
def exporter(lines: list[str], port: int) -> Iterator[None]:
    if EXPORTER is not None:
        udp = free(socket.SOCK_DGRAM)
        options = [f"--statsd.mapping-config={FOLDER / 'statsd_mapping.yml'}", "--statsd.listen-tcp="]
        options += [f"--statsd.listen-udp=127.0.0.1:{udp}", f"--web.listen-address=127.0.0.1:{port}"]
        with running(EXPORTER, *options), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            until(lambda: urlopen(f"http://127.0.0.1:{port}/metrics").read())
            for line in lines:
                sender.sendto(line.encode(), ("127.0.0.1", udp))
            yield
        return
    text = exposition(lines).encode()

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", port), Page)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


def test_every_query_of_the_board_has_an_answer(lines: list[str], tmp_path: Path) -> None:
    target, port = free(), free()
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    config["global"]["scrape_interval"] = "1s"
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [f"127.0.0.1:{target}"]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))

    def ask(what: str, **query: str) -> Any:
        answer = json.loads(urlopen(f"http://127.0.0.1:{port}/api/v1/{what}?{urlencode(query)}").read())
        assert answer["status"] == "success", answer
        return answer["data"]

    options = [f"--config.file={tmp_path / 'prometheus.yml'}", f"--storage.tsdb.path={tmp_path / 'data'}"]
    options.append(f"--web.listen-address=127.0.0.1:{port}")
    board = json.loads((FOLDER / "grafana.json").read_text())
    queries = [item["expr"] for panel in board["panels"] for item in panel["targets"]]
    variable = {"match[]": "tightframe_running"}
    with exporter(lines, target), running(PROMETHEUS, *options):
        (job_id,) = until(lambda: ask("label/job_id/values", **variable))
        found = {}
        for query in queries:
            asked = query.replace("$job_id", job_id)
            found[query] = {
                tuple(sorted(item["metric"].items())): float(item["value"][1])
                for item in until(lambda asked=asked: ask("query", query=asked)["result"])
            }
    last: dict[str, float] = {}
    for line in lines:
        name, value = re.match(r"([^:]+):([^|]+)", line).groups()  # type: ignore[union-attr]
        if "class:" not in line:
            last[name] = float(value)
    for query, answers in found.items():
        name = query.partition("{")[0]
        labels = [dict(key) for key in answers]
        assert all(item["job_id"] == job_id and item["job"] == "tightframe" for item in labels)
        if name in last:
            assert list(answers.values()) == [pytest.approx(last[name])], query
        else:
            assert all("class" in item for item in labels), query
