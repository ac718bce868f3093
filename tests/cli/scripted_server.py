"""An HTTP server on a loopback port that answers as it is told, and counts what it was asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec

from phalanx.schema.statistics import EngineStatistics, ReplicaStatistics


def info(**counters: float) -> dict[str, object]:
    """`/server_info` of a server with one replica."""
    statistics = EngineStatistics(replicas=(ReplicaStatistics(replica=0, **counters),))
    return {
        "plugin": "echo",
        "served_model_name": "tiny",
        "version": "0.1.0",
        "something": "else",
        "internal_states": [msgspec.to_builtins(statistics)],
    }


class ScriptedServer:
    """`answers` are (status, body) pairs; the last one stays. A body that is no string is JSON."""

    def __init__(self, *answers: tuple[int, object], port: int = 0) -> None:
        self.answers = list(answers)
        self.asked: list[dict[str, str]] = []
        self.asked_again = threading.Condition()
        script = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:  # noqa: N802 - the base class calls it so
                with script.asked_again:
                    script.asked.append({"path": self.path, **dict(self.headers.items())})
                    more = len(script.answers) > 1
                    status, body = script.answers.pop(0) if more else script.answers[0]
                    script.asked_again.notify_all()
                data = body if isinstance(body, str) else json.dumps(body)
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data.encode())

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"

    @contextmanager
    def running(self) -> Iterator[ScriptedServer]:
        thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()
