"""What a model server needs of a checkpoint beside the model: its tokenizer and its facts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from phalanx.errors import CheckpointError
from phalanx.layers.weight_files import check_weight_files
from phalanx.models.causal_lm.args import CausalLMArgs
from phalanx.processing.text import TextTokenizer
from phalanx.processing.text.files import read_json

FACTS = ("model_type", "architectures", "vocab_size", "hidden_size", "num_hidden_layers")


class CausalLMServing:
    """Reads a checkpoint directory without loading its weights, and without torch."""

    def __init__(self, args: CausalLMArgs) -> None:
        """Raises `CheckpointError` naming the file that is missing, broken or cut short."""
        self._directory = Path(args.checkpoint_dir)
        if not self._directory.is_dir():
            raise CheckpointError(
                f"checkpoint_dir={str(self._directory)!r} is not a directory; give the directory "
                "that holds config.json, the weights and the tokenizer"
            )
        self._config = read_json(self._directory / "config.json", required=True)
        self._context_length = args.context_length
        self._tokenizer = TextTokenizer(self._directory)
        check_weight_files(self._directory)

    @property
    def tokenizer(self) -> TextTokenizer:
        return self._tokenizer

    @property
    def model_info(self) -> dict[str, Any]:
        """The fields of `/model_info` that the checkpoint decides."""
        facts = {name: self._config[name] for name in FACTS if name in self._config}
        return {
            "model_path": str(self._directory),
            "tokenizer_path": str(self._directory),
            "context_length": self._context_length or self._config.get("max_position_embeddings"),
            "eos_token_ids": list(self._tokenizer.eos_token_ids),
            "has_chat_template": self._tokenizer.chat_template is not None,
            **facts,
        }
