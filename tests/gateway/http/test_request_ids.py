"""A caller's own id where it can be used, else one that no other request has."""

from __future__ import annotations

from phalanx.gateway.http.request_ids import MAX_LENGTH, RequestIds


def test_new_ids_are_of_one_form_and_never_the_same():
    ids = RequestIds()
    made = [ids.of(None) for _ in range(3 * 4096)]
    assert len(set(made)) == len(made)
    assert made == sorted(made)
    assert {len(each) for each in made} == {32}
    assert all(int(each, 16) >= 0 for each in made)


def test_two_gateways_make_different_ones():
    assert RequestIds().of(None) != RequestIds().of(None)


def test_an_id_that_is_given_is_kept_where_it_can_be():
    ids = RequestIds()
    assert ids.of(b"mine") == b"mine"
    for given in (b"", b" mine", b"\xff", b"x" * (MAX_LENGTH + 1)):
        assert ids.of(given) != given
