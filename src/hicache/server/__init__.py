"""An OpenAI-compatible HTTP server over the engine: the same tokens as the engine gives, and where they came from."""

from hicache.server.app import build_app

__all__ = ["build_app"]
