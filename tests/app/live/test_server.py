"""A live page's server: each line of what it relies on, by what happens without it."""

from __future__ import annotations

import hmac
import json
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from tests.support.live_pages import Answer, Visitor
from tests.support.pages import Page

from tightframe.report.drawing import layout
from tightframe.report.drawing.markup import tag
from tightframe_app.live import server
from tightframe_app.live.server import SCRIPT, Content, Live, LiveError

METHODS = ("HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "PROPFIND", "FOO")


def content(text: str, *, over: bool = False) -> Content:
    return Content(f"title {text}", f"said {text}", tag("section", tag("h2", text), id="one"), over)


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def live(told: list[str]) -> Iterator[Live]:
    with Live("a page", "of tests", content("first"), say=told.append) as made:
        yield made


@pytest.fixture
def stranger(live: Live) -> Visitor:
    return Visitor(live)


@pytest.fixture
def visitor(live: Live) -> Visitor:
    made = Visitor(live)
    assert made.opened().status == 303
    return made


def test_it_listens_on_this_machine_only(live: Live) -> None:
    mine = [item for item in psutil.Process().net_connections("tcp") if item.laddr.port == live.port]
    assert {item.laddr.ip for item in mine if item.status == psutil.CONN_LISTEN} == {"127.0.0.1"}
    assert urlsplit(live.link).hostname == "127.0.0.1"


def test_the_link_opens_the_page_once_for_one_browser(live: Live, told: list[str]) -> None:
    first, second = Visitor(live), Visitor(live)
    opened = first.opened()
    assert opened.status == 303 and opened.headers["Location"] == first.path
    assert first.ask(first.path).status == 200 and first.ask(first.path + "state").status == 200
    again = second.opened()
    assert again.status == 403 and "Set-Cookie" not in again.headers and "used before" in again.body
    assert second.ask(first.path).status == 403
    assert told == [
        "the page was opened; its link is used up",
        "somebody tried the page's link again; it was refused",
    ]


def test_of_many_who_use_the_link_at_once_one_gets_in(live: Live) -> None:
    found: list[int] = []
    ready = threading.Barrier(8)

    def use() -> None:
        ready.wait(10)
        found.append(live._opened(live._token)[0])

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sorted(found) == [303] + [403] * 7


@pytest.mark.parametrize("token", ["", "x", "0" * 43, "%00", "%c3%a9", "%ed%a0%80", "{token}x", "{half}"])
def test_a_wrong_token_opens_nothing_and_uses_nothing_up(token: str, stranger: Visitor) -> None:
    right = stranger.live._token
    given = token.replace("{token}", right).replace("{half}", right[:20])
    answer = stranger.ask(f"/?token={given}")
    assert answer.status == 403 and "Set-Cookie" not in answer.headers
    assert stranger.opened().status == 303


def test_secrets_are_long_new_each_time_and_compared_in_constant_time(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Live("a page", "of tests", content("other"))
    other._server.server_close()
    secrets = [(item._token, item._session, item._path.strip("/")) for item in (live, other)]
    assert len({*secrets[0], *secrets[1]}) == 6
    assert all(re.fullmatch(r"[\w-]{43}", secret) for secret in (*secrets[0], *secrets[1])), "32 random bytes"
    compared: list[tuple[bytes, bytes]] = []
    real = hmac.compare_digest

    def compare(one: bytes, two: bytes) -> bool:
        compared.append((one, two))
        return real(one, two)

    monkeypatch.setattr(server.hmac, "compare_digest", compare)
    visitor = Visitor(live)
    visitor.opened()
    visitor.ask(visitor.path)
    token, session = live._token.encode(), live._session.encode()
    assert compared == [(token, token), (session, session)]


def test_the_cookie_is_for_this_page_alone_and_for_no_script(live: Live) -> None:
    visitor = Visitor(live)
    name, *attributes = visitor.opened().headers["Set-Cookie"].split("; ")
    assert name == f"tightframe={live._session}"
    assert attributes == [f"Path={live._path}", "HttpOnly", "SameSite=Strict"]
    assert visitor.ask(visitor.path).headers.get("Set-Cookie") is None


@pytest.mark.parametrize(
    "cookie", ["", "tightframe=", "tightframe=x", "other={session}", "tightframe={session}x"]
)
def test_without_the_cookie_there_is_nothing(cookie: str, stranger: Visitor) -> None:
    stranger.cookie = cookie.replace("{session}", stranger.live._session)
    for target in ("/", stranger.path, f"{stranger.path}state", "/x", f"/?token={stranger.live._session}"):
        answer = stranger.ask(target)
        assert answer.status == 403 and "first" not in answer.body
    stranger.cookie = f"a=b; tightframe={stranger.live._session}; c"
    assert stranger.ask(stranger.path).status == 200


def test_another_host_is_refused_whatever_it_knows(visitor: Visitor, stranger: Visitor) -> None:
    port = visitor.live.port
    hosts = [
        "example.org",
        f"example.org:{port}",
        "127.0.0.1",
        f"127.0.0.1:{port + 1}",
        f"127.0.0.1:{port}.example.org",
    ]
    for host in [*hosts, f"localhost.example.org:{port}", f"user@127.0.0.1:{port}", f"[::1]:{port}", ""]:
        answer = visitor.ask(visitor.path, Host=host)
        assert answer.status == 403 and "first" not in answer.body, host
    for host in (f"localhost:{port}", f"LOCALHOST:{port}"):
        assert visitor.ask(visitor.path, Host=host).status == 200


def test_two_hosts_are_none(visitor: Visitor) -> None:
    port = visitor.live.port
    lines = [f"GET {visitor.path} HTTP/1.1", f"Host: 127.0.0.1:{port}", "Host: example.org"]
    raw = "\r\n".join([*lines, f"Cookie: {visitor.cookie}", "", ""])
    with socket.create_connection(("127.0.0.1", port), 10) as line:
        line.sendall(raw.encode())
        assert line.recv(100).startswith(b"HTTP/1.0 403")


def test_another_host_does_not_use_the_link_up(stranger: Visitor) -> None:
    assert stranger.ask(f"/?token={stranger.live._token}", Host="example.org").status == 403
    assert stranger.ask(f"/?token={stranger.live._token}", Sec_Fetch_Site="cross-site").status == 403
    assert stranger.opened().status == 303


@pytest.mark.parametrize("site", ["cross-site", "same-site", "anything"])
def test_what_another_page_asks_for_is_refused(site: str, visitor: Visitor) -> None:
    """Another port of this machine is the same site to a browser, which then sends the cookie."""
    assert visitor.ask(visitor.path + "state", Sec_Fetch_Site=site).status == 403
    for own in ("none", "same-origin"):
        assert visitor.ask(visitor.path + "state", Sec_Fetch_Site=own).status == 200


@pytest.mark.parametrize("method", METHODS)
def test_only_get_is_answered(method: str, visitor: Visitor) -> None:
    for target in (visitor.path, visitor.path + "state", "/", f"/?token={visitor.live._token}"):
        answer = visitor.ask(target, method)
        assert answer.status == 405 and answer.headers["Allow"] == "GET" and "first" not in answer.body
    assert visitor.ask(visitor.path).status == 200


def test_no_path_reaches_a_file(visitor: Visitor) -> None:
    opened: list[Any] = []
    on = True

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        reads = event in ("open", "os.listdir", "os.scandir", "import", "subprocess.Popen", "os.system")
        if on and reads and threading.current_thread() is not threading.main_thread():
            opened.append((event, arguments))

    visitor.ask(visitor.path)  # what is imported once, is
    sys.addaudithook(note)
    path = visitor.path
    here = f"http://127.0.0.1:{visitor.live.port}{path}"
    for target in (
        "/etc/passwd", "//etc/passwd", "/../../etc/passwd", f"{path}../../etc/passwd", 
        f"{path}%2e%2e/%2fetc/passwd",
        f"{path}state/../../etc/passwd", f"{path}..\\..\\x", f"{path}%00", f"{path}state%00", f"{path}state/",
        f"{path}.", f"{path}index.html", f"{path}STATE", f"{path}state?x=1", f"{path}?x", f"{path[:-1]}", "*",
        "", here, f"file://{path}", "/favicon.ico", "/" + "x" * 4000, "/[", path[1:],
    ):  # fmt: skip
        assert visitor.ask(target or "/").status in (400, 403, 404), target
    assert visitor.ask(path).status == 200 and visitor.ask(f"{path}state").status == 200
    on = False
    assert opened == []


def test_every_answer_says_that_nothing_may_be_done_with_it(visitor: Visitor, stranger: Visitor) -> None:
    wanted = {
        "X-Frame-Options": "DENY",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "no-store",
    }
    page = visitor.ask(visitor.path)
    answers = [
        page,
        visitor.ask(visitor.path + "state"),
        visitor.ask("/x"),
        stranger.ask("/"),
        stranger.opened(),
    ]
    answers += [
        visitor.ask("/", "POST"),
        visitor.ask("/", Host="example.org"),
        visitor.ask("/", Sec_Fetch_Site="x"),
    ]
    assert {answer.status for answer in answers} == {200, 403, 404, 405}
    for answer in answers:
        assert {name: answer.headers.get(name) for name in wanted} == wanted
        policy = dict(part.split(" ", 1) for part in answer.headers["Content-Security-Policy"].split("; "))
        assert policy.pop("style-src").startswith("'sha256-") and policy.pop("script-src").startswith(
            "'sha256-"
        )
        assert policy.pop("connect-src") == "'self'"
        assert set(policy) == {"default-src", "base-uri", "form-action", "frame-ancestors"}
        assert set(policy.values()) == {"'none'"}
        assert not {"Access-Control-Allow-Origin", "Server-Timing"} & set(answer.headers)
        assert "Python" not in answer.headers.get("Server", "")


def test_the_page_has_its_own_script_and_loads_nothing(visitor: Visitor) -> None:
    page = Page(visitor.ask(visitor.path).body)
    (script,) = page.tree.iter("script")
    assert script.text == SCRIPT and not set(script.attrib) - {"type"}
    for item in page.tree.iter():
        assert not set(item.attrib) & {"src", "action", "style", "srcset"}
        assert not [name for name in item.attrib if name.startswith("on")]
        assert (item.get("href") or "#").startswith("#")
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page.source)
    assert layout.policy(SCRIPT) in page.source.replace("&#x27;", "'")
    secrets = (visitor.live._token, visitor.live._session, visitor.live._path)
    assert not [secret for secret in secrets if secret in page.source]


def test_names_are_shown_and_never_run(told: list[str]) -> None:
    nasty = "<script>x()</script>\"'><img src=x onerror=y()>\u202e"
    shown = Content(nasty, nasty, tag("section", tag("h2", nasty), id="one"))
    with Live(nasty, nasty, shown) as live:
        visitor = Visitor(live)
        visitor.opened()
        page = Page(visitor.ask(visitor.path).body)
        state = json.loads(visitor.ask(visitor.path + "state").body)
    assert len(list(page.tree.iter("script"))) == 1 and not list(page.tree.iter("img"))
    assert (
        "&lt;script&gt;" in state["content"]
        and "<script" not in state["content"]
        and "<img" not in state["content"]
    )
    assert "\u202e" not in page.source


def test_what_changes_is_told_with_its_version(visitor: Visitor) -> None:
    first = visitor.ask(visitor.path + "state")
    version = first.headers["ETag"]
    assert json.loads(first.body) == {
        "title": "title first",
        "said": "said first",
        "content": '<section id="one"><h2>first</h2></section>',
        "over": False,
    }
    same = visitor.ask(visitor.path + "state", If_None_Match=version)
    assert same.status == 304 and same.body == ""
    visitor.live.show(content("second"))
    later = visitor.ask(visitor.path + "state", If_None_Match=version)
    assert later.status == 200 and "second" in later.body and later.headers["ETag"] != version
    assert "second" in visitor.ask(visitor.path).body


def test_nothing_is_printed_of_any_request(visitor: Visitor, capfd: pytest.CaptureFixture[str]) -> None:
    visitor.ask("/x")
    visitor.ask("/", "POST")
    with socket.create_connection(("127.0.0.1", visitor.live.port), 10) as line:
        line.sendall(b"\x16\x03\x01 no http\r\n\r\n")
        assert line.recv(100).startswith((b"HTTP/1.0 400", b"<", b"Expected"))
    line = socket.create_connection(("127.0.0.1", visitor.live.port), 10)
    line.sendall(f"GET {visitor.path} HTTP/1.1\r\n".encode())
    line.close()
    assert visitor.ask(visitor.path).status == 200
    assert capfd.readouterr() == ("", "")


def test_it_serves_a_few_at_a_time_and_waits_for_nobody_for_long(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server._Handler, "timeout", 0.5)
    visitor = Visitor(live)
    visitor.opened()
    idle = [
        socket.create_connection(("127.0.0.1", live.port), 10) for _ in range(server.MOST_CONNECTIONS + 1)
    ]
    try:
        assert idle[-1].recv(1) == b"", "one too many"
        end = time.monotonic() + 60
        while live._server._room._value < server.MOST_CONNECTIONS and time.monotonic() < end:
            time.sleep(0.02)
        assert visitor.ask(visitor.path).status == 200, "those who sent nothing are gone"
    finally:
        for line in idle:
            line.close()


def test_it_ends_with_its_command_and_leaves_the_port(told: list[str]) -> None:
    with Live("a page", "of tests", content("first")) as live:
        visitor = Visitor(live)
        visitor.opened()
    assert not live._thread.is_alive()
    with pytest.raises(ConnectionRefusedError):
        visitor.ask(visitor.path)
    with Live("a page", "of tests", content("first"), port=live.port) as again:
        assert again.port == live.port and Visitor(again, visitor.cookie).ask(visitor.path).status == 403


def test_a_browser_that_looks_gets_the_last_content(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "LEAVE", 30.0)
    last: list[Answer] = []

    def look_late(visitor: Visitor) -> None:
        time.sleep(0.2)
        last.append(visitor.ask(visitor.path + "state"))

    with Live("a page", "of tests", content("first")) as live:
        visitor = Visitor(live)
        visitor.opened()
        visitor.ask(visitor.path)
        live.show(content("last", over=True))
        thread = threading.Thread(target=look_late, args=(visitor,))
        thread.start()
        began = time.monotonic()
    assert time.monotonic() - began < 10, "as soon as it was fetched"
    thread.join(10)
    assert json.loads(last[0].body)["over"] is True


def test_without_a_browser_nobody_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "LEAVE", 30.0)
    began = time.monotonic()
    with Live("a page", "of tests", content("first")) as live:
        live.show(content("last", over=True))
    assert time.monotonic() - began < 10


def test_a_port_in_use_is_named(live: Live) -> None:
    with pytest.raises(LiveError, match=rf"^TF-816: .*port {live.port} .* --port"):
        Live("a page", "of tests", content("first"), port=live.port)
