"""A plan as a picture: who is on which device in which phase, in as many rows as fit."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace

from phalanx.roles.placement.picture import Picture, colours, picture
from phalanx.roles.placement.planner import plan
from phalanx.roles.placement.svg import is_dark, svg
from phalanx.schema.roles import InferenceModelSpec
from tests.roles.placement.requests import (
    DECOUPLED,
    DEFER,
    SPLIT,
    group,
    nodes,
    request,
    role,
)

SVG = "{http://www.w3.org/2000/svg}"


def table(drawn: Picture) -> dict[str, list[str]]:
    """Labels of cells by row: in brackets where the phase is another's."""
    rows = {}
    for row in drawn.rows:
        rows[row.label] = [
            "-" if cell is None else cell.label if cell.active else f"({cell.label})"
            for cell in row.cells
        ]
    return rows


def three(mode, *sizes: int, **fields):
    roles = role("rollout", group(2, 2)), role("genrm"), role("teacher", group(1, 2))
    return plan(request(mode, nodes(*sizes), *roles, **fields))


def test_where_roles_take_turns_a_device_has_another_one_in_each_phase():
    drawn = picture(three(DEFER, 2, 3, trainer_devices=4), 10)
    assert drawn.phases == ("rollout", "genrm", "teacher", "train")
    assert table(drawn) == {
        "n0:0": ["rollout-model/0", "genrm-model/0", "teacher-model/0", "trainer"],
        "n0:1": ["rollout-model/0", "-", "teacher-model/0", "trainer"],
        "n1:0": ["rollout-model/1", "-", "-", "trainer"],
        "n1:1": ["rollout-model/1", "-", "-", "trainer"],
        "n1:2": ["-", "-", "-", "-"],
    }


def test_where_nobody_gives_way_a_device_is_held_in_all_phases():
    drawn = picture(three(SPLIT, 8, trainer_devices=1), 10)
    rows = table(drawn)
    assert rows["n0:0"] == ["rollout-model/0"] + ["(rollout-model/0)"] * 3
    assert rows["n0:4"] == ["(genrm-model/0)", "genrm-model/0"] + ["(genrm-model/0)"] * 2
    assert rows["n0:7"] == ["(trainer)"] * 3 + ["trainer"]
    assert table(picture(three(DECOUPLED, 8, trainer_devices=1), 10)) == rows


def test_bundles_to_scale_into_are_the_roles():
    asked = request(SPLIT, nodes(3), role("rollout", group(1, 1, bundles=[0, 1])))
    assert [row[0] for row in table(picture(plan(asked), 10)).values()] == [
        "rollout-model/0",
        "rollout (to scale)",
        "-",
    ]


def test_many_devices_are_folded_where_they_look_alike():
    roles = role("rollout", group(5000)), role("genrm", group(2500, 2))
    made = plan(request(SPLIT, nodes(*[8] * 1250), *roles))
    assert table(picture(made, 16)) == {
        "n0:0 to n624:7 (5,000)": ["rollout-model/0..4999"] + ["(rollout-model/0..4999)"] * 2,
        "n625:0 to n1249:7 (5,000)": [
            "(genrm-model/0..2499)",
            "genrm-model/0..2499",
            "(genrm-model/0..2499)",
        ],
    }
    few = plan(request(SPLIT, nodes(4), role("rollout", group(1, 2)), role("genrm", group(2))))
    assert list(table(picture(few, 3))) == ["n0:0-1 (2)", "n0:2", "n0:3"]


def test_nodes_that_look_alike_are_folded_device_by_device():
    made = plan(
        request(SPLIT, nodes(*[4] * 30), role("rollout", group(20, 3)), role("genrm", group(20)))
    )
    assert table(picture(made, 8)) == {
        "n0:0-2 to n19:0-2 (60)": ["rollout-model/0..19", *["(rollout-model/0..19)"] * 2],
        "n0:3 to n19:3 (20)": ["(genrm-model/0..19)", "genrm-model/0..19", "(genrm-model/0..19)"],
        "n20:0-3 to n29:0-3 (40)": ["-", "-", "-"],
    }
    assert picture(made, 8).num_hidden == 0
    assert (len(picture(made, 2).rows), picture(made, 2).num_hidden) == (2, 40)


def test_what_does_not_fold_is_counted():
    roles = [role(f"r{number}") for number in range(12)]
    drawn = picture(plan(request(SPLIT, nodes(12), *roles)), 5)
    assert len(drawn.rows) == 5
    assert drawn.num_hidden == 7


def test_models_of_the_same_name_are_told_apart():
    model = InferenceModelSpec("default", "/m", (group(),))
    roles = [replace(role(name), models=(model,)) for name in ("rollout", "genrm")]
    rows = table(picture(plan(request(SPLIT, nodes(2), *roles)), 5))
    assert [row[0] for row in rows.values()] == ["rollout default/0", "(genrm default/0)"]


def test_every_role_has_a_colour_of_its_own():
    made = plan(request(SPLIT, nodes(9), *(role(f"r{number}") for number in range(8))))
    assert len(set(colours(made).values())) == 9
    assert is_dark("#000000") and not is_dark("#ffffff")
    assert not is_dark("#ee6677"), "white on it is hard to read"


def test_the_svg_is_the_same_picture_with_a_legend():
    drawn = picture(three(DEFER, 2, 3, trainer_devices=4), 10)
    tree = ET.fromstring(svg(drawn, "a <b> & c"))
    texts = [element.text for element in tree.iter(f"{SVG}text")]
    assert texts[0] == "a <b> & c"
    assert {"rollout", "genrm", "teacher", "trainer"} <= set(texts)
    assert texts.count("rollout-model/0") == 2
    assert [row.label for row in drawn.rows] == [text for text in texts if text in table(drawn)]
    width, height = float(tree.get("width")), float(tree.get("height"))
    for each in tree.iter(f"{SVG}rect"):
        if each.get("width") != "100%":
            assert float(each.get("x")) + float(each.get("width")) <= width
            assert float(each.get("y")) + float(each.get("height")) <= height


def test_the_svg_says_what_it_leaves_out_and_is_paler_where_a_phase_is_anothers():
    roles = [role(f"r{number}") for number in range(12)]
    text = svg(picture(plan(request(SPLIT, nodes(12), *roles)), 5), "t")
    assert "and 7 more devices" in text
    assert 'fill-opacity="0.35"' in text
    assert "paler: resident, while the phase is another&apos;s" in text.replace("'", "&apos;")
    by_turns = svg(picture(three(DEFER, 4), 9), "t")
    assert 'fill-opacity="0.35"' not in by_turns and "paler" not in by_turns
