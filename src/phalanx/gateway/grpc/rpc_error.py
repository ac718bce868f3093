"""How a call at a server failed."""

from __future__ import annotations

import grpc

from phalanx.gateway.grpc.metadata import Metadata


class RpcError(Exception):
    """`metadata` is what the server sent along with its status."""

    def __init__(self, code: grpc.StatusCode, details: str, metadata: Metadata = ()) -> None:
        super().__init__(details)
        self.code = code
        self.details = details
        self.metadata = metadata
