"""The roles of an RL job on their devices: manager, launchers, engines, and the process that has them."""
