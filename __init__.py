"""Headstart trains draft heads for speculative decoding, proves them lossless and measures their acceptance."""

__version__ = "0.1.0"
