"""The `pi0` plugin: pi0, requests that arrive together in one forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.errors import CheckpointError
from phalanx.models.pi.building import PolicyKind, build_service, load_policy
from phalanx.models.pi.entry import PiEntry
from phalanx.models.pi.geometry import cameras_of
from phalanx.models.pi.request import check_pi_request, check_state
from phalanx.models.pi.service import PolicyService
from phalanx.models.pi0.args import PI0Args
from phalanx.models.pi0.config import PI0_BASE
from phalanx.models.pi0.expert import PI0Expert
from phalanx.models.pi0.request import PI0Request
from phalanx.plugin import PolicyAdapter
from phalanx.schema.limits import Limits


def filled_cameras_of(stored: Mapping[str, Any]) -> int | None:
    """How many cameras `config.json` names that are not always empty."""
    cameras, empty = cameras_of(stored), stored.get("empty_cameras", 0)
    if cameras is None:
        return None
    if isinstance(empty, bool) or not isinstance(empty, int) or not 0 <= empty < cameras:
        raise CheckpointError(
            f"config.json: empty_cameras={empty!r} of {cameras} cameras; at least one must be filled"
        )
    return cameras - empty


PI0 = PolicyKind(PI0_BASE, PI0Expert, filled_cameras_of)


class PI0Entry(PiEntry):
    """pi0 from a directory of LeRobot or openpi."""

    name = "pi0"
    args_cls = PI0Args
    request_cls = PI0Request

    @staticmethod
    def validate(request: PI0Request, limits: Limits) -> None:
        """Refuse wrong shapes and dtypes, numbers that are not finite, and tokens out of range."""
        check_pi_request(request, limits)
        check_state(request.state, len(request.input_ids), limits)

    @classmethod
    def policy(cls, args: PI0Args, settings: Mapping[str, Any]) -> PolicyAdapter:
        from phalanx.models.pi0.serving import PI0Serving
        from phalanx.processing.policy.openpi import OpenpiKind

        return PI0Serving(PI0, OpenpiKind.pi0(), args, settings)

    def load(self, args: PI0Args) -> PolicyService:
        return build_service(load_policy(PI0, args), args.max_batch_size)

    def start(self, rid: str, request: PI0Request) -> None:
        self._service.start(rid, request, request.state)
