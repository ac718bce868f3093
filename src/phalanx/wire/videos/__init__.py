"""`POST /v1/videos/generations`: one video of a text, as JSON asks for it."""

from phalanx.wire.videos.answer import answer_body, completed_event, progress_event
from phalanx.wire.videos.call import ResponseForm, VideoCall, parse_video_call
from phalanx.wire.videos.media import read_clip_file, read_image_file

__all__ = [
    "ResponseForm",
    "VideoCall",
    "answer_body",
    "completed_event",
    "parse_video_call",
    "progress_event",
    "read_clip_file",
    "read_image_file",
]
