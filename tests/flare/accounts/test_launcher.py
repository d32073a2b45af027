"""The engine's side of two accounts: it starts jobs through the training account's service, or not at all."""

from __future__ import annotations

import json
import os
import pwd
import re
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_launcher_spec import JobProcessArgs, JobReturnCode
from nvflare.apis.workspace import Workspace
from nvflare.app_common.job_launcher.client_process_launcher import ClientProcessJobLauncher
from nvflare.private.fed.utils.fed_utils import get_job_launcher
from tests.support.flare.client import Site
from tests.support.jobs import SMALL

from tightframe.config.job_manifest import PLACE
from tightframe.config.site import SiteEntry
from tightframe.flare import CODE, doors
from tightframe.flare.accounts import launcher, permissions
from tightframe.flare.accounts.launcher import TrainingHandle, TrainingLauncher
from tightframe.flare.accounts.permissions import ENTER, READ, Account
from tightframe.flare.accounts.request import KILL, AccountError, Start, receive, send
from tightframe.flare.executor import SiloExecutor

JOB = "0f8fad5b-d9cb-469f-a165-70867728950e"
META = {"job_id": JOB, "job_clients": []}
ME = pwd.getpwuid(os.geteuid()).pw_name


@pytest.fixture
def context(tmp_path: Path) -> Callable[..., FLContext]:
    """What the engine gives a launcher, for a deployed job."""
    for name in ("local", "startup", f"{JOB}/app_site-1/config"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "startup" / "client.crt").write_text("CERTIFICATE")
    (tmp_path / JOB / "app_site-1" / "config" / "config_fed_client.json").write_text("{}")
    (tmp_path / JOB / "app_site-1" / PLACE).write_text("{}")

    def make(url: str = "tcp://localhost:40000", security: str = "clear") -> FLContext:
        made = FLContext()
        arguments = {
            JobProcessArgs.PARENT_URL: ("-p", url),
            JobProcessArgs.PARENT_CONN_SEC: ("--parent_conn_sec", security),
            JobProcessArgs.AUTH_TOKEN: ("-t", "a-b"),
            JobProcessArgs.TOKEN_SIGNATURE: ("-ts", "c="),
            JobProcessArgs.SSID: ("-d", "d"),
        }
        made.set_prop(FLContextKey.WORKSPACE_OBJECT, Workspace(str(tmp_path), "site-1"), private=True)
        made.set_prop(FLContextKey.JOB_PROCESS_ARGS, arguments, private=True)
        return made

    return make


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[socket.socket]:
    """Somebody's service."""
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(tmp_path / "s"))
        made.listen(1)
        made.settimeout(60)
        yield made


@pytest.fixture
def of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the service were of the account 4711, and that the training account."""
    monkeypatch.setattr(launcher, "peer", lambda connection: 4711)
    monkeypatch.setattr(Account, "named", lambda name: Account(name, 4711, frozenset()))


def test_without_the_training_accounts_service_no_job_starts(context: Any, tmp_path: Path) -> None:
    with pytest.raises(AccountError, match=r"TF-741.*not run in this account instead"):
        TrainingLauncher("nobody", str(tmp_path / "s")).launch_job(META, context())
    with pytest.raises(AccountError, match="TF-742: Expected the account 'no-such-one'"):
        TrainingLauncher("no-such-one", str(tmp_path / "s")).launch_job(META, context())


def test_a_service_of_this_or_a_third_account_is_asked_for_nothing(
    context: Any, listening: socket.socket, tmp_path: Path
) -> None:
    for account, owner in (
        ("nobody", f"it runs as the account with id {os.geteuid()}|as this account"),
        (ME, "it runs as this account"),
    ):
        with pytest.raises(AccountError, match=rf"TF-741.*({owner})"):
            TrainingLauncher(account, str(tmp_path / "s")).launch_job(META, context())
        connection, _ = listening.accept()
        with connection:
            assert connection.recv(1) == b"", "no byte was sent"


def test_beside_another_launcher_the_engine_starts_nothing() -> None:
    """So that the engine's own one, left in by mistake, is no way back to one account."""

    class Engine:
        launchers: tuple[Any, ...] = ()

        def new_context(self) -> FLContext:
            return FLContext()

        def fire_event(self, event: str, context: FLContext) -> None:
            for one in self.launchers:
                one.handle_event(event, context)

    engine, ours = Engine(), TrainingLauncher("nobody")
    asked = SimpleNamespace(get_engine=lambda: engine)
    engine.launchers = (ours,)
    assert get_job_launcher(META, asked) is ours
    for launchers in ((ours, ClientProcessJobLauncher()), (ClientProcessJobLauncher(), ours)):
        engine.launchers = launchers
        with pytest.raises(RuntimeError, match="Exactly one job launcher"):
            get_job_launcher(META, asked)
    ours.handle_event(EventType.AFTER_JOB_LAUNCH, FLContext())


