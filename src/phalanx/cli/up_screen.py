"""What `phalanx up` prints: a table of the replicas while they start, then where each role is, then
what happens.
"""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.live import Live

from phalanx.cli.roles_table import event_line, job_table
from phalanx.clock import Clock
from phalanx.roles.control_messages import Job, JobStage
from phalanx.roles.events import RoleEvent

_REFRESH_S = 0.5


class UpScreen:
    """Lines on stdout, and above the prompt of a terminal a table until every role has started."""

    def __init__(self, console: Console, clock: Clock) -> None:
        self._console = console
        self._clock = clock
        self._live: Live | None = None
        self.last_event = 0
        """The number of the last event that was shown."""

    @property
    def refresh_s(self) -> float | None:
        """How often it is worth showing the same again; None where nothing would change."""
        return _REFRESH_S if self._console.is_terminal else None

    def show(self, job: Job, events: Iterable[RoleEvent]) -> None:
        """What has happened, and how the job stands."""
        for event in events:
            self.last_event = event.number
            line = event_line(event)
            if line is not None:
                self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        if job.stage is not JobStage.STARTING or not self._console.is_terminal:
            self.end_table()
            return
        table = job_table(job, self._clock.wall_s())
        if self._live is None:
            self._live = Live(table, console=self._console, auto_refresh=False, transient=True)
            self._live.start(refresh=True)
        else:
            self._live.update(table, refresh=True)

    def ready(self, job: Job) -> None:
        """One line a role, which says where it is."""
        self.end_table()
        for status in job.roles:
            document = status.document
            parts = [
                f"{name} ({len(model.engines)} {model.state})"
                if model.engines
                else f"{name} ({model.state})"
                for name, model in document.models.items()
            ]
            self.say(f"{document.role} at {job.gateway_url}/{document.role}: {', '.join(parts)}")
        self.say(f"{job.name} is up; status page {job.gateway_url}/, logs in {job.log_directory}")

    def say(self, words: str) -> None:
        self._console.print(f"phalanx: {words}", markup=False, highlight=False, soft_wrap=True)

    def end_table(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
