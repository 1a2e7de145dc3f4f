"""Where a request's recurrent state is worth a snapshot: only at page boundaries, and only where reuse is likely."""

from collections.abc import Iterable


def boundaries(
    page_size: int, start: int, prompt_tokens: int, interval_tokens: int, shared: Iterable[int]
) -> tuple[int, ...]:
    """Positions after `start`, ascending, at which a prompt of `prompt_tokens` should leave a snapshot.

    Every `interval_tokens` (0: not), at the end of what it has in common with others (`shared`, token counts), and at
    the last boundary that the same prompt, asked again, can resume at.
    """
    last = (prompt_tokens - 1) // page_size * page_size
    wanted = {last, *(tokens // page_size * page_size for tokens in shared)}
    if interval_tokens:
        step = -(-interval_tokens // page_size) * page_size
        wanted.update(range(step, last + 1, step))
    return tuple(sorted(position for position in wanted if start < position <= last))


def next_stop(stops: Iterable[int], position: int, tokens: int) -> int:
    """How many of `tokens` tokens may be computed in one piece from `position` on, without passing a stop."""
    return min([tokens, *(stop - position for stop in stops if stop > position)])
