"""The egress guard in the engine's own filter chain: what passes, what is stopped, what cannot leave."""

from __future__ import annotations

import ast
import dataclasses
import json
import logging
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.filter import Filter
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import Shareable, make_reply
from tests.support import ROOT
from tests.support.flare.client import JOB_ID, Site, Wire
from tests.support.jobs import SMALL

from tightframe.config.policy import Policy
from tightframe.config.profiles import PROFILES
from tightframe.config.refusals import REFUSALS, BelowPolicyError, Refusal
from tightframe.config.site import SiteEntry
from tightframe.errors import SiteConfigError
from tightframe.flare import CODE, MESSAGE, doors, guard
from tightframe.flare.executor import SiloExecutor
from tightframe.flare.outgoing import looks_masked
from tightframe.learning.few_records.products import Products
from tightframe.rounds.declaration import Declaration
from tightframe.rounds.few_records import rule
from tightframe.rounds.server.coordinator import Coordinator
from tightframe.rounds.setup import prepare
from tightframe.rounds.sums.common import SECURE
from tightframe.rounds.sums.simulated_identity import simulated_anchor
from tightframe.rounds.sums.transcripts import ServerIdentity
from tightframe.securesum.checks import masked_hash
from tightframe.securesum.messages import Masked, Receipt, SumId

SECRET = 4711.4711
"""What a hand-made executor tries to send; looked for in whatever leaves."""
DECLARED = Declaration(
    weight=290.0,
    synthetic=True,
    profile="research",
    min_class_count=5,
    any_static_cohort=False,
    untold=(),
)
RESEARCH: Mapping[str, Any] = {"sites": {"site-1": {"policy": {"profile": "research"}}}}
STANDARD: Mapping[str, Any] = {"sites": {"site-1": {"policy": {"profile": "standard"}}}}


class HandMade(Executor):
    """An executor that somebody else wrote; ``act`` may do whatever it likes."""

    def __init__(self, act: Callable[[HandMade, Any], Any]) -> None:
        super().__init__()
        self._act = act

    def execute(self, task_name: str, shareable: Any, fl_ctx: Any, abort_signal: Any) -> Any:
        return self._act(self, fl_ctx)


class Failing(SiloExecutor):
    """Fails where it should send its first term."""

    def execute(self, task_name: str, shareable: Any, fl_ctx: Any, abort_signal: Any) -> Any:
        if task_name == "contribute":
            shareable = Shareable()
        return super().execute(task_name, shareable, fl_ctx, abort_signal)


def _run(job: Mapping[str, Any], folder: Path, executors: Mapping[str, Executor], **site: Any) -> Wire:
    """A whole run of the real coordinator with real executors, each inside a real client runner."""
    wire = Wire({name: Site(folder / name, name, item, **site) for name, item in executors.items()})
    identity = ServerIdentity(JOB_ID, simulated_anchor(JOB_ID, production=False), simulated=True)
    Coordinator(prepare(dict(job)), folder / "server", identity=identity).run(wire)
    return wire


@pytest.mark.whole
def test_a_whole_secure_run_with_a_drop_out_passes_and_nothing_leaves_by_other_ways(tmp_path: Path) -> None:
    job = {**SMALL, "summation": "secure", "sites": [f"site-{i}" for i in range(1, 5)], "min_sites": 3}
    executors = {name: SiloExecutor(**job) for name in job["sites"]} | {"site-4": Failing(**job)}
    wire = _run(job, tmp_path, executors)
    tasks = {task for site, task, reply in wire.answers if site != "site-4"}
    assert tasks == {"enroll", "confirm", "contribute", "agree", "reveal"}
    failed = {(site, task) for site, task, reply in wire.answers if reply.get_return_code() != ReturnCode.OK}
    assert failed == {("site-4", "contribute")}
    assert all(reply.get_return_code() != ReturnCode.TASK_RESULT_FILTER_ERROR for *_, reply in wire.answers)
    for site in wire.sites.values():
        assert guard.in_place(site.manager.new_context()) and site.contexts
        assert site.other_ways() == []


@pytest.mark.whole
def test_a_whole_plain_run_with_its_extras_passes_where_the_policy_accepts_it(tmp_path: Path) -> None:
    job = {**SMALL, "summation": "plain", "local_baseline_epochs": 1, "personalise": True}
    wire = _run(job, tmp_path, {name: SiloExecutor(**job) for name in job["sites"]})
    assert {task for _, task, _ in wire.answers} == {"enroll", "contribute", "baseline"}
    assert all(reply.get_return_code() == ReturnCode.OK for *_, reply in wire.answers)
    assert all(site.other_ways() == [] for site in wire.sites.values())