@pytest.mark.usefixtures("of_another")
def test_a_job_is_asked_for_held_and_killed_over_one_connection(
    context: Any, listening: socket.socket, tmp_path: Path
) -> None:
    asked: list[Start] = []
    bytes_: list[bytes] = []

    def serve() -> None:
        connection, _ = listening.accept()
        with connection:
            asked.append(Start.from_bytes(receive(connection, 60)))
            send(connection, b'{"started": true}')
            bytes_.append(connection.recv(1))
            send(connection, b'{"ended": -9, "recorded": null}')

    thread = threading.Thread(target=serve)
    thread.start()
    handle = TrainingLauncher("training", str(tmp_path / "s")).launch_job(META, context())
    assert handle.poll() == JobReturnCode.UNKNOWN
    handle.terminate()
    handle.wait()
    thread.join(60)
    assert bytes_ == [KILL] and handle.poll() == JobReturnCode.EXECUTION_ERROR
    (request,) = asked
    assert (request.job, request.port, request.token) == (JOB, 40000, "a-b")
    # The lead's manifest, too: without it the site's policy refuses the job (TF-633).
    assert request.files == {"config/config_fed_client.json": b"{}", PLACE: b"{}"}
    assert "a-b" not in repr(request) and "a-b" not in str(request)
    handle.terminate()  # what has ended is not ended twice


@pytest.mark.usefixtures("of_another")
def test_a_refusal_and_an_end_without_a_word_are_told(
    context: Any, listening: socket.socket, tmp_path: Path
) -> None:
    def serve(answer: bytes | None) -> None:
        connection, _ = listening.accept()
        with connection:
            if answer is not None:
                receive(connection, 60)
                send(connection, answer)

    for answer, expected in (
        (b'{"refused": "TF-743", "reason": "not signed"}', "TF-743.*not signed"),
        (b"[]", "TF-741.*something else"),
        (None, "TF-741.*engine_account"),
    ):
        thread = threading.Thread(target=serve, args=(answer,))
        thread.start()
        with pytest.raises(AccountError, match=expected):
            TrainingLauncher("training", str(tmp_path / "s")).launch_job(META, context())
        thread.join(60)


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ({"ended": 0, "recorded": None}, JobReturnCode.SUCCESS),
        ({"ended": 1, "recorded": None}, JobReturnCode.EXECUTION_ERROR),
        ({"ended": 0, "recorded": 103}, 103),
        (None, JobReturnCode.EXECUTION_ERROR),
    ],
)
def test_how_a_job_ended_is_what_the_engine_is_told(answer: Any, code: int) -> None:
    """A service that is gone has ended its jobs."""
    mine, theirs = socket.socketpair()
    handle = TrainingHandle(mine)
    if answer is not None:
        send(theirs, json.dumps(answer).encode())
    theirs.close()
    handle.wait()
    assert handle.poll() == code


def test_a_job_may_take_longer_than_an_answer() -> None:
    """A connection comes with the time limit of the answer before it; at its end the job would be killed."""
    mine, theirs = socket.socketpair()
    mine.settimeout(0.05)
    handle = TrainingHandle(mine)
    theirs.settimeout(0.5)
    with pytest.raises(TimeoutError):
        theirs.recv(1)  # the end of the connection would be read here
    assert handle.poll() == JobReturnCode.UNKNOWN
    send(theirs, b'{"ended": 0, "recorded": null}')
    handle.wait()
    theirs.close()
    assert handle.poll() == JobReturnCode.SUCCESS


def test_a_job_with_code_or_another_listener_is_not_asked_for(context: Any, tmp_path: Path) -> None:
    for url, security in (
        ("grpc://localhost:1", "clear"),
        ("tcp://10.0.0.1:1", "clear"),
        ("tcp://localhost:1", "mtls"),
    ):
        with pytest.raises(AccountError, match=r"comm_config\.json"):
            TrainingLauncher("nobody").launch_job(META, context(url, security))
    (tmp_path / JOB / "app_site-1" / "custom").mkdir()
    (tmp_path / JOB / "app_site-1" / "custom" / "mine.py").touch()
    with pytest.raises(AccountError, match=r"configuration files alone.*custom/mine\.py"):
        TrainingLauncher("nobody").launch_job(META, context())


