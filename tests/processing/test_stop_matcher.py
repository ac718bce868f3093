"""Where a text ends, whatever the pieces it comes in."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.errors import InvalidRequestError
from phalanx.processing.text import StopMatcher, compile_stop_regex


def run(matcher: StopMatcher, pieces: list[str]) -> tuple[str, str | None]:
    text = ""
    for piece in pieces:
        emitted, matched = matcher.feed(piece)
        text += emitted
        if matched is not None:
            return text, matched
    return text + matcher.finish(), None


def cut(text: str, at: list[int]) -> list[str]:
    points = [0, *sorted(point for point in at if point <= len(text)), len(text)]
    return [text[a:b] for a, b in zip(points, points[1:], strict=False)]


def reference(text: str, stops: list[str]) -> tuple[str, str | None]:
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("ab\n", max_size=20),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=4),
    at=st.lists(st.integers(0, 20), max_size=6),
)
def test_result_does_not_depend_on_the_pieces(text, stops, at):
    assert run(StopMatcher(stops), cut(text, at)) == reference(text, stops)


def test_holds_back_only_what_could_still_stop():
    matcher = StopMatcher(["</end>"])
    assert matcher.feed("text <") == ("text ", None)
    assert matcher.feed("/e") == ("", None)
    assert matcher.feed("x") == ("</ex", None)
    assert matcher.feed("</end> rest") == ("", "</end>")


def test_finish_gives_back_what_was_held():
    matcher = StopMatcher(["stop"])
    assert matcher.feed("do not sto") == ("do not ", None)
    assert matcher.finish() == "sto"


def test_no_stop_trim_keeps_the_string_and_drops_the_rest():
    assert run(StopMatcher(["END"], no_stop_trim=True), ["a EN", "D tail"]) == ("a END", "END")


def test_thousands_of_overlapping_stop_strings_are_bounded_work():
    stops = ["a" * length + "b" for length in range(1, 257)]
    text, matched = run(StopMatcher(stops), ["a" * 50] * 20 + ["c"])
    assert (len(text), matched) == (1001, None)


def test_expression_ends_the_text_and_stays_in_it():
    matched = run(StopMatcher([], compile_stop_regex([r"\d{3}"])), ["call 1", "2", "34 now"])
    assert matched == ("call 123", r"\d{3}")


def test_the_match_that_ends_first_wins():
    assert run(StopMatcher(["zz"], compile_stop_regex([r"\d"])), ["a 1 zz"]) == ("a 1", r"\d")
    assert run(StopMatcher(["zz"], compile_stop_regex([r"\d"])), ["a zz 1"]) == ("a ", "zz")


def test_expression_sees_the_true_beginning_of_the_text_only():
    pieces = ["x"] * 5000 + ["b"]
    assert run(StopMatcher([], compile_stop_regex(["^b"])), pieces)[1] is None
    assert run(StopMatcher([], compile_stop_regex([r"\bb"])), pieces)[1] is None
    assert run(StopMatcher([], compile_stop_regex(["xb"])), pieces)[1] == "xb"


def test_expression_that_can_never_match_changes_nothing():
    assert run(StopMatcher([], compile_stop_regex([r"[^\s\S]"])), ["abc", "def"]) == (
        "abcdef",
        None,
    )


@pytest.mark.parametrize(
    "expression", ["(", "a(?=b)", r"(a)\1", "((a{100}){100}){100}", "x*", "(?<!a)b"]
)
def test_unusable_expression_is_refused_by_name(expression):
    with pytest.raises(InvalidRequestError, match="stop_regex") as caught:
        compile_stop_regex([expression])
    assert caught.value.field == "stop_regex"


def test_backtracking_trap_is_linear():
    text, matched = run(StopMatcher([], compile_stop_regex(["(a+)+$b"])), ["a" * 1000] * 5)
    assert (len(text), matched) == (5000, None)


def test_matchers_share_compiled_expressions():
    patterns = compile_stop_regex([r"\d\d"])
    first, second = StopMatcher([], patterns), StopMatcher([], patterns)
    assert [first.feed("a1"), second.feed("b1")] == [("a1", None), ("b1", None)]
    assert first.feed("2") == ("2", r"\d\d")
    assert second.feed("x2") == ("x2", None)
