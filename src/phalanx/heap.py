"""What becomes of memory that a process frees: kept for the next payload, or given back at once."""

from __future__ import annotations

import ctypes
import sys

# Names and numbers of <malloc.h>. The first takes no more than this.
_M_MMAP_THRESHOLD, _MAX_MMAP_THRESHOLD_BYTES = -3, 32 * 1024 * 1024
_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES = -1, 128 * 1024 * 1024


def keep_freed_memory() -> None:
    """Let this process's allocator return less to the system, where it is glibc's.

    Otherwise each payload's arrays are mapped anew, and their page faults cost several times what
    copying the payload costs.
    """
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_M_MMAP_THRESHOLD, _MAX_MMAP_THRESHOLD_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES)


def give_back_freed_memory() -> None:
    """Return all that is free in this process's heap to the system, where it is glibc's."""
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
