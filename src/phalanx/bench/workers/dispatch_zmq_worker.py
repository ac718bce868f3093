"""ZeroMQ over `ipc`: a msgpack header and each array as a raw frame, as vLLM feeds its engines.

Requests leave through a ROUTER to the worker with the fewest in flight, which reads a DEALER;
actions come back from PUSH to PULL. Large frames are neither copied when they are sent nor when
they are received. The caller itself reads what comes, so that no thread stands between.
"""

from __future__ import annotations

import multiprocessing
import uuid
from itertools import count
from typing import Any

import msgpack
import numpy as np
import zmq  # type: ignore[import-not-found]
from dispatch_protocol import Action, Observation, answer, serve  # type: ignore[import-not-found]

Frames = list[Any]


def pack(number: int, arrays: list[Any], **values: int) -> Frames:
    """A header, then the arrays' own memory."""
    header = {"number": number, "arrays": [(a.dtype.str, a.shape) for a in arrays], **values}
    return [msgpack.packb(header), *(array.data.cast("B") for array in arrays)]


def unpack(frames: Frames) -> tuple[dict[str, Any], list[Any]]:
    """Arrays over the received memory."""
    header = msgpack.unpackb(frames[0].buffer)
    arrays = [
        np.frombuffer(frame.buffer, dtype).reshape(shape)
        for frame, (dtype, shape) in zip(frames[1:], header["arrays"], strict=True)
    ]
    return header, arrays


def work(requests_address: str, replies_address: str, identity: bytes) -> None:
    """Answer until told to end."""
    context = zmq.Context()
    requests, replies = context.socket(zmq.DEALER), context.socket(zmq.PUSH)
    requests.setsockopt(zmq.IDENTITY, identity)
    requests.connect(requests_address)
    replies.connect(replies_address)
    requests.send(b"ready")
    while len(frames := requests.recv_multipart(copy=False)) > 1:
        header, (*images, state) = unpack(frames)
        observation = {**header, "images": images, "state": state}
        replies.send_multipart(pack(header["number"], [answer(observation)]), copy=False)
    context.destroy()


class ZmqTransport:
    def __init__(self, message: dict[str, Any]) -> None:
        # Of Linux's abstract kind, which leaves no file behind.
        address = f"ipc://@phalanx-bench-{uuid.uuid4().hex}"
        self._context = zmq.Context()
        self._requests = self._context.socket(zmq.ROUTER)
        self._replies = self._context.socket(zmq.PULL)
        for sock, name in ((self._requests, "requests"), (self._replies, "replies")):
            sock.set_hwm(0)
            sock.bind(f"{address}-{name}")
        context = multiprocessing.get_context("spawn")
        identities = [b"worker-%d" % index for index in range(message["workers"])]
        self._processes = [
            context.Process(
                target=work, args=(f"{address}-requests", f"{address}-replies", identity)
            )
            for identity in identities
        ]
        for process in self._processes:
            process.start()
        for _ in identities:
            self._requests.recv_multipart()  # each says that it is there
        self._in_flight = dict.fromkeys(identities, 0)
        self._numbers = count()
        self._arrived: dict[int, Any] = {}

    def describe(self) -> str:
        return f"pyzmq {zmq.__version__} (libzmq {zmq.zmq_version()}), msgpack {msgpack.version}"

    def submit(self, observation: Observation) -> tuple[int, bytes]:
        number = next(self._numbers)
        worker = min(self._in_flight, key=self._in_flight.__getitem__)
        self._in_flight[worker] += 1
        arrays = [*observation["images"], observation["state"]]
        frames = pack(number, arrays, reply_elements=observation["reply_elements"])
        self._requests.send_multipart([worker, *frames], copy=False)
        return number, worker

    def result(self, pending: tuple[int, bytes]) -> Action:
        number, worker = pending
        while number not in self._arrived:
            header, (action,) = unpack(self._replies.recv_multipart(copy=False))
            self._arrived[header["number"]] = action
        self._in_flight[worker] -= 1
        return self._arrived.pop(number)

    def close(self) -> None:
        for worker in self._in_flight:
            self._requests.send_multipart([worker, b"end"])
        for process in self._processes:
            process.join()
        self._context.destroy()


if __name__ == "__main__":
    serve(ZmqTransport)
