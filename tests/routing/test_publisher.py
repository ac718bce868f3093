"""Snapshots are replaced whole, by whoever saw the latest one."""

from __future__ import annotations

import threading

from phalanx.routing.endpoint import Endpoint
from phalanx.routing.publisher import Publisher
from phalanx.routing.snapshot import Server


def server(name: str) -> Server:
    return Server(name, "m", Endpoint.parse("127.0.0.1:1"))


def test_a_change_takes_the_next_revision_and_no_change_takes_none():
    publisher = Publisher("e")
    first = publisher.snapshot
    assert publisher.publish((server("a"),), expected_revision=0)
    assert publisher.publish((server("a"),), expected_revision=1)
    assert publisher.snapshot.revision == 1
    assert (first.epoch, first.revision, first.servers) == ("e", 0, ())


def test_who_did_not_see_the_latest_changes_nothing():
    publisher = Publisher("e")
    publisher.publish((server("a"),), expected_revision=0)
    latest = publisher.snapshot
    assert not publisher.publish((server("b"),), expected_revision=0)
    assert publisher.snapshot is latest


def test_a_listener_hears_every_later_snapshot_in_order_until_it_ends():
    publisher, heard = Publisher("e"), []
    end = publisher.listen(lambda snapshot: heard.append(snapshot.revision))
    for revision in range(3):
        publisher.publish((server(str(revision)),), expected_revision=revision)
    end()
    publisher.publish((), expected_revision=3)
    assert heard == [1, 2, 3]


def test_writers_of_several_threads_lose_no_change():
    publisher, heard = Publisher("e"), []
    publisher.listen(lambda snapshot: heard.append(snapshot.revision))
    go = threading.Barrier(4)

    def add(name: str) -> None:
        go.wait(10)
        for number in range(50):
            while True:
                seen = publisher.snapshot
                servers = (*seen.servers, server(f"{name}{number}"))
                if publisher.publish(servers, expected_revision=seen.revision):
                    break

    threads = [threading.Thread(target=add, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({known.server_id for known in publisher.snapshot.servers}) == 200
    assert heard == list(range(1, 201))
