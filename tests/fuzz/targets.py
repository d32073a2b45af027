"""What is fuzzed: each reader with a valid input, and what may come out of it.

A target's ``check`` makes one damaged input from a seed and reads it. A named error of the project is right,
and so is an input that turns out to be readable; anything else comes through.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import save
from tests.fuzz.mutations import WRONG, as_json, changed, damaged
from tests.support import jobs
from tests.support.attacks.malicious_server import Federation, hearts
from tests.support.ledgers import CAP, SiteKeys, charge, open_ledger
from typer.testing import CliRunner

from tightframe import federation
from tightframe.config.job import parse_job
from tightframe.config.site import (
    FILE_NAME,
    open_data,
    parse_site_file,
    read_object,
    server_entry,
    site_entry,
)
from tightframe.errors import TightframeError
from tightframe.files import file_sha256
from tightframe.privacy.ledger import rows as ledger_rows
from tightframe.privacy.ledger import store as ledger_store
from tightframe.privacy.ledger import summary as ledger_report
from tightframe.privacy.ledger.chain import read_ledger
from tightframe.report import writing
from tightframe.results.files import CHECKPOINT
from tightframe.rounds import checkpoint
from tightframe.rounds.context import SiloContext
from tightframe.rounds.server import resume
from tightframe.rounds.server.record import RunRecord
from tightframe.rounds.setup import prepare
from tightframe.rounds.silo import own_state as takeover
from tightframe.rounds.silo.session import TASKS
from tightframe.rounds.state_files import COMMITTED, EARLIER, PROPOSED
from tightframe.securesum.messages import SumId
from tightframe.securesum.primitives import encode_fields
from tightframe_app.cli import app

QUIET = logging.getLogger("tests.fuzz.quiet")
QUIET.setLevel(logging.CRITICAL + 1)
QUIET.propagate = False

HEART = {**jobs.HEART, "job_name": "fuzzed"}


class _PlugPulledError(Exception):
    """Stops a run as a lost machine does."""


class ForeignError(AssertionError):
    """A reader broke a rule without raising anything foreign."""


@functools.cache
def _run(folder: Path, *, whole: bool) -> Path:
    """A small run's folder: whole, or stopped in its third round."""

    def stop(row: Any) -> None:
        if not whole and row.kind == "train" and row.round == 3:
            raise _PlugPulledError

    logging.getLogger("tightframe").setLevel(logging.CRITICAL)
    with contextlib.suppress(_PlugPulledError):
        federation.run_job(parse_job(HEART), folder=folder, on_round=stop)
    return folder


@contextlib.contextmanager
def _named(path: Path | None = None) -> Iterator[None]:
    """Let named errors pass; of a file they must name it, and leave it as it was."""
    before = None if path is None or not path.is_file() else path.read_bytes()
    try:
        yield
    except TightframeError as error:
        if path is not None and str(path) not in str(error):
            raise ForeignError(f"the message does not name {path.name}: {error}") from error
    if before is not None and path is not None and path.read_bytes() != before:
        raise ForeignError(f"reading {path} has changed it")


