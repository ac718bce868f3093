"""A model server's robot protocols: observations in, actions out."""
