"""Shared by all tests: where real data lie, and one thread of torch."""

from __future__ import annotations

import fcntl
import functools
import gc
import importlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _pytest.doctest import DoctestModule
from hypothesis import settings
from numpy.typing import NDArray
from tests.support import ROOT
from tests.support.browser import CHROMIUM, Browser, opened
from tests.support.jobs import SMALL
from tests.support.pages import where_wanted, written
from tests.support.randomness import drawn_by_name

WHOLE = tuple(
    ROOT / "tests" / name
    for name in (
        "benchmarks",
        "ci/test_release.py",
        "engine",
        "faults",
        "fuzz",
        "production",
        "rounds/private",
        "rounds/server/test_resume.py",
        "rounds/sums/test_runs.py",
    )
)
"""Where all tests are `whole`: the simulator, a production federation, runs of many rounds."""
SELDOM = 50_000
"""New objects after which the garbage collector looks for cycles."""
KEPT_MODELS = 16
"""Models that a process of tests keeps as they begin."""
FAST = "not whole"
"""The fast tier, as an expression of markers."""
WAITING = [
    ROOT / "tests" / name
    for name in (
        "production/test_production.py",
        "engine/test_faults.py",
        "production/test_withdrawing.py",
        "production/test_accounts.py",
        "engine/test_privacy.py",
        "docs/test_doors.py",
        "engine/test_jobs.py",
        "engine/test_secure.py",
        "engine/test_resume.py",
        "faults/test_faults.py",
        "faults/test_resumed.py",
        "test_extension.py",
        "engine/test_real_data.py",
        "engine/test_parity.py",
        "engine/test_allow_list.py",
        "app/site/test_stop.py",
        "app/site/membership/test_joining.py",
    )
]
"""Files that run the engine or a site's client, the longest first."""
LONG = tuple(
    ROOT / "tests" / name
    for name in (
        "methods/test_fedetf_against_fedavg.py",
        "docs/test_own_pictures.py",
        "docs/test_own_data.py",
        "inference/test_exports.py",
        "app/test_recipes.py",
        "benchmarks/test_eicu.py",
        "docs/test_notebook.py",
        "attacks/test_any_server.py",
        "fuzz/test_fuzz.py",
    )
)
"""Files of few tests that take long; all others are as long as they have many that are `whole`."""

PAGELESS = tuple(
    ROOT / "tests" / name
    for name in (
        "attacks",
        "benchmarks",
        "data",
        "inference",
        "learning",
        "methods",
        "rounds/phases",
        "rounds/private",
        "rounds/riders",
        "rounds/server",
        "rounds/silo",
        "rounds/sums",
        "rounds/test_evaluate_only.py",
        "rounds/test_feature_files.py",
        "rounds/test_frozen_encoder.py",
        "rounds/test_plan.py",
        "rounds/test_sampling.py",
        "rounds/test_setup.py",
        "rounds/test_site_models.py",
        "test_federation.py",
        "test_objects.py",
        "test_own_modules.py",
    )
)
"""Where runs in this process write no page: none is read there, but by tests that ask for ``pages``."""


@functools.lru_cache(maxsize=4096)
def _lies_in(path: Path, places: tuple[Path, ...]) -> bool:
    return any(path.is_relative_to(place) for place in places)


# Two cores are shared by everything that the tests start. Here and not in a hook, because the
# `conftest` of a folder imports torch before hooks run.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests compare bits, of runs side by side and of proofs in float32. With CUDA_VISIBLE_DEVICES a GPU is used.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
# A third of the time of small runs was waiting for the disk, which ledgers and journals flush at each step.
MEMORY, NEEDED = Path("/dev/shm"), 6 * 2**30  # noqa: S108
if "TMPDIR" not in os.environ and MEMORY.is_dir() and os.access(MEMORY, os.W_OK | os.X_OK):
    about = os.statvfs(MEMORY)
    if about.f_bavail * about.f_frsize >= NEEDED and not about.f_flag & os.ST_NOEXEC:
        os.environ["TMPDIR"] = str(MEMORY)
        tempfile.tempdir = None


ENGINE_FIRST = "nvflare.apis.fl_component"
"""Its modules search all that is imported for their own names, which takes a second more after torch."""