def _ok(message: Any, **more: Any) -> Shareable:
    reply = make_reply(ReturnCode.OK)
    reply[MESSAGE] = message
    reply.update(more)
    return reply


def _headed(reply: Shareable, key: str) -> Shareable:
    reply.set_header(key, SECRET)
    return reply


def _dxo() -> Shareable:
    return DXO(DataKind.WEIGHTS, data={"w": np.full(3, SECRET)}).to_shareable()


def _masked(update: bytes, *, name: str = "site-1", honest: bool = True, phase: str = "train-0") -> bytes:
    """A term with all that belongs to it: only whether it is masked is the question."""
    shown = masked_hash(update if honest else b"", b"")
    none, signature = masked_hash(b"", b""), secrets.token_bytes(64)
    receipt = Receipt(
        name, 0, SumId(1, phase), bytes(32), bytes(32), {}, True, shown, none, bytes(32), signature
    )
    return Masked(update, b"", receipt, b"").to_bytes()


UNMASKED = np.full(500, int(SECRET * 2**12), "<u4").tobytes()
SMALL_NUMBERS = np.random.default_rng(0).normal(0, 3e4, 400).astype("<i4").tobytes()


class _Kind(Shareable):
    pass


class _Bytes(bytes):
    pass


def _as_kind() -> Shareable:
    reply = _Kind(_ok({"declaration": DECLARED.to_bytes()}))
    reply.set_return_code(ReturnCode.OK)
    return reply


STOPPED: Mapping[str, tuple[str, Callable[[], Any]]] = {
    "a raw array": ("contribute", lambda: _ok(np.full(3, SECRET))),
    "an array as a term": ("contribute", lambda: _ok({"term": {"update": np.full(3, SECRET)}})),
    "a DXO of weights": ("contribute", _dxo),
    "a number": ("contribute", lambda: _ok({SECURE: SECRET})),
    "something beside the message": (
        "enroll",
        lambda: _ok({"declaration": DECLARED.to_bytes()}, weights=SECRET),
    ),
    "something in the message": (
        "enroll",
        lambda: _ok({"declaration": DECLARED.to_bytes(), "loss": SECRET}),
    ),
    "something in a header": ("baseline", lambda: _headed(_ok({}), "x")),
    "something in the engine's cookies": ("baseline", lambda: _headed(_ok({}), "__cookie_jar__")),
    "the name of another task": ("baseline", lambda: _headed(_ok({}), "__task_name__")),
    "a baseline's result": ("baseline", lambda: _ok({"accuracy": SECRET})),
    "the answer of another task": ("agree", lambda: _ok({"declaration": DECLARED.to_bytes()})),
    "a task that there is not": ("extra", lambda: _ok({})),
    "a term that nobody masked": ("contribute", lambda: _ok({SECURE: _masked(UNMASKED)})),
    "small integers that nobody masked": ("contribute", lambda: _ok({SECURE: _masked(SMALL_NUMBERS)})),
    "a term under another's name": (
        "contribute",
        lambda: _ok({SECURE: _masked(secrets.token_bytes(999), name="site-2")}),
    ),
    "a term that is not the receipt's": (
        "contribute",
        lambda: _ok({SECURE: _masked(secrets.token_bytes(999), honest=False)}),
    ),
    "a message in the receipt": (
        "contribute",
        lambda: _ok({SECURE: _masked(secrets.token_bytes(999), phase="patient 4711")}),
    ),
    "bytes after the message": (
        "contribute",
        lambda: _ok({SECURE: _masked(secrets.token_bytes(999)) + b"4711"}),
    ),
    "spaces in a declaration": (
        "enroll",
        lambda: _ok({"declaration": json.dumps(DECLARED.model_dump()).encode()}),
    ),
    "another kind of bytes": ("enroll", lambda: _ok({"declaration": _Bytes(DECLARED.to_bytes())})),
    "another kind of answer": ("enroll", _as_kind),
    "a code that is not documented": (
        "enroll",
        lambda: _failure("4711"),
    ),
    "text beside a code": ("enroll", lambda: _failure("TF-301", text="patient 4711")),
    "another return code": ("enroll", lambda: make_reply(ReturnCode.EMPTY_RESULT)),
    "reasons with another code": (
        "enroll",
        lambda: _failure("TF-301", **{REFUSALS: [["weights", "a", "b"]]}),
    ),
    "reasons of no rule": ("enroll", lambda: _failure("TF-614", **{REFUSALS: [["4711", "a", "b"]]})),
    "reasons that are long": (
        "enroll",
        lambda: _failure("TF-614", **{REFUSALS: [["weights", "a" * 999, "b"]]}),
    ),
}


