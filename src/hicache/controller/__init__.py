"""Complete or abort, never half; the controller's own failures shrink a hit, they never fail a request."""

from hicache.controller.agree import Agree, OneRank, Seen, Subject
from hicache.controller.controller import ControllerConfig, HybridCacheController, WritePolicy
from hicache.controller.flushes import Flush, Flushed
from hicache.controller.loads import LoadBack
from hicache.controller.patience import Patience, PrefetchPolicy
from hicache.controller.place import Place
from hicache.controller.prefetch import Prefetch
from hicache.controller.ranks import Channel, DistributedAgree, Exchange

__all__ = [
    "Agree",
    "Channel",
    "ControllerConfig",
    "DistributedAgree",
    "Exchange",
    "Flush",
    "Flushed",
    "HybridCacheController",
    "LoadBack",
    "OneRank",
    "Patience",
    "Place",
    "Prefetch",
    "PrefetchPolicy",
    "Seen",
    "Subject",
    "WritePolicy",
]
