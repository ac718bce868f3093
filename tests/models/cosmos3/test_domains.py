"""The embodiments are those that were published, by their names."""

from __future__ import annotations

from phalanx.models.cosmos3.domains import DOMAINS


def test_published_embodiments_are_known_by_name():
    assert {(one.id, one.raw_action_dim) for one in DOMAINS.values()} == {
        *((0, None), (1, 9), (2, 9), (3, 57), (4, 2), (5, None), (6, 10), (7, 10)),
        *((8, 10), (9, 30), (12, 20), (13, 10), (15, 29), (20, 10)),
    }
    assert DOMAINS["droid_lerobot"] == DOMAINS["robomind-franka"] == (8, 10)
    assert [name for name, one in DOMAINS.items() if one.id == 15] == [
        "agibotworld",
        "agibot_gear_gripper",
        "agibot_gear_gripper_ext",
    ]
