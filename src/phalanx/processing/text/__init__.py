"""Text in and out of token ids: tokenizer, chat template, incremental decoding, stop conditions."""

from phalanx.processing.text.chat_template import ChatTemplate
from phalanx.processing.text.detokenizer import IncrementalDetokenizer
from phalanx.processing.text.stop_matcher import StopMatcher, StopStrings
from phalanx.processing.text.stop_regex import StopPattern, compile_stop_regex
from phalanx.processing.text.tokenizer import TextTokenizer

__all__ = [
    "ChatTemplate",
    "IncrementalDetokenizer",
    "StopMatcher",
    "StopPattern",
    "StopStrings",
    "TextTokenizer",
    "compile_stop_regex",
]
