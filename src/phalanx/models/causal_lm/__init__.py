"""Decoder-only language models: Llama, Qwen2 and Qwen3."""

from phalanx.models.causal_lm.args import CausalLMArgs

__all__ = ["CausalLMArgs"]
