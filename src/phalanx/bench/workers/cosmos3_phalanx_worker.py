"""Phalanx itself, through its public Engine: in this process, or in two that share the branches."""

from __future__ import annotations

import os
import socket
import time
from typing import Any

import psutil
import torch
from cosmos3_protocol import (  # type: ignore[import-not-found]
    DOMAIN_ID,
    RAW_ACTION_DIM,
    Floats,
    Inputs,
    Start,
    arguments,
    latent_shape,
    no_actions,
    serve,
)

import phalanx
from phalanx import DeploymentConfig, DeviceConfig, Engine, EngineArgs, EngineConfig, RuntimeConfig
from phalanx.engine.registry import plugin_class
from phalanx.schema.parallel import OuterParallelConfig, ParallelConfig
from phalanx.schema.plugin_args import build_plugin_args
from phalanx.server import WorkerSupervisorConfig

MOST_TEXT = 512


class Phalanx:
    def __init__(self, start: Start) -> None:
        name = "cosmos3_policy" if start.policy else "cosmos3"
        plugin = plugin_class(name)
        values = {"checkpoint_dir": start.checkpoint, "max_text_tokens": MOST_TEXT}
        args = build_plugin_args(plugin.args_cls, values, "benchmark")
        config = EngineConfig(
            DeviceConfig(start.device, start.dtype),
            RuntimeConfig(num_threads=start.threads),
            ParallelConfig(outer=OuterParallelConfig(cfg_size=start.num_ranks)),
        )
        deployment = DeploymentConfig()
        if start.num_ranks > 1:
            process = WorkerSupervisorConfig(base_port=_free_port())
            deployment = DeploymentConfig.local(replica_count=1, process_config=process)
        self._engine = Engine(EngineArgs(name, args, config), deployment=deployment)
        self._request_cls = plugin.request_cls
        self._start = start

    def latents(self, inputs: Inputs) -> tuple[Floats, Floats]:
        values = self._values(inputs)
        if not self._start.policy:
            video = self._engine.step(self._request_cls(**values, output="latents")).video
            return video.cpu().numpy(), no_actions()
        answer = self._engine.step(self._request_cls(**values, **self._of_actions(inputs)))
        return answer.video.cpu().numpy(), answer.action[0].cpu().numpy()

    def processor_s(self) -> dict[int, float]:
        # Of other processes there are hundredths of a second, of this one more than that.
        found = {os.getpid(): time.process_time()}
        for process in psutil.Process().children(recursive=True):
            times = process.cpu_times()
            found[process.pid] = times.user + times.system
        return found

    def rate(self) -> float:
        """Operations a second of large matrix products on the device, the best of some."""
        dtype = getattr(torch, self._start.dtype)
        size = 8192 if self._start.device != "cpu" else 512
        one, other = torch.randn(2, size, size, device=self._start.device).to(dtype)
        best_s = float("inf")
        for _ in range(5):
            began_s = time.perf_counter()
            for _ in range(10):
                product = one @ other
            product[0, 0].item()  # waits for all of them
            best_s = min(best_s, time.perf_counter() - began_s)
        return 10 * 2 * size**3 / best_s

    def describe(self) -> str:
        ranks = self._start.num_ranks
        where = f", {ranks} processes" if ranks > 1 else ""
        return f"phalanx {phalanx.__version__}, torch {torch.__version__}{where}"

    def close(self) -> None:
        self._engine.close()

    def _values(self, inputs: Inputs) -> dict[str, Any]:
        text, negative = (torch.tensor([ids]) for ids in (inputs.prompt, inputs.negative))
        return {
            "text_ids": text,
            "text_mask": torch.ones_like(text),
            "neg_text_ids": negative,
            "neg_text_mask": torch.ones_like(negative),
            "video_shape": latent_shape(inputs.case),
            "noise": torch.from_numpy(inputs.noise),
            **arguments(inputs),
        }

    def _of_actions(self, inputs: Inputs) -> dict[str, Any]:
        return {
            "mode": "policy",
            "domain_id": DOMAIN_ID,
            "action_chunk": inputs.case.action_rows,
            "raw_action_dim": RAW_ACTION_DIM,
            "action_dim": self._start.action_dim,
            "action_noise": torch.from_numpy(inputs.action_noise)[None],
            "cond_video_latents": torch.from_numpy(inputs.known),
        }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    serve(Phalanx)
