"""A site's real client runner in this process: the engine's own filter chain, events and contexts.

Only what would use the network is replaced, by something that writes down what would have left.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import FLContextKey, ReservedKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.workspace import Workspace
from nvflare.fuel.sec.audit import AuditService
from nvflare.private.fed.app.fl_conf import create_privacy_manager
from nvflare.private.fed.client.client_engine_executor_spec import TaskAssignment
from nvflare.private.fed.client.client_run_manager import ClientRunManager
from nvflare.private.fed.client.client_runner import ClientRunner, ClientRunnerConfig, TaskRouter
from nvflare.private.privacy_manager import PrivacyService
from tests.support import ROOT

from tightframe.errors import TightframeError, failure_code
from tightframe.flare import MESSAGE
from tightframe.flare.transport import FlareTransport
from tightframe.rounds.context import Message
from tightframe.rounds.sums.common import Accept

JOB_ID = "job"
PRIVACY = ROOT / "provisioning" / "local" / "privacy.json"


class Manager(ClientRunManager):
    """The engine of a client's job process, with the network replaced by a list."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.left: list[tuple[str, Any]] = []
        super().__init__(*args, **kwargs)

    def send_aux_request(self, targets: Any, topic: str, request: Shareable, *_: Any, **__: Any) -> dict:
        self.left.append((f"aux {topic}", dict(request)))
        return {}

    def multicast_aux_requests(self, topic: str, target_requests: Any, *_: Any, **__: Any) -> dict:
        self.left.append((f"aux {topic}", target_requests))
        return {}

    def fire_and_forget_aux_request(self, topic: str, request: Shareable, *_: Any, **__: Any) -> dict:
        self.left.append((f"aux {topic}", dict(request)))
        return {}

    def stream_objects(self, *args: Any, **_: Any) -> Any:
        self.left.append(("stream", args))


class Site:
    """One site: its folder, its ``local/``, its executor and the engine around it.

    Args:
        folder: of the site.
        name: of the site.
        executor: of the job.
        config: of ``local/tightframe.json``; none is written without.
        guarded: whether the site has ``provisioning/local/privacy.json``.
        secure: whether the engine runs in its secure mode.
        meta: the job's metadata.
        job_filters: result filters that the job brings.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        executor: Executor,
        *,
        config: Mapping[str, Any] | None = None,
        guarded: bool = True,
        secure: bool = False,
        meta: Mapping[str, Any] | None = None,
        job_filters: tuple[Any, ...] = (),
        tasks: tuple[str, ...] = ("enroll", "confirm", "contribute", "agree", "reveal", "baseline"),
    ) -> None:
        self.folder, self.name, self.executor = folder, name, executor
        for part in ("local", "startup", JOB_ID):
            (folder / part).mkdir(parents=True, exist_ok=True)
        if config is not None:
            (folder / "local" / "tightframe.json").write_text(json.dumps(config))
        if guarded:
            shutil.copy(PRIVACY, folder / "local")
        workspace = Workspace(str(folder), name)
        Path(workspace.get_job_meta_path(JOB_ID)).write_text(json.dumps(dict(meta or {"name": "small"})))
        AuditService.the_auditor = AuditService.the_auditor or _NoAuditor()
        privacy = create_privacy_manager(workspace, names_only=False)
        PrivacyService.initialize(privacy)
        router = TaskRouter()
        router.add_executor(list(tasks), executor)
        handlers: list[Any] = [executor, *(privacy.components or {}).values()]
        client = SimpleNamespace(client_args={}, client_name=name)
        self.manager = Manager(name, JOB_ID, workspace, client, {}, handlers, None)
        chain = {f"{task}/out": list(job_filters) for task in tasks}
        config_ = ClientRunnerConfig(router, {}, chain, handlers, {})
        self.runner = ClientRunner({}, config_, JOB_ID, self.manager)
        self.manager.add_handler(self.runner)
        self.contexts: list[FLContext] = []
        with self.manager.new_context() as context:
            context.set_prop(FLContextKey.SECURE_MODE, secure, private=True, sticky=True)
            context.set_prop(FLContextKey.WORKSPACE_ROOT, str(folder), private=True, sticky=True)
            # As at the start of a run, so that the engine's own runner of federated events is ready.
            self.runner.fire_event("_start_run", context)
        self.public = self._public()

    def answer(self, task: str, message: Any) -> Shareable:
        """What the engine would send for a task."""
        with self.manager.new_context() as context:
            peer = FLContext()
            peer.put(ReservedKey.RUN_NUM, JOB_ID, private=False, sticky=False)
            context.set_peer_context(peer)
            request = Shareable()
            request[MESSAGE] = message
            reply = self.runner._process_task(TaskAssignment(task, "task-1", request), context)
            assert isinstance(reply, Shareable)
            self.contexts.append(context)
        return reply

    def other_ways(self) -> list[tuple[str, Any]]:
        """All that left, or is public to the server, beside the answers of tasks."""
        with self.manager.new_context() as context:
            new = [("property", item) for item in self._public(context).items() - self.public.items()]
        for context in self.contexts:
            new += [("property", item) for item in self._public(context).items() - self.public.items()]
        return self.manager.left + new

    def _public(self, context: FLContext | None = None) -> dict[str, str]:
        found = (context or self.manager.new_context()).get_all_public_props()
        return {key: repr(value) for key, value in found.items()}


class Wire:
    """A transport over sites, which reads answers as the server's own does."""

    def __init__(self, sites: Mapping[str, Site]) -> None:
        self.sites = sites
        self.answers: list[tuple[str, str, Shareable]] = []
        self.log: list[str] = []

    def exchange(self, task: str, requests: Mapping[str, Message], accept: Accept) -> Mapping[str, str]:
        failed: dict[str, str] = {}
        state = SimpleNamespace(accept=accept)
        for site, request in sorted(requests.items()):
            reply = self.sites[site].answer(task, request)
            self.answers.append((site, task, reply))
            # Through the engine's own serialisation, which refuses what it cannot send.
            sent = Shareable.from_bytes(reply.to_bytes())
            try:
                FlareTransport._accept(_TRANSPORT, site, sent, state)  # type: ignore[arg-type]
            except TightframeError as error:
                failed[site] = failure_code(error)
                self.log.append(f"{site}: {error}")
        return failed


_TRANSPORT = SimpleNamespace(_log=logging.getLogger("tests.wire"))


class _NoAuditor:
    def add_job_event(self, *_: Any, **__: Any) -> str:
        return ""

    def add_event(self, *_: Any, **__: Any) -> str:
        return ""
