"""On-policy distillation with phases: rollouts, deferred scoring of whole batches, and the loss."""
