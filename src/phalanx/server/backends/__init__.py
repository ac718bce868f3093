"""Adapters that a server's file can name as `adapter.factory`."""
