"""The version of this package: apart, so that every layer may import it."""

__version__ = "0.1.0.dev0"
