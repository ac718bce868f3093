"""Pickles that would do harm to whoever unpickles them, by name."""

from __future__ import annotations

import collections
import os
import pickle
import struct
from collections.abc import Iterable

import numpy as np

from phalanx.wire.lerobot import decode_observation
from tests.wire.lerobot.pickles import config, features, observation, recorded

MARKER = "phalanx_was_here"
COMMAND = f"touch {MARKER}"


class Calls:
    """Pickles to a call of `function`."""

    def __init__(self, function, *arguments):
        self.reduced = (function, arguments)

    def __reduce__(self):
        return self.reduced


def _size(num_bytes: int) -> bytes:
    return struct.pack("<I", num_bytes)


def _sensors(values: Iterable[bytes]) -> bytes:
    """Further entries of an observation, in the place of one."""
    named = (_string(f"k{number}") + value for number, value in enumerate(values))
    return b"K\x00s(" + b"".join(named) + b"u" + _string("last") + b"K\x00"


def _string(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode()


def storage(payload: bytes) -> bytes:
    """A call of the function by which torch loads a storage, with a file of our own."""
    return (
        b"\x80\x02ctorch.storage\n_load_from_bytes\n"
        + b"B"
        + struct.pack("<I", len(payload))
        + payload
        + b"\x85R."
    )


def _in_observation(value: bytes) -> bytes:
    """`value`, a pickle without protocol and stop, as the camera of an observation."""
    head = (
        b"\x80\x04\x8c\x1flerobot.async_inference.helpers\x8c\x10TimedObservation\x93)\x81}("
        + b"\x8c\x09timestampG"
        + struct.pack(">d", 1.0)
        + b"\x8c\x08timestepK\x00\x8c\x0bobservation}\x8c\x05front"
    )
    return head + value + b"sub."


def _tensor(stored: bytes, offset: bytes, size: bytes, stride: bytes) -> bytes:
    """An observation of a tensor with these parts, as opcodes."""
    payload = b"B" + struct.pack("<I", len(stored)) + stored
    return _in_observation(
        b"ctorch._utils\n_rebuild_tensor_v2\n(ctorch.storage\n_load_from_bytes\n"
        + payload
        + b"\x85R"
        + offset
        + size
        + b"\x85"
        + stride
        + b"\x85\x89ccollections\nOrderedDict\n)RtR"
    )


def _nested_storages() -> dict[str, bytes]:
    """Harm in each of the five pickles of a storage, and after them."""
    evil = pickle.dumps(Calls(os.system, COMMAND), 2)
    good = [
        b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.",
        b"\x80\x02M\xe9\x03.",
        b"\x80\x02}(" + _string("little_endian") + b"\x88u.",
        b"\x80\x02("
        + _string("storage")
        + b"ctorch\nFloatStorage\n"
        + _string("0")
        + _string("cpu")
        + b"K\x01NtQ.",
        b"\x80\x02]" + _string("0") + b"a.",
    ]
    numbers = struct.pack("<q", 1) + struct.pack("<f", 1.0)
    made = {
        f"nested_storage_{place}": storage(
            b"".join(good[:place]) + evil + b"".join(good[place + 1 :]) + numbers
        )
        for place in range(5)
    }
    huge = good[3].replace(b"K\x01", b"\x8a\x08" + struct.pack("<q", 1 << 60))
    made["storage_of_a_huge_size"] = storage(
        b"".join([*good[:3], huge, good[4]]) + struct.pack("<q", 1 << 60)
    )
    negative = good[3].replace(b"K\x01", b"J" + struct.pack("<i", -1))
    made["storage_of_a_negative_size"] = storage(
        b"".join([*good[:3], negative, good[4]]) + struct.pack("<q", -1)
    )
    other = good[3].replace(b"ctorch\nFloatStorage\n", b"cos\nsystem\n")
    made["storage_of_a_function"] = storage(b"".join([*good[:3], other, good[4]]) + numbers)
    whole = b"".join(good) + numbers
    one = b"K\x01"
    assert decode_observation(_tensor(whole, b"K\x00", one, one)).sensors["front"] == [1.0]
    made |= {
        "storage_with_fewer_numbers": _tensor(whole[:-4], b"K\x00", one, one),
        "storage_with_more_numbers": _tensor(whole + bytes(4), b"K\x00", one, one),
        "tensor_beyond_its_storage": _tensor(whole, b"K\x00", b"K\x09", one),
        "tensor_beside_its_storage": _tensor(whole, b"K\x05", one, one),
        "tensor_before_its_storage": _tensor(whole, b"J" + struct.pack("<i", -1), one, one),
        "tensor_of_a_repeated_number": _tensor(
            whole, b"K\x00", b"\x8a\x05" + (1 << 35).to_bytes(5, "little"), b"K\x00"
        ),
        "tensor_with_negative_strides": _tensor(whole, b"K\x00", one, b"J" + struct.pack("<i", -4)),
    }
    inside = storage(whole)
    made["storage_in_a_storage"] = storage(inside)
    made["storage_as_zip"] = storage(b"PK\x03\x04" + bytes(200))
    return made


def _arrays() -> dict[str, bytes]:
    dtype = b"cnumpy\ndtype\n"
    shell = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R"
    u1 = (
        dtype
        + b"\x8c\x02u1\x89\x88\x87R(K\x03\x8c\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    )
    swapped = (
        shell
        + b"(K\x01J"
        + struct.pack("<i", 1 << 13)
        + b"\x85"
        + u1.replace(b"u1", b"f8").replace(b"|", b">")
        + b"\x89"
    )
    large = b"\x8a\x08" + struct.pack("<q", 1 << 39)
    return {
        "objects": observation({"front": np.array([{"a": 1}], dtype=object)}),
        "texts": observation({"front": np.array(["abc"])}),
        "records": observation({"front": np.zeros(2, [("a", "f4")])}),
        "times": observation({"front": np.array(["2026-01-01"], "M8[D]")}),
        "array_of_a_huge_shape": _in_observation(
            shell + b"(K\x01" + large + large + b"\x86" + u1 + b"\x89C\x01xtb"
        ),
        "array_of_no_bytes_and_a_huge_shape": _in_observation(
            shell + b"(K\x01" + large + large + b"K\x00\x87" + u1 + b"\x89C\x00tb"
        ),
        "array_of_a_wrong_shape": _in_observation(
            shell + b"(K\x01K\x03\x85" + u1 + b"\x89C\x01xtb"
        ),
        "array_of_a_smaller_shape": _in_observation(
            shell + b"(K\x01K\x00\x85" + u1 + b"\x89C\x01xtb"
        ),
        "array_of_a_negative_shape": _in_observation(
            shell + b"(K\x01J\xff\xff\xff\xffJ\xff\xff\xff\xff\x86" + u1 + b"\x89C\x01xtb"
        ),
        "array_twice_given_its_numbers": _in_observation(
            shell + (b"(K\x01K\x01\x85" + u1 + b"\x89C\x01xtb") * 2
        ),
        "array_without_its_numbers": _in_observation(shell),
        "many_arrays_of_the_same_bytes": _in_observation(
            _sensors(
                swapped
                + (b"h\x07" if number else b"B" + _size(1 << 16) + bytes(1 << 16) + b"q\x07")
                + b"tb"
                for number in range(300)
            )
        ),
        "dtype_with_fields": _in_observation(
            shell + b"(K\x01K\x01\x85" + u1.replace(b"NNN", b"N}N") + b"\x89C\x01xtb"
        ),
        "array_subclass": _in_observation(
            b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nmemmap\nK\x00\x85C\x01b\x87R"
        ),
    }


def _bombs() -> dict[str, bytes]:
    return {
        "deep_lists": b"\x80\x04" + b"](" * 100_000,
        "deep_tuples": b"\x80\x04)" + b"\x85" * 100_000 + b".",
        "billion_laughs": b"\x80\x04]q\x00" + b"(h\x00h\x00lq\x00" * 5000 + b".",
        "doubling_tuples": _in_observation(b")q\x01" + b"0h\x01h\x01\x86q\x01" * 4000),
        "doubling_without_pop": _in_observation(
            b"(" + b")q\x01" + b"h\x01h\x01\x86q\x01" * 4000 + b"t"
        ),
        "far_memo": b"\x80\x04Nr\xff\xff\xff\x7f" * 3 + b".",
        "claimed_bytes": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 62) + b"x",
        "claimed_bytearray": b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b"x",
        "claimed_text": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 40) + b"x",
        "claimed_frame": b"\x80\x04\x95" + struct.pack("<Q", 1 << 62) + b"N.",
        "claimed_integer": b"\x80\x02\x8b" + struct.pack("<i", 1 << 30) + b"x",
        "large_integer": _in_observation(b"\x8a\xff" + b"\x7f" * 255),
        "much_text": _in_observation(
            _sensors(b"X" + _size(60_000) + b"a" * 60_000 for _ in range(60))
        ),
        "many_opcodes": b"\x80\x04" + b"(" + b"N" * 1_000_000 + b"t.",
        "many_fields": _in_observation(
            b"}(" + b"".join(_string(str(n)) + b"N" for n in range(15_000)) + b"u"
        ),
    }


