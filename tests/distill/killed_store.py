"""Writes a batch's whole life to a store on a disk, and kills itself with SIGKILL at the n-th call
that changes a file. Prints a word for each step that is done.

python killed_store.py DIRECTORY N
"""

from __future__ import annotations

import os
import signal
import sys

import msgspec

from phalanx.distill import DiskStore, Scoring, Stage, StoredBatch
from phalanx.testing.sample_store_conformance import scored, stored_samples

_CHANGES = {"open", "os.rename", "os.remove", "os.truncate", "os.mkdir", "os.unlink"}


def main(directory: str, nth: int) -> None:
    left = nth
    is_armed = False

    def hook(event: str, args: tuple[object, ...]) -> None:
        nonlocal left
        if is_armed and event in _CHANGES and str(args[0]).startswith(directory):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def done(word: str) -> None:
        os.write(1, word.encode() + b"\n")

    samples = stored_samples()
    whole = tuple(scored(one, -1.0) for one in samples)
    batch = StoredBatch(batch_id="one", stage=Stage.COLLECTING, needs=(Scoring.TEACHER,))
    sys.addaudithook(hook)
    store = DiskStore(directory)
    is_armed = True
    store.save(batch)
    done("collecting")
    store.note("one", samples[:1])
    done("noted")
    store.note("one", samples[1:2])
    done("noted")
    batch = msgspec.structs.replace(batch, stage=Stage.STAGED, samples=samples)
    store.save(batch)
    done("staged")
    store.note("one", whole[:1])
    done("noted")
    batch = msgspec.structs.replace(
        batch, stage=Stage.SCORED, samples=whole, done=(Scoring.TEACHER,)
    )
    store.save(batch)
    done("scored")
    store.save(msgspec.structs.replace(batch, stage=Stage.VALIDATED))
    done("validated")
    assert store.publish("one")
    done("published")
    store.consume("one")
    done("consumed")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
