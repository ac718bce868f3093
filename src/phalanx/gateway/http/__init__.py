"""The gateway's HTTP core: an asyncio protocol that answers, upgrades and relays requests."""
