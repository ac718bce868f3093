"""Cosmos3: a world model and policy; the plugins `cosmos3` and `cosmos3_policy`."""