def _compiled() -> bool:
    """Check whether tests were collected here before, or leave nothing compiled."""
    kept = sys.pycache_prefix is None and not sys.dont_write_bytecode and os.access(ROOT / "tests", os.W_OK)
    return not kept or any((ROOT / "tests" / "__pycache__").glob("test_*-pytest-*.pyc"))


def _lead() -> int | None:
    """Return a lock that the other processes of tests wait for, if this one is to compile everything.

    In a new environment each of them would compile the same modules at the same moment. One at a time, the
    others import large packages meanwhile, in another order than the tests do, so that two cores compile.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ or _compiled():
        return None
    lock = os.open(ROOT / "tests", os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        beside = os.open(ROOT / "custom", os.O_RDONLY)
        fcntl.flock(beside, fcntl.LOCK_EX)
        gc.disable()  # until everything is collected
        for name in ("scipy.stats", "sklearn.metrics", "pandas", ENGINE_FIRST, "opacus"):
            importlib.import_module(name)
        os.close(beside)
        fcntl.flock(lock, fcntl.LOCK_EX)
    if not _compiled():
        return lock
    os.close(lock)
    return None


_leading = _lead()
# How long an example takes depends on what else runs; tests time nothing. The same examples in each run.
settings.register_profile("steady", deadline=None, derandomize=True)
settings.register_profile("drawn anew", deadline=None)
settings.load_profile("steady")


@pytest.fixture(scope="session")
def root() -> Path:
    """The project's root."""
    return ROOT


@pytest.fixture(scope="session", autouse=True)
def _rendered_once() -> Iterator[None]:
    """Each record of the twins is drawn once in a process of tests: more than half of a small run is that."""
    from tightframe.data.heart import twin as heart
    from tightframe.data.isic import twin

    with pytest.MonkeyPatch.context() as patch:
        drawn = functools.lru_cache(maxsize=8192)(twin.image)

        def image(key: twin.Key, side: int) -> NDArray[np.uint8]:
            return drawn(key, side).copy()

        patch.setattr(twin, "image", image)
        patch.setattr(heart, "record", functools.lru_cache(maxsize=8192)(heart.record))  # is stacked
        yield


@pytest.fixture(scope="session", autouse=True)
def _priced_once() -> Iterator[None]:
    """An order of sampled steps is priced once in a process of tests, by Opacus, as everywhere.

    It is a pure function of three numbers, asked for again by every silo, round and analysis, which is most
    of the time of a small private run. Tests that never import Opacus need not do it for this.
    """
    rdp = sys.modules.get("opacus.accountants.analysis.rdp")
    with pytest.MonkeyPatch.context() as patch:
        if rdp is not None:
            patch.setattr(rdp, "_compute_rdp", functools.lru_cache(maxsize=65536)(rdp._compute_rdp))
        yield


@pytest.fixture(scope="session", autouse=True)
def _counted_once() -> Iterator[None]:
    """What columns tell of each other or of few, and pictures' looks, are counted once for the same records.

    These are pure functions of arrays, and most runs of tests have the records of others.
    """
    from tightframe.data import columns, looks
    from tightframe.data.table import common_values
    from tightframe.learning.few_records import record_values

    combinations, found = columns._combinations, dict[tuple[Any, ...], Any]()

    def once(given: Any, joined: Any) -> Any:
        key = (joined, *(column.hashes.tobytes() for column in given))
        if key not in found:
            found[key] = combinations(given, joined)
        return list(found[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns, "_combinations", once)
        patch.setattr(looks, "_places", _by_arrays(looks._places))
        for name in ("_levels", "_independent", "_bits_of"):
            patch.setattr(record_values, name, _by_arrays(getattr(record_values, name)))
        patch.setattr(common_values, "common_values", _by_arrays(common_values.common_values))
        yield


@pytest.fixture(scope="session", autouse=True)
def _begun_once() -> Iterator[Callable[..., Any]]:
    """The model that a seed gives is drawn once in a process of tests, and a template built once.

    The server and each silo of a run begin with it; most runs of tests have the job of others.
    """
    from tightframe.learning import model_update

    whole, known = model_update.initial_model, dict[Any, Any]()

    def initial_model(setting: Any, seed: int) -> dict[str, Any]:
        if (setting.build_model, seed) not in known:
            if len(known) == KEPT_MODELS:
                known.clear()
            known[setting.build_model, seed] = whole(setting, seed)
        return {name: tensor.clone() for name, tensor in known[setting.build_model, seed].items()}

    template = functools.lru_cache(maxsize=KEPT_MODELS)(model_update.template_of.__wrapped__)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_update, "initial_model", initial_model)
        patch.setattr(model_update, "template_of", template)
        yield whole


