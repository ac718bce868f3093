"""A post-training loop on a CPU: what `examples/rl_demo.py` runs."""
