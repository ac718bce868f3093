"""The pi0 policy (Physical Intelligence 2024), from checkpoints of LeRobot and of openpi."""
