"""The plan of a step as a function of who runs and who waits."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import pytest

from phalanx.errors import ConfigurationError
from phalanx.loop.request import LoopRequest, Status, Work
from phalanx.loop.scheduler import Budget, StepPlan, plan_step
from phalanx.testing.token_request import TokenRequest

STATE = TokenRequest((1,), 1)


class Room:
    """A pool of `tokens` for all requests together, none at node `full`, and largest batches by
    (node, walk)."""

    def __init__(self, tokens: int = 10_000, full: str = "", **max_rows: int) -> None:
        self.tokens = tokens
        self.full = full
        self.max_rows = max_rows

    def fits(self, node: str, totals: Mapping[str, int]) -> bool:
        return node != self.full and sum(totals.values()) <= self.tokens

    def get_max_batch_size(self, node: str, walk: str) -> int | None:
        return self.max_rows.get(f"{node}_{walk}")


class Queue:
    """Requests in order of their arrival; turns are given like those of the loop."""

    def __init__(self, name: str = "r") -> None:
        self.name = name
        self.requests: list[LoopRequest] = []

    def serve(self, made: StepPlan) -> None:
        """Put the rows of a step behind everybody else."""
        for request, _ in sorted(made.rows, key=lambda row: row[0].turn):
            request.turn = 1 + max(one.turn for one in self.requests)

    def add(
        self,
        remaining: int,
        *,
        total: int = 0,
        priority: int = 0,
        turn: int | None = None,
        place: tuple[str, str] = ("n", "w"),
        divisible: bool = True,
    ) -> LoopRequest:
        work = Work(*place, remaining, max(total, remaining), divisible)
        number = len(self.requests)
        made = LoopRequest(f"{self.name}{number}", STATE, priority, number, work)
        if turn is not None:
            made.turn = turn
        self.requests.append(made)
        return made

    def sorted(self) -> list[LoopRequest]:
        return sorted(self.requests, key=lambda request: request.rank)


def plan(
    running: Queue,
    waiting: Queue | None = None,
    budget: Budget = Budget(16, 8),
    room: Room | None = None,
) -> StepPlan | None:
    queued = [] if waiting is None else waiting.sorted()
    return plan_step(running.sorted(), queued, budget, room or Room())


def spans(made: StepPlan | None) -> dict[str, int]:
    assert made is not None
    return {request.rid: span for request, span in made.rows}


def test_nothing_to_do_is_no_plan():
    assert plan(Queue(), Queue()) is None


def test_decode_comes_first_and_prefill_takes_what_is_left():
    running = Queue()
    running.add(100, turn=0)
    running.add(1, total=9, turn=1)
    running.add(1, total=9, turn=1)
    made = plan(running)
    assert [request.rid for request, _ in made.rows] == ["r1", "r2", "r0"]
    assert spans(made) == {"r1": 1, "r2": 1, "r0": 14}


def test_short_prompts_share_a_step_and_the_last_is_cut():
    running = Queue()
    for remaining in (5, 7, 9):
        running.add(remaining)
    assert spans(plan(running)) == {"r0": 5, "r1": 7, "r2": 4}


def test_the_token_budget_is_never_exceeded_by_divisible_work():
    running = Queue()
    for remaining in (1, 30, 1, 30, 1):
        running.add(remaining)
    for tokens in range(1, 20):
        assert sum(spans(plan(running, budget=Budget(tokens, 8))).values()) <= tokens


def run_steps(queue: Queue, num_steps: int, budget: Budget, room: Room | None = None) -> list[dict]:
    """Plan step after step; work never ends, only turns move."""
    history = []
    for _ in range(num_steps):
        made = plan(queue, budget=budget, room=room)
        queue.serve(made)
        history.append(spans(made))
    return history


def test_prompts_take_turns():
    queue = Queue()
    for _ in range(3):
        queue.add(1000)
    history = run_steps(queue, 6, Budget(16, 8))
    assert [list(step) for step in history] == [["r0"], ["r1"], ["r2"]] * 2


@pytest.mark.parametrize(("rows", "tokens"), [(5, 2), (5, 3), (7, 3), (9, 8)])
def test_item_8_5_8_more_decode_rows_than_the_budget_take_turns(rows, tokens):
    queue = Queue()
    for _ in range(rows):
        queue.add(1, total=9)
    history = run_steps(queue, rows * 4, Budget(tokens, 20))
    assert all(len(step) == tokens for step in history)
    assert {sum(f"r{index}" in step for step in history) for index in range(rows)} == {4 * tokens}


def test_a_prompt_gets_on_beside_more_decode_rows_than_the_budget():
    queue = Queue()
    queue.add(100)
    for _ in range(4):
        queue.add(1, total=9)
    history = run_steps(queue, 12, Budget(4, 8))
    assert all(sum(step.values()) == 4 for step in history)
    assert [step.get("r0", 0) for step in history[:3]] == [2, 0, 2]
    assert {sum(f"r{index}" in step for step in history) for index in range(1, 5)} <= {8, 9}


@pytest.mark.parametrize("tokens", [4, 5, 16])
def test_work_is_never_cut_to_a_single_token(tokens):
    """Neither now nor in the step that takes the rest: other operators compute single tokens."""
    for lengths in product(range(1, 9), repeat=3):
        queue = Queue()
        for length in (*lengths, 1, 1):
            queue.add(length)
        for step in run_steps(queue, 4, Budget(tokens, 9)):
            for name, length in zip(("r0", "r1", "r2"), lengths, strict=True):
                span = step.get(name, 0)
                assert (span != 1 or length == 1) and length - span != 1 or span == 0, (
                    lengths,
                    step,
                )


def test_whoever_is_due_is_in_every_step():
    """For all mixes: the oldest turn among the highest priority is computed."""
    for tokens in (1, 2, 5):
        for max_rows in (1, 2, 9):
            queue = Queue()
            for index, remaining in enumerate((1, 40, 1, 3, 1, 40)):
                queue.add(remaining, divisible=index != 3)
            room = Room(n_w=max_rows)
            for _ in range(30):
                due = min(queue.requests, key=lambda one: one.turn)
                made = plan(queue, budget=Budget(tokens, 9), room=room)
                assert due.rid in spans(made)
                assert len(made.rows) <= max_rows
                queue.serve(made)


def test_indivisible_work_is_taken_whole_or_waits():
    running = Queue()
    running.add(1, total=5, turn=0)
    running.add(10, turn=1, divisible=False)
    running.add(10, turn=1)
    assert spans(plan(running, budget=Budget(16, 8))) == {"r0": 1, "r1": 10, "r2": 5}
    assert spans(plan(running, budget=Budget(8, 8))) == {"r0": 1, "r2": 7}


def test_indivisible_work_beyond_the_budget_runs_when_its_turn_comes():
    queue = Queue()
    queue.add(50, divisible=False)
    queue.add(1, total=9)
    queue.add(1, total=9)
    history = run_steps(queue, 4, Budget(8, 8))
    assert history[0] == {"r0": 50}
    assert history[1] == {"r1": 1, "r2": 1}
    assert history[2] == {"r0": 50}


def test_item_8_5_8_rows_respect_the_nodes_largest_batch():
    queue = Queue()
    for _ in range(5):
        queue.add(1, total=9)
    queue.add(20)
    history = run_steps(queue, 6, Budget(16, 8), Room(n_w=2))
    assert all(len(step) == 2 for step in history)
    assert {rid for step in history for rid in step} == {f"r{index}" for index in range(6)}


def test_priority_goes_before_arrival():
    running = Queue()
    running.add(20)
    running.add(20, priority=1)
    assert spans(plan(running, budget=Budget(16, 8))) == {"r1": 16}
    waiting = Queue()
    for priority in (0, 2, 1, 2):
        waiting.add(4, priority=priority)
    made = plan(Queue(), waiting, Budget(16, 3))
    assert [request.rid for request in made.admitted] == ["r1", "r3", "r2"]


def test_waiting_requests_are_admitted_in_order_up_to_the_running_limit():
    running, waiting = Queue(), Queue("w")
    running.add(1, total=4)
    for _ in range(5):
        waiting.add(3)
    made = plan(running, waiting, Budget(64, 4))
    assert [request.rid for request in made.admitted] == ["w0", "w1", "w2"]
    assert plan(running, waiting, Budget(64, 1)).admitted == ()


def test_the_first_that_does_not_fit_holds_those_behind_it():
    running, waiting = Queue(), Queue("w")
    running.add(1, total=50)
    for remaining in (20, 40, 5):
        waiting.add(remaining)
    made = plan(running, waiting, room=Room(tokens=100))
    assert [request.rid for request in made.admitted] == ["w0"]


def test_nobody_overtakes_the_head_of_the_queue():
    running, waiting = Queue(), Queue("w")
    running.add(1, total=50)
    waiting.add(5, place=("m", "w"))
    waiting.add(5)
    assert plan(running, waiting, room=Room(full="m")).admitted == ()


def test_running_requests_count_with_what_they_will_hold():
    running, waiting = Queue(), Queue("w")
    running.add(30, total=80)
    waiting.add(21)
    assert plan(running, waiting, room=Room(tokens=100)).admitted == ()
    assert plan(running, waiting, room=Room(tokens=101)).admitted != ()


def test_the_first_request_is_admitted_even_if_it_cannot_fit():
    """The step's own admission then says why, and ends it."""
    waiting = Queue()
    waiting.add(50)
    waiting.add(1)
    made = plan(Queue(), waiting, room=Room(tokens=10))
    assert [request.rid for request in made.admitted] == ["r0"]


