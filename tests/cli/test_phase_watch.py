"""Whoever watches the phases of a job sees its end."""

from __future__ import annotations

import http.server
import threading

import msgspec

from phalanx.cli.control_client import ControlClient
from phalanx.cli.job_view import watch_phases
from phalanx.wire.phases import PhasesDocument


class _Job(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:  # noqa: N802 - its name in http.server
        document = PhasesDocument(number=1, mode="defer", phases=(), phase=None, batch="7")
        body = msgspec.json.encode(document)
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nobody reads it."""


def test_the_end_of_the_job_is_no_failure(capsys):
    server = http.server.HTTPServer(("127.0.0.1", 0), _Job)

    def answer_once() -> None:
        server.handle_request()
        server.server_close()

    answering = threading.Thread(target=answer_once)
    answering.start()
    watch_phases(ControlClient(f"http://127.0.0.1:{server.server_port}", None))
    answering.join()
    shown = capsys.readouterr().out
    assert "phase: none of batch 7" in shown
    assert shown.endswith("the job has ended\n")
