"""The service's four messages, and uploads in several of them."""

from __future__ import annotations

import pytest
from google.protobuf import descriptor_pb2, message_factory
from google.protobuf.descriptor_pool import DescriptorPool

from phalanx.errors import BodyTooLargeError, MalformedRequestError
from phalanx.wire.lerobot import (
    TransferState,
    Upload,
    UploadPart,
    decode_data,
    decode_upload_part,
    encode_data,
    encode_upload_part,
)
from phalanx.wire.lerobot.upload import MAX_MESSAGES
from tests.wire.fuzzing import taking_at_most


def message_classes():
    """The messages as protobuf itself would have them."""
    file = descriptor_pb2.FileDescriptorProto(name="s.proto", package="transport", syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto
    observation = file.message_type.add(name="Observation")
    observation.field.add(name="transfer_state", number=1, type=kinds.TYPE_INT32, label=1)
    observation.field.add(name="data", number=2, type=kinds.TYPE_BYTES, label=1)
    file.message_type.add(name="Actions").field.add(
        name="data", number=1, type=kinds.TYPE_BYTES, label=1
    )
    pool = DescriptorPool()
    pool.Add(file)
    names = ("Observation", "Actions")
    found = [pool.FindMessageTypeByName(f"transport.{name}") for name in names]
    return [message_factory.GetMessageClass(descriptor) for descriptor in found]


OBSERVATION, ACTIONS = message_classes()


@pytest.mark.parametrize("size", [0, 1, 127, 128, 300, 70_000])
def test_messages_are_protobufs(size):
    data = bytes(range(256)) * (size // 256 + 1)
    data = data[:size]
    theirs = OBSERVATION(transfer_state=3, data=data).SerializeToString()
    part = decode_upload_part(theirs)
    assert (part.state, bytes(part.data)) == (TransferState.END, data)
    ours = OBSERVATION.FromString(encode_upload_part(TransferState.MIDDLE, data))
    assert (ours.transfer_state, ours.data) == (2, data)
    assert decode_data(ACTIONS(data=data).SerializeToString()) == data
    assert encode_data(data) == ACTIONS(data=data).SerializeToString()


@pytest.mark.parametrize("message", [b"\x08", b"\x12\x05ab", b"\x07", b"\x10\x00" * 40])
def test_what_is_no_message_is_refused(message):
    with pytest.raises(MalformedRequestError):
        decode_upload_part(message)


def test_an_unknown_field_is_passed_over():
    assert decode_data(b"\x10\x05" + encode_data(b"x")) == b"x"


def part(state: int, data: bytes = b"") -> UploadPart:
    return UploadPart(state, memoryview(data))


def test_one_message_is_the_payload():
    assert bytes(Upload().add(part(TransferState.END, b"abc"))) == b"abc"


def test_messages_come_together_and_the_next_payload_is_its_own():
    upload = Upload()
    assert upload.add(part(TransferState.BEGIN, b"a")) is None
    assert upload.add(part(TransferState.MIDDLE, b"b")) is None
    assert upload.add(part(TransferState.END, b"c")) == b"abc"
    assert bytes(upload.add(part(TransferState.END, b"d"))) == b"d"
    upload.close()


def test_a_begin_starts_anew():
    upload = Upload()
    upload.add(part(TransferState.BEGIN, b"old"))
    upload.add(part(TransferState.BEGIN, b"a"))
    assert upload.add(part(TransferState.END, b"b")) == b"ab"


def test_half_an_upload_is_told():
    upload = Upload()
    upload.add(part(TransferState.BEGIN, b"abc"))
    with pytest.raises(MalformedRequestError, match="stopped after 3 bytes without its END"):
        upload.close()


@pytest.mark.parametrize("state", [0, 4, 99])
def test_an_unknown_state_is_named(state):
    with pytest.raises(MalformedRequestError, match=f"transfer_state={state}"):
        Upload().add(part(state))


def test_a_middle_without_a_begin_is_refused():
    with pytest.raises(MalformedRequestError, match="before its BEGIN"):
        Upload().add(part(TransferState.MIDDLE))


def test_too_much_is_refused_when_it_becomes_too_much():
    upload = Upload(max_bytes=4)
    upload.add(part(TransferState.BEGIN, b"abc"))
    with pytest.raises(BodyTooLargeError, match="more than 4 bytes"):
        upload.add(part(TransferState.MIDDLE, b"de"))


def test_empty_messages_take_no_memory_and_do_not_go_on_forever():
    upload = Upload()
    upload.add(part(TransferState.BEGIN, b"a"))
    with taking_at_most(1 << 16):
        for _ in range(MAX_MESSAGES - 2):
            assert upload.add(part(TransferState.MIDDLE)) is None
        assert upload.add(part(TransferState.END, b"b")) == b"ab"
        with pytest.raises(MalformedRequestError, match="more than 16384 messages"):
            upload.add(part(TransferState.BEGIN))


def test_a_message_is_not_held_for_a_few_of_its_bytes():
    message = encode_upload_part(TransferState.MIDDLE, b"abc") + b"\x1a\xac\x02" + bytes(300)
    assert decode_upload_part(message).data.obj == b"abc"
    whole = encode_upload_part(TransferState.MIDDLE, b"abc" * 10)
    assert decode_upload_part(whole).data.obj is whole
