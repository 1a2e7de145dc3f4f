"""What `hicache simulate` can be told; the simulator itself is loaded when it runs."""

import argparse

from hicache.cli.flags import add_settings
from hicache.config import CacheConfig, parse_size

SEEDS, STEPS = 100, 300
_SETTINGS = frozenset(CacheConfig.model_fields) | {"max_running", "chunk_tokens", "preemption"}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """What `hicache simulate` can be told."""
    parser.add_argument("--seeds", type=int, default=SEEDS, metavar="N", help=f"seeds to run (default: {SEEDS})")
    parser.add_argument("--first-seed", type=int, default=0, metavar="N", help="the first of them (default: 0)")
    parser.add_argument("--steps", type=int, metavar="N", help=f"scheduler steps per seed (default: {STEPS})")
    parser.add_argument("--seed", type=int, metavar="N", help="run this seed only, and show its report")
    parser.add_argument("--trace", action="store_true", help="with --seed: print every event")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    machine = parser.add_argument_group("a machine that you state", "with --requests; no faults, and virtual seconds")
    machine.add_argument("--requests", type=int, metavar="N", help="how many, with the settings below")
    machine.add_argument(
        "--shape",
        default="full",
        metavar="KIND",
        help="kinds of state: full, window, state, latent, full+window, full+state, all",
    )
    machine.add_argument("--window", type=int, default=1024, metavar="TOKENS", help="of windows (default: 1024)")
    machine.add_argument(
        "--token-bytes", type=parse_size, default="128KiB", metavar="SIZE", help="of state (default: 128KiB)"
    )
    machine.add_argument("--step-ms", type=float, default=10.0, metavar="MS", help="a step at least (default: 10)")
    machine.add_argument("--prefill-rate", type=float, default=10_000.0, metavar="TOKENS/S", help="(default: 10000)")
    machine.add_argument(
        "--host-rate", type=parse_size, default="20GiB", metavar="SIZE/S", help="to host (default: 20GiB)"
    )
    machine.add_argument(
        "--storage-rate", type=parse_size, default="2GiB", metavar="SIZE/S", help="to storage (default: 2GiB)"
    )
    machine.add_argument("--storage-ms", type=float, default=1.0, metavar="MS", help="a call at least (default: 1)")
    machine.add_argument("--rate", type=float, default=2.0, metavar="N/S", help="requests per second (default: 2)")
    machine.add_argument("--prompt-tokens", type=int, default=4096, metavar="N", help="at most (default: 4096)")
    machine.add_argument("--answer-tokens", type=int, default=256, metavar="N", help="at most (default: 256)")
    machine.add_argument("--documents", type=int, default=8, metavar="N", help="what prompts begin with (default: 8)")
    add_settings(parser, _SETTINGS)
