"""openpi's own client at the gateway: `make test-long`.

Its environment is made by `python scripts/peer_env.py openpi`.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import grpc
import pytest

from phalanx.wire import robot_inference as wire
from tests.gateway.adapters.running import robots
from tests.gateway.policy_servers import HOST, FakePolicyServer, actions, answer_to, refusing, run

PYTHON = Path(__file__).parents[3] / ".venv-openpi" / "bin" / "python"
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not PYTHON.exists(), reason="no openpi-client: run `python scripts/peer_env.py openpi`"
    ),
]
ROBOT = """
import json, sys
import numpy as np
from openpi_client import action_chunk_broker, websocket_client_policy

host, port, key = sys.argv[1:]
policy = websocket_client_policy.WebsocketClientPolicy(host, int(port), api_key=key)
said = {"metadata": policy.get_server_metadata()}
try:
    policy.infer({"observation/state": np.zeros(3), "prompt": "refused"})
except RuntimeError as error:
    said["error"] = str(error)
broker = action_chunk_broker.ActionChunkBroker(policy, action_horizon=3)
image = np.arange(16 * 16 * 3, dtype=np.uint8).reshape(16, 16, 3)
observation = {
    "observation/exterior_image_1_left": image,
    "observation/joint_position": np.arange(7.0),
    "observation/gripper_position": np.array([0.5]),
    "prompt": "pick up the cube",
}
said["actions"] = [broker.infer(observation)["actions"].tolist() for _ in range(6)]
result = policy.infer(observation)
said["dtype"] = str(result["actions"].dtype)
said["timing"] = sorted(result["server_timing"])
print(json.dumps(said))
"""


def test_openpis_own_client_runs_a_robot_through_the_gateway():
    words = "state has 3 numbers; the policy takes 8"
    refuse = refusing(grpc.StatusCode.INVALID_ARGUMENT, words)

    async def behave(data, context):
        if wire.decode_request(data).observation.instructions == ("refused",):
            return await refuse(data, context)
        return answer_to(data)

    async def scenario():
        server = FakePolicyServer(behave)
        async with robots(server, api_key="secret", default_model="pi05") as gateway:
            robot = await asyncio.create_subprocess_exec(
                PYTHON, "-c", ROBOT, HOST, str(gateway.port), "secret", stdout=-1, stderr=-1
            )
            output, errors = await robot.communicate()
            assert robot.returncode == 0, errors.decode()
            said = json.loads(output)
            assert said["metadata"] == {"model_name": "pi05"}
            assert words in said["error"]
            assert said["actions"] == actions().tolist() * 2
            assert said["dtype"] == "float32"
            assert said["timing"] == ["infer_ms", "prev_total_ms"]
            observation = wire.decode_request(server.requests[-1]).observation
            assert list(observation.images) == ["exterior_image_1_left"]
            assert observation.state.tolist() == [0, 1, 2, 3, 4, 5, 6, 0.5]

    run(scenario())
