"""One address in front of many model servers: adapters, resolver, relay. Loads no torch."""
