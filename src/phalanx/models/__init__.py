"""Built-in plugins, found through the `phalanx.models` entry-point group like anybody's."""
