"""Whoever watches the phases of a job sees each change once, and its end."""

from __future__ import annotations

import http.server
import threading

import msgspec

from phalanx.cli.control_client import ControlClient
from phalanx.cli.job_view import watch_phases
from phalanx.wire.phases import PhasesDocument

DOCUMENT = PhasesDocument(number=1, mode="defer", phases=(), phase=None, batch="7")


def watched(*documents: PhasesDocument) -> None:
    """Watch a job that shows these, one after the other, and ends."""
    left = list(documents)

    class Job(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # noqa: N802 - its name in http.server
            body = msgspec.json.encode(left.pop(0))
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nobody reads it."""

    server = http.server.HTTPServer(("127.0.0.1", 0), Job)

    def answer() -> None:
        for _ in documents:
            server.handle_request()
        server.server_close()

    answering = threading.Thread(target=answer)
    answering.start()
    watch_phases(ControlClient(f"http://127.0.0.1:{server.server_port}", None))
    answering.join()


def test_the_end_of_the_job_is_no_failure(capsys):
    watched(DOCUMENT)
    shown = capsys.readouterr().out
    assert "phase: none of batch 7" in shown
    assert shown.endswith("the job has ended\n")


def test_lines_tell_each_change_once(capsys):
    later = msgspec.structs.replace(DOCUMENT, number=2, phase="rollout")
    watched(DOCUMENT, DOCUMENT, later, later, DOCUMENT)
    assert capsys.readouterr().out.splitlines() == [
        "phase: none of batch 7 (defer: )",
        "phase: rollout of batch 7 (defer: )",
        "phase: none of batch 7 (defer: )",
        "the job has ended",
    ]
