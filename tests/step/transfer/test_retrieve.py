"""A cache imports what another one published: pending, landed, failed, or never to be."""

from __future__ import annotations

from contextlib import ExitStack

import msgspec
import pytest
import torch

from phalanx.device.cpu import CpuBackend
from phalanx.schema.handoff import PublishedKV
from phalanx.step.outcomes import AdmitRuntimeError, AllocationFailed, NotReady
from phalanx.step.resources.base import BuildInfo
from phalanx.step.resources.kv_cache import (
    KVCache,
    KVConfig,
    KVRequestConfig,
    KVSpec,
    TransferSpec,
)
from phalanx.step.transfer.base import TAKEN, PageRead, Reason
from phalanx.step.waker import Waker
from phalanx.testing.fake_transfer import FakeNetwork, FakeTransfer
from tests.step.caches import context, kv_step, lengths, run, stored


class Engine:
    """A cache with a transfer on a fake network."""

    def __init__(self, network: FakeNetwork, name: str, num_pages: int = 8, **options) -> None:
        self.transfer = FakeTransfer(network, name)
        world_size = options.pop("world_size", 1)
        fields = {
            "num_layers": 2,
            "num_kv_heads": 1,
            "head_dim": 2,
            "num_pages": num_pages,
            "page_size": 4,
            "max_seq_len": 1000,
            "dtype": torch.float32,
        }
        config = KVConfig(**{**fields, **options})
        spec = KVSpec(
            "kv", frozenset({"node"}), config, TransferSpec(lambda: self.transfer, 0, world_size)
        )
        self.waker = Waker()
        self.cache: KVCache = spec.build(BuildInfo(CpuBackend(), {}, self.waker))

    def publish(self, rid: str = "p", tokens: int = 6, value: float = 10.0) -> PublishedKV:
        """Compute a request, hand it over, and end it."""
        self.cache.ingest_request(rid, None)
        run(self.cache, kv_step((rid, tokens)), value)
        published = self.cache.hold(rid)
        self.cache.remove_request(rid)
        return published

    def at_rest(self) -> bool:
        return self.cache.at_rest() and len(self.transfer.holds) == 0


@pytest.fixture
def network() -> FakeNetwork:
    return FakeNetwork()


@pytest.fixture
def prefill(network: FakeNetwork) -> Engine:
    return Engine(network, "prefill")


@pytest.fixture
def decode(network: FakeNetwork) -> Engine:
    return Engine(network, "decode")


