"""The plugins `cosmos3` (videos) and `cosmos3_policy` (robots' actions): one model, two requests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from phalanx.errors import ConfigurationError
from phalanx.models.cosmos3.action_validation import check_action_request
from phalanx.models.cosmos3.answers import action_answer, video_answer
from phalanx.models.cosmos3.args import Cosmos3Args, Cosmos3PolicyArgs
from phalanx.models.cosmos3.building import build_service, load_model
from phalanx.models.cosmos3.checkpoint import FOLDER, read_config
from phalanx.models.cosmos3.request import (
    Cosmos3Action,
    Cosmos3ActionRequest,
    Cosmos3T2VRequest,
    Cosmos3Video,
)
from phalanx.models.cosmos3.service import Cosmos3Service
from phalanx.models.cosmos3.validation import check_video_request
from phalanx.plugin import PolicyAdapter, ServiceEntry, VideoAdapter
from phalanx.schema.limits import Limits
from phalanx.schema.parallel import ParallelConfig

CFG_SIZES = (1, 2)
TP_SIZES = (1, 2, 4, 8)


class Cosmos3Entry(ServiceEntry[Cosmos3Service]):
    """Over tensor-parallel ranks, and two ranks for the branches of guidance."""

    parallel_domains: ClassVar[frozenset[str]] = frozenset({"cfg", "dense", "attention"})

    @classmethod
    def validate_parallel(
        cls, parallel: ParallelConfig, replica_world_size: int | None = None
    ) -> None:
        """Accepts `cfg_size` 1 or 2 and the same tensor parallelism of 1, 2, 4 or 8 in dense layers
        and attention, and nothing else.
        """
        cfg = parallel.outer.cfg_size
        if cfg not in CFG_SIZES:
            raise ConfigurationError(
                f"plugin {cls.name!r} cannot run outer.cfg_size={cfg}: guidance has two branches; "
                "set it to 1, or to 2"
            )
        super().validate_parallel(parallel, replica_world_size)
        for name in ("dense", "attention", "moe"):
            domain = parallel.domain(name)
            if not domain.is_tp_only:
                raise ConfigurationError(
                    f"plugin {cls.name!r} splits a model by tensor parallelism only, the same in "
                    f"all layers, but {name} is {domain}; set dense.tp_size and attention.tp_size "
                    "and leave out the rest"
                )
        if replica_world_size is None:
            replica_world_size = parallel.infer_replica_world_size()
        resolved = parallel.resolve(replica_world_size)
        dense, attention = resolved.tp_size("dense"), resolved.tp_size("attention")
        if dense not in TP_SIZES or attention != dense:
            raise ConfigurationError(
                f"plugin {cls.name!r} cannot run dense.tp_size={dense} with attention.tp_size="
                f"{attention}; set both to the same of {', '.join(map(str, TP_SIZES))}"
            )

    @classmethod
    def validate_args(cls, args: Cosmos3Args, parallel: ParallelConfig) -> None:
        """Refuses ranks that the checkpoint does not divide by, where it is on this machine, and
        texts that the ranks of guidance have no room for.
        """
        args.check_branches(parallel.outer.cfg_size)
        directory = Path(args.checkpoint_dir)
        if (directory / FOLDER).is_dir():
            resolved = parallel.resolve(parallel.infer_replica_world_size())
            read_config(directory).check_tensor_parallel(resolved.tp_size("dense"))

    def start(self, rid: str, request: Cosmos3T2VRequest | Cosmos3ActionRequest) -> None:
        self._service.start(rid, request)


class Cosmos3(Cosmos3Entry):
    """Videos of a prompt, and of an image or a clip, with sound where the checkpoint has it."""

    name = "cosmos3"
    args_cls = Cosmos3Args
    request_cls = Cosmos3T2VRequest
    output_cls = Cosmos3Video

    @staticmethod
    def validate(request: Cosmos3T2VRequest, limits: Limits) -> None:
        """Refuse wrong shapes and dtypes, numbers that are not finite, and tokens out of range."""
        check_video_request(request, limits)

    @classmethod
    def videos(cls, args: Cosmos3Args, settings: Mapping[str, Any]) -> VideoAdapter:
        from phalanx.models.cosmos3.video_serving import Cosmos3Videos, video_settings

        return Cosmos3Videos(args, video_settings(settings))

    def load(self, args: Cosmos3Args) -> Cosmos3Service:
        return build_service(load_model(args), args, video_answer)


class Cosmos3Policy(Cosmos3Entry):
    """A robot's actions, or what it would see of given ones."""

    name = "cosmos3_policy"
    args_cls = Cosmos3PolicyArgs
    request_cls = Cosmos3ActionRequest
    output_cls = Cosmos3Action

    @staticmethod
    def validate(request: Cosmos3ActionRequest, limits: Limits) -> None:
        """As that of videos, and what a mode lacks or does not take."""
        check_action_request(request, limits)

    @classmethod
    def policy(cls, args: Cosmos3PolicyArgs, settings: Mapping[str, Any]) -> PolicyAdapter:
        from phalanx.models.cosmos3.policy_serving import Cosmos3PolicyServing
        from phalanx.models.cosmos3.policy_settings import policy_settings

        return Cosmos3PolicyServing(args, policy_settings(settings))

    def load(self, args: Cosmos3Args) -> Cosmos3Service:
        assert isinstance(args, Cosmos3PolicyArgs)
        decode_video = args.decode_video
        return build_service(load_model(args), args, action_answer, decode_video=decode_video)
