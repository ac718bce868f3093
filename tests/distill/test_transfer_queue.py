"""The store in TransferQueue, against the real package in an environment of its own, which is made by
`python scripts/peer_env.py transferqueue`.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from phalanx.distill.stores.transfer_queue_store import TransferQueueStore
from phalanx.errors import MissingDependencyError

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-transferqueue" / "bin" / "python"


@pytest.mark.long
@pytest.mark.skipif(
    not PYTHON.exists(),
    reason="no TransferQueue: run `python scripts/peer_env.py transferqueue`",
)
def test_the_store_in_transfer_queue_does_what_a_store_does():
    command = [PYTHON, "-m", "tests.distill.in_transfer_queue"]
    ran = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    done = json.loads(ran.stdout.splitlines()[-1])
    assert done["conformance"] == done["bounds"] == "ok"
    assert done["leftovers"] == "['head/one', 'save/one-more/1']"
    rows = done["rows"]
    assert rows["before"] == {}
    assert rows["keys"] == [f"one/group {group}/{at}" for group in range(2) for at in range(2)]
    assert rows["last"] == [False, False, False, True]
    assert rows["responses"] == [[0, 1, 2], [0, 1, 2, 3]] * 2
    assert rows["teacher"] == [-1.0, -2.0, -3.0, -4.0]
    assert rows["support"] == [[3, 2], [4, 2]] * 2
    assert set(rows["columns"]) == {
        "prompt_ids",
        "response_ids",
        "rollout_log_probs",
        "reward",
        "teacher_log_probs",
        "teacher_topk_token_ids",
        "teacher_topk_log_probs",
        "opd_topk_token_ids",
        "opd_topk_teacher_log_probs",
        "opd_topk_ksz",
    }


def test_without_the_package_the_way_to_it_is_told():
    try:
        import transfer_queue  # noqa: F401
    except ImportError:
        with pytest.raises(MissingDependencyError, match=r"phalanx\[transferqueue\]"):
            TransferQueueStore()
    else:
        pytest.skip("the package is installed here")
