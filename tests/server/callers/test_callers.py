"""Every caller's exact requests are answered as it needs them, by one server without a word about
any of them (`spec/roles.md` section 3.8).
"""

import base64
import pickle
from pathlib import Path

import pytest
import safetensors.torch

from tests.server.callers import sglang_callers as sglang
from tests.server.callers import vllm_callers as vllm
from tests.server.callers.call import Call
from tests.server.rl.models import serving, weights_of, write_llama

CALLERS = {
    "relax": sglang.RELAX,
    "slime": sglang.SLIME,
    "verl": sglang.VERL,
    "areal": sglang.AREAL,
    "nemo-rl": sglang.NEMO_RL,
    "skyrl": vllm.SKYRL,
    "prime-rl": vllm.PRIME_RL,
    "trl": vllm.TRL,
    "openrlhf": vllm.OPENRLHF,
}


@pytest.fixture(scope="module")
def known(tmp_path_factory) -> dict[str, str]:
    directory = write_llama(tmp_path_factory.mktemp("trained"), 2)
    tensors = weights_of(directory)
    return {
        "directory": str(directory),
        "tensors": base64.b64encode(safetensors.torch.save(tensors)).decode(),
        "pickled": base64.b64encode(pickle.dumps(list(tensors.items()))).decode(),
    }


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return write_llama(tmp_path_factory.mktemp("served"), 1)


@pytest.mark.parametrize("caller", CALLERS)
def test_a_caller_gets_what_it_reads(directory, known, caller):
    calls: list[Call] = CALLERS[caller]
    with serving(directory) as server, server.client() as client:
        for call in calls:
            call.made(client, known)


def test_nothing_in_the_server_names_a_caller():
    """No adapter code per caller: what they send is known, not who they are."""
    source = Path(__file__).parents[3] / "src/phalanx/server"
    text = "".join(path.read_text().lower() for path in sorted(source.rglob("*.py")))
    assert "user-agent" not in text
