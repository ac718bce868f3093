"""How the ranks of one replica do the same things in the same order."""
