"""Reading pages that another engine holds: over shared memory on one machine, else over TCP."""
