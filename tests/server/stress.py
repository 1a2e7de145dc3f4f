"""Clients that behave badly at random, from one seed: what they ask, how they leave, and what each must be answered."""

import json
import random
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any

import httpx

from hicache.engine import Engine, SamplingParams
from hicache.server.prompts import PromptEncoder
from hicache.server.schema import ChatRequest

CHAT = "/v1/chat/completions"
AT_ONCE = 8
TALKS_PER_OPENING = 2
TOPICS = ("the lighthouse", "an old bridge", "a market town", "the ferry")
WORDS = ("stone", "river", "seven", "quiet", "morning", "lamp", "keeper", "window", "letter", "salt", "north", "copper")

Turns = tuple[tuple[str, str], ...]
"""Messages so far: role and text."""


class Way(Enum):
    """How a client behaves."""

    WHOLE = "waits for the whole answer"
    TOKENS = "gives token ids, and waits for the whole answer"
    STREAM = "reads a stream to its end"
    LEAVES = "closes a stream in mid-answer"
    WAITS_NOT = "sends a request and hangs up before the first byte of its answer"
    HALF_BODY = "hangs up in mid-body"
    HALF_HEAD = "hangs up in mid-header"
    TOO_LONG = "asks for more than can ever fit"


WEIGHTS = dict.fromkeys(Way, 1) | {Way.WHOLE: 2, Way.STREAM: 3, Way.LEAVES: 2}
"""How often each way is drawn, among the others."""