def _calls() -> dict[str, bytes]:
    made = {
        f"os_system_{protocol}": pickle.dumps(Calls(os.system, COMMAND), protocol)
        for protocol in range(6)
    }
    made |= {
        f"eval_{protocol}": pickle.dumps(Calls(eval, f"open({MARKER!r}, 'w').close()"), protocol)
        for protocol in range(6)
    }
    chain = _in_observation(
        b"cbuiltins\ngetattr\ncos\nsystem\n\x8c\x08__call__\x86R" + _string(COMMAND) + b"\x85R"
    )
    return made | {
        "in_an_observation": observation({"front": Calls(os.system, COMMAND)}),
        "chain_of_calls": chain,
        "instance": b"(S'" + COMMAND.encode() + b"'\nios\nsystem\n.",
        "obj": b"\x80\x02(cos\nsystem\n" + _string(COMMAND) + b"o.",
        "newobj_of_a_function": b"\x80\x02cos\nsystem\n" + _string(COMMAND) + b"\x85\x81.",
        "newobj_with_arguments": b"\x80\x04\x8c\x1flerobot.async_inference.helpers"
        b"\x8c\x10TimedObservationK\x01\x85\x81.",
        "newobj_ex": b"\x80\x04cos\nsystem\n)}\x92.",
        "persistent_id": b"\x80\x02" + _string("x") + b"Q.",
        "persistent_id_text": b"Px\n.",
        "extension_1": b"\x80\x02\x82\x01.",
        "extension_2": b"\x80\x02\x83\x01\x00.",
        "extension_4": b"\x80\x02\x84\x01\x00\x00\x00.",
        "next_buffer": b"\x80\x05\x97.",
        "dotted_name": b"\x80\x04\x8c\x05numpy\x8c\x0edtype.__init__\x93.",
        "dotted_class": b"\x80\x04\x8c\x05numpy\x8c\x10ndarray.__reduce__\x93.",
        "call_of_a_token": b"\x80\x02cnumpy\nndarray\nK\x01\x85\x85R.",
        "call_without_a_tuple": b"\x80\x02cnumpy\ndtype\nNR.",
        "hooks": b"\x80\x02ccollections\nOrderedDict\n](]" + _string("a") + b"K\x01ee\x85R.",
        "set": b"\x80\x04\x8f(K\x01\x90.",
        "bytes_by_codec": pickle.dumps({"front": np.zeros(3, np.uint8)}, 2),
        "counter": pickle.dumps(collections.Counter("a"), 4),
    }


