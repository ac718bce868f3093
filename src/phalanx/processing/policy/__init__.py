"""Between robots and policies: LeRobot's processing steps, read from and written to its files."""

from phalanx.processing.policy.adapter_settings import AdapterSettings, adapter_settings
from phalanx.processing.policy.pipeline import Pipeline, Processors
from phalanx.processing.policy.policy_processor import PolicyProcessor
from phalanx.processing.policy.processor_files import read_processors, write_processors
from phalanx.processing.policy.resize_with_pad import resize_with_pad, to_policy_range
from phalanx.processing.policy.step import ProcessorStep, Surroundings
from phalanx.processing.policy.transition import Transition

__all__ = [
    "AdapterSettings",
    "Pipeline",
    "PolicyProcessor",
    "ProcessorStep",
    "Processors",
    "Surroundings",
    "Transition",
    "adapter_settings",
    "read_processors",
    "resize_with_pad",
    "to_policy_range",
    "write_processors",
]
