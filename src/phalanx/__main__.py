"""`python -m phalanx` is the command `phalanx`."""

from __future__ import annotations

from phalanx.cli.main import main

if __name__ == "__main__":
    main()
