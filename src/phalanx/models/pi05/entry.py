"""The `pi05` plugin: pi0.5, requests that arrive together in one forward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from phalanx.models.pi.args import vision_dtype
from phalanx.models.pi.building import PolicyKind, PolicyOptions, build_service, load_policy
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
        from phalanx.models.pi.serving import PiServing
        from phalanx.models.pi05.serving import PI05Serving
        from phalanx.processing.policy.openpi import OpenpiKind

        shapes = args.inputs_image_shape
        return PI05Serving(PiServing(PI05, OpenpiKind.pi05(), options_of(args), shapes, settings))

    def load(self, args: PI05Args) -> PolicyService:
        config = args.config or PI05Config()
        value_from = config.value_from if config.add_value_head else None
        kind = replace(PI05, make_expert=partial(PI05Expert, value_from=value_from))
        policy = load_policy(kind, options_of(args))
        captured = args.capture_rollout
        return build_service(policy, args.max_batch_size, captures_rollouts=captured)

    def start(self, rid: str, request: PI05Request) -> None:
        if isinstance(request, PI05RolloutRequest):
            noise, valued = request.step_noise, request.compute_values
            self._service.start_rollout(rid, request, request.sigmas, noise, with_values=valued)
        else:
            self._service.start(rid, request)


def options_of(args: PI05Args) -> PolicyOptions:
    shapes = args.inputs_image_shape
    return PolicyOptions(
        checkpoint_dir=args.checkpoint_dir,
        config=args.config,
        num_cameras=None if shapes is None else len(shapes),
        weight_remap=args.weight_remap,
        weight_strict=args.weight_strict,
        vision_dtype=vision_dtype(args.vision_params_dtype),
        native_operators=args.native_operators,
    )
