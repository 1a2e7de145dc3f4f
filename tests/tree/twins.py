"""Slow twins of the policies, as textbooks have them: caches of single pages that look at everything each time."""

from collections import OrderedDict
from math import inf

from hicache.tree import NO_WISH
from tests.tree.trees import PAGE


class LruTwin:
    """What all twins do: `order` says what goes first; `hit` and `come` remember what it needs."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.now = 0
        self.used: dict[int, int] = {}
        self.came: dict[int, int] = {}
        self.hits: dict[int, int] = {}

    def order(self, page: int) -> tuple[float, ...]:
        return (self.used[page],)

    def hit(self, page: int) -> None:
        self.hits[page] += 1

    def come(self, page: int) -> None:
        """A page is new."""

    def leave(self, page: int) -> None:
        """A page goes."""

    def use(self, page: int) -> int | None:
        self.now += 1
        gone = None
        if page in self.used:
            self.used[page] = self.now
            self.hit(page)
            return None
        if len(self.used) == self.room:
            gone = min(self.used, key=self.order)
            self.leave(gone)
            for table in (self.used, self.came, self.hits):
                del table[gone]
        self.used[page] = self.came[page] = self.now
        self.hits[page] = 0
        self.come(page)
        return gone


class FifoTwin(LruTwin):
    def order(self, page: int) -> tuple[float, ...]:
        return (self.came[page],)


class LfuTwin(LruTwin):
    def order(self, page: int) -> tuple[float, ...]:
        return (self.hits[page], self.used[page])


class SlruTwin(LruTwin):
    """Two lists, each from the least to the most recent, as in the textbook."""

    def __init__(self, room: int) -> None:
        super().__init__(room)
        self.probation: list[int] = []
        self.protected: list[int] = []

    def order(self, page: int) -> tuple[float, ...]:
        return ((self.probation + self.protected).index(page),)

    def come(self, page: int) -> None:
        self.probation.append(page)

    def leave(self, page: int) -> None:
        (self.probation if page in self.probation else self.protected).remove(page)

    def hit(self, page: int) -> None:
        self.leave(page)
        self.protected.append(page)
        if len(self.protected) > 0.5 * self.room:
            self.probation.append(self.protected.pop(0))


class S3FifoTwin(LruTwin):
    """Two queues, the head first, and rounds to go."""

    def __init__(self, room: int) -> None:
        super().__init__(room)
        self.small: list[int] = []
        self.main: OrderedDict[int, int] = OrderedDict()

    def order(self, page: int) -> tuple[float, ...]:
        return ((sorted(self.small, key=lambda each: self.came[each]) + list(self.main)).index(page),)

    def come(self, page: int) -> None:
        self.small.append(page)

    def leave(self, page: int) -> None:
        self.main.pop(page, None)
        if page in self.small:
            self.small.remove(page)

    def hit(self, page: int) -> None:
        super().hit(page)
        if page in self.main:
            self.main[page] = min(3, self.main[page] + 1)
        elif self.hits[page] >= 2:
            self.small.remove(page)
            self.main[page] = 0
        while len(self.main) > 0.6 * self.room:
            head, rounds = next(iter(self.main.items()))
            del self.main[head]
            if rounds:
                self.main[head] = rounds - 1
            else:
                self.small.append(head)


class CostTwin(LruTwin):
    """All pages cost the same: what remains is when they were last used, in rounds of the whole cache."""

    def __init__(self, room: int) -> None:
        super().__init__(room)
        self.level = 0.0
        self.keys: dict[int, float] = {}

    def order(self, page: int) -> tuple[float, ...]:
        return (self.keys[page], self.used[page])

    def come(self, page: int) -> None:
        self.keys[page] = self.level + 1 + PAGE / 2 / 100

    hit = come

    def leave(self, page: int) -> None:
        self.level = max(self.level, self.keys[page])


class PriorityTwin(LruTwin):
    """Every page with what was asked for it last; who is over the share is found by looking at all."""

    def __init__(self, room: int) -> None:
        super().__init__(room)
        self.now_s = 0.0
        self.asked: dict[int, tuple[int, float, float]] = {}
        self.demoted: set[int] = set()
        self.wish = NO_WISH

    def order(self, page: int) -> tuple[float, ...]:
        priority, _, until_s = self.asked[page]
        if until_s <= self.now_s:
            return (-inf, self.used[page])
        return (0 if page in self.demoted else priority, self.used[page])

    def hit(self, page: int) -> None:
        self.ask(page, self.asked[page])

    def come(self, page: int) -> None:
        self.ask(page, (0, 0.0, -inf))

    def leave(self, page: int) -> None:
        del self.asked[page]
        self.demoted.discard(page)

    def ask(self, page: int, before: tuple[int, float, float]) -> None:
        wanted = (self.wish.priority, inf if self.wish.ttl_s is None else self.wish.ttl_s)
        if before[2] > self.now_s:
            wanted = max(wanted, before[:2])
        self.asked[page] = (*wanted, self.now_s + wanted[1])
        self.demoted.discard(page)
        while True:
            above = [each for each in self.asked if self.order(each)[0] > 0]
            if len(above) <= 0.5 * self.room:
                return
            self.demoted.add(min(above, key=self.order))
