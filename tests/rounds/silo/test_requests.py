"""The outer form of a server's messages: refused by name, without a word of what came."""

from __future__ import annotations

from typing import Any

import pytest

from tightframe.errors import RunError
from tightframe.rounds.silo.checks import requests

CONTRIBUTE: dict[str, Any] = {
    "kind": "train",
    "round": 1,
    "phase": 0,
    "attempt": 0,
    "state": "0" * 64,
    "before": "",
    "total": b"",
    "opened": {"0/statistics-0/0": ["site-1"]},
    "declared": {"site-1": b"{}", "site-2": b"{}"},
}


def test_what_an_honest_server_sends_is_let_through() -> None:
    requests.check("contribute", CONTRIBUTE, "site-1", secure=False)
    more = {"before": "1" * 64, "start": b"", "state_bytes": b""}
    requests.check("contribute", CONTRIBUTE | more, "site-1", secure=False)
    requests.check("contribute", CONTRIBUTE | {"declared": None, "more": 1}, "site-1", secure=True)
    requests.check("enroll", {"job_sha256": "x", "version": "1", "secure": b"x"}, "site-1", secure=True)


@pytest.mark.parametrize("value", [None, [], "x", b"x", 7, {1: 2}, {None: None}, {"secure": b"", 1: 2}])
def test_what_is_no_message_is_refused(value: Any) -> None:
    for task in ("enroll", "confirm", "contribute", "agree", "reveal", "baseline"):
        with pytest.raises(RunError, match=rf"^TF-604: .*message of the task {task}"):
            requests.check(task, value, "site-1", secure=True)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("kind", 1),
        ("round", True),
        ("round", -1),
        ("round", "1"),
        ("phase", 2**40),
        ("attempt", None),
        ("state", "secret-text"),
        ("state", ""),
        ("before", "secret-text"),
        ("total", "secret-text"),
        ("opened", []),
        ("opened", {"secret-text": []}),
        ("opened", {"0/train-0/0": "site-1"}),
        ("declared", {}),
        ("declared", {"site-2": b"{}"}),
        ("declared", {"site-1": "secret-text"}),
        ("declared", [b"secret-text"]),
    ],
)
def test_a_wrong_key_is_named_and_its_value_is_not(key: str, value: Any) -> None:
    with pytest.raises(RunError, match=key) as caught:
        requests.check("contribute", CONTRIBUTE | {key: value}, "site-1", secure=False)
    assert caught.value.code == "TF-604" and "secret-text" not in str(caught.value)
    without = {name: item for name, item in CONTRIBUTE.items() if name != key}
    with pytest.raises(RunError, match=f"{key}: Field required"):
        requests.check("contribute", without, "site-1", secure=False)


def test_of_many_wrong_keys_five_are_named() -> None:
    for count, more in ((5, ""), (6, "; and 1 more")):
        without = {key: value for key, value in list(CONTRIBUTE.items())[count:]}
        with pytest.raises(RunError) as caught:
            requests.check("contribute", without, "site-1", secure=False)
        assert str(caught.value).count("Field required") == 5
        assert f"Field required{more}. The message" in str(caught.value)
