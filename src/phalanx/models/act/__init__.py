"""The ACT policy (Zhao et al. 2023), from checkpoints of LeRobot."""
