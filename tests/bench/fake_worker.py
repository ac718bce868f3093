"""A worker that speaks the benchmark's protocol without any model; run as a script.

Its behaviour is chosen by the `options` of `start`: `fail` raises in every command after it,
`die` ends the process, `hang` never answers once it has written to the named pipe, which it removes
when it is interrupted, `child` starts a process that would outlive it and keeps the named pipe
open.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from worker_protocol import Generation, Recorder, Scoring, Start, serve


class Fake:
    def __init__(self, start: Start) -> None:
        self._options = start.options
        self._cached = 0
        self._model = os.path.basename(start.model)
        if "child" in start.options:
            with open(start.options["child"], "w") as kept_open:
                subprocess.Popen(
                    [sys.executable, "-c", "import signal; signal.pause()"],
                    pass_fds=[kept_open.fileno()],
                )

    def describe(self) -> str:
        print("noise that must not reach the answers")
        return f"fake of {self._model}"

    def generate(self, prompts, max_new_tokens, concurrency) -> Generation:
        if "fail" in self._options:
            raise ValueError("as asked")
        if "die" in self._options:
            os._exit(3)
        if "hang" in self._options:
            # One that comes before anybody waits for it is not lost.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            with open(self._options["hang"], "w") as told:
                told.write("hanging")
            signal.sigwait({signal.SIGINT})
            os.unlink(self._options["hang"])
            raise KeyboardInterrupt
        self._cached += len(prompts)
        recorder = Recorder()
        for index in range(len(prompts)):
            recorder.sent(str(index))
            recorder.tokens(str(index), 1, first=True)
            if max_new_tokens > 1:
                recorder.tokens(str(index), max_new_tokens - 1, first=False)
        return recorder.finish([[1] * max_new_tokens for _ in prompts])

    def score(self, prompts) -> Scoring:
        return Scoring(0.5, sum(map(len, prompts)), -2.5)

    def flush(self) -> None:
        print(f"flushed {self._cached}", file=sys.stderr, flush=True)
        self._cached = 0

    def close(self) -> None: ...


if __name__ == "__main__":
    serve(Fake)
