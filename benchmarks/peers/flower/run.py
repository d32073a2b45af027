"""Cost of Flower's SecAgg+: its own client mod and server workflow, run in one process.

Run by ``benchmarks/secure_sum.py`` with the Python of an environment made from the
``requirements.txt`` beside this file; nothing of Tightframe is imported here.

    python run.py --sites 20 --size 1000000 --threshold 14 --drops 0 1 2 --out flower.json

Each round runs ``SecAggPlusWorkflow``'s four stages over a grid that passes every message to
``secaggplus_mod`` at once. A client's CPU time is that of its four calls of the mod, less the
"training" inside the third (which returns a ready vector). The server's CPU time is the workflow's
outside the grid. Not counted, all in Flower's favour: protobuf encoding of messages, transport,
storage, and the strategy's aggregation. Every message still passes through Flower's own encoding,
untimed, to get its size, and because the mod changes its input.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib.metadata
import json
import logging
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.common import (
    Code,
    FitIns,
    FitRes,
    Parameters,
    Status,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.compat.common import recorddict_compat as compat
from flwr.server.compat.legacy_context import LegacyContext
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD
from flwr.server.workflow.constant import Key as WorkflowKey
from flwr.server.workflow.secure_aggregation.secaggplus_workflow import SecAggPlusWorkflow, WorkflowState
from flwr.supercore.task_identity import TaskIdentity

STAGES = Stage.all()
CLIP, RANGE, WEIGHT = 8.0, 1 << 22, 1000
"""Flower's defaults. Every client has the largest weight, so that weights cost no precision."""


def vector(seed: int, site: int, size: int) -> np.ndarray:
    """Return a site's vector, the same as in ``secure_sum_ours.py``."""
    return np.random.default_rng((seed, site)).standard_normal(size, np.float32) / 4


class PeakMemory:
    """Peak memory of a block beyond what the process held before it, in bytes (Linux)."""

    def __enter__(self) -> PeakMemory:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak
        self._before = self._read("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        self.bytes = self._read("VmHWM") - self._before

    @staticmethod
    def _read(field: str) -> int:
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.split(f"{field}:")[1].split()[0])


class Client:
    """One client: its context, and its costs so far."""

    def __init__(self, node: int, values: np.ndarray) -> None:
        self.context = Context(1, node, {}, RecordDict(), {})
        parameters = ndarrays_to_parameters([values])
        self._result = FitRes(Status(Code.OK, ""), parameters, WEIGHT, {})
        self._trained = 0.0
        self.seconds: dict[str, float] = {}

    def __call__(self, message: Message, stage: str) -> Message:
        """Answer a message, and record the time."""
        self._trained = 0.0
        start = time.process_time()
        reply = secaggplus_mod(message, self.context, self._train)
        self.seconds[stage] = time.process_time() - start - self._trained
        return reply

    def _train(self, message: Message, _: Context) -> Message:
        start = time.process_time()
        reply = Message(compat.fitres_to_recorddict(self._result, keep_input=True), reply_to=message)
        self._trained = time.process_time() - start
        return reply


class InProcessGrid:
    """Passes messages to clients and their replies back; its time counts for neither side.

    Args:
        clients: by node.
        full: nodes with a vector of the full size. The others mask one element, and the server gets
            a full client's upload in place of theirs, so that large cases need not mask n times.
        dropped: nodes that drop out from the third stage on.
        weigh: whether to measure the peak memory of the first full client's masking.
    """

    def __init__(self, clients: dict[int, Client], full: list[int], dropped: set[int], weigh: bool) -> None:
        self.clients, self.full, self.dropped, self.weigh = clients, full, dropped, weigh
        self.seconds, self.peak = 0.0, 0
        self.up: dict[str, int] = {}
        self.down: dict[str, int] = {}

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Return the replies of the clients that have not dropped out."""
        start = time.process_time()
        # Full clients first: the others' uploads are copied from the last of them.
        ordered = sorted(messages, key=lambda item: item.metadata.dst_node_id not in self.full)
        replies, upload = [], None
        for message in ordered:
            node = message.metadata.dst_node_id
            stage = str(message.content.config_records[RECORD_KEY_CONFIGS][Key.STAGE])
            if node in self.dropped and stage in (Stage.COLLECT_MASKED_VECTORS, Stage.UNMASK):
                continue
            coded = recorddict_to_proto(message.content)
            self.down[stage] = max(self.down.get(stage, 0), coded.ByteSize())
            message.content = recorddict_from_proto(coded)
            if self.weigh and node == self.full[0] and stage == Stage.COLLECT_MASKED_VECTORS:
                with PeakMemory() as memory:
                    reply = self.clients[node](message, stage)
                self.peak = memory.bytes
            else:
                reply = self.clients[node](message, stage)
            if stage == Stage.COLLECT_MASKED_VECTORS:
                record = reply.content.config_records[RECORD_KEY_CONFIGS]
                if node in self.full:
                    upload = record[Key.MASKED_PARAMETERS]
                else:
                    reply.content.config_records[RECORD_KEY_CONFIGS] = ConfigRecord(
                        {Key.MASKED_PARAMETERS: upload}, False
                    )
            if node in self.full:
                self.up[stage] = max(self.up.get(stage, 0), recorddict_to_proto(reply.content).ByteSize())
            replies.append(reply)
        self.seconds += time.process_time() - start
        return replies


class Strategy:
    """Selects all clients and keeps the aggregate; its time is not counted."""

    def __init__(self, nodes: Iterable[int]) -> None:
        self.nodes, self.aggregate = list(nodes), np.empty(0)

    def configure_fit(self, *_: Any) -> list[tuple[Any, FitIns]]:
        """Everybody."""
        return [(SimpleNamespace(node_id=node), FitIns(Parameters([], ""), {})) for node in self.nodes]

    def aggregate_fit(self, _round: int, results: list[tuple[Any, FitRes]], _: Any) -> tuple[None, dict]:
        """Keep the opened aggregate."""
        self.aggregate = parameters_to_ndarrays(results[0][1].parameters)[0]
        return None, {}

    def num_available(self) -> int:
        """Return the number of clients, for Flower's log."""
        return len(self.nodes)


