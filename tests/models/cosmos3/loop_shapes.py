"""The layouts of the stored loops' media."""

from __future__ import annotations

from dataclasses import replace

from phalanx.models.cosmos3.geometry import MediaShape

_FIRST = frozenset({0})
_VIDEO = MediaShape((3, 3, 4), fps=24.0)
_POLICY = MediaShape((3, 3, 4), fps=15.0, action_rows=8, clean_frames=_FIRST)

SHAPES = {
    "loop_t2v": _VIDEO,
    "loop_t2v_sound": replace(_VIDEO, sound_frames=10),
    "loop_i2v_karras": MediaShape((3, 3, 4), fps=16.0, clean_frames=_FIRST),
    "loop_t2i": MediaShape((1, 3, 4), fps=24.0),
    "loop_policy": _POLICY,
    "loop_policy_state": replace(_POLICY, action_rows=9, has_state=True, clean_rows=_FIRST),
    "loop_forward_dynamics": replace(_POLICY, clean_rows=frozenset(range(8))),
}