class Target:
    """One reader.

    Args:
        folder: to work in.
    """

    examples = 200
    """Of the short run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def check(self, seed: int) -> None:
        """Read one damaged input.

        Raises:
            Exception: whatever the reader raised that is no named error.
        """
        raise NotImplementedError


class CheckpointTarget(Target):
    """The server's checkpoint: bytes, header, tensors, and the run so far with a hash that fits again."""

    examples = 80

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.whole = (_run(folder / "run", whole=False) / "server" / CHECKPOINT).read_bytes()
        path = folder / "valid.safetensors"
        path.write_bytes(self.whole)
        self.loaded = checkpoint.load_state(path)
        self.job = resume.next_job(path)
        self.setup = prepare(self.job)
        self.path = folder / "checkpoint.safetensors"

    def check(self, seed: int) -> None:
        random = Random(seed)  # noqa: S311 - examples, no secrets
        self.path.write_bytes(self._made(random))
        with _named(self.path):
            resume.read(self.path)
        with contextlib.suppress(TightframeError):
            resume.next_job(self.path)
            named = {**self.job.resume.model_dump(), "checkpoint_sha256": file_sha256(self.path)}  # type: ignore[union-attr]
            job = parse_job({**self.job.anew.model_dump(mode="json"), "resume": named})
            found = resume.continued(job, self.path)
            if found is not None:
                record = RunRecord(self.folder / "restored", self.setup, QUIET)
                (self.folder / "restored").mkdir(exist_ok=True)
                resume.restore(record, *found, QUIET)
                record.finish("stopped")

    def _made(self, random: Random) -> bytes:
        if random.random() < 0.3:
            return damaged(random, self.whole)
        described = changed(random, dict(self.loaded.described))
        flat = {f"model/{name}": value for name, value in self.loaded.state.model.items()}
        flat |= {f"extra/{name}": value for name, value in self.loaded.state.extra.items()}
        if random.random() < 0.3:
            name = random.choice(sorted(flat))
            way = random.randrange(5)
            tensor = flat.pop(name)
            if way == 1:
                flat[name.replace("/", "", 1)] = tensor
            elif way == 2:
                flat[name] = tensor.to(random.choice([torch.float16, torch.bool, torch.int64]))
            elif way == 3:
                flat[name] = torch.zeros(random.choice([(0,), (1,), (7, 3)]))
            elif way == 4:
                flat[random.choice(["strange/x", "", "model/", "x"])] = tensor
        if random.random() < 0.8 and isinstance(described, dict):
            described.pop("sha256", None)
            with contextlib.suppress(TypeError, ValueError):  # what JSON has no text for
                described["sha256"] = checkpoint._hash(described, flat)
        try:
            text = as_json(random, described).decode(errors="replace")
        except (TypeError, ValueError):
            text = random.choice(["", "[]", "null", "x"])
        key = checkpoint.DESCRIPTION if random.random() < 0.95 else "other"
        return save(flat, {key: text})


class SiloStateTarget(Target):
    """A silo's own state of a stopped job, which another job goes on with."""

    examples = 100

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        values = {**HEART, "method": "scaffold", "rounds": 2}
        job = parse_job(values)
        self.before = folder / "before"
        self.before.mkdir()
        self.job = parse_job(
            {
                **values,
                "resume": {
                    "lineage": "job-1",
                    "previous": "job-1",
                    "after_round": 1,
                    "checkpoint_sha256": "0" * 64,
                },
            }
        )
        self.run = {"job_sha256": job.sha256(), "lineage": "job-1"}
        self.tensors = {"control/x": torch.zeros(3)}

    def check(self, seed: int) -> None:
        random = Random(seed)  # noqa: S311 - examples, no secrets
        shutil.rmtree(self.before)
        self.before.mkdir()
        run = self.run if random.random() < 0.7 else changed(random, self.run)
        (self.before / takeover.RUN).write_bytes(
            as_json(random, run) if random.random() < 0.9 else damaged(random, json.dumps(self.run).encode())
        )
        for name in (COMMITTED, EARLIER, PROPOSED):
            if random.random() < 0.8:
                sums = [
                    "1/train-0/0",
                    "2/train-0/0",
                    "0/before-0/0",
                    "",
                    "x",
                    "1/2",
                    "a/train/0",
                    "1/x/0",
                    "9" * 5000,
                ]
                metadata = {"sum_id": random.choice(sums)} if random.random() < 0.9 else {"x": "y"}
                raw = save(self.tensors, metadata if random.random() < 0.95 else None)
                (self.before / name).write_bytes(raw if random.random() < 0.7 else damaged(random, raw))
        context = SiloContext(
            "site-1",
            self.job,
            None,
            self.folder / "run",
            previous_state=self.before,
            job_id="job-2",
            log=QUIET,
        )
        with contextlib.suppress(TightframeError):
            takeover.begin(context)
            store = takeover.SiloStateStore(context.state_folder, "site-1")
            store.settle({"1/train-0/0": ["site-1"], "2/train-0/0": ["site-1"]})
            store.committed()
            store.propose(SumId.of("train", 2, 0, 0), self.tensors)


