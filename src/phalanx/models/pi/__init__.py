"""What pi0 and pi0.5 have in common: a vision tower and a language model whose keys and values an
expert reads while it denoises a chunk of actions.
"""