@pytest.fixture(scope="session", autouse=True)
def _verified_once() -> Iterator[None]:
    """A signature that holds is checked once in a process of tests: each silo opens its ledger at each step.

    These are pure functions of bytes; one that does not hold is checked each time. Of a certificate's
    signatures that were made here the first is checked: the others hold by the same code.
    """
    from tightframe.rounds.site_ledger import keys
    from tightframe.securesum import checks, identity

    sign, verify = identity.KeySigner.sign, identity.verify_signature
    made, proven = dict[tuple[bytes, bytes, bytes], bool](), set[bytes]()

    def signed(signer: Any, message: bytes) -> bytes:
        signature = sign(signer, message)
        made[signer.certificate, message, signature] = True
        return signature

    @functools.lru_cache(maxsize=8192)
    def verified(certificate: bytes, message: bytes, signature: bytes, **words: str) -> None:
        if not made.pop((certificate, message, signature), False) or certificate not in proven:
            verify(certificate, message, signature, **words)
            proven.add(certificate)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "ed25519_verify", functools.lru_cache(maxsize=8192)(checks.ed25519_verify))
        patch.setattr(identity.KeySigner, "sign", signed)
        for module in (identity, keys):
            patch.setattr(module, "verify_signature", verified)
        yield


@pytest.fixture(scope="session", autouse=True)
def _held_by_nobody() -> Iterator[Callable[..., None]]:
    """Silos in a process of tests answer when their work is done: waiting was a tenth of the time of attacks.

    A ``Pace`` with a clock of its own waits on that; a test that measures time asks for ``held``.
    """
    from tightframe.rounds.pace import Pace

    hold = Pace._hold

    def by_own_clock(pace: Pace, until: float) -> None:
        if pace._clock is not time.monotonic:
            hold(pace, until)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pace, "_hold", by_own_clock)
        yield hold


