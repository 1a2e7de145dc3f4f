"""Every failure that a user can mend ends in one line on stderr: status 2 for a setting, 1 for anything else."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import TypeAlias

import hicache
from hicache.cli.bench_storage import add_bench_storage
from hicache.cli.flags import add_settings, settings_from
from hicache.cli.simulate_flags import add_flags
from hicache.cli.store_flags import add_store
from hicache.errors import CacheError, ConfigError

Command: TypeAlias = Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status comes back."""
    arguments = _parser().parse_args(argv)
    command: Command = arguments.command
    try:
        return command(arguments)
    except ConfigError as error:
        return _fail(str(error), status=2)
    except CacheError as error:
        return _fail(str(error), status=1)
    except ModuleNotFoundError as error:
        missing = (error.name or "hicache").partition(".")[0]
        if missing == "hicache":
            raise
        return _fail(f'{missing} is not installed; try: pip install "hicache[server]"', status=1)
    except KeyboardInterrupt:
        return 130


def _fail(message: str, *, status: int) -> int:
    print(f"hicache: {message}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("hicache", description=hicache.__doc__, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"hicache {hicache.__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="show on a real model what each tier saves", allow_abbrev=False)
    demo.add_argument("--json", action="store_true", help="print the rows as JSON")
    add_settings(demo)
    demo.set_defaults(command=_demo)

    serve = commands.add_parser("serve", help="serve a model with an OpenAI-compatible API", allow_abbrev=False)
    add_settings(serve)
    serve.set_defaults(command=_serve)

    bench = commands.add_parser("bench", help="measure a part of hicache", allow_abbrev=False)
    parts = bench.add_subparsers(title="parts", required=True, metavar="PART")
    tree = parts.add_parser("tree", help="match, insert and evict on a large tree", allow_abbrev=False)
    tree.add_argument("--page", type=int, default=64, metavar="TOKENS", help="tokens per page (default: 64)")
    tree.add_argument("--json", action="store_true", help="print the figures as JSON")
    tree.set_defaults(command=_bench_tree)
    add_bench_storage(parts)
    exact = parts.add_parser("exact", help="show for every family that what is cached is exact", allow_abbrev=False)
    exact.add_argument(
        "--families", default="", metavar="NAME,NAME", help="model types of transformers (default: all of them)"
    )
    exact.add_argument("--short", action="store_true", help="fewer lengths and shorter answers")
    exact.add_argument("--json", action="store_true", help="print the rows as JSON")
    exact.set_defaults(command=_bench_exact)
    pressure = parts.add_parser(
        "pressure", help="serve more requests than memory holds, in several ways", allow_abbrev=False
    )
    pressure.add_argument("--short", action="store_true", help="tiny models only, and few requests")
    pressure.add_argument("--json", action="store_true", help="print the figures as JSON")
    pressure.set_defaults(command=_bench_pressure)

    simulated = commands.add_parser(
        "simulate", help="run scheduler and cache on a virtual machine, seed by seed", allow_abbrev=False
    )
    add_flags(simulated)
    simulated.set_defaults(command=_simulate)
    add_store(commands)
    return parser


def _demo(arguments: argparse.Namespace) -> int:
    settings = settings_from(arguments)
    from hicache.cli.demo import run_demo

    return run_demo(settings, arguments.json)


def _serve(arguments: argparse.Namespace) -> int:
    settings = settings_from(arguments)
    from hicache.server import run

    print(settings.describe(), file=sys.stderr)
    return run(settings)


def _simulate(arguments: argparse.Namespace) -> int:
    from hicache.cli.simulate import simulate

    return simulate(arguments)


def _bench_tree(arguments: argparse.Namespace) -> int:
    if arguments.page < 1:
        raise ConfigError(f"--page={arguments.page}: at least one token")
    from hicache.bench.tree import run

    print(json.dumps(run(arguments.page), indent=None if arguments.json else 2))
    return 0


def _bench_exact(arguments: argparse.Namespace) -> int:
    from hicache.bench.exact import run

    families = [name.strip() for name in arguments.families.split(",") if name.strip()]
    return run(families, arguments.short, arguments.json)


def _bench_pressure(arguments: argparse.Namespace) -> int:
    from hicache.bench.pressure import run

    return run(arguments.short, arguments.json)
