"""The egress guard: a result filter of the site's own that lets only the protocol's messages out.

A site names it in its ``local/privacy.json``; no job can add, omit or loosen it. It does not trust the
executor: only the keys, types and sizes of this package's answers pass, and what passes is rebuilt from
the parts that were checked. Anything else fails that one result with the engine's filter error; the job
goes on.

The engine runs a site's filters before a job's, so the same class, named there as a component, checks
again after all filters. It also stops federated events, which no filter sees.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from nvflare.apis.event_type import EventType
from nvflare.apis.filter import ContentBlockedException, Filter
from nvflare.apis.fl_constant import EventScope, FedEventHeader, FLContextKey, ProcessType, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import ReservedHeaderKey, Shareable, make_reply
from nvflare.app_common.logging.constants import is_log_streaming_allowed

from tightframe.config.policy import Policy
from tightframe.config.refusals import BELOW_POLICY, BESIDE_RULES, MAX_TOLD, REFUSALS
from tightframe.config.site import SiteEntry, site_entry
from tightframe.errors import REASONS, SiteConfigError, TightframeError
from tightframe.flare import CODE, MESSAGE, doors
from tightframe.flare.outgoing import OutgoingError, checked

MAX_BYTES = 2**30
"""Default size of the largest answer that passes, in bytes."""
MAX_REFUSALS = 64
_OWN_HEADERS: Mapping[str, str] = {
    ReservedHeaderKey.TASK_NAME: FLContextKey.TASK_NAME,
    ReservedHeaderKey.TASK_ID: FLContextKey.TASK_ID,
}
"""Headers of the engine beside the return code, and the context property that each must equal."""
_REFUSAL_TEXT = re.compile(rf"[ -~]{{1,{MAX_TOLD}}}")
_STOPPED = "stopped"


class EgressError(TightframeError, ContentBlockedException):
    """The guard stopped a result (TF-730); the site's log says why, and no log holds its values."""

    code = "TF-730"


class EgressGuard(Filter):
    """Lets only the protocol's typed, size-checked messages out of a site.

    Args:
        max_bytes: the largest answer that passes.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        super().__init__()
        if not isinstance(max_bytes, int) or isinstance(max_bytes, bool) or max_bytes < 1:
            raise ValueError(f"Expected `max_bytes` to be a number of bytes, but got {max_bytes!r}")
        self._max_bytes = max_bytes

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Return the same answer, rebuilt from its checked parts.

        Raises:
            EgressError: TF-730, which makes the engine answer with its filter error instead.
        """
        task = fl_ctx.get_prop(FLContextKey.TASK_NAME)
        try:
            return self._passed(shareable, str(task), fl_ctx)
        except OutgoingError as error:
            reason = str(error)
        except Exception as error:
            # The text of an unexpected error may show values.
            reason = f"Expected an answer that can be checked, but checking it raised {type(error).__name__}."
        raise EgressError(
            f"the guard stopped a result of the task {str(task)[:40]!r}: {reason} Nothing of it has left "
            "this site. Unless somebody changed the job on purpose, report this as a bug."
        )

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Check results again after the job's filters, and stop federated events; as a site's component."""
        if fl_ctx.get_process_type() != ProcessType.CLIENT_JOB:
            return
        if event_type == EventType.AFTER_TASK_RESULT_FILTER:
            self._check_again(fl_ctx)
        elif fl_ctx.get_prop(FLContextKey.EVENT_SCOPE) == EventScope.FEDERATION:
            self._keep_event(event_type, fl_ctx)

    def _passed(self, reply: Shareable, task: str, fl_ctx: FLContext) -> Shareable:
        if type(reply) is not Shareable:
            raise OutgoingError("Expected the engine's own type of answer, but got another one.")
        _check_headers(reply, fl_ctx)
        code = reply.get_return_code()
        if code == ReturnCode.OK:
            _exactly(reply, {MESSAGE})
            passed = make_reply(ReturnCode.OK)
            passed[MESSAGE] = checked(
                task,
                reply[MESSAGE],
                fl_ctx.get_identity_name(),
                plain=not _policy(fl_ctx).require_secure_sum,
                max_bytes=self._max_bytes,
            )
            return passed
        if code != ReturnCode.EXECUTION_EXCEPTION:
            raise OutgoingError("Expected the return code of success or of failure, but got another one.")
        return _failure(reply, fl_ctx)

    def _check_again(self, fl_ctx: FLContext) -> None:
        result = fl_ctx.get_prop(FLContextKey.TASK_RESULT)
        if not isinstance(result, dict):
            return  # the engine itself refuses such a result
        try:
            self.process(result, fl_ctx)
        except Exception as error:
            # An event handler cannot fail a result, but it can empty it.
            dict.clear(result)
            dict.update(result, make_reply(ReturnCode.TASK_RESULT_FILTER_ERROR))
            self.logger.error("%s", error)

    def _keep_event(self, event_type: str, fl_ctx: FLContext) -> None:
        data = fl_ctx.get_prop(FLContextKey.EVENT_DATA)
        if not isinstance(data, Shareable) or data.get_header(FedEventHeader.DIRECTION, "out") != "out":
            return
        dict.clear(data)
        data.set_header(FedEventHeader.DIRECTION, _STOPPED)  # the engine sends events with direction "out"
        self.logger.error(
            "TF-730: the guard stopped a federated event (%s) at this site: this package fires none.",
            event_type[:40],
        )


def in_place(fl_ctx: FLContext) -> bool:
    """Check whether the job of a context runs in a scope of the site in which the guard filters results."""
    scope = fl_ctx.get_prop(FLContextKey.SCOPE_OBJECT)
    filters = getattr(scope, "task_result_filters", {}).get("out", [])
    return any(isinstance(item, EgressGuard) for item in filters)


def require(fl_ctx: FLContext, policy: Policy) -> None:
    """Refuse to run if the doors are open, the guard required by the policy is missing, or logs are streamed.

    For production only: the simulator has no scopes.

    Raises:
        SiteConfigError: TF-202, TF-731 or TF-732; the text names the file to change.
    """
    if policy.egress_guard and not in_place(fl_ctx):
        raise SiteConfigError(
            "Expected the egress guard (tightframe.flare.guard.EgressGuard) among the result filters of this "
            "site's local/privacy.json, but it is not there: take the file that `tightframe provisioning "
            "show local/privacy.json` prints, or set "
            '"egress_guard": false in the policy.'
        )
    if is_log_streaming_allowed(fl_ctx):
        raise SiteConfigError(
            'Expected "allow_log_streaming": false in this site\'s local/resources.json, but the engine can '
            "send this site's log to the server: the line is in what `tightframe provisioning show "
            "local/resources.json` prints."
        )
    doors.require("site")


def _exactly(reply: Shareable, keys: set[str]) -> None:
    present = set(reply) - {ReservedHeaderKey.HEADERS}
    if present != keys:
        raise OutgoingError(
            f"Expected {sorted(keys)} in the answer, but got {len(keys - present)} missing and "
            f"{len(present - keys)} unknown keys."
        )


def _check_headers(reply: Shareable, fl_ctx: FLContext) -> None:
    """Refuse headers other than the return code and the engine's own names of the task."""
    headers = reply.get(ReservedHeaderKey.HEADERS)
    if type(headers) is not dict:
        raise OutgoingError("Expected the engine's headers, but got none.")
    for key, value in headers.items():
        if key == ReservedHeaderKey.RC:
            continue
        if key not in _OWN_HEADERS or type(value) is not str or value != fl_ctx.get_prop(_OWN_HEADERS[key]):
            raise OutgoingError("Expected the engine's own headers only, but got another one.")