def test_nobody_is_admitted_whose_decode_the_budget_cannot_hold():
    running, waiting = Queue(), Queue("w")
    for _ in range(3):
        running.add(1, total=9)
    for _ in range(5):
        waiting.add(1)
    made = plan(running, waiting, Budget(5, 20))
    assert len(made.admitted) == 2
    for _ in range(2):
        running.add(1, total=9)
    assert plan(running, waiting, Budget(5, 20)).admitted == ()


def test_item_8_5_8_a_step_is_of_one_node_and_walk_and_they_take_turns():
    queue = Queue()
    places = [("n", "w"), ("n", "v"), ("m", "w"), ("n", "w")]
    for place in places:
        queue.add(1, total=9, place=place)
    seen = []
    for _ in range(6):
        made = plan(queue)
        assert {(one.work.node, one.work.walk) for one, _ in made.rows} == {(made.node, made.walk)}
        seen.append((made.node, made.walk, len(made.rows)))
        queue.serve(made)
    assert seen == [("n", "w", 2), ("n", "v", 1), ("m", "w", 1)] * 2


def test_a_higher_priority_chooses_the_walk():
    queue = Queue()
    queue.add(1, place=("n", "w"))
    queue.add(1, place=("n", "v"), priority=1, turn=7)
    assert plan(queue).walk == "v"