def test_the_executor_trains_in_no_account_that_is_not_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that was started by other means: by the engine's own launcher in the training account's kit."""
    monkeypatch.setattr(doors, "require", lambda _: None)
    (tmp_path / "site-1" / "local").mkdir(parents=True)
    (tmp_path / "site-1" / "local" / "resources.json").write_text('{"allow_log_streaming": false}')
    (tmp_path / "state").mkdir(mode=0o700)
    config = {"state_dir": str(tmp_path / "state"), "engine_account": ME}
    site = Site(tmp_path / "site-1", "site-1", SiloExecutor(**SMALL), config=config, secure=True)
    assert site.answer("enroll", b"")[CODE] == "TF-742"


class TestRights:
    """Of an account that owns nothing and is in one group."""

    @pytest.fixture
    def place(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="tightframe-rights-") as folder:
            Path(folder).chmod(0o755)
            made = Path(folder) / "a" / "b"
            made.mkdir(parents=True)
            (made / "file").touch()
            yield made

    def test_reading_needs_every_folder_above(self, place: Path) -> None:
        stranger = Account("x", 4711, frozenset())
        file = place / "file"
        for path, mode in ((file, 0o644), (place, 0o755), (place.parent, 0o755)):
            path.chmod(mode)
        assert stranger.may(file, READ) and stranger.may(place, ENTER)
        place.parent.chmod(0o700)
        assert not stranger.may(file, READ) and not stranger.may(place, ENTER)
        place.parent.chmod(0o711)
        assert stranger.may(file, READ), "a known name is enough"
        file.chmod(0o640)
        assert not stranger.may(file, READ)
        assert Account("x", 4711, frozenset({file.stat().st_gid})).may(file, READ)
        assert Account("root", 0, frozenset()).may(file, READ)
        assert not stranger.may(place / "absent", READ)

    def test_a_link_is_as_open_as_what_it_leads_to(self, place: Path) -> None:
        stranger = Account("x", 4711, frozenset())
        for path in (place, place.parent):
            path.chmod(0o755)
        (place / "file").chmod(0o600)
        (place / "link").symlink_to(place / "file")
        assert not stranger.may(place / "link", READ)
        (place / "file").chmod(0o644)
        assert stranger.may(place / "link", READ)

    def test_an_access_list_counts_as_given_to_everybody(
        self, place: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for path in (place, place.parent):
            path.chmod(0o755)
        file = place / "file"
        file.chmod(0o640)  # with a list, the bits of the group are the most that it gives
        assert not Account("x", 4711, frozenset()).may(file, READ)
        monkeypatch.setattr(
            permissions.os, "listxattr", lambda path: ["system.posix_acl_access"] if path == file else []
        )
        assert Account("x", 4711, frozenset()).may(file, READ)

    def test_changing_needs_one_folder_above(self, place: Path) -> None:
        stranger = Account("x", 4711, frozenset())
        file = place / "file"
        assert not stranger.may_change(file)
        place.parent.chmod(0o777)
        assert stranger.may_change(file), "another folder can be put in its place"
        place.parent.chmod(0o1777)
        assert not stranger.may_change(file), "but not where only owners may"
        file.chmod(0o666)
        assert stranger.may_change(file)
        file.chmod(0o644)
        if os.geteuid() == 0:
            shutil.chown(place, user=4711)
            assert stranger.may_change(file), "an owner gives itself every right"

    def test_whoever_can_replace_a_link_on_the_way_leads_elsewhere(self, place: Path) -> None:
        stranger = Account("x", 4711, frozenset())
        middle = place / "middle"
        middle.mkdir()
        (middle / "there").symlink_to(place / "file")
        (place / "link").symlink_to(middle / "there")
        assert not stranger.may_change(place / "link")
        middle.chmod(0o777)
        assert stranger.may_change(place / "link"), "of the folder that only the second link is in"
        middle.chmod(0o1777)
        assert not stranger.may_change(place / "link")
        if os.geteuid() == 0:
            os.lchown(middle / "there", 4711, -1)
            assert stranger.may_change(place / "link"), "a link belongs to whoever made it"

    def test_each_file_that_the_configuration_names_counts(self, place: Path) -> None:
        """The names of withdrawn patients, a database's own file, and who else may have signed the ledger."""
        names = ("withdrawn.csv", "root.pem", "address", "table.db")
        withdrawn, root, address, table = (place / name for name in names)
        for path in (place.parent, place):
            path.chmod(0o755)
        address.write_text(f"sqlite:///{table}?mode=ro")
        for path in (withdrawn, root, table):
            path.touch()
        entry = SiteEntry(
            withdrawn={"table": str(withdrawn)},
            ledger_roots=[str(root)],
            data={"table": {"database": {"url_file": str(address), "query": "SELECT 1"}}},
        )
        for path in (withdrawn, root, address, table):
            path.chmod(0o600)

        def wrong() -> str:
            found = permissions.separation(place, entry, Account("x", 4711, frozenset()))
            return "\n".join(line for line in found if " can read the jobs' results" not in line)

        assert not any(name in wrong() for name in names)
        for path in (withdrawn, address, table):
            path.chmod(0o604)
            assert re.search(rf"x can read .* {path}$", wrong(), re.MULTILINE), path.name
        for path in (withdrawn, root, address, table):
            path.chmod(0o602)
            assert f"x can change or replace {path}" in wrong(), path.name
