"""Small tokenizer directories of the kinds that language models use, made on the spot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = (
    "The capital of France is Paris. The sea is wide and deep.",
    "List three fruits: apple, pear, plum; 12 and 345 of each.",
    "Grüße aus Köln, 北京 and 東京, naïve café, Привет 😀😁.",
    "def main():\n    return 'hello world'\n",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' "
    "+ message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_TOKEN = "<|im_end|>"


def write_byte_level_tokenizer(
    directory: Path, *, vocab_size: int = 400, more_special: Sequence[str] = ()
) -> Path:
    """A byte-level BPE with ChatML tokens and template; ids 0 to 2 are special, 2 ends a turn, and
    from 3 on there are `more_special` ones.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*SPECIAL_TOKENS, *more_special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _write(directory, tokenizer, eos_token=EOS_TOKEN)


def write_byte_fallback_tokenizer(directory: Path) -> Path:
    """A BPE as of Llama 2: spaces as U+2581, unknown characters as byte tokens, `<s>` in front."""
    alphabet = sorted(set("".join(CORPUS)) - set("北京東😀😁\n") | {"▁"})
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *alphabet]
    tokens += ["▁t", "▁th", "he"]
    vocabulary = {token: at for at, token in enumerate(dict.fromkeys(tokens))}
    merges = [("▁", "t"), ("▁t", "h"), ("h", "e")]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", vocabulary["<s>"])]
    )
    special = [AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")]
    tokenizer.add_special_tokens(special)
    return _write(directory, tokenizer, eos_token="</s>", bos_token="<s>")


def write_word_piece_tokenizer(directory: Path) -> Path:
    """A WordPiece vocabulary, whose pieces of one word begin with `##`."""
    words = ["[UNK]", "[CLS]", "[SEP]", "the", "sea", "is", "wide", "##r", "##s", ".", ",", "a"]
    tokenizer = Tokenizer(
        models.WordPiece(vocab={word: at for at, word in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[CLS]", "[SEP]"])
    return _write(directory, tokenizer, eos_token="[SEP]")


def _write(directory: Path, tokenizer: Tokenizer, **special_tokens: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {**special_tokens, "chat_template": CHAT_TEMPLATE}
    (directory / "tokenizer_config.json").write_bytes(msgspec.json.encode(config))
    return directory
