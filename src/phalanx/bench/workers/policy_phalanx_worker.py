"""Phalanx itself, through its public Engine, in this process."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from policy_protocol import Floats, Observation, Start, serve  # type: ignore[import-not-found]

import phalanx
from phalanx.engine.engine import Engine
from phalanx.engine.registry import plugin_class
from phalanx.engine_config import DeviceConfig, EngineArgs, EngineConfig, RuntimeConfig
from phalanx.schema.plugin_args import build_plugin_args

PLUGIN = "pi05"


class Phalanx:
    def __init__(self, start: Start) -> None:
        plugin = plugin_class(PLUGIN)
        heads = {"vision_num_heads": start.geometry["vision_num_heads"]}
        values = {
            "checkpoint_dir": start.checkpoint,
            "config": heads,
            "max_batch_size": start.rows,
        }
        args = build_plugin_args(plugin.args_cls, values, "benchmark")
        config = EngineConfig(
            DeviceConfig("cpu", start.dtype), RuntimeConfig(num_threads=start.threads)
        )
        self._engine = Engine(EngineArgs(PLUGIN, args, config))
        self._request_cls = plugin.request_cls
        self._actions = start.geometry["action_dim"]

    def chunks(self, observations: Sequence[Observation]) -> list[Floats]:
        pending = [self._engine.submit(self._request(each)) for each in observations]
        outputs = [each.result() for each in pending]
        return [output[0, :, : self._actions].float().numpy() for output in outputs]

    def describe(self) -> str:
        return f"phalanx {phalanx.__version__}, torch {torch.__version__}"

    def close(self) -> None:
        self._engine.close()

    def _request(self, observation: Observation) -> object:
        there = np.arange(len(observation.images)) < observation.num_cameras
        return self._request_cls(
            torch.from_numpy(observation.images)[None] * 2.0 - 1.0,
            torch.from_numpy(observation.tokens)[None],
            torch.from_numpy(observation.mask).sum()[None],
            torch.from_numpy(observation.noise)[None],
            image_masks=torch.from_numpy(there)[None],
        )


if __name__ == "__main__":
    serve(Phalanx)
