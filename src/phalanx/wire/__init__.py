"""Protocols as typed bodies: parsing to the schema's values and rendering from them, no I/O."""
