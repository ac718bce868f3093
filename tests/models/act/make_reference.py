"""Makes `lerobot.safetensors`: what LeRobot's own ACT answers, with the weights of `weights.py`.

Run by the interpreter of an environment with lerobot 0.6.1 and torchvision:

    python tests/models/act/make_reference.py
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent
FIXTURE = HERE.parents[1] / "fixtures" / "policies" / "act"


def main() -> None:
    from lerobot.policies.act.modeling_act import ACTPolicy

    sys.path.insert(0, str(HERE))
    from weights import write_checkpoint

    torch.set_num_threads(1)
    stored = load_file(FIXTURE / "io.safetensors")
    seen = {name[4:]: value for name, value in stored.items() if name.startswith("pre.")}
    with tempfile.TemporaryDirectory() as scratch:
        policy = ACTPolicy.from_pretrained(write_checkpoint(FIXTURE, Path(scratch) / "act"))
        actions = policy.predict_action_chunk(seen)
    save_file({"normalized_actions": actions.contiguous()}, HERE / "lerobot.safetensors")


if __name__ == "__main__":
    main()
