"""Which bundles each replica and the trainer get, decided and checked before anything is made."""