class LedgerTarget(Target):
    """A privacy ledger's file and head file: bytes, columns of any type, entries with hashes that fit."""

    examples = 50

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.keys, self.valid = SiteKeys(), folder / "valid.sqlite"
        with open_ledger(self.valid, self.keys, create=True) as ledger:
            for number in range(3):
                ledger.charge(charge(f"round {number}"), cap=CAP)
            ledger.note_data("ward-7", "ab" * 32)
        with contextlib.closing(sqlite3.connect(self.valid)) as opened:
            opened.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self.head = ledger_store.head_file(self.valid).read_bytes()
        ledger_report.spendings(
            read_ledger(self.valid, check=None).entries, 1e-5
        )  # imports, which take seconds
        self.path = folder / "ledger.sqlite"

    def check(self, seed: int) -> None:
        random = Random(seed)  # noqa: S311 - examples, no secrets
        for left in self.folder.glob("ledger.sqlite*"):
            left.unlink()
        shutil.copyfile(self.valid, self.path)
        head = ledger_store.head_file(self.path)
        head.write_bytes(self.head)
        way = random.random()
        if way < 0.3:
            self.path.write_bytes(damaged(random, self.path.read_bytes()))
        elif way < 0.5:
            values = json.loads(self.head)
            head.write_bytes(
                as_json(random, changed(random, values))
                if random.random() < 0.7
                else damaged(random, self.head)
            )
        elif way < 0.75:
            self._columns(random)
        else:
            self._entry(random)
        with contextlib.suppress(TightframeError):
            whole = read_ledger(self.path, check=None)
            ledger_report.spendings(whole.entries, 1e-5)
        with contextlib.suppress(TightframeError), open_ledger(self.path, self.keys) as ledger:
            ledger.charge(charge("another"), cap=CAP)

    def _columns(self, random: Random) -> None:
        table, columns = random.choice(
            [
                (
                    "entries",
                    ["sequence", "time", "kind", "content", "previous", "signer", "hash", "signature"],
                ),
                ("head", ["ledger", "count", "hash", "time", "signer", "signature"]),
                ("signers", ["id", "certificate"]),
            ]
        )
        column = random.choice(columns)
        plain = [item for item in WRONG if item is None or isinstance(item, int | float | str | bytes)]
        value = random.choice(plain)
        with (
            contextlib.closing(sqlite3.connect(self.path)) as opened,
            contextlib.suppress(sqlite3.Error, OverflowError, UnicodeEncodeError),
        ):
            opened.execute(
                f"UPDATE {table} SET {column} = ? WHERE rowid = (SELECT rowid FROM {table} "  # noqa: S608
                "ORDER BY random() LIMIT 1)",
                (value,),
            )
            if random.random() < 0.3:  # text that is no UTF-8
                opened.execute(f"UPDATE {table} SET {column} = CAST(X'FFFE80' AS TEXT)")  # noqa: S608
            opened.commit()

    def _entry(self, random: Random) -> None:
        """Change what the first entry says, and sign it again: a site can do so with its own key."""
        with contextlib.closing(sqlite3.connect(self.path)) as opened:
            row = list(opened.execute("SELECT * FROM entries WHERE sequence = 1").fetchone())
            content = changed(random, json.loads(row[3]))
            with contextlib.suppress(TypeError, ValueError, OverflowError, sqlite3.Error):
                text = ledger_rows.canonical(content) if random.random() < 0.8 else json.dumps(content)
                time = (
                    row[1]
                    if random.random() < 0.8
                    else random.choice(["", "x", "9999-12-31T23:59:59.999999-23:59"])
                )
                kind = row[2] if random.random() < 0.9 else random.choice(["data", "x"])
                hashed = ledger_rows._hash_of(1, time, kind, text, row[4], row[5])
                signed = self.keys.signer.sign(encode_fields(ledger_rows.ENTRY, hashed))
                opened.execute(
                    "UPDATE entries SET time = ?, kind = ?, content = ?, hash = ?, signature = ? "
                    "WHERE sequence = 1",
                    (time, kind, text, hashed, signed),
                )
                opened.execute("DELETE FROM entries WHERE sequence > 1")
                head = ledger_store.Head(
                    *opened.execute(
                        "SELECT ledger, count, hash, time, signer, signature FROM head"
                    ).fetchone()
                )
                told = (
                    head.time if random.random() < 0.8 else random.choice(["x", "0001-01-01T00:00:00+14:00"])
                )
                message = encode_fields(ledger_rows.HEAD, head.ledger, 1, hashed, told)
                signature = self.keys.signer.sign(message).hex()
                opened.execute(
                    "UPDATE head SET count = 1, hash = ?, time = ?, signature = ?", (hashed, told, signature)
                )
                opened.commit()
                values = {"ledger": head.ledger, "count": 1, "hash": hashed, "time": told}
                values |= {"signer": head.signer, "signature": signature}
                ledger_store.head_file(self.path).write_text(json.dumps(values))