def travelled(published: PublishedKV) -> PublishedKV:
    """As it comes out of a message."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(published), type=PublishedKV)


def test_item_8_5_6_a_read_is_pending_until_it_has_landed(prefill: Engine, decode: Engine):
    published = travelled(prefill.publish())
    cache = decode.cache
    cache.ingest_request("d", None)
    for _ in range(2):  # asked again, it is not read again
        outcome = cache.admit_retrieve("d", published)
        assert (outcome.ok, outcome.ready) == (True, False)
    [reading] = decode.transfer.pending
    refused = cache.admit(kv_step(("d", 1)), context("d"))
    assert isinstance(refused.reason, NotReady)
    assert not decode.waker.take()
    reading.land()
    assert decode.waker.take()
    outcome = cache.admit_retrieve("d", published)
    assert (outcome.ok, outcome.ready) == (True, True)
    assert stored(cache, "d") == [10.0, 11.0, 12.0, 13.0, 14.0, 15.0]
    assert decode.transfer.released == [TAKEN]
    assert prefill.at_rest()
    run(cache, kv_step(("d", 2)), 16.0)
    assert stored(cache, "d")[5:] == [15.0, 16.0, 17.0]
    cache.remove_request("d")
    assert decode.at_rest()


def test_item_8_5_6_a_failed_read_is_latched_and_terminal(prefill: Engine, decode: Engine):
    published = prefill.publish()
    cache = decode.cache
    cache.ingest_request("d", None)
    cache.admit_retrieve("d", published)
    decode.transfer.pending[0].fail("the other side is gone")
    for _ in range(2):
        outcome = cache.admit_retrieve("d", published)
        assert outcome.reason == AdmitRuntimeError("the other side is gone", "d")
    assert decode.transfer.pending == []
    cache.remove_request("d")
    [ending] = decode.transfer.released
    assert (ending.reason, ending.message) == (Reason.DROPPED, "the other side is gone")
    assert decode.at_rest()
    assert prefill.at_rest()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"world_size": 2}, "an engine of 1 ranks and this one has 2"),
        ({"page_size": 8}, "page_size=4 and this engine has 8"),
        ({"num_layers": 3}, "num_layers=2 and this engine has 3"),
        ({"num_kv_heads": 2}, "num_kv_heads=1 and this engine has 2"),
        ({"head_dim": 4}, "head_dim=2 and this engine has 4"),
        ({"dtype": torch.bfloat16}, "dtype=float32 and this engine has bfloat16"),
        ({"max_seq_len": 5}, "6 tokens exceed the cache's sequence limit 5"),
    ],
)
def test_item_8_5_6_a_mismatch_is_terminal(network, prefill: Engine, options: dict, said: str):
    other = Engine(network, "other", **options)
    other.cache.ingest_request("d", None)
    outcome = other.cache.admit_retrieve("d", prefill.publish())
    assert isinstance(outcome.reason, AdmitRuntimeError)
    assert said in outcome.reason.message
    assert other.transfer.reads == []
    other.cache.remove_request("d")
    assert other.at_rest()


def test_item_8_5_6_labels_outside_the_needed_set_are_ignored(prefill: Engine, decode: Engine):
    cache = prefill.cache
    cache.ingest_request("p", None)
    run(cache, kv_step(("p", 5), ("p", 3, "image")), 1.0)
    published = cache.hold("p")
    cache.remove_request("p")
    assert set(published.ranks[0]) == {"main", "image"}
    for rid, labels, wanted in (("d", ("main",), {"main": 5}), ("e", ("image",), {"image": 3})):
        decode.cache.ingest_request(rid, KVRequestConfig((), labels=labels))
        decode.cache.admit_retrieve(rid, published)
        [reading] = decode.transfer.pending
        assert {reading.read.label: reading.read.stop} == wanted
        reading.land()
        if rid == "d":
            # Its own reader has it: the second finds nothing to read any more.
            continue
        assert decode.cache.admit_retrieve(rid, published).ready
        assert lengths(decode.cache, rid) == wanted


@pytest.mark.parametrize("labels", [{}, {"image"}])
def test_item_8_5_6_a_needed_label_must_have_been_published(
    prefill: Engine, decode: Engine, labels
):
    published = prefill.publish()
    streams = dict.fromkeys(labels, published.ranks[0]["main"])
    changed = msgspec.structs.replace(published, ranks={0: streams})
    decode.cache.ingest_request("d", None)
    outcome = decode.cache.admit_retrieve("d", changed)
    assert isinstance(outcome.reason, AdmitRuntimeError)
    assert outcome.reason.message == "rank 0 has published nothing of label 'main'"
    decode.cache.remove_request("d")
    assert decode.at_rest()


@pytest.mark.parametrize("tokens", [6, 8])
def test_item_8_5_6_what_it_holds_itself_is_not_read_but_moved_back(prefill: Engine, tokens: int):
    published = travelled(prefill.publish(tokens=tokens))
    cache = prefill.cache
    free = cache.num_free_pages
    cache.ingest_request("again", None)
    for _ in range(2):
        assert cache.admit_retrieve("again", published).ready
    assert prefill.transfer.reads == []
    assert stored(cache, "again") == [10.0 + index for index in range(tokens)]
    assert cache.num_free_pages == free
    run(cache, kv_step(("again", 1)), 99.0)
    assert stored(cache, "again")[tokens:] == [99.0]
    cache.remove_request("again")
    assert prefill.at_rest()


@pytest.mark.parametrize("how", ["again", "read", "changed"])
def test_what_it_does_not_hold_any_more_cannot_be_moved_back(prefill: Engine, how: str):
    published = prefill.publish()
    cache = prefill.cache
    if how == "again":
        cache.ingest_request("first", None)
        assert cache.admit_retrieve("first", published).ready
    elif how == "changed":
        main = published.ranks[0]["main"]
        changed = msgspec.structs.replace(main, length=5)
        published = msgspec.structs.replace(published, ranks={0: {"main": changed}})
    cache.ingest_request("again", None)
    [handle] = published.handles()
    with ExitStack() as reading:
        if how == "read":
            read = PageRead("main", published.ranks[0]["main"].generation, 0, 6)
            reading.enter_context(prefill.transfer.holds.reading(handle.hold, read))
        outcome = cache.admit_retrieve("again", published)
        if how == "changed":
            prefill.transfer.pending[0].land()
            outcome = cache.admit_retrieve("again", published)
    assert isinstance(outcome.reason, AdmitRuntimeError)
    assert "under this id" in outcome.reason.message
    cache.remove_request("again")
    cache.remove_request("first")
    assert prefill.at_rest()


def test_item_8_5_6_only_the_missing_suffix_is_read(prefill: Engine, decode: Engine):
    published = prefill.publish(tokens=9)
    cache = decode.cache
    cache.ingest_request("d", None)
    run(cache, kv_step(("d", 5)), 10.0)
    cache.admit_retrieve("d", published)
    [reading] = decode.transfer.pending
    assert (reading.read.start, reading.read.stop) == (5, 9)
    reading.land()
    assert cache.admit_retrieve("d", published).ready
    assert stored(cache, "d") == [10.0 + index for index in range(9)]


def test_what_is_there_already_is_not_read(prefill: Engine, decode: Engine):
    published = prefill.publish(tokens=5)
    cache = decode.cache
    cache.ingest_request("d", None)
    run(cache, kv_step(("d", 7)), 0.0)
    assert cache.admit_retrieve("d", published).ready
    assert decode.transfer.reads == []
    assert decode.transfer.released == [TAKEN]
    assert lengths(cache, "d") == {"main": 7}


def test_known_tokens_are_taken_over_before_the_rest_is_read(prefill: Engine, decode: Engine):
    tokens = list(range(9))
    published = prefill.publish(tokens=9)
    cache = decode.cache
    cache.ingest_request("earlier", KVRequestConfig(tokens))
    run(cache, kv_step(("earlier", 9)), 10.0)
    cache.remove_request("earlier")
    cache.ingest_request("d", KVRequestConfig([*tokens, 9]))
    cache.admit_retrieve("d", published)
    [reading] = decode.transfer.pending
    assert (reading.read.start, reading.read.stop) == (8, 9)
    reading.land()
    assert cache.admit_retrieve("d", published).ready
    assert stored(cache, "d") == [10.0 + index for index in range(9)]


def test_an_import_without_room_takes_nothing(network, prefill: Engine):
    small = Engine(network, "small", num_pages=2)
    small.cache.ingest_request("x", None)
    run(small.cache, kv_step(("x", 4)))
    published = prefill.publish(tokens=6)
    small.cache.ingest_request("d", None)
    outcome = small.cache.admit_retrieve("d", published)
    assert isinstance(outcome.reason, AllocationFailed)
    assert (outcome.reason.pages_short, small.transfer.reads) == (1, [])
    small.cache.remove_request("x")
    assert not small.cache.admit_retrieve("d", published).ready
    small.transfer.pending[0].land()
    assert small.cache.admit_retrieve("d", published).ready


@pytest.mark.parametrize("tokens", [4, 20])
def test_defect_8_6_14_a_step_waits_only_for_as_many_pages_as_come_back(
    prefill: Engine, tokens: int
):
    """Of eight pages two are held and five are a request's that could be moved away."""
    cache = prefill.cache
    prefill.publish(tokens=6)
    for rid, count in (("b", 20), ("a", 4)):
        cache.ingest_request(rid, None)
        run(cache, kv_step((rid, count)))
    reason = cache.admit(kv_step(("a", tokens)), context("a")).reason
    assert isinstance(reason, NotReady if tokens == 4 else AllocationFailed)


