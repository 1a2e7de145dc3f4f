"""Importing hicache is quick: names are loaded when they are first used, and no engine, server or backend with them."""

__version__ = "0.1.0"
