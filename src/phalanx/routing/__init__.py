"""Who serves what, and who gets this request: snapshots, their publishers and the one resolver."""
