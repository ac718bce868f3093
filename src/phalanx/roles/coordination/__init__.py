"""Which role may be resident when: phases, leases on bundles, and a journal of both."""
