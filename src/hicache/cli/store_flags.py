"""The flags of `hicache store`; a part's code is imported when it runs."""

import argparse
from collections.abc import Callable
from typing import TypeAlias

Parts: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_store(commands: Parts) -> None:
    """Adds the command to the parser of `hicache`."""
    store = commands.add_parser("store", help="look at a store, check it, clean it up", allow_abbrev=False)
    parts = store.add_subparsers(title="parts", required=True, metavar="PART")
    _part(parts, "ls", "its namespaces: model, pages, bytes, last use")
    _part(parts, "stat", "what it holds in all")
    check = _part(parts, "verify", "read every page and check it")
    check.add_argument("--repair", action="store_true", help="remove what is damaged")
    clean = _part(parts, "gc", "remove what nobody can use any more")
    clean.add_argument("--size", help="then drop what rested longest, until the store takes at most so much")
    remove = _part(parts, "rm", "remove a namespace")
    remove.add_argument("namespace", metavar="NAMESPACE", help="the beginning of its fingerprint, as ls shows it")
    remove.add_argument("--yes", action="store_true", help="don't ask")


def _part(parts: Parts, name: str, text: str) -> argparse.ArgumentParser:
    parser = parts.add_parser(name, help=text, allow_abbrev=False)
    parser.add_argument("url", metavar="URL", help="the store, as file:./store")
    parser.add_argument("--json", action="store_true", help="print as JSON")
    parser.set_defaults(command=_command(name))
    return parser


def _command(name: str) -> Callable[[argparse.Namespace], int]:
    def run(arguments: argparse.Namespace) -> int:
        from hicache.cli import store

        commands = {"ls": store.ls, "stat": store.stat, "verify": store.verify_all, "gc": store.gc, "rm": store.rm}
        return commands[name](arguments)

    return run
