"""Frozen, validated values that cross the layers: requests, outputs, control operations."""
