"""HTTP/2 (RFC 9113) as gRPC needs it, for either side of a connection: frames, flow control, header
blocks without state, and bounds on what a peer may cost.
"""
