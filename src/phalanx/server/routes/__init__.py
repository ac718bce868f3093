"""The server's routes, one file a group."""