class SiteFileTarget(Target):
    """A site's own file, one site's or the simulator's, and the records that it names."""

    examples = 200

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        local = folder / "local"
        local.mkdir()
        self.path, self.job = local / FILE_NAME, parse_job(HEART)
        single = {
            "state_dir": str(folder / "state"),
            "data": {
                "fed_heart_disease": {"root": str(folder), "center": 0},
                "fed_isic2019": {"root": str(folder), "center": 1},
            },
            "device": "cpu",
            "loader_workers": 0,
            "ledger_roots": [str(folder / "root.pem")],
            "dataset_id": "ward-7",
            "accepted_options": {"fed_isic2019": {"oversample_minority": True}},
            "policy": {"profile": "strict", "pins": {"site-2": "ab" * 32}, "min_class_count": 3},
            "server": {"initial_model": str(folder / "m"), "statsd": {"host": "127.0.0.1", "port": 9125}},
        }
        entry = {key: value for key, value in single.items() if key != "server"}
        many = {"sites": {"site-1": entry, "site-2": {}}, "server": single["server"]}
        self.valid: tuple[dict[str, Any], ...] = (single, many)

    def check(self, seed: int) -> None:
        random = Random(seed)  # noqa: S311 - examples, no secrets
        value = random.choice(self.valid)
        raw = as_json(random, changed(random, value))
        self.path.write_bytes(raw if random.random() < 0.8 else damaged(random, json.dumps(value).encode()))
        local = self.path.parent
        with _named(self.path):
            server_entry(local)
        with _named(self.path):
            parse_site_file(read_object(self.path), str(self.path))
        for production in (True, False):
            with contextlib.suppress(TightframeError):
                entry = site_entry(local, "site-1", production=production, alone=random.random() < 0.5)
                if entry is not None:
                    entry.policy.resolve(production=production).check(self.job, submitter=None)
                open_data(self.job, "site-1", entry).check()


class JobTarget(Target):
    """The values of a job, as somebody's job folder gives them."""

    examples = 150

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        from tightframe_app.jobs import recipes

        names = ("fedmr_isic", "fedetf_isic", "fednh_isic", "fedavg_etf_isic", "fedilc_eicu", "fedetf_heart")
        self.jobs = [recipes.get(name).job().model_dump(mode="json") for name in names]
        self.jobs.append({**HEART, "privacy": {"epsilon": 8.0, "delta": 1e-5}, "weights": "uniform"})
        self.jobs.append({**HEART, "method": "fedproto", "site_models": {"site-1": {"model": "mlp"}}})

    def check(self, seed: int) -> None:
        random = Random(seed)  # noqa: S311 - examples, no secrets
        value = dict(random.choice(self.jobs))
        way = random.random()
        if way < 0.6:  # of these keys most changes are told of before anything is built
            keys = [key for key in value if isinstance(value[key], dict)] or ["training"]
            key = random.choice(keys)
            value[key] = changed(random, value[key])
            if random.random() < 0.5 and isinstance(value[key], dict) and value[key]:
                inner = random.choice(list(value[key]))
                numbers = [0, -1, 1, 2, 3, 7, 1e-300, 1e300, 0.5, True, "mean", [0], [1, 1], [-1], None]
                value[key][inner] = random.choice(numbers)
        else:
            value = changed(random, value)
        with contextlib.suppress(TightframeError):
            prepare(value)


