"""Complete or abort, never half; the controller's own failures shrink a hit, they never fail a request."""

from hicache.controller.agree import Agree, OneRank
from hicache.controller.controller import ControllerConfig, HybridCacheController, WritePolicy
from hicache.controller.loads import LoadBack
from hicache.controller.prefetch import Prefetch

__all__ = [
    "Agree",
    "ControllerConfig",
    "HybridCacheController",
    "LoadBack",
    "OneRank",
    "Prefetch",
    "WritePolicy",
]
