"""A worker that speaks the benchmark's protocol without any model; run as a script.

Its behaviour is chosen by the `options` of `start`: `fail` raises in every command after it,
`die` ends the process, `child` starts a process that would outlive it.
"""

from __future__ import annotations

import os
import subprocess
import sys

from worker_protocol import Generation, Recorder, Scoring, Start, serve


class Fake:
    def __init__(self, start: Start) -> None:
        self._options = start.options
        self._description = f"fake of {os.path.basename(start.model)}"
        if "child" in start.options:
            child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
            self._child = child
            self._description = str(child.pid)

    def describe(self) -> str:
        print("noise that must not reach the answers")
        return self._description

    def generate(self, prompts, max_new_tokens, concurrency) -> Generation:
        if "fail" in self._options:
            raise ValueError("as asked")
        if "die" in self._options:
            os._exit(3)
        recorder = Recorder()
        for index in range(len(prompts)):
            recorder.sent(str(index))
            recorder.tokens(str(index), 1, first=True)
            if max_new_tokens > 1:
                recorder.tokens(str(index), max_new_tokens - 1, first=False)
        return recorder.finish([[1] * max_new_tokens for _ in prompts])

    def score(self, prompts) -> Scoring:
        return Scoring(0.5, sum(map(len, prompts)), -2.5)

    def close(self) -> None: ...


if __name__ == "__main__":
    serve(Fake)