def _failure(code: str, **more: Any) -> Shareable:
    reply = make_reply(ReturnCode.EXECUTION_EXCEPTION)
    reply[CODE] = code
    reply.update(more)
    return reply


def _answer(folder: Path, task: str, make: Callable[[], Any], **site: Any) -> Shareable:
    made = Site(
        folder,
        "site-1",
        HandMade(lambda executor, context: make()),
        config=site.pop("config", RESEARCH),
        tasks=("enroll", "contribute", "agree", "baseline", "extra"),
        **site,
    )
    return made.answer(task, {})


@pytest.mark.parametrize("what", STOPPED)
def test_a_hand_made_executor_is_stopped_with_a_filter_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    task, make = STOPPED[what]
    with caplog.at_level(logging.DEBUG):
        reply = _answer(tmp_path / "guarded", task, make)
    assert reply.get_return_code() == ReturnCode.TASK_RESULT_FILTER_ERROR
    assert set(reply) == {"__headers__"} and "4711" not in repr(reply)
    assert "TF-730" in caplog.text and "4711" not in caplog.text, "the reason is in the log, the value is not"
    # What the same engine lets out without the guard, so that it is the guard that stops it.
    loose = _answer(tmp_path / "loose", task, make, guarded=False)
    assert loose.get_return_code() != ReturnCode.TASK_RESULT_FILTER_ERROR


@pytest.mark.parametrize("profile", ["research", "standard"])
def test_plain_answers_pass_only_where_the_policy_accepts_plain_sums(tmp_path: Path, profile: str) -> None:
    config = RESEARCH if profile == "research" else STANDARD
    expected = ReturnCode.OK if profile == "research" else ReturnCode.TASK_RESULT_FILTER_ERROR
    for task, message in (
        ("enroll", {"declaration": DECLARED.to_bytes()}),
        ("contribute", {"term": {"update": bytes(8), "static": b""}}),
    ):
        reply = _answer(tmp_path / task, task, lambda message=message: _ok(message), config=config)
        assert reply.get_return_code() == expected
    masked = _masked(secrets.token_bytes(4000))
    reply = _answer(tmp_path / "masked", "contribute", lambda: _ok({SECURE: masked}), config=config)
    assert reply.get_return_code() == ReturnCode.OK and reply[MESSAGE] == {SECURE: masked}


def test_what_a_job_falls_short_of_passes_unless_the_policy_keeps_it(tmp_path: Path) -> None:
    told = [["weights", "exact", "one of power_of_two, uniform"]]
    quiet = {"sites": {"site-1": {"policy": {"tell_refusals": False}}}}
    reply = _answer(tmp_path / "a", "enroll", lambda: _failure("TF-614", **{REFUSALS: told}))
    assert reply[CODE] == "TF-614" and reply[REFUSALS] == told
    reply = _answer(tmp_path / "b", "enroll", lambda: _failure("TF-614", **{REFUSALS: told}), config=quiet)
    assert reply.get_return_code() == ReturnCode.TASK_RESULT_FILTER_ERROR and REFUSALS not in reply
    reply = _answer(tmp_path / "c", "enroll", lambda: _failure("TF-614"), config=quiet)
    assert reply[CODE] == "TF-614"


def test_so_does_what_a_sum_of_products_falls_short_of(tmp_path: Path) -> None:
    with pytest.raises(BelowPolicyError) as caught:
        rule._check(
            Policy(profile="standard", **PROFILES["standard"]), Products(256, 2, 13), 144, 144 * 13, "counted"
        )
    error = caught.value
    reply = _answer(tmp_path, "contribute", lambda: _failure(error.code, **{REFUSALS: error.outside()}))
    assert reply[CODE] == "TF-625" and reply[REFUSALS] == error.outside() != []


