"""One line of snapshots: whole, never back, and the newest for who waits."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from phalanx.routing.roles.mirror import RoleMirror
from phalanx.routing.roles.registry import RoleRegistry
from phalanx.routing.roles.snapshot import ReplicaState, RoleSnapshot
from phalanx.routing.roles.waiting import NUM_AT_ONCE
from tests.routing.roles.snapshots import contents, model, replica, snapshot

EMPTY = snapshot().content
ONE = snapshot(model("math", replica("math/0"))).content
TWO = snapshot(model("math", replica("math/0"), replica("math/1"))).content


def registry() -> RoleRegistry:
    return RoleRegistry("teacher", "e1", EMPTY)


def test_i54_a_reader_keeps_one_whole_snapshot_while_others_follow():
    published = registry()
    first = published.snapshot
    assert published.publish(ONE, 0) and published.publish(TWO, 1)
    assert (first.revision, first.content) == (0, EMPTY)
    assert published.snapshot == RoleSnapshot("teacher", "e1", 2, TWO)


def test_i52_identical_content_is_no_change_and_reading_is_none():
    published = registry()
    heard: list[int] = []
    published.listen(lambda now: heard.append(now.revision))
    assert published.publish(ONE, 0)
    before = published.snapshot
    same = snapshot(model("math", replica("math/0"))).content
    assert same is not ONE and published.publish(same, 1)
    assert published.snapshot is before and heard == [1]


def test_d5_every_change_counts_states_and_phase_too():
    published = registry()
    asleep = replica("math/0", ReplicaState.SLEEPING)
    for number, content in enumerate(
        (
            ONE,
            snapshot(model("math", asleep)).content,
            snapshot(model("math", asleep, state=ReplicaState.SLEEPING)).content,
            snapshot(model("math", asleep, state=ReplicaState.SLEEPING), phase="score").content,
        )
    ):
        assert published.publish(content, number)
        assert published.snapshot.revision == number + 1


def test_i51_scaling_restart_recovery_and_a_new_address_are_changes():
    published = registry()
    steps = (
        (replica("math/0"),),
        (replica("math/0"), replica("math/1")),  # scale-out
        (replica("math/0"),),  # scale-in
        (replica("math/0", generation=1),),  # restart
        (replica("math/0", ReplicaState.DEAD, generation=1),),
        (replica("math/0", generation=2),),  # recovery
        (replica("math/0", generation=2, base_url="http://10.0.0.7:1"),),  # address
    )
    for number, replicas in enumerate(steps):
        assert published.publish(snapshot(model("math", *replicas)).content, number)
        assert published.snapshot.revision == number + 1


def test_who_did_not_see_the_newest_changes_nothing():
    published = registry()
    assert published.publish(ONE, 0)
    assert not published.publish(TWO, 0)
    assert published.snapshot.content == ONE


def test_a_waiter_gets_what_is_newest_when_it_is_woken():
    async def scenario():
        published = registry()
        waiting = asyncio.create_task(published.wait(0, None))
        await asyncio.sleep(0)
        assert published.num_waiting == 1
        published.publish(ONE, 0)
        published.publish(TWO, 1)
        assert (await waiting).revision == 2
        assert published.num_waiting == 0

    asyncio.run(scenario())


def test_who_has_another_revision_or_epoch_waits_for_nothing():
    async def scenario():
        published = registry()
        published.publish(ONE, 0)
        assert (await published.wait(0, None)).revision == 1
        assert (await published.wait(9, None)).revision == 1  # of an earlier life
        assert (await published.wait(1, None, "another")).epoch == "e1"
        assert (await published.wait(1, 0.0, "e1")).revision == 1  # nothing has changed

    asyncio.run(scenario())


def test_publishing_the_same_wakes_nobody_and_closing_wakes_all():
    async def scenario():
        published = registry()
        waiting = [asyncio.create_task(published.wait(0, None)) for _ in range(3)]
        await asyncio.sleep(0)
        published.publish(EMPTY, 0)
        await asyncio.sleep(0)
        assert not any(task.done() for task in waiting)
        published.close()
        assert [(await task).revision for task in waiting] == [0, 0, 0]
        assert (await published.wait(0, None)).revision == 0

    asyncio.run(scenario())


def test_waking_many_leaves_turns_to_what_else_the_loop_has_to_do():
    async def scenario():
        published = registry()
        woken: list[int] = []

        async def wait() -> None:
            await published.wait(0, 60.0)
            woken.append(turns)

        waiting = [asyncio.create_task(wait()) for _ in range(10 * NUM_AT_ONCE)]
        await asyncio.sleep(0)
        assert published.num_waiting == len(waiting)
        turns = 0
        published.publish(ONE, 0)
        while not all(task.done() for task in waiting):
            await asyncio.sleep(0)
            turns += 1
        assert max(woken.count(turn) for turn in set(woken)) == NUM_AT_ONCE
        assert woken == sorted(woken) and woken[-1] >= 9

    asyncio.run(scenario())


def test_who_is_still_to_be_woken_gets_what_was_published_meanwhile():
    async def scenario():
        published = registry()
        waiting = [asyncio.create_task(published.wait(0, None)) for _ in range(3 * NUM_AT_ONCE)]
        await asyncio.sleep(0)
        published.publish(ONE, 0)
        waiting.append(asyncio.create_task(published.wait(1, None)))
        await asyncio.sleep(0)
        published.publish(TWO, 1)
        got = [(await task).revision for task in waiting]
        assert set(got[NUM_AT_ONCE:]) == {2} and published.num_waiting == 0
        last = asyncio.create_task(published.wait(2, None))
        await asyncio.sleep(0)
        published.publish(ONE, 2)
        published.close()
        assert (await last).revision == 3

    asyncio.run(scenario())


def test_a_waiter_that_is_cancelled_is_counted_no_more():
    async def scenario():
        published = registry()
        waiting = asyncio.create_task(published.wait(0, None))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert published.num_waiting == 0

    asyncio.run(scenario())


def test_a_mirror_keeps_the_others_revisions_and_never_goes_back_in_an_epoch():
    async def scenario():
        first = snapshot(revision=3)
        mirror = RoleMirror(first)
        heard: list[RoleSnapshot] = []
        end = mirror.listen(heard.append)
        waiting = asyncio.create_task(mirror.wait(3, None, "e1"))
        await asyncio.sleep(0)
        assert not mirror.put(replace(first, content=ONE))
        assert not mirror.put(replace(first, revision=2, content=ONE))
        later = replace(first, revision=9, content=ONE)
        assert mirror.put(later) and await waiting is later
        anew = replace(first, epoch="e2", revision=0)
        assert mirror.put(anew) and mirror.snapshot is anew
        end()
        mirror.put(replace(anew, revision=1))
        assert heard == [later, anew]
        mirror.close()
        assert (await mirror.wait(1, None, "e2")).revision == 1

    asyncio.run(scenario())


class Published(RuleBasedStateMachine):
    """Writers with old and new views, and waiters, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.registry = RoleRegistry("teacher", "e1", EMPTY)
        self.seen = [self.registry.snapshot]
        self.waiting: list[tuple[int, asyncio.Task[RoleSnapshot]]] = []

    @rule(content=st.sampled_from((EMPTY, ONE, TWO)) | contents(), behind=st.integers(0, 2))
    def publish(self, content, behind):
        before = self.registry.snapshot
        expected = max(before.revision - behind, 0)
        taken = self.registry.publish(content, expected)
        after = self.registry.snapshot
        assert taken == (expected == before.revision)
        changed = taken and content != before.content
        assert after.revision == before.revision + changed
        assert after.content == (content if taken else before.content)
        assert changed or after is before
        if changed:
            self.seen.append(after)

    @rule(behind=st.integers(0, 2))
    def wait(self, behind):
        revision = max(self.registry.snapshot.revision - behind, 0)

        async def begin():
            return asyncio.create_task(self.registry.wait(revision, None))

        self.waiting.append((revision, self.runner.run(begin())))
        self.turn()

    @precondition(lambda self: self.waiting)
    @rule()
    def turn(self):
        async def settle():
            for _ in range(4):
                await asyncio.sleep(0)

        self.runner.run(settle())
        now = self.registry.snapshot
        still = []
        for revision, task in self.waiting:
            assert task.done() == (revision != now.revision)
            if task.done():
                assert task.result() is now
            else:
                still.append((revision, task))
        self.waiting = still

    @invariant()
    def revisions_count_up_by_one(self):
        assert [one.revision for one in self.seen] == list(range(len(self.seen)))

    def teardown(self):
        async def end():
            for _, task in self.waiting:
                task.cancel()
            await asyncio.gather(*(task for _, task in self.waiting), return_exceptions=True)

        self.runner.run(end())
        self.runner.close()


Published.TestCase.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
test_any_order = Published.TestCase


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5)), max_size=20))
def test_a_mirror_shows_only_what_it_was_given_and_never_goes_back(puts):
    mirror = RoleMirror(RoleSnapshot("r", "", -1, EMPTY))
    left = set()
    for epoch, revision in puts:
        before, given_one = mirror.snapshot, RoleSnapshot("r", epoch, revision, EMPTY)
        taken = mirror.put(given_one)
        assert mirror.snapshot is (given_one if taken else before)
        if epoch == before.epoch:
            assert taken == (revision > before.revision)
        else:
            assert taken == (epoch not in left)
            left |= {before.epoch} if taken else set()
