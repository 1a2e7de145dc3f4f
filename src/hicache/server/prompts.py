"""A prompt that leaves here is token ids of this model that fit into its context together with the answer asked for."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from jinja2.exceptions import TemplateError

from hicache.server.engine_like import TokenizerLike
from hicache.server.errors import ApiError, context_too_long, invalid, text_too_long
from hicache.server.schema import ChatMessage, Prompt

MOST_CHARACTERS_PER_TOKEN = 128
"""No prompt has more on average. Longer ones are refused unread, so that encoding them keeps nobody waiting."""


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """Token ids and the most tokens that may be added to them."""

    token_ids: tuple[int, ...]
    max_tokens: int


class PromptEncoder:
    """Templates, encodes and checks prompts. Thread-safe: a tokenizer isn't, so one thread uses it at a time."""

    def __init__(self, tokenizer: TokenizerLike, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = len(tokenizer)
        self._limit_tokens = max_model_len
        self._lock = threading.Lock()

    def chat(self, messages: Sequence[ChatMessage], answer_tokens: int | None) -> PreparedPrompt:
        """Render `messages` by the model's chat template. None for `answer_tokens`: all there is room for."""
        self._check_length("messages", sum(len(message.content) for message in messages))
        turns = [{"role": message.template_role, "content": message.content} for message in messages]
        with self._lock:
            token_ids = tuple(self._tokenizer.encode(self._render(turns), add_special_tokens=False))
        return self._fit("messages", token_ids, answer_tokens, None)

    def completion(self, prompt: Prompt, answer_tokens: int | None, param: str, default: int) -> PreparedPrompt:
        """Encode one prompt. None for `answer_tokens`: `default`, or less where the context has no room for it."""
        if isinstance(prompt, str):
            self._check_length(param, len(prompt))
            with self._lock:
                token_ids = tuple(self._tokenizer.encode(prompt))
        else:
            token_ids = self._known(prompt, param)
        if not token_ids:
            raise invalid(param, "the prompt is empty; at least one token is needed")
        return self._fit(param, token_ids, answer_tokens, default)

    def _check_length(self, param: str, characters: int) -> None:
        limit = self._limit_tokens * MOST_CHARACTERS_PER_TOKEN
        if characters > limit:
            raise text_too_long(param, characters, limit, self._limit_tokens)

    def _render(self, turns: list[dict[str, str]]) -> str:
        if not self._tokenizer.chat_template:
            raise ApiError(
                400,
                "messages: this model has no chat template, so it can't chat; send a prompt to /v1/completions",
                param="messages",
                code="no_chat_template",
            )
        try:
            return self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise invalid("messages", f"the model's chat template refuses them: {error}") from error

    def _known(self, token_ids: tuple[int, ...], param: str) -> tuple[int, ...]:
        largest = max(token_ids, default=0)
        if largest >= self._vocabulary:
            raise invalid(param, f"token id {largest} is unknown; this model's ids end at {self._vocabulary - 1}")
        return token_ids

    def _fit(
        self, param: str, token_ids: tuple[int, ...], answer_tokens: int | None, default: int | None
    ) -> PreparedPrompt:
        room = self._limit_tokens - len(token_ids)
        needed = 1 if answer_tokens is None else answer_tokens
        if room < needed:
            raise context_too_long(param, len(token_ids), needed, self._limit_tokens)
        if answer_tokens is not None:
            return PreparedPrompt(token_ids, answer_tokens)
        return PreparedPrompt(token_ids, room if default is None else min(room, default))