def test_a_site_that_is_not_configured_sends_codes_and_nothing_else(tmp_path: Path) -> None:
    site: dict[str, Any] = {"config": {"state_dir": 3}, "secure": True}
    reply = _answer(tmp_path / "a", "enroll", lambda: _failure("TF-202"), **site)
    assert reply[CODE] == "TF-202"
    for name, message in (("b", {"declaration": DECLARED.to_bytes()}), ("c", {})):
        site = {"config": {"state_dir": 3}, "secure": True}
        reply = _answer(tmp_path / name, "enroll", lambda message=message: _ok(message), **site)
        assert reply.get_return_code() == ReturnCode.TASK_RESULT_FILTER_ERROR


class _Swap(Filter):
    """A job's own filter, which the engine runs after the site's."""

    def process(self, shareable: Any, fl_ctx: Any) -> Any:
        return _ok({"declaration": b"patient 4711"})


def test_what_a_jobs_filter_puts_in_after_the_guard_does_not_leave(tmp_path: Path) -> None:
    def honest() -> Shareable:
        return _ok({"declaration": DECLARED.to_bytes()})

    swapped = _answer(tmp_path / "guarded", "enroll", honest, job_filters=(_Swap(),))
    assert swapped.get_return_code() == ReturnCode.TASK_RESULT_FILTER_ERROR and MESSAGE not in swapped
    loose = _answer(tmp_path / "loose", "enroll", honest, job_filters=(_Swap(),), guarded=False)
    assert loose[MESSAGE] == {"declaration": b"patient 4711"}, "which is why the guard looks twice"


def _fires(executor: HandMade, context: Any) -> Shareable:
    executor.fire_fed_event("a.b", DXO(DataKind.ANALYTIC, data={"loss": SECRET}).to_shareable(), context)
    return _ok({})


def _sends(executor: HandMade, context: Any) -> Shareable:
    context.get_engine().send_aux_request([], "topic", Shareable({"loss": SECRET}), 1.0, context)
    return _ok({})


def _publishes(executor: HandMade, context: Any) -> Shareable:
    context.set_prop("loss", SECRET, private=False, sticky=True)
    return _ok({})


@pytest.mark.parametrize("act", [_fires, _sends, _publishes])
def test_the_tests_would_see_another_way_out(tmp_path: Path, act: Any) -> None:
    """The control of ``other_ways() == []`` above; federated events the guard keeps at the site."""
    loose = Site(tmp_path / "loose", "site-1", HandMade(act), config=RESEARCH, guarded=False)
    loose.answer("baseline", {})
    assert str(SECRET) in repr(loose.other_ways())
    guarded = Site(tmp_path / "guarded", "site-1", HandMade(act), config=RESEARCH)
    assert guarded.answer("baseline", {}).get_return_code() == ReturnCode.OK
    assert (guarded.other_ways() == []) == (act is _fires)


OTHER_WAYS = {
    "send_aux_request",
    "send_aux_to_targets",
    "multicast_aux_requests",
    "fire_and_forget_aux_request",
    "fire_fed_event",
    "stream_objects",
    "stream_file",
    "send_to_peer",
    "get_cell",
    "set_cookie_jar",
    "add_cookie",
    "set_peer_props",
    "set_peer_context",
    "set_public_props",
}


