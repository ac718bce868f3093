"""Clients of a role: they follow its discovery and send requests to its engines or its gateway."""