def _aliases() -> dict[str, bytes]:
    """Policy instructions that name one long text many times over."""
    text, key = "x" * 900_000, "k" * 900_000
    return {
        "aliased_texts": config(lerobot_features={"note": [text] * 500}),
        "aliased_keys": config(lerobot_features={"note": [{key: 0}] * 500}),
        "aliased_renaming": config(rename_map={str(number): text for number in range(500)}),
        "aliased_between_fields": config(
            lerobot_features={**features(), "note": text}, rename_map={"a": text}
        ),
        "aliased_names": config(policy_type=text, pretrained_name_or_path=text, device=text),
        "large_instructions": config(device=bytes(5 << 20)),
    }


def _records() -> dict[str, bytes]:
    honest = recorded("remote_policy_config")
    return {
        "unknown_field": observation({}).replace(b"must_go", b"mustgo_"),
        "state_of_a_list": _in_observation(b"]}b"),
        "state_of_a_class": _in_observation(b"cnumpy\nndarray\n}b"),
        "record_as_sensor": _in_observation(
            b"\x8c\x1flerobot.async_inference.helpers\x8c\x10TimedObservation\x93)\x81"
        ),
        "function_as_sensor": _in_observation(b"cnumpy\ndtype\n"),
        "number_as_key": _in_observation(b"}K\x01K\x02s"),
        "another_record": honest,
        "cut": observation({"front": np.zeros((4, 4, 3), np.uint8)})[:-30],
        "more_after_the_end": observation({}) + b"N.",
        "two_values": b"\x80\x04NN.",
        "nothing": b"\x80\x04.",
        "open_mark": b"\x80\x04N(.",
        "no_bytes": b"",
        "json": b'{"observation": {}}',
    }


CORPUS: dict[str, bytes] = {
    **_calls(),
    **_nested_storages(),
    **_arrays(),
    **_bombs(),
    **_aliases(),
    **_records(),
}
