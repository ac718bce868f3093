"""The names that vLLM's servers and their callers have for sleep, pause, weights and tokens, and
those of TRL's own server."""
