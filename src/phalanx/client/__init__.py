"""Clients of model servers and of the gateway, asynchronous and synchronous.

```python
from phalanx.client import PolicyClient

with PolicyClient("127.0.0.1:50111", model="pi05") as client:
    actions = client.act(
        images={"base": base, "wrist": wrist},
        state=joints,
        instruction="pick up the cube",
    )
```
"""

from phalanx.errors import MissingDependencyError
from phalanx.schema.observation import Actions, Observation

try:
    from phalanx.client.async_policy_client import AsyncPolicyClient
    from phalanx.client.policy_client import PolicyClient
    from phalanx.client.policy_settings import PolicySettings
except ImportError as error:
    raise MissingDependencyError(
        f"a policy's client needs {error.name}; install it with `pip install phalanx[serve]`"
    ) from error

__all__ = ["Actions", "AsyncPolicyClient", "Observation", "PolicyClient", "PolicySettings"]
