"""A robot's open stream: its newest data is answered, and it is told what is wrong."""

from __future__ import annotations

import asyncio
import io
import threading

import grpc
import numpy as np
from PIL import Image

from phalanx.gateway.grpc.robot_stream import Newest
from phalanx.gateway.workers import Workers
from phalanx.schema.observation import Observation
from phalanx.wire import robot_inference as wire
from phalanx.wire.robot_inference.messages import SENSOR_DATA
from tests.gateway.policy_servers import (
    FakePolicyServer,
    actions,
    failure,
    fleet,
    refusing,
    run,
)

Code = grpc.StatusCode


def sensors(timestamp_ns: int) -> bytes:
    image = np.zeros((480, 640, 3), np.uint8)
    observation = Observation({"image": image}, np.zeros(6, np.float32), ("go",))
    return wire.encode_sensor_data(wire.SensorData(timestamp_ns, observation))


def open_stream(client):
    return client.stream_stream(wire.COMMUNICATE)()


async def command(stream) -> wire.ActionCommand:
    return wire.decode_action_command(await stream.read())


def test_each_command_answers_the_sensor_data_of_its_time():
    async def scenario():
        server = FakePolicyServer()
        async with fleet(server, robot_model="pi05") as gateway, gateway.client() as client:
            stream = open_stream(client)
            for timestamp_ns in (11, 22):
                await stream.write(sensors(timestamp_ns))
                got = await command(stream)
                assert got.timestamp_ns == timestamp_ns
                np.testing.assert_array_equal(got.actions, actions())
            await stream.done_writing()
            assert await stream.read() is grpc.aio.EOF
            assert await stream.code() is Code.OK
            calls = [wire.decode_request(data) for data in server.requests]
            assert [call.timestamp_ns for call in calls] == [11, 22]
            assert {call.model_name for call in calls} == {"pi05"}
            assert len({call.request_id for call in calls}) == 2
            assert calls[0].observation.images["image"].shape == (480, 640, 3)

    run(scenario())


class NotedWorkers(Workers):
    """Notes the threads that work was done on."""

    def __init__(self) -> None:
        super().__init__(1)
        self.threads: list[str] = []

    async def run(self, work, num_bytes):
        def noted():
            self.threads.append(threading.current_thread().name)
            return work()

        return await super().run(noted, num_bytes)


def test_images_are_read_on_a_thread_also_where_they_came_in_few_bytes():
    async def scenario():
        file = io.BytesIO()
        Image.fromarray(np.zeros((64, 64, 3), np.uint8)).save(file, "PNG")
        message = SENSOR_DATA.new()
        image = message.images.add()
        image.name, image.data, image.encoding = "base", file.getvalue(), 3
        workers, server = NotedWorkers(), FakePolicyServer()
        async with (
            fleet(server, robot_model="pi05", workers=workers) as gateway,
            gateway.client() as client,
        ):
            stream = open_stream(client)
            await stream.write(message.SerializeToString())
            await command(stream)
            [thread] = workers.threads
            assert thread.startswith("phalanx-gateway")
            stream.cancel()

    run(scenario())


def test_only_the_newest_waits_while_a_request_runs():
    async def arriving(messages):
        for message in messages:
            yield message

    async def scenario():
        newest = Newest()
        await newest.read(arriving([b"1", b"2", b"3"]))
        assert await newest.take() == b"3"
        assert await newest.take() is None
        waiting = Newest()
        taken = asyncio.ensure_future(waiting.take())
        await asyncio.sleep(0)
        await waiting.read(arriving([b"1"]))
        assert await taken == b"1"

    run(scenario())


def test_what_arrives_during_a_request_is_answered_after_it_newest_last():
    async def scenario():
        server = FakePolicyServer()
        server.behave = server.hold
        async with fleet(server) as gateway, gateway.client() as client:
            stream = open_stream(client)
            await stream.write(sensors(1))
            await server.arrived()
            for timestamp_ns in (2, 3, 4):
                await stream.write(sensors(timestamp_ns))
            await stream.done_writing()
            assert len(server.requests) == 1
            server.release.set()
            times = []
            while (data := await stream.read()) is not grpc.aio.EOF:
                times.append(wire.decode_action_command(data).timestamp_ns)
            assert times == sorted(times)
            assert (times[0], times[-1]) == (1, 4)

    run(scenario())


def test_a_refusal_reaches_the_robot_in_words():
    async def scenario():
        words = "camera 'image' is not one of base, wrist"
        server = FakePolicyServer(refusing(Code.INVALID_ARGUMENT, words))
        async with fleet(server) as gateway, gateway.client() as client:
            stream = open_stream(client)
            await stream.write(sensors(1))
            error = await failure(stream.read())
            assert (error.code(), error.details()) == (Code.INVALID_ARGUMENT, words)
            broken = open_stream(client)
            await broken.write(b"\xff")
            assert (await failure(broken.read())).code() is Code.INVALID_ARGUMENT

    run(scenario())


def test_a_robot_that_goes_away_cancels_its_request():
    async def scenario():
        server = FakePolicyServer()
        server.behave = server.hold
        async with fleet(server) as gateway:
            client = gateway.client()
            stream = open_stream(client)
            await stream.write(sensors(1))
            await server.arrived()
            await client.close()
            await server.cancelled.wait()
            await gateway.all_left(1)
            assert len(asyncio.all_tasks()) < 10

    run(scenario())