def _failure(reply: Shareable, fl_ctx: FLContext) -> Shareable:
    """Return a failure with its documented code and, if the policy allows it, the rules that were broken."""
    refusals = reply.get(REFUSALS)
    _exactly(reply, {CODE} if refusals is None else {CODE, REFUSALS})
    code = reply[CODE]
    if type(code) is not str or code not in REASONS:
        raise OutgoingError("Expected a documented code, but got something else.")
    passed = make_reply(ReturnCode.EXECUTION_EXCEPTION)
    passed[CODE] = code
    if refusals is not None:
        if code not in BELOW_POLICY or not _policy(fl_ctx).tell_refusals:
            raise OutgoingError("Expected a code alone, but got reasons with it.")
        passed[REFUSALS] = _refusals(refusals)
    return passed


def _refusals(refusals: object) -> list[list[str]]:
    rules = {*Policy.model_fields, *BESIDE_RULES}
    if type(refusals) is not list or len(refusals) > MAX_REFUSALS:
        raise OutgoingError("Expected a short list of rules, but got something else.")
    for item in refusals:
        if type(item) is not list or len(item) != 3 or item[0] not in rules:
            raise OutgoingError("Expected a rule, the job's value and the required one, but got other data.")
        if not all(type(part) is str and _REFUSAL_TEXT.fullmatch(part) for part in item):
            raise OutgoingError("Expected short printable values, but got something else.")
    return [list(item) for item in refusals]


def _policy(fl_ctx: FLContext) -> Policy:
    """Return the site's policy, read again for each result, because the site may change its file.

    Raises:
        SiteConfigError: if the site is not configured; then only codes pass.
    """
    local = Path(fl_ctx.get_engine().get_workspace().get_site_config_dir())
    production = bool(fl_ctx.get_prop(FLContextKey.SECURE_MODE, True))
    name = fl_ctx.get_identity_name()
    entry = site_entry(local, name, production=production, alone=True) or SiteEntry()
    return entry.policy.resolve(production=production)
