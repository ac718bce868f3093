"""The pi0.5 policy (Physical Intelligence 2025), from checkpoints of LeRobot and of openpi."""
