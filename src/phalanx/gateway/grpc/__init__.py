"""The gateway's gRPC side: its port, the services on it, and the connections to model servers."""
