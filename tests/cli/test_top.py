"""`phalanx top` against servers that answer, refuse, go away and come back."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from phalanx.cli.server_snapshot import Absent, Snapshot, base_url, take_snapshot
from phalanx.cli.top_view import TopView
from phalanx.errors import ConfigurationError, EngineUnavailableError
from tests.cli.scripted_server import ScriptedServer, info

PHALANX = Path(sys.executable).with_name("phalanx")
LOADING = (503, {"error": {"message": "the server is loading; try again later"}})


def text_of(frame: object) -> str:
    console = Console(width=120, color_system=None)
    with console.capture() as captured:
        console.print(frame)
    return captured.get()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


def test_r114_once_prints_the_load_since_the_start(run):
    with ScriptedServer((200, info(num_completed=30, uptime_s=10.0))).running() as server:
        code, out, err = run("top", server.url, "--once")
        assert [asked["path"] for asked in server.asked] == ["/server_info"]
    assert (code, err) == (0, "")
    assert f"tiny (echo) at {server.url}, since its start" in out
    assert "3.00" in out


@pytest.mark.parametrize(
    ("answer", "code", "message"),
    [
        ((404, "nothing"), 2, "is not a Phalanx model server: GET /server_info answers 404"),
        ((200, "<html>"), 2, "is not a Phalanx model server: its answer is of another form"),
        ((200, {"version": "1"}), 2, "is not a Phalanx model server"),
        ((200, {**info(), "internal_states": []}), 2, "is not a Phalanx model server"),
        ((500, "broken"), 2, "GET /server_info answers 500 Internal Server Error"),
        ((401, {}), 2, "refuses: it asks for a key; give the right one with --api-key"),
        (LOADING, 1, "answers 503: the server is loading; try again later"),
        ((503, "a proxy's page"), 1, "answers 503: Service Unavailable"),
    ],
)
def test_what_cannot_be_shown_ends_with_one_line(run, answer, code, message):
    with ScriptedServer(answer).running() as server:
        ended, out, err = run("top", server.url, "--once")
    assert (ended, out) == (code, "")
    assert err.startswith(f"phalanx: {server.url} ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("flags", [(), ("--once",)])
def test_a_server_that_is_not_there_ends_with_one_line(run, flags):
    url = f"http://127.0.0.1:{free_port()}"
    code, out, err = run("top", url, *flags)
    assert (code, out) == (1, "")
    assert err.startswith(f"phalanx: {url} does not answer: Connection refused")


def test_a_wrong_key_is_told_apart_from_none(run):
    with ScriptedServer((401, {})).running() as server:
        code, _, err = run("top", server.url, "--once", "--api-key", "secret-1")
        assert server.asked[0]["Authorization"] == "Bearer secret-1"
    assert code == 2
    assert "the key that was given is not its key" in err
    assert "secret-1" not in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ftp://h",), "'ftp://h' is not the address of a server"),
        (("http://",), "is not the address of a server"),
        (("h:99999",), "'h:99999' is not the address of a server"),
        (("h:1", "--interval", "0"), "--interval 0 must be at least 0.05 s"),
        (("h:1", "--timeout", "inf"), "--timeout inf must be"),
    ],
)
def test_wrong_arguments_are_refused(run, arguments, message):
    code, _, err = run("top", *arguments)
    assert code == 2
    assert message in err


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("127.0.0.1:30000", "http://127.0.0.1:30000"),
        ("http://h/", "http://h"),
        ("https://h:1/behind/", "https://h:1/behind"),
        ("[::1]:30000", "http://[::1]:30000"),
    ],
)
def test_an_address_may_be_short(text, url):
    assert base_url(text) == url


def test_counters_that_are_new_to_this_version_are_ignored():
    answer = info(num_completed=2)
    answer["internal_states"][0]["num_dreams"] = 3
    with ScriptedServer((200, answer)).running() as server:
        snapshot = take_snapshot(server.url, None, 5.0)
    assert isinstance(snapshot, Snapshot)
    assert snapshot.statistics.replicas[0].num_completed == 2


def test_a_server_that_says_nothing_is_absent():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        answer = take_snapshot(url, None, 0.05)
    assert answer == Absent(f"{url} does not answer: nothing came within 0.05 s", answered=False)


def test_the_view_goes_on_when_the_server_leaves_and_comes_back():
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    view = TopView(url, None, 5.0)
    answers = [
        (200, info(num_completed=10, uptime_s=10.0)),
        (200, info(num_completed=30, uptime_s=14.0)),
    ]
    with ScriptedServer(*answers, port=port).running():
        assert "since its start" in text_of(view.first())
        assert "over 4.0 s" in text_of(frame := view.next())
        assert " 5.00 " in text_of(frame)
    away = text_of(view.next())
    assert f"{url} does not answer: Connection refused; trying again" in away
    assert " 5.00 " in away, "the last numbers stay"
    with ScriptedServer(LOADING, (200, info(num_completed=4, uptime_s=2.0)), port=port).running():
        assert "the server is loading; try again later; trying again" in text_of(view.next())
        back = text_of(view.next())
    assert "since its start" in back
    assert " 2.00 " in back
    assert "trying again" not in back


def test_a_server_that_is_loading_is_waited_for():
    with ScriptedServer(LOADING, (200, info(uptime_s=1.0))).running() as server:
        view = TopView(server.url, None, 5.0)
        assert "the server is loading" in text_of(view.first())
        assert "since its start" in text_of(view.next())


def test_what_comes_back_as_something_else_ends_the_view():
    with ScriptedServer((200, info(uptime_s=1.0)), (404, "")).running() as server:
        view = TopView(server.url, None, 5.0)
        view.first()
        with pytest.raises(ConfigurationError, match="not a Phalanx model server"):
            view.next()


def test_the_first_look_at_nothing_says_what_may_be_wrong():
    view = TopView(f"http://127.0.0.1:{free_port()}", None, 5.0)
    with pytest.raises(EngineUnavailableError, match="is `phalanx serve` running there"):
        view.first()


@pytest.mark.parametrize("terminal", [pytest.param(False, marks=pytest.mark.long), True])
def test_ctrl_c_ends_it_cleanly(terminal):
    """It is interrupted when it has shown one frame and asked again."""
    with ScriptedServer((200, info(num_completed=1, uptime_s=1.0))).running() as server:
        command = [PHALANX, "top", server.url, "--interval", "0.05"]
        environment = {"FORCE_COLOR": "1"} if terminal else {}
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        ) as process:
            with server.asked_again:
                server.asked_again.wait_for(lambda: len(server.asked) >= 3)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    assert "tiny (echo)" in out
    shows_cursor = "\x1b[?25h"
    assert not terminal or out.rstrip("\n").endswith(shows_cursor)
