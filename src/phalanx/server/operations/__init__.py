"""What trainers ask of a running server, in the engine's words: every dialect's routes call these."""
