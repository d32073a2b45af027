"""Mapping, scrape file and Grafana's board: every query names a measure that a run really sends."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.flare.test_telemetry import record, seen, simulated, told
from tests.support import ROOT
from tests.support.flare.boards import listening
from tests.support.results.building import evaluated, row

from tightframe.config.site import ServerEntry, StatsD

FOLDER = ROOT / "provisioning" / "monitoring"
NAME = re.compile(r"\btightframe_\w+")


@pytest.fixture(scope="module")
def mapping() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((FOLDER / "statsd_mapping.yml").read_text())
    return found


@pytest.fixture(scope="module")
def board() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / "grafana.json").read_text())
    return found


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What comes to a socket from a whole run, and from one with differential privacy and its evaluation."""
    test = {"noisy": True, "accuracy": 0.5, "balanced_accuracy": 0.5, "auroc": 0.5, "average_precision": None}
    limits = {f"{name}_interval": [0.4, 0.6] for name in ("accuracy", "balanced_accuracy", "auroc")}
    recall = {"recall": {"x": 0.5}, "recall_interval": {"x": [0.4, 0.6]}}
    found = evaluated(**(test | limits | recall | {"classes_told": 1, "one_answer": None}))
    private = row(1, "train", ["a"], evaluation=found)
    with seen(tmp_path_factory.mktemp("run")) as first:
        simulated(tmp_path_factory.mktemp("job"))
    with listening() as second:
        entry = ServerEntry(statsd=StatsD(port=second.port))
        with told(tmp_path_factory.mktemp("private"), entry) as (made, _):
            one = record(private, epsilon=4.0)
            made.watch(one)
            one.watcher()
    return first.lines + second.lines


def mapped(mapping: dict[str, Any], name: str) -> str | None:
    """What the exporter makes of a gauge's name: by the first rule that matches; None if it drops it."""
    for rule in mapping["mappings"]:
        if re.search(rule["match"], name) and rule.get("match_metric_type", "gauge") == "gauge":
            return None if rule.get("action") == "drop" else rule["name"]
    return re.sub(r"\W", "_", name)


def test_the_mapping_knows_what_is_sent_and_nothing_else(mapping: dict[str, Any], lines: list[str]) -> None:
    sent = {line.partition(":")[0] for line in lines}
    own = {name for name in sent if name.startswith("tightframe")}
    rules = [rule for rule in mapping["mappings"] if rule.get("action") != "drop"]
    assert {mapped(mapping, name) for name in own} == own == {rule["name"] for rule in rules}
    assert {mapped(mapping, name) for name in sent - own} <= {None}, "the client library's own lines"
    assert mapped(mapping, "datadog.dogstatsd.client.metrics") is None
    assert all(rule["help"] for rule in rules) and mapping["defaults"]["match_type"] == "regex"


def test_every_query_of_the_board_has_a_measure(board: dict[str, Any], lines: list[str]) -> None:
    sent = {line.partition(":")[0] for line in lines}
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    used = {name for query in queries for name in NAME.findall(query)}
    assert used <= sent and all('{job_id="$job_id"}' in query for query in queries)
    assert sent - used <= {line.partition(":")[0] for line in lines if line.startswith("datadog.")}
    labels = {tag.partition(":")[0] for line in lines for tag in line.partition("|#")[2].split(",")}
    legends = "".join(target["legendFormat"] for panel in board["panels"] for target in panel["targets"])
    assert set(re.findall(r"{{(\w+)}}", legends)) == {"class"} <= labels


def test_the_board_chooses_a_job_and_its_panels_do_not_overlap(board: dict[str, Any]) -> None:
    source, job = board["templating"]["list"]
    assert (source["name"], source["type"], source["query"]) == ("datasource", "datasource", "prometheus")
    assert job["query"]["query"] == job["definition"] == "label_values(tightframe_running, job_id)"
    sources = {json.dumps(item["datasource"]) for item in (job, *board["panels"])}
    assert sources == {'{"type": "prometheus", "uid": "${datasource}"}'}
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    cells: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        own = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert not own & cells and place["x"] + place["w"] <= 24, panel["title"]
        cells |= own


def test_prometheus_asks_where_the_guide_has_the_exporter_listen() -> None:
    scrape = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    (target,) = scrape[0]["static_configs"][0]["targets"]
    guide = (ROOT / "docs" / "monitoring.md").read_text()
    assert f"--web.listen-address={target}" in guide
    assert f"--statsd.listen-udp={StatsD().host}:{StatsD().port}" in guide
    for path in FOLDER.iterdir():
        assert f"provisioning/monitoring/{path.name}" in guide, path


def test_the_guide_has_every_measure(mapping: dict[str, Any]) -> None:
    guide = Path(ROOT / "docs" / "monitoring.md").read_text()
    for rule in mapping["mappings"]:
        if rule.get("action") != "drop":
            assert (
                f"`{re.sub('_noisy(_low|_high)?$', '', rule['name'].removeprefix('tightframe_'))}`" in guide
            )
