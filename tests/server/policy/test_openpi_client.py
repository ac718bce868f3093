"""openpi's own client against a policy server: `make test-long`.

Its environment is made by `python scripts/peer_env.py openpi`.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

from phalanx.schema.observation import Observation
from phalanx.testing.policy import FakePolicyArgs, fake_actions
from tests.server.policy.running import serving

PYTHON = Path(__file__).parents[3] / ".venv-openpi" / "bin" / "python"
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not PYTHON.exists(), reason="no openpi-client: run `python scripts/peer_env.py openpi`"
    ),
]
ARGS = FakePolicyArgs(cameras=("exterior_image_1_left", "wrist_image_left"))

ROBOT = """
import json, sys
import numpy as np
from openpi_client import action_chunk_broker, image_tools
from openpi_client.websocket_client_policy import WebsocketClientPolicy

policy = WebsocketClientPolicy("127.0.0.1", int(sys.argv[1]), api_key="k1")
observation = {
    "observation/exterior_image_1_left": image_tools.resize_with_pad(
        np.full((48, 64, 3), 3, np.uint8), 224, 224
    ),
    "observation/wrist_image_left": np.full((224, 224, 3), 5, np.uint8),
    "observation/state": np.arange(4, dtype=np.float64),
    "prompt": "pick up the fork",
}
answer = policy.infer(observation)
try:
    policy.infer({**observation, "prompt": "fail"})
    error = None
except RuntimeError as failure:
    error = str(failure)
again = policy.infer(observation)
broker = action_chunk_broker.ActionChunkBroker(policy, action_horizon=5)
steps = [broker.infer(observation)["actions"].tolist() for _ in range(7)]
print(json.dumps({
    "metadata": policy.get_server_metadata(),
    "actions": answer["actions"].tolist(),
    "dtype": str(answer["actions"].dtype),
    "timing": answer["server_timing"],
    "error": error,
    "again": again["actions"].tolist(),
    "steps": steps,
}))
"""


def test_openpis_own_client_drives_a_robot():
    with serving(ARGS, http_port=0, api_key="k1") as server:
        port = urlsplit(server.url).port
        done = subprocess.run(
            [PYTHON, "-c", ROBOT, str(port)], capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    padded = np.zeros((224, 224, 3), np.uint8)
    padded[28:196] = 3
    observation = Observation(
        images={
            "exterior_image_1_left": padded,
            "wrist_image_left": np.full((224, 224, 3), 5, np.uint8),
        },
        state=np.arange(4, dtype=np.float32),
    )
    expected = fake_actions(ARGS, observation)[0].tolist()
    assert said["dtype"] == "float32"
    assert said["actions"] == said["again"] == expected
    assert said["steps"] == [*expected, *expected[:2]]
    assert said["metadata"]["cameras"] == list(ARGS.cameras)
    assert said["timing"]["infer_ms"] > 0
    assert "the policy failed; the log of its server tells why" in said["error"]
