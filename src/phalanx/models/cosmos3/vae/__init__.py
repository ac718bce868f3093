"""The video autoencoder of Wan 2.2: frames to latents and back, causal in time."""
