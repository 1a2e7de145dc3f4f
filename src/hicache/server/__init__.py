"""An OpenAI-compatible HTTP server over the engine: the same tokens as the engine gives, and where they came from."""

from hicache.server.app import build_app
from hicache.server.launch import run

__all__ = ["build_app", "run"]
