"""Commands reach the server that has their key: the only one, or the node of a cluster that owns the key's slot."""

import threading
from collections.abc import Sequence
from typing import Protocol

from fastcrc import crc16

from hicache.errors import StorageError
from hicache.storage.remote import Deadline
from hicache.storage.valkey.nodes import Command, Node, Outcome, Unanswered
from hicache.storage.valkey.wire import Address, Login, Refusal

SLOTS = 16384
_ROUNDS = 4
"""How often a command follows a cluster that is being rearranged before it counts as not answered."""

_PASSING = ("LOADING", "BUSY", "MASTERDOWN", "CLUSTERDOWN")
"""Refusals that end by themselves."""


class Servers(Protocol):
    """What a backend asks."""

    def run(self, commands: Sequence[Command], deadline: Deadline) -> list[Outcome]:
        """One outcome per command, in order."""

    def check(self, deadline: Deadline) -> str | None:
        """Why the servers can't be reached now, or None. StorageError for what waiting does not mend."""

    def nodes(self) -> Sequence[Node]:
        """Every server that has keys, as far as is known."""

    def close(self) -> None:
        """Ends all connections."""


class SingleServer:
    """One server that has all keys."""

    def __init__(self, address: Address, login: Login) -> None:
        self._node = Node(address, login)

    def run(self, commands: Sequence[Command], deadline: Deadline) -> list[Outcome]:
        """One outcome per command, in order."""
        return self._node.run(commands, deadline)

    def check(self, deadline: Deadline) -> str | None:
        """Why the server can't be reached now, or None. StorageError when it has a mind to refuse for good."""
        outcome = self._node.call(deadline, b"PING")
        if isinstance(outcome, Refusal) and outcome.code not in _PASSING:
            raise StorageError(f"{self._node.address} refuses: {outcome.text}")
        return outcome.text if isinstance(outcome, Refusal) else _no_answer(outcome)

    def nodes(self) -> Sequence[Node]:
        """The server."""
        return (self._node,)

    def close(self) -> None:
        """Ends all connections."""
        self._node.close()


class Cluster:
    """The nodes of a cluster, found through any of some addresses; the map is asked for again when it proves old."""

    def __init__(self, seeds: Sequence[Address], login: Login) -> None:
        self._seeds = tuple(seeds)
        self._login = login
        self._lock = threading.Lock()
        self._nodes: dict[Address, Node] = {}
        self._owners: list[Address | None] = [None] * SLOTS
        self._known = False

    def run(self, commands: Sequence[Command], deadline: Deadline) -> list[Outcome]:
        """One outcome per command, in order; follows keys that move between nodes meanwhile."""
        if not self._known and (reason := self.check(deadline)) is not None:
            return [Unanswered(reason)] * len(commands)
        outcomes: list[Outcome] = [Unanswered("the cluster is being rearranged")] * len(commands)
        todo = list(range(len(commands)))
        for _ in range(_ROUNDS):
            self._ask_owners(commands, todo, outcomes, deadline)
            self._follow_asking(commands, todo, outcomes, deadline)
            todo = [i for i in todo if _is_elsewhere(outcomes[i])]
            if not todo or self.check(deadline) is not None:
                break
        return outcomes

    def check(self, deadline: Deadline) -> str | None:
        """Asks for the map of slots. Why nobody tells it, or None. StorageError when this is not a cluster."""
        reason = "no address of a node is known"
        with self._lock:
            known = [address for address in self._nodes if address not in self._seeds]
        for address in (*self._seeds, *known):
            outcome = self._node(address).call(deadline, b"CLUSTER", b"SLOTS")
            if isinstance(outcome, list):
                self._learn(outcome, address)
                return None
            if isinstance(outcome, Refusal) and outcome.code not in _PASSING:
                raise StorageError(f"{address} is not a node of a cluster that can be used: {outcome.text}")
            reason = _no_answer(outcome) or f"{address} tells no slots"
        return reason

    def nodes(self) -> Sequence[Node]:
        """Every node that owns slots."""
        return [self._node(address) for address in dict.fromkeys(self._owners) if address is not None]

    def close(self) -> None:
        """Ends all connections."""
        with self._lock:
            nodes, self._nodes = self._nodes, {}
        for node in nodes.values():
            node.close()

    def _ask_owners(
        self, commands: Sequence[Command], todo: Sequence[int], outcomes: list[Outcome], deadline: Deadline
    ) -> None:
        groups: dict[Address, list[int]] = {}
        for i in todo:
            slot = key_slot(commands[i].key)
            owner = self._owners[slot]
            if owner is None:
                outcomes[i] = Unanswered(f"no node of the cluster has slot {slot}")
            else:
                groups.setdefault(owner, []).append(i)
        for owner, group in groups.items():
            for i, outcome in zip(group, self._node(owner).run([commands[i] for i in group], deadline), strict=True):
                outcomes[i] = outcome

    def _follow_asking(
        self, commands: Sequence[Command], todo: Sequence[int], outcomes: list[Outcome], deadline: Deadline
    ) -> None:
        for i in todo:
            outcome = outcomes[i]
            if isinstance(outcome, Refusal) and outcome.code == "ASK":
                node = self._node(_address(outcome.text.split(" ")[2]))
                outcomes[i] = node.run([commands[i]], deadline, asking=True)[0]

    def _node(self, address: Address) -> Node:
        with self._lock:
            return self._nodes.setdefault(address, Node(address, self._login))

    def _learn(self, ranges: list[object], teller: Address) -> None:
        owners: list[Address | None] = [None] * SLOTS
        for entry in ranges:
            match entry:
                case [int(first), int(last), [host, int(port), *_], *_]:
                    # A node that does not know its own name leaves it out: it is where it was found.
                    name = host.decode() if isinstance(host, bytes) and host not in (b"", b"?") else teller.host
                    owners[first : last + 1] = [Address(name, port)] * (last + 1 - first)
        self._owners = owners
        self._known = True


def key_slot(key: bytes) -> int:
    """The slot of a key without braces, 0 to 16383."""
    return crc16.xmodem(key) % SLOTS


def _no_answer(outcome: Outcome) -> str | None:
    if isinstance(outcome, Unanswered) and outcome.for_good:
        raise StorageError(outcome.reason)
    return outcome.reason if isinstance(outcome, Unanswered) else None


def _is_elsewhere(outcome: Outcome) -> bool:
    """The node that was asked is not, or not any more, the one to ask."""
    if isinstance(outcome, Unanswered):
        return True
    return isinstance(outcome, Refusal) and outcome.code in ("MOVED", "ASK", "TRYAGAIN", "READONLY")


def _address(text: str) -> Address:
    host, _, port = text.rpartition(":")
    return Address(host.strip("[]"), int(port))
