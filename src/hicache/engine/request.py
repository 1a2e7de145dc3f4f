"""A request from prompt to last chunk: its tokens, how they are chosen, what was shown. It knows no slots."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hicache.engine.sampling import Sampler
from hicache.engine.segment import TokenArray
from hicache.engine.text import Decoder, Detokenizer, StopStrings
from hicache.engine.types import CACHED, CacheUse, Chunk, FinishReason, SamplingParams, Usage
from hicache.keys import Namespace


@dataclass(frozen=True, slots=True)
class Stops:
    """Token ids that end an answer: the model's own, and those that the request adds."""

    end_of_text: frozenset[int]
    asked: frozenset[int]

    def __contains__(self, token: int) -> bool:
        return token in self.end_of_text or token in self.asked


def _nothing() -> None:
    """Nobody needs to know."""


class Request:
    """One request. `emit` gets every chunk, the one with a finish reason last and only once.

    `on_admitted` is called whenever the scheduler takes it out of its queue. `cache` says what it does with cached
    pages. A higher `priority` goes first; `turn` is
    the scheduler's, earlier ones go first.
    """

    def __init__(
        self,
        request_id: int,
        prompt: Sequence[int],
        params: SamplingParams,
        namespace: Namespace,
        decoder: Decoder,
        end_of_text: frozenset[int],
        emit: Callable[[Chunk], None],
        submitted_s: float,
        on_admitted: Callable[[], None] = _nothing,
        priority: int = 0,
        cache: CacheUse = CACHED,
    ) -> None:
        self.id = request_id
        self.params = params
        self.namespace = namespace
        self.prompt_tokens = len(prompt)
        self.submitted_s = submitted_s
        self.priority = priority
        self.cache = cache
        self.turn: tuple[float, int] = (submitted_s, request_id)
        self.cached_tokens: Mapping[str, int] | None = None
        self.finished = False
        self._emit = emit
        self._on_admitted = on_admitted
        self._tokens: TokenArray = np.zeros(len(prompt) + params.max_tokens, np.uint32)
        self._tokens[: len(prompt)] = prompt
        self._length = len(prompt)
        self._sampler = Sampler(params)
        self._stops = Stops(frozenset() if params.ignore_eos else end_of_text, frozenset(params.stop_token_ids))
        self._detokenizer = Detokenizer(decoder)
        self._stop_strings = StopStrings(params.stop)

    @property
    def length(self) -> int:
        """Tokens of prompt and answer so far."""
        return self._length

    @property
    def answer_tokens(self) -> int:
        """Tokens of the answer so far."""
        return self._length - self.prompt_tokens

    def tokens(self, start: int, stop: int) -> TokenArray:
        """Token ids of positions `start` to `stop`: a view."""
        return self._tokens[start:stop]

    def admitted(self) -> None:
        """It waits no longer: it is computed from now on."""
        self._on_admitted()

    def use_cache(self, cached_tokens: Mapping[str, int]) -> None:
        """What of the prompt was cached. Only the first time counts: pages that a resumed request finds are its own."""
        if self.cached_tokens is None:
            self.cached_tokens = dict(cached_tokens)

    def soon_tokens(self, ahead: int) -> int:
        """How many tokens have their state in slots when `ahead` more are chosen, or when it ends."""
        return min(self._length + ahead, self.prompt_tokens + self.params.max_tokens - 1)

    @property
    def remaining(self) -> int:
        """Tokens that the answer may still get."""
        return self.params.max_tokens - self.answer_tokens

    def advance(self, logits: npt.NDArray[np.float32], now_s: float) -> int:
        """Choose the next token, show what can be shown, and finish if that was the last. Returns the token."""
        if np.isnan(logits).any():
            raise ArithmeticError("the model's logits are not numbers; its weights or its dtype can't be right")
        token = self._sampler.choose(logits, self.answer_tokens)
        self._tokens[self._length] = token
        self._length += 1
        ttft_s = now_s - self.submitted_s if self.answer_tokens == 1 else None
        if token in self._stops:
            self._finish("stop", self._rest(), (token,), ttft_s)
            return token
        piece = self._stop_strings.add(self._detokenizer.add(token))
        if piece.stopped:
            self._finish("stop", piece.text, (token,), ttft_s)
        elif self.answer_tokens == self.params.max_tokens:
            rest = self._stop_strings.add(self._detokenizer.finish())
            reason: FinishReason = "stop" if rest.stopped else "length"
            text = piece.text + rest.text + self._stop_strings.finish()
            self._finish(reason, text, (token,), ttft_s)
        else:
            self._emit(Chunk(piece.text, (token,), ttft_s=ttft_s))
        return token

    def abort(self) -> None:
        """End it where it is; what was held back is not shown."""
        self._finish("abort", "", (), None)

    def fail(self, error: str) -> None:
        """End it with an error that says what went wrong."""
        self._finish("error", "", (), None, error)

    def _rest(self) -> str:
        piece = self._stop_strings.add(self._detokenizer.finish())
        return piece.text if piece.stopped else piece.text + self._stop_strings.finish()

    def _finish(
        self, reason: FinishReason, text: str, tokens: tuple[int, ...], ttft_s: float | None, error: str | None = None
    ) -> None:
        if self.finished:
            return
        self.finished = True
        usage = Usage(self.prompt_tokens, self.answer_tokens, self.cached_tokens or _NOTHING_CACHED)
        self._emit(Chunk(text, tokens, reason, usage, error, ttft_s))


_NOTHING_CACHED: Mapping[str, int] = {"device": 0, "host": 0, "storage": 0}
