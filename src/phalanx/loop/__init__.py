"""What drives steps on one rank: request state, scheduling, push-back. No clock of its own."""
