"""The `pi05` plugin: pi0.5, requests that arrive together in one forward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from phalanx.models.pi.building import PolicyKind, build_service, load_policy
from phalanx.models.pi.entry import PiEntry
from phalanx.models.pi.geometry import cameras_of
from phalanx.models.pi.request import check_pi_request
from phalanx.models.pi.rollout import check_rollout_request
from phalanx.models.pi.service import PolicyService
from phalanx.models.pi05.args import PI05Args
from phalanx.models.pi05.config import PI05_BASE, PI05Config
from phalanx.models.pi05.expert import PI05Expert
from phalanx.models.pi05.request import PI05Request, PI05RolloutRequest
from phalanx.plugin import PolicyAdapter
from phalanx.schema.limits import Limits

PI05 = PolicyKind(PI05_BASE, PI05Expert, cameras_of)


class PI05Entry(PiEntry):
    """pi0.5 from a directory of LeRobot or openpi."""

    name = "pi05"
    args_cls = PI05Args
    request_cls = PI05Request
    rollout_cls = PI05RolloutRequest

    @staticmethod
    def validate(request: PI05Request, limits: Limits) -> None:
        """Refuse wrong shapes and dtypes, numbers that are not finite, and tokens out of range."""
        if not isinstance(request, PI05RolloutRequest):
            check_pi_request(request, limits)
            return
        noise, valued = request.step_noise, request.compute_values
        check_rollout_request(request, request.sigmas, noise, limits, compute_values=valued)

    @classmethod
    def policy(cls, args: PI05Args, settings: Mapping[str, Any]) -> PolicyAdapter:
        from phalanx.models.pi05.serving import PI05Serving
        from phalanx.processing.policy.openpi import OpenpiKind

        return PI05Serving(PI05, OpenpiKind.pi05(), args, settings)

    def load(self, args: PI05Args) -> PolicyService:
        config = args.config or PI05Config()
        value_from = config.value_from if config.add_value_head else None
        kind = replace(PI05, make_expert=partial(PI05Expert, value_from=value_from))
        policy = load_policy(kind, args)
        captured = args.capture_rollout
        return build_service(policy, args.max_batch_size, captures_rollouts=captured)

    def start(self, rid: str, request: PI05Request) -> None:
        if isinstance(request, PI05RolloutRequest):
            noise, valued = request.step_noise, request.compute_values
            self._service.start_rollout(rid, request, request.sigmas, noise, with_values=valued)
        else:
            self._service.start(rid, request)