def one_round(arguments: argparse.Namespace, drops: int, weigh: bool) -> dict[str, Any]:
    """Run one whole aggregation; return seconds, bytes, and the error of the mean."""
    nodes = list(range(1, arguments.sites + 1))
    full = nodes if not arguments.light else nodes[: arguments.light]
    dropped = set(nodes[len(nodes) - drops :])
    clients = {
        node: Client(node, vector(arguments.seed, node, arguments.size if node in full else 1))
        for node in nodes
    }
    grid, strategy = InProcessGrid(clients, full, dropped, weigh), Strategy(nodes)
    context: Any = LegacyContext(
        Context(1, 0, {}, RecordDict(), {}), strategy=strategy, client_manager=strategy
    )
    context.state.config_records[MAIN_CONFIGS_RECORD] = ConfigRecord({WorkflowKey.CURRENT_ROUND: 1})
    context.state.array_records[MAIN_PARAMS_RECORD] = compat.parameters_to_arrayrecord(
        ndarrays_to_parameters([np.zeros(1)]), True
    )
    workflow = SecAggPlusWorkflow(
        arguments.sites,
        arguments.threshold,
        max_weight=float(WEIGHT),
        clipping_range=CLIP,
        quantization_range=RANGE,
    )
    state, server = WorkflowState(), {}
    steps = (
        workflow.setup_stage,
        workflow.share_keys_stage,
        workflow.collect_masked_vectors_stage,
        workflow.unmask_stage,
    )
    for stage, step in zip(STAGES, steps, strict=True):
        grid.seconds, start = 0.0, time.process_time()
        if not step(grid, context, state):
            sys.exit(f"Expected stage {stage} of SecAgg+ to succeed, but it failed.")
        server[stage] = time.process_time() - start - grid.seconds
    error = None
    if not arguments.light:
        alive = [node for node in nodes if node not in dropped]
        mean = np.zeros(arguments.size)
        for node in alive:
            mean += vector(arguments.seed, node, arguments.size)
        error = float(np.abs(strategy.aggregate - mean / len(alive)).max())
    timed = [client for node, client in clients.items() if node in full and node not in dropped]
    return {
        "client": {stage: [1000 * item.seconds[stage] for item in timed] for stage in STAGES},
        "server": {stage: 1000 * server[stage] for stage in STAGES},
        "up": sum(grid.up.values()),
        "down": sum(grid.down.values()),
        "error": error,
        "peak": grid.peak,
    }


def main() -> None:
    """Measure, and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sites", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--threshold", type=int, required=True)
    parser.add_argument("--drops", type=int, nargs="+", required=True)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--light", type=int, default=0, help="number of clients with a full vector; 0: all")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 0  # as Flower's runtime sets them
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    np.seterr(all="ignore")  # a sum of stand-ins may have no weight at all
    results: dict[str, Any] = {}
    weigh = Path("/proc/self/clear_refs").exists()
    peak = 0
    if arguments.size <= 100_000:  # exclude modules that load at first use
        one_round(arguments, 0, False)
    for repeat in range(arguments.repeats):
        for drops in arguments.drops:
            result = one_round(arguments, drops, weigh and not repeat)
            peak = max(peak, result["peak"])
            kept = results.setdefault(str(drops), {"client": {}, "server": {}, "errors": []})
            for stage in STAGES:
                kept["client"].setdefault(stage, []).extend(result["client"][stage])
                kept["server"].setdefault(stage, []).append(result["server"][stage])
            kept["errors"].append(result["error"])
            kept["up"], kept["down"] = result["up"], result["down"]
    report = {
        "versions": {
            name: importlib.metadata.version(name)
            for name in ("flwr", "numpy", "cryptography", "pycryptodome")
        },
        "python": sys.version.split()[0],
        "light": arguments.light,
        "peak_client_bytes": peak or None,
        "drops": {
            drops: {
                "client_ms": {stage: statistics.median(result["client"][stage]) for stage in STAGES},
                "server_ms": {stage: statistics.median(result["server"][stage]) for stage in STAGES},
                "server_spread_ms": [
                    fold(sum(column) for column in zip(*result["server"].values(), strict=True))
                    for fold in (min, max)
                ],
                "up_bytes": result["up"],
                "down_bytes": result["down"],
                "error": None if arguments.light else max(result["errors"]),
            }
            for drops, result in results.items()
        },
    }
    arguments.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
