"""Where a policy's tokenizer is: told, in the checkpoint, or saved beside it."""

from __future__ import annotations

from pathlib import Path

from phalanx.errors import CheckpointError, ConfigurationError

TOKENIZER_FILE = "tokenizer.json"


def find_tokenizer(checkpoint: Path, given: Path | None, name: str | None) -> Path:
    """The folder with `tokenizer.json`: `given`, else the checkpoint, else a folder of it.

    `name` is what the processor file calls it. A name on a hub is not looked up: nothing here goes
    out to a network. Raises `ConfigurationError` for a wrong `given`, else `CheckpointError`.
    """
    if given is not None:
        if not (given / TOKENIZER_FILE).is_file():
            raise ConfigurationError(
                f"tokenizer_dir={str(given)!r} has no {TOKENIZER_FILE}; give the folder of the "
                "policy's tokenizer"
            )
        return given
    folders = [checkpoint]
    if name is not None and ".." not in Path(name).parts and not Path(name).is_absolute():
        folders.append(checkpoint / name)
    folders += sorted(path for path in checkpoint.iterdir() if path.is_dir())
    for folder in folders:
        if (folder / TOKENIZER_FILE).is_file():
            return folder
    wanted = "the policy's tokenizer" if name is None else f"the tokenizer {name!r}"
    raise CheckpointError(
        f"{checkpoint} has no {TOKENIZER_FILE}, in itself or in a folder of it; download {wanted} "
        "and say where it is: tokenizer_dir in adapter.args"
    )
