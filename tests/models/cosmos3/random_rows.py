"""Requests of any size, as rows."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from phalanx.layers.unipc import FlowSchedule, SchedulerConfig
from phalanx.models.cosmos3.geometry import MediaShape
from phalanx.models.cosmos3.guidance import Guidance
from phalanx.models.cosmos3.media import MediaRow
from phalanx.models.cosmos3.row import RowInputs

CHANNELS, SOUND_DIM, ACTION_DIM, VOCABULARY, DOMAINS = 6, 5, 12, 96, 12


def texts(longest: int = 24):
    return st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=longest).map(tuple)


@st.composite
def shapes(draw) -> MediaShape:
    video = (draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 4)))
    rows, has_state = draw(st.integers(0, 4)), draw(st.booleans())
    has_state = has_state and rows > 0
    clean = draw(st.sampled_from((range(rows), range(int(has_state)))))
    return MediaShape(
        video,
        fps=draw(st.sampled_from((10.0, 15.0, 24.0))),
        sound_frames=draw(st.integers(0, 3)),
        action_rows=rows,
        has_state=has_state,
        clean_frames=frozenset(draw(st.sets(st.integers(0, video[0] - 1)))),
        clean_rows=frozenset(clean),
    )


@st.composite
def rows(draw) -> RowInputs:
    shape = draw(shapes())
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def noise(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    guidance = Guidance(
        draw(st.sampled_from((0.0, 1.0, 1.0, 3.0))),
        draw(st.sampled_from((None, None, (900, 1000), (0, 850), (1001, 1002)))),
    )
    config = SchedulerConfig(
        use_karras_sigmas=draw(st.booleans()), flow_shift=draw(st.sampled_from((1.0, 5.0)))
    )
    media = MediaRow(
        shape,
        0,
        noise(CHANNELS, *shape.video),
        noise(SOUND_DIM, shape.sound_frames) if shape.sound_frames else None,
        noise(shape.action_rows, ACTION_DIM) if shape.action_rows else None,
        draw(st.integers(0, DOMAINS - 1)),
    )
    raw = draw(st.integers(1, ACTION_DIM))
    known_actions = noise(shape.action_rows, ACTION_DIM)
    known_actions[:, raw:] = 0
    return RowInputs(
        prompt=draw(texts()),
        negative=draw(texts()) if guidance.guides else None,
        shape=shape,
        schedule=FlowSchedule.of(config, draw(st.integers(1, 4))),
        guidance=guidance,
        noise=media,
        raw_action_dim=raw,
        known=noise(CHANNELS, *shape.video),
        known_actions=known_actions,
    )
