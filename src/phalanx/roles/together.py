"""Several things at once: until the first fails, or all of them to their ends."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable

from phalanx.errors import PhalanxError, RoleOperationError, RoleOperationFailedError


async def all_or_first_error(acts: Iterable[Coroutine[object, object, None]]) -> None:
    """The first failure cancels the others, which have ended when it is raised."""
    tasks = [asyncio.create_task(act) for act in acts]
    if not tasks:
        return
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def all_to_their_ends(
    acts: Iterable[Coroutine[object, object, None]],
) -> tuple[PhalanxError, ...]:
    """All of them; the failures. A fault of ours is raised, when all have ended."""
    results = await asyncio.gather(*acts, return_exceptions=True)
    failures: list[PhalanxError] = []
    for result in results:
        if isinstance(result, PhalanxError):
            failures.append(result)
        elif isinstance(result, BaseException):
            raise result
    return tuple(failures)


def raise_failures(what: str, failures: Iterable[PhalanxError]) -> None:
    """One error of all of them, if there are any: a refusal where nothing was begun anywhere."""
    failures = tuple(failures)
    if not failures:
        return
    if len(failures) == 1 and isinstance(failures[0], RoleOperationError):
        raise failures[0]
    text = "; ".join(str(failure) for failure in failures)
    raise RoleOperationFailedError(f"{what}: {text}") from failures[0]
