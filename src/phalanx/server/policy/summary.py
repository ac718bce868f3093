"""The line that a policy server says when it is ready."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.schema.observation import PolicyInfo


@dataclass(frozen=True)
class ServedPolicy:
    """A policy that is being served: its name, what it is, and the addresses of its protocols."""

    name: str
    info: PolicyInfo
    grpc: str
    http: str | None

    def __str__(self) -> str:
        parts = [f"serving {self.name} ({self.info.policy}) at grpc://{self.grpc}"]
        if self.http is not None:
            parts[0] += f", HTTP and openpi at {self.http}"
        cameras = ", ".join(self.info.cameras) or "none"
        parts.append(f"cameras: {cameras}")
        if self.info.state_dim is not None:
            parts.append(f"state: {self.info.state_dim}")
        parts.append(f"actions: {self.info.horizon} x {self.info.action_dim}")
        return "; ".join(parts)