@pytest.fixture
def held(_held_by_nobody: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Silos of this test hold their answers back."""
    monkeypatch.setattr("tightframe.rounds.pace.Pace._hold", _held_by_nobody)


@pytest.fixture(scope="session", autouse=True)
def _profiled_by_nobody() -> Iterator[None]:
    """Torch tells no profiler of each batch and step: 0.1 ms of the 0.3 that a small one takes."""
    torch = sys.modules.get("torch")
    with pytest.MonkeyPatch.context() as patch:
        if torch is not None:
            patch.setattr(torch.autograd.profiler, "record_function", nullcontext)
        yield


@pytest.fixture(scope="session", autouse=True)
def _commands_once() -> Iterator[None]:
    """Typer makes an app's commands of their functions' signatures once in a process, as in a user's."""
    from typer import testing

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(testing, "_get_command", functools.cache(testing._get_command))
        yield


def _by_arrays(function: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[tuple[Any, ...], Any] = {}

    def once(*given: Any) -> Any:
        arrays = [np.asarray(item) for item in given]
        key = (
            *((item.shape, item.dtype) for item in arrays),
            sha256(b"".join(item.tobytes() for item in arrays)).digest(),
        )
        if key not in known:
            known[key] = function(*given)
        return known[key]

    return once


def _real_data() -> Path:
    return Path(os.environ.get("TIGHTFRAME_TEST_DATA", ROOT.parent / "shared" / "data")).resolve()


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Folder of the real records, which are not part of the project."""
    path = _real_data()
    if not path.is_dir():
        pytest.skip(f"no real data: {path} does not exist (set TIGHTFRAME_TEST_DATA)")
    return path


@pytest.fixture(scope="session")
def images() -> Path | None:
    """The real dermoscopy images of four centres; None for tests that have the twin instead."""
    path = _real_data() / "fed_isic_ham"
    return path if path.is_dir() else None


@pytest.fixture(scope="session", autouse=True)
def _pages_where_read() -> Iterator[None]:
    from tightframe.report import writing

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "leave", where_wanted(writing.leave))
        yield


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Debian's chromium, once for a process of tests."""
    if CHROMIUM is None:
        pytest.skip("needs chromium")
    with opened(tmp_path_factory.mktemp("chromium")) as found:
        yield found


@pytest.fixture
def pages() -> None:
    """Runs of this test write their pages."""


@pytest.fixture
def small() -> dict[str, Any]:
    """Values of a small valid job; a fresh copy for each test."""
    return {key: (value.copy() if isinstance(value, dict | list) else value) for key, value in SMALL.items()}


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Processes of ``-n auto``: two a core, because tests of the engine mostly wait; of the fast tier few do.

    Each needs nine seconds of a core to import and collect everything.
    """
    cores = os.cpu_count() or 1
    return cores + 1 if config.getoption("markexpr") == FAST else 2 * cores


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path) -> Generator[None, list[Any], list[Any]]:
    """Search a file of tests for examples only where it has some: a second of a core in each process."""
    found = yield
    if file_path.suffix == ".py" and b">>>" not in file_path.read_bytes():
        return [one for one in found if not isinstance(one, DoctestModule)]
    return found


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported for the tests stays, so the garbage collector need not search it, then or later.

    By default it looks for cycles at each 700 new objects, which was a twentieth of the time of small runs.
    """
    gc.disable()
    if "PYTEST_XDIST_WORKER" in os.environ:
        importlib.import_module(ENGINE_FIRST)
    try:
        return (yield)
    finally:
        if _leading is not None:
            os.close(_leading)
        gc.freeze()
        gc.set_threshold(SELDOM)
        gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    """An option instead of a marker's expression, so that ``-m`` stays free for others."""
    parser.addoption("--faults", action="store_true", help="Also kill, pause and cut a federation of six.")
    parser.addoption(
        "--drawn-anew",
        action="store_true",
        help="Noise and examples that no other run had: a few tests may fail.",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Let examples be chosen anew, if asked to."""
    if config.getoption("--drawn-anew", False):
        settings.load_profile("drawn anew")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Draw by the test's name, in its fixtures, too, write pages where somebody reads them, keep threads."""
    asked = "pages" in getattr(item, "fixturenames", ())
    told = written(asked or not _lies_in(item.path, PAGELESS))
    drawn = nullcontext() if item.config.getoption("--drawn-anew", False) else drawn_by_name(item.nodeid)
    with told, drawn, _threads_kept():
        return (yield)


@contextmanager
def _threads_kept() -> Iterator[None]:
    """Let no test leave torch more threads: on busy cores these wait for each other, ten times as long."""
    torch = sys.modules.get("torch")
    before = None if torch is None else torch.get_num_threads()
    try:
        yield
    finally:
        if torch is not None and torch.get_num_threads() != before:
            torch.set_num_threads(before)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is `whole` by its place; leave fault tests out unless asked for; spread files that wait."""
    for item in items:
        if _lies_in(item.path, WHOLE):
            item.add_marker("whole")
    if not config.getoption("--faults", False):
        left_out = [item for item in items if item.get_closest_marker("faults")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    items[:] = _spread(items)


def _is_whole(item: pytest.Item) -> bool:
    return item.get_closest_marker("whole") is not None


def _spread(items: list[pytest.Item]) -> list[pytest.Item]:
    """Files that run the engine among the others, the longest at the start.

    Each is handed to one process as a whole, in this order; they take minutes and mostly wait. At the end,
    or several at once, they would leave the cores idle. Short files are last, so that all processes end
    together.
    """
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    last = len(WAITING)
    places = {path: WAITING.index(path) if path in WAITING else last for path in files}
    waiting = sorted((path for path in files if places[path] < last), key=lambda path: places[path])
    working = sorted(
        (path for path in files if places[path] == last),
        key=lambda path: (path not in LONG, -sum(map(_is_whole, files[path])), -len(files[path])),
    )
    ordered, waiting = waiting[:1], waiting[1:]
    # All of them are begun while files with tests that are `whole` are left, with which they share the cores:
    # those take most of the time and are less than a third of all files.
    long = sum(any(map(_is_whole, files[path])) for path in working) or len(working) // 2
    every = max(1, 2 * long // (3 * len(waiting))) if waiting else 1
    for place, path in enumerate(working, 1):
        ordered.append(path)
        if place % every == 0 and waiting:
            ordered.append(waiting.pop(0))
    return [item for path in [*ordered, *waiting] for item in files[path]]