def _other_ways_in(source: str) -> list[str]:
    """Calls in a source that would take something out of a site beside a task's answer."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        private = [item.value for item in node.keywords if item.arg == "private"] + node.args[2:3]
        if name in OTHER_WAYS:
            found.append(name)
        elif name in ("set_prop", "put") and [item for item in private if getattr(item, "value", 0) is False]:
            found.append(f"{name}(private=False)")
    return found


@pytest.mark.whole
def test_no_module_calls_what_no_filter_sees() -> None:
    sources = sorted((ROOT / "custom" / "tightframe").rglob("*.py"))
    assert len(sources) > 100
    assert {str(path): found for path in sources if (found := _other_ways_in(path.read_text()))} == {}
    assert _other_ways_in("engine.send_aux_request(1)") == ["send_aux_request"]
    assert _other_ways_in("ctx.set_prop('a', 1, private=False)") == ["set_prop(private=False)"]
    assert _other_ways_in("ctx.set_prop('a', 1, False)") == ["set_prop(private=False)"]
    assert _other_ways_in("ctx.set_prop('a', 1, private=True)") == []


def test_the_templates_name_the_guard_and_stream_no_logs() -> None:
    local = ROOT / "provisioning" / "local"
    privacy = json.loads((local / "privacy.json").read_text())
    path = f"{guard.EgressGuard.__module__}.{guard.EgressGuard.__qualname__}"
    assert [item["path"] for item in privacy["components"]] == [path]
    for scope in privacy["scopes"]:
        assert [item["path"] for item in scope["task_result_filters"]] == [path]
    assert privacy["default_scope"] in [scope["name"] for scope in privacy["scopes"]]
    resources = json.loads((local / "resources.json").read_text())
    assert resources["allow_log_streaming"] is False
    assert not [item for item in resources["components"] if "log_streamer" in item["path"]]


def test_production_refuses_to_run_without_guard_and_doors_or_with_log_streaming(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = SiteEntry().policy.resolve(production=True)

    def asked(name: str, resources: Any, **site: Any) -> None:
        folder = tmp_path / name
        (folder / "local").mkdir(parents=True)
        (folder / "local" / "resources.json").write_text(json.dumps(resources))
        made = Site(folder, "site-1", HandMade(lambda *_: _ok({})), secure=True, **site)
        guard.require(made.manager.new_context(), policy)

    with pytest.raises(SiteConfigError, match=r"TF-731.*SiteDoors"):
        asked("open", {"allow_log_streaming": False})
    monkeypatch.setattr(doors, "require", lambda _: None)
    asked("good", {"allow_log_streaming": False})
    with pytest.raises(SiteConfigError, match=r"egress guard.*privacy\.json"):
        asked("bare", {"allow_log_streaming": False}, guarded=False)
    with pytest.raises(SiteConfigError, match="allow_log_streaming"):
        asked("streaming", {"allow_log_streaming": True})
    with pytest.raises(SiteConfigError, match="allow_log_streaming"):
        asked("silent", {})


@pytest.mark.parametrize("size", [0, 1, 7, 40, 64, 333, 4096, 100_000, 5_000_001])
def test_masked_bytes_pass_and_integers_that_nobody_masked_do_not(size: int) -> None:
    assert all(looks_masked(secrets.token_bytes(size)) for _ in range(200 if size < 10_000 else 3))
    if size < 40:
        return  # too few to tell
    integers = np.random.default_rng(size).integers(-1000, 1000, size // 4)
    assert not looks_masked(integers.astype("<i4").tobytes())
    assert not looks_masked(integers.astype("<i8").tobytes())
    fractions = np.random.default_rng(size).normal(0, 1e-3, max(size // 8, 300))
    assert not looks_masked((fractions * 2**36).astype("<i8").tobytes()), "a gradient at its full resolution"
    assert not looks_masked(fractions.astype("<f4").tobytes()), "a raw tensor"


def test_size_is_bounded_by_the_site(tmp_path: Path) -> None:
    site = Site(tmp_path, "site-1", HandMade(lambda *_: _ok({SECURE: _masked(secrets.token_bytes(5000))})))
    (tmp_path / "local" / "tightframe.json").write_text(json.dumps(RESEARCH))
    with site.manager.new_context() as context:
        context.set_prop("__task_name__", "contribute", private=True, sticky=False)
        small, large = guard.EgressGuard(max_bytes=1000), guard.EgressGuard()
        answer = _ok({SECURE: _masked(secrets.token_bytes(5000))})
        assert large.process(answer, context)[MESSAGE] == answer[MESSAGE]
        with pytest.raises(guard.EgressError, match="at most 1000 bytes"):
            small.process(answer, context)
    with pytest.raises(ValueError, match="max_bytes"):
        guard.EgressGuard(max_bytes=0)


def test_it_says_nothing_at_a_server(tmp_path: Path) -> None:
    """The simulator copies a site's file to the server as well."""
    from nvflare.apis.fl_context import FLContext

    context = FLContext()
    reply = _ok({"anything": 1})
    context.put("__task_result__", reply, private=True, sticky=False)
    guard.EgressGuard().handle_event(EventType.AFTER_TASK_RESULT_FILTER, context)
    assert reply[MESSAGE] == {"anything": 1}


def test_every_rule_can_be_told() -> None:
    refusals = [Refusal(name, "x", "y") for name in Policy.model_fields]
    assert guard._refusals([[item.rule, item.asked, item.required] for item in refusals])
    assert dataclasses.is_dataclass(Refusal)