def test_a_step_waits_for_pages_that_are_read_for_nobody_any_more(prefill: Engine, decode: Engine):
    published = prefill.publish(tokens=24)
    cache = decode.cache
    cache.ingest_request("d", None)
    cache.admit_retrieve("d", published)
    [reading] = decode.transfer.pending
    reading.future.set_running_or_notify_cancel()
    cache.ingest_request("a", None)
    step = kv_step(("a", 12))
    assert isinstance(cache.admit(step, context("a")).reason, NotReady)
    cache.remove_request("d")
    assert isinstance(cache.admit(step, context("a")).reason, NotReady)
    reading.future.set_result(None)
    run(cache, step)


def test_a_request_that_ends_while_it_is_read_leaves_its_pages_to_the_read(
    prefill: Engine, decode: Engine
):
    published = prefill.publish(tokens=6)
    cache = decode.cache
    cache.ingest_request("d", None)
    cache.admit_retrieve("d", published)
    [reading] = decode.transfer.pending
    reading.future.set_running_or_notify_cancel()
    cache.remove_request("d")
    assert cache.num_free_pages == 6, "somebody still writes into two of them"
    assert decode.transfer.released[0].reason is Reason.DROPPED
    reading.future.set_result(None)
    assert decode.at_rest()
    assert prefill.at_rest()


