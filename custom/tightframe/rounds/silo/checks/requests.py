"""Validation of the messages that a server sends to a silo, before any use.

Without it a malformed message would fail inside the silo and be reported as TF-503, an error of the silo,
although the fault is the server's. Keys that are not listed here are not checked.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tightframe.errors import RunError

Place = Annotated[int, Field(ge=0, lt=2**31)]
SumName = Annotated[str, Field(pattern=r"^\d{1,10}/[a-z]+-\d{1,10}/\d{1,10}$")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Silo = Annotated[str, Field(min_length=1, max_length=200)]


class _Request(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, hide_input_in_errors=True)


class _Enrol(_Request):
    job_sha256: str
    version: str


class _Contribute(_Request):
    kind: Annotated[str, Field(max_length=64)]
    round: Place
    phase: Place
    attempt: Place
    state: Sha256
    before: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]
    start: bytes | None = None
    state_bytes: bytes | None = None
    opened: dict[SumName, list[Silo]]


class _PlainContribute(_Contribute):
    total: bytes
    declared: Annotated[dict[Silo, bytes], Field(min_length=1, max_length=1000)]


def check(task: str, message: Any, silo: str, *, secure: bool) -> None:
    """Refuse a message that does not have the form of its task.

    Args:
        silo: name of the silo that received it.
        secure: whether the job's sums are secure: then the protocol has its own parsers for its message.

    Raises:
        RunError: TF-604, naming each key that is missing or wrong, but never its value.
    """
    if not isinstance(message, dict) or not all(isinstance(key, str) for key in message):
        raise _malformed(task, [f"Expected keys and values, but got {type(message).__name__}"])
    contribution = _Contribute if secure else _PlainContribute
    model = {"enroll": _Enrol, "contribute": contribution}.get(task, _Request)
    try:
        model.model_validate(message)
    except ValidationError as error:
        # Only the top-level key, which is never text of the server's.
        raise _malformed(task, [f"{item['loc'][0]}: {item['msg']}" for item in error.errors()]) from None
    if not secure and task == "contribute" and silo not in message["declared"]:
        raise _malformed(task, [f"declared: Expected {silo}, this silo, among them, but got only others"])


def _malformed(task: str, problems: list[str]) -> RunError:
    more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
    return RunError(
        f"Expected a message of the task {task} as this version of tightframe sends it, but got: "
        f"{'; '.join(problems[:5])}{more}. The message was ignored: compare the server's version.",
        code="TF-604",
    )
