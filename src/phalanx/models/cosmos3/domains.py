"""The embodiments that Cosmos3 was trained for: how each is called, its id, and how many numbers one
of its actions has. Checkpoints that were trained further have others besides.
"""

from __future__ import annotations

from typing import NamedTuple


class Domain(NamedTuple):
    """`raw_action_dim` None: it depends on the checkpoint."""

    id: int
    raw_action_dim: int | None


DOMAINS = {
    "no_action": Domain(0, None),
    "av": Domain(1, 9),
    "camera_pose": Domain(2, 9),
    "hand_pose": Domain(3, 57),
    "pusht": Domain(4, 2),
    "libero": Domain(5, None),
    "umi": Domain(6, 10),
    "bridge_orig_lerobot": Domain(7, 10),
    "droid_lerobot": Domain(8, 10),
    "robomind-franka": Domain(8, 10),
    "galbot": Domain(9, 30),
    "robomind-franka-dual": Domain(12, 20),
    "robomind-ur": Domain(13, 10),
    "agibotworld": Domain(15, 29),
    "agibot_gear_gripper": Domain(15, 29),
    "agibot_gear_gripper_ext": Domain(15, 29),
    "fractal": Domain(20, 10),
}