def test_a_read_that_has_not_begun_is_called_off(prefill: Engine, decode: Engine):
    published = prefill.publish()
    decode.cache.ingest_request("d", None)
    decode.cache.admit_retrieve("d", published)
    decode.cache.remove_request("d")
    assert decode.at_rest()


def test_held_pages_belong_to_nobody_and_come_back(network, prefill: Engine):
    published = prefill.publish(tokens=6)
    cache = prefill.cache
    assert lengths(cache, "p") == {}
    assert cache.num_free_pages == 6
    cache.ingest_request("next", None)
    refused = cache.admit(kv_step(("next", 28)), context("next"))
    assert isinstance(refused.reason, NotReady)
    assert "2 are held for other engines" in refused.reason.message
    network.clock.advance(network.ttl_s)
    prefill.transfer.holds.expire()
    assert prefill.waker.take()
    ctx = context("next")
    assert cache.admit(kv_step(("next", 28)), ctx).ok
    cache.unadmit(kv_step(("next", 28)), ctx)
    cache.remove_request("next")
    assert prefill.at_rest()
    assert published.handles()[0].hold


def test_a_late_reader_fails(network, prefill: Engine, decode: Engine):
    published = prefill.publish()
    network.clock.advance(network.ttl_s)
    prefill.transfer.holds.expire()
    decode.cache.ingest_request("d", None)
    decode.cache.admit_retrieve("d", published)
    decode.transfer.pending[0].land()
    outcome = decode.cache.admit_retrieve("d", published)
    assert isinstance(outcome.reason, AdmitRuntimeError)
    assert "longer than the 120 s" in outcome.reason.message


def test_a_merge_adds_ranks_and_labels(prefill: Engine):
    first = prefill.publish()
    stream = first.ranks[0]["main"]
    second = msgspec.structs.replace(first, ranks={0: {"image": stream}, 1: {"main": stream}})
    merged = first.merged(second)
    assert {rank: set(streams) for rank, streams in merged.ranks.items()} == {
        0: {"main", "image"},
        1: {"main"},
    }
    assert len(merged.handles()) == 1


def test_a_cache_without_a_transfer_neither_holds_nor_reads(prefill: Engine):
    published = prefill.publish()
    spec = KVSpec("kv", frozenset({"node"}), prefill.cache.config)
    plain = spec.build(BuildInfo(CpuBackend()))
    plain.ingest_request("d", None)
    for outcome in (plain.admit_retrieve("d", published), plain.admit_retrieve("d", {"main": 3})):
        assert isinstance(outcome.reason, AdmitRuntimeError)
    with pytest.raises(Exception, match="without a transfer"):
        plain.hold("d")