@dataclass(frozen=True, slots=True)
class Expected:
    """The prompt as token ids, and the text that follows it."""

    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, what answers it, and what its client does; `patience`, from 0 to 1, says when it leaves."""

    turns: Turns
    expected: Expected
    way: Way
    patience: float


class Talks:
    """Conversations that share their first messages and grow turn by turn, with what an unloaded engine answers."""

    def __init__(self, engine: Engine, answer_tokens: int, *, words: int, turns: int = 3, seed: int = 0) -> None:
        self.expected: dict[Turns, Expected] = {}
        self.answer_tokens = answer_tokens
        self._engine = engine
        self._prompts = PromptEncoder(engine.tokenizer, engine.max_model_len)
        rng = random.Random(seed)
        openings = [_words(rng, words, topic) for topic in TOPICS]
        now: list[Turns] = [(("system", opening),) for opening in openings for _ in range(TALKS_PER_OPENING)]
        for _ in range(turns):
            asked = [(*one, ("user", _words(rng, words // 4, rng.choice(TOPICS)))) for one in now]
            self._answer(asked)
            now = [(*one, ("assistant", self.expected[one].text)) for one in asked]

    @property
    def running_tokens(self) -> int:
        """What the requests that are sent at once need together, on average."""
        each = [len(one.token_ids) + self.answer_tokens for one in self.expected.values()]
        return AT_ONCE * sum(each) // len(each)

    def _answer(self, asked: Sequence[Turns]) -> None:
        prompts = [self._token_ids(turns) for turns in asked]
        params = SamplingParams(max_tokens=self.answer_tokens, ignore_eos=True)
        # A salt of its own for each: nothing is shared, so this is what an empty cache answers.
        streams = [self._engine.submit(ids, params, salt=str(turns)) for turns, ids in zip(asked, prompts, strict=True)]
        for turns, ids, stream in zip(asked, prompts, streams, strict=True):
            self.expected[turns] = Expected(ids, "".join(chunk.text for chunk in stream))

    def _token_ids(self, turns: Turns) -> tuple[int, ...]:
        request = ChatRequest.model_validate({"model": "any", "messages": messages(turns)})
        return self._prompts.chat(request.messages, self.answer_tokens).token_ids

    def asks(self, count: int, seed: int) -> list[Ask]:
        """`count` requests of which more than half are read to the end; every way occurs."""
        rng = random.Random(seed)
        ways = list(Way) + rng.choices(list(WEIGHTS), list(WEIGHTS.values()), k=count - len(Way))
        rng.shuffle(ways)
        chosen = rng.choices(sorted(self.expected), k=count)
        return [Ask(turns, self.expected[turns], way, rng.random()) for turns, way in zip(chosen, ways, strict=True)]


def messages(turns: Turns) -> list[dict[str, str]]:
    """Turns as they go over the wire."""
    return [{"role": role, "content": text} for role, text in turns]


def _words(rng: random.Random, count: int, topic: str) -> str:
    return f"Tell me about {topic}: " + " ".join(rng.choices(WORDS, k=count)) + "."


class Crowd:
    """Sends requests to the server at `url`, eight at once, and fails on any that is not answered as it must be."""

    def __init__(self, url: str, model: str, answer_tokens: int, timeout_s: float = 300) -> None:
        self._url = url
        self._model = model
        self._answer_tokens = answer_tokens
        self._timeout_s = timeout_s

    def send(self, asks: Sequence[Ask]) -> None:
        """Returns when every client has its answer or has left. Raises the first client's failure."""
        with (
            httpx.Client(base_url=self._url, timeout=self._timeout_s) as http,
            ThreadPoolExecutor(AT_ONCE) as clients,
        ):
            for _ in clients.map(lambda ask: self._one(http, ask), asks):
                pass

    def _one(self, http: httpx.Client, ask: Ask) -> None:
        match ask.way:
            case Way.WHOLE:
                self._whole(http, ask)
            case Way.TOKENS:
                self._tokens(http, ask)
            case Way.STREAM | Way.LEAVES:
                self._stream(http, ask)
            case Way.TOO_LONG:
                self._too_long(http, ask)
            case Way.WAITS_NOT | Way.HALF_BODY | Way.HALF_HEAD:
                self._hang_up(http.base_url, ask)

    def _body(self, **more: Any) -> dict[str, Any]:
        limits = {"max_tokens": self._answer_tokens, "ignore_eos": True, "temperature": 0.0}
        return {"model": self._model, **limits, **more}

    def _chat(self, ask: Ask, **more: Any) -> dict[str, Any]:
        return self._body(messages=messages(ask.turns), **more)

    def _whole(self, http: httpx.Client, ask: Ask) -> None:
        answer = http.post(CHAT, json=self._chat(ask))
        assert answer.status_code == 200, answer.text
        choice, usage = answer.json()["choices"][0], answer.json()["usage"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (ask.expected.text, "length")
        assert self._counted(ask, usage)

    def _tokens(self, http: httpx.Client, ask: Ask) -> None:
        answer = http.post("/v1/completions", json=self._body(prompt=ask.expected.token_ids))
        assert answer.status_code == 200, answer.text
        choice, usage = answer.json()["choices"][0], answer.json()["usage"]
        assert (choice["text"], choice["finish_reason"]) == (ask.expected.text, "length")
        assert self._counted(ask, usage)

    def _counted(self, ask: Ask, usage: Mapping[str, int]) -> bool:
        lengths = (len(ask.expected.token_ids), self._answer_tokens)
        return (usage["prompt_tokens"], usage["completion_tokens"]) == lengths

    def _stream(self, http: httpx.Client, ask: Ask) -> None:
        body = self._chat(ask, stream=True, stream_options={"include_usage": True})
        leaves_after = int(ask.patience * self._answer_tokens) if ask.way is Way.LEAVES else None
        text = ""
        with http.stream("POST", CHAT, json=body) as answer:
            assert answer.status_code == 200, answer.read()
            for count, event in enumerate(_events(answer)):
                if count == leaves_after:
                    assert ask.expected.text.startswith(text)
                    return
                assert "error" not in event, event
                text += event["choices"][0]["delta"].get("content", "") if event["choices"] else ""
        assert text == ask.expected.text
        assert self._counted(ask, event["usage"])

    def _too_long(self, http: httpx.Client, ask: Ask) -> None:
        answer = http.post(CHAT, json=self._chat(ask) | {"max_tokens": 1 << 20})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["code"] == "context_length_exceeded"

    def _hang_up(self, url: httpx.URL, ask: Ask) -> None:
        body = json.dumps(self._chat(ask, stream=ask.patience < 0.5)).encode()
        head = (
            f"POST {CHAT} HTTP/1.1\r\nHost: {url.host}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode()
        whole = head + body
        sent = {Way.WAITS_NOT: len(whole), Way.HALF_BODY: len(head) + len(body) // 2, Way.HALF_HEAD: len(head) // 2}
        with connect(url) as client:
            client.sendall(whole[: sent[ask.way]])
            client.settimeout(ask.patience / 4)
            with suppress(TimeoutError):
                client.recv(1)
            if ask.patience > 0.8:
                reset_at_close(client)


def _events(answer: httpx.Response) -> Iterator[Any]:
    """The objects of a stream of server-sent events; fails if it ends without `[DONE]`."""
    for line in answer.iter_lines():
        if line == "data: [DONE]":
            return
        if line:
            yield json.loads(line.removeprefix("data: "))
    raise AssertionError("a stream ended without [DONE]")


def connect(url: httpx.URL) -> socket.socket:
    """A bare connection to a server."""
    return socket.create_connection((url.host, url.port or 80), timeout=60)


def reset_at_close(client: socket.socket) -> None:
    """Let the connection end with a reset in place of a farewell."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
