"""Clients of model servers, of the gateway, of roles and of a job's phases, asynchronous and synchronous.

```python
from phalanx.client import PolicyClient

with PolicyClient("127.0.0.1:50111", model="pi05") as client:
    actions = client.act(
        images={"base": base, "wrist": wrist},
        state=joints,
        instruction="pick up the cube",
    )
```

```python
from phalanx.client import RoleClient

with RoleClient("http://127.0.0.1:30000/genrm") as judge:
    answer = judge.chat({"messages": messages})
```

```python
from phalanx.client import PhaseClient

with PhaseClient("http://127.0.0.1:30100") as phases:
    phases.enter("rollout", batch="7")
```

Names are resolved on first use: a policy's client needs no HTTP, and a role's no gRPC.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from phalanx.errors import MissingDependencyError
from phalanx.schema.observation import Actions, Observation

if TYPE_CHECKING:  # what the names below are
    from phalanx.client.async_policy_client import AsyncPolicyClient
    from phalanx.client.phases import PhaseClient
    from phalanx.client.phases_async import AsyncPhaseClient
    from phalanx.client.policy_client import PolicyClient
    from phalanx.client.policy_settings import PolicySettings
    from phalanx.client.roles.async_role_client import AsyncRoleClient
    from phalanx.client.roles.role_client import RoleClient
    from phalanx.client.roles.settings import RoleClientSettings

_HOME = {
    "AsyncPhaseClient": "phalanx.client.phases_async",
    "AsyncPolicyClient": "phalanx.client.async_policy_client",
    "AsyncRoleClient": "phalanx.client.roles.async_role_client",
    "PhaseClient": "phalanx.client.phases",
    "PolicyClient": "phalanx.client.policy_client",
    "PolicySettings": "phalanx.client.policy_settings",
    "RoleClient": "phalanx.client.roles.role_client",
    "RoleClientSettings": "phalanx.client.roles.settings",
}

__all__ = [
    "Actions",
    "AsyncPhaseClient",
    "AsyncPolicyClient",
    "AsyncRoleClient",
    "Observation",
    "PhaseClient",
    "PolicyClient",
    "PolicySettings",
    "RoleClient",
    "RoleClientSettings",
]


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'phalanx.client' has no attribute {name!r}")
    try:
        value: object = getattr(import_module(home), name)
    except ImportError as error:
        raise MissingDependencyError(
            f"{name} needs {error.name}; install it with `pip install phalanx[serve]`"
        ) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
