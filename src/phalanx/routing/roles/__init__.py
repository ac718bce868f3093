"""Roles as gateway, discovery and direct clients see them: snapshots, and the one resolver."""