class MessageTarget(Target):
    """Any task with any value that a server can send to a silo, in plain sums and in secure ones."""

    examples = 60
    _TURNS = 40

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.turn = 0
        self._begin()

    def _begin(self) -> None:
        """Begin with new silos: what was accepted before changes what they answer."""
        state = self.folder / f"state-{self.turn}"
        method = ("fedavg", "fedmr", "fedilc", "scaffold")[self.turn // self._TURNS % 4]
        self.messages: list[tuple[str, Any]] = []
        logging.getLogger("tightframe").setLevel(logging.CRITICAL)
        training = {"batch_size": 64, "momentum": 0.0, "learning_rate": 1e-6}
        values = {"method": method, "rounds": 2, "model_options": {"widths": [4]}, "training": training}
        self.made = Federation(values, hearts(3), state=state)
        target = self.made.sessions["hospital-1"]
        handle = target.handle

        def heard(task: str, message: Any) -> Any:
            self.messages.append((task, dict(message)))
            return handle(task, message)

        target.handle = heard  # type: ignore[method-assign]
        self.made.enroll()
        self.made.sum("train", 1)
        self.made.sum("train", 2)
        self.handle = handle
        from tightframe.rounds.silo.session import SiloSession

        job = parse_job({**self.made.job.model_dump(mode="json"), "summation": "plain"})
        context = SiloContext(
            "hospital-1",
            job,
            None,
            state / "plain",
            records=self.made.data["hospital-1"],
            job_id="j",
            log=QUIET,
        )
        self.plain = SiloSession(context)
        self.plain_hash = job.sha256()
        own = self.plain._declare(again=False).to_bytes()
        self.declared = {name: own for name in job.sites}

    def check(self, seed: int) -> None:
        self.turn += 1
        if self.turn % self._TURNS == 0:
            self._begin()
        random = Random(seed)  # noqa: S311 - examples, no secrets
        task, message = random.choice(self.messages)
        plain = random.random() < 0.5
        if plain and task == "enroll":
            message = {**message, "job_sha256": self.plain_hash}
        if plain and task == "contribute":
            message = {**message, "declared": self.declared}
            message.pop("secure")
        if random.random() < 0.1:
            task = random.choice([*TASKS, "", "x", "handle", "__init__"])
        value = random.choice(WRONG) if random.random() < 0.05 else changed(random, message)
        if isinstance(value, dict) and "before" in value and random.random() < 0.4:
            value |= self._another_state(random)
        if isinstance(value, dict) and isinstance(value.get("secure"), bytes) and random.random() < 0.3:
            value["secure"] = damaged(random, value["secure"])
        with contextlib.suppress(TightframeError):
            (self.plain.handle if plain else self.handle)(task, value)

    def _another_state(self, random: Random) -> dict[str, Any]:
        """A state that is not the run's, sent as if the silo had missed an exchange, or not."""
        state = self.made.shared.state
        tensors = {f"model/{name}": item for name, item in state.model.items()}
        sent = self._state(tensors, random)
        named = hashlib.sha256(sent).hexdigest() if random.random() < 0.8 else "0" * 64
        before = random.choice(["", "0" * 64, self.made.shared.before])
        return {"state": named, "before": before, "state_bytes": sent}

    def _state(self, tensors: dict[str, torch.Tensor], random: Random) -> bytes:
        if random.random() < 0.3:
            return damaged(random, checkpoint.tensor_bytes(tensors))
        for _ in range(random.randint(1, 2)):
            name = random.choice(sorted(tensors))
            tensor = tensors.pop(name)
            way = random.randrange(6)
            if way == 1:
                tensors[name] = tensor.to(
                    random.choice([torch.float16, torch.bool, torch.int64, torch.float64])
                )
            elif way == 2:
                tensors[name] = torch.zeros(random.choice([(0,), (1,), (7, 3), ()]))
            elif way == 3:
                tensors[name + "x"] = tensor
            elif way == 4:
                tensors[name] = tensor * float("nan")
            elif way == 5:
                tensors[random.choice(["", "x", "model/", "extra/x"])] = tensor
            if not tensors:
                break
        return checkpoint.tensor_bytes(tensors)


class ResultsTarget(Target):
    """The files of results of a server and of a silo, of which a page is made."""

    examples = 80

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        run = _run(folder / "run", whole=True)
        names = ("outcome.json", "metrics.jsonl", "model.json", "transcript.jsonl")
        self.server = {name: (run / "server" / name).read_bytes() for name in names}
        self.silo = {"local_report.json": (run / "site-1" / "local_report.json").read_bytes()}

    def check(self, seed: int) -> None:
        random = Random(seed)  # noqa: S311 - examples, no secrets
        files = dict(self.silo if random.random() < 0.3 else self.server)
        name = random.choice(sorted(files))
        raw = files[name]
        if random.random() < 0.3:
            raw = damaged(random, raw)
        elif name.endswith(".jsonl"):
            lines = raw.splitlines()
            place = random.randrange(len(lines))
            lines[place] = as_json(random, changed(random, json.loads(lines[place]))).replace(b"\n", b"")
            raw = b"\n".join(lines) + b"\n"
        else:
            raw = as_json(random, changed(random, json.loads(raw)))
        folder = self.folder / "results"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for each, content in files.items():
            (folder / each).write_bytes(raw if each == name else content)
        with _named(folder / name):
            writing.write(folder)


class TranscriptTarget(Target):
    """``tightframe transcript verify``: a transcript, or a root, that is damaged."""

    examples = 30

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        run = _run(folder / "run", whole=True)
        self.lines = (run / "server" / "transcript.jsonl").read_bytes()
        self.root = (run / "server" / "simulated_root.pem").read_bytes()

    def check(self, seed: int) -> None:
        random = Random(seed)  # noqa: S311 - examples, no secrets
        lines, root = self.lines, self.root
        way = random.random()
        if way < 0.25:
            lines = damaged(random, lines)
        elif way < 0.35:
            root = damaged(random, root)
        else:
            lines = self._changed(random)
        file, certificate = self.folder / "t.jsonl", self.folder / "root.pem"
        file.write_bytes(lines)
        certificate.write_bytes(root)
        done = CliRunner().invoke(app, ["transcript", "verify", str(file), "--root", str(certificate)])
        if done.exception is not None and not isinstance(done.exception, SystemExit | TightframeError):
            raise done.exception
        if done.exit_code not in (0, 1, 2):
            raise ForeignError(f"exit code {done.exit_code}: {done.output}")

    def _changed(self, random: Random) -> bytes:
        """One line changed, and those after it chained to it again."""
        from tightframe.securesum.transcript.lines import line_hash

        values = [json.loads(line) for line in self.lines.splitlines()]
        place = random.randrange(len(values))
        values[place] = changed(random, values[place])
        made: list[bytes] = []
        for value in values:
            if made and isinstance(value, dict) and "previous" in value and random.random() < 0.95:
                value["previous"] = line_hash(made[-1])
            text = json.dumps(_plain(value), sort_keys=True, separators=(",", ":"))
            made.append(text.encode() + b"\n")
        return b"".join(made)


def _plain(value: Any) -> Any:
    made = as_json(Random(0), value)  # noqa: S311 - an example, no secret
    return json.loads(made.decode(errors="replace"))


TARGETS: Mapping[str, Callable[[Path], Target]] = {
    "checkpoint": CheckpointTarget,
    "silo-state": SiloStateTarget,
    "ledger": LedgerTarget,
    "site": SiteFileTarget,
    "job": JobTarget,
    "message": MessageTarget,
    "results": ResultsTarget,
    "transcript": TranscriptTarget,
}