def test_the_plan_changes_nothing():
    running, waiting = Queue(), Queue("w")
    running.add(30)
    waiting.add(30)
    first = plan(running, waiting)
    assert plan(running, waiting) == first
    assert running.requests[0].turn == waiting.requests[0].turn == 0
    assert waiting.requests[0].status is Status.WAITING


def test_single_tokens_lie_before_longer_rows():
    running = Queue()
    running.add(6, turn=1)
    running.add(1, total=3, turn=1)
    running.add(6, turn=0)
    running.add(1, total=3, turn=0)
    assert [span for _, span in plan(running).rows] == [1, 1, 6, 6]


@pytest.mark.parametrize(("tokens", "running"), [(0, 1), (1, 0), (-1, 5)])
def test_a_budget_of_nothing_is_refused(tokens, running):
    with pytest.raises(ConfigurationError, match="at least one token and one request"):
        Budget(tokens, running)


@pytest.mark.parametrize(("remaining", "total"), [(0, 5), (-1, 5), (6, 5)])
def test_work_is_something_and_within_its_total(remaining, total):
    with pytest.raises(ValueError, match="must be from 1 to total"):
        Work("n", "w", remaining, total)


def test_work_that_is_not_kept_may_be_more_than_its_total():
    assert Work("n", "w", 6, 5, kept=False).remaining == 6
    with pytest.raises(ValueError, match="must be from 1 to total"):
        Work("n", "w", 0, 5, kept=False)
