"""Clients of model servers and of the gateway, asynchronous and synchronous."""
