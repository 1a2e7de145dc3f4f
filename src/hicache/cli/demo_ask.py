"""One question to one engine, measured from submission to the first token; also as a process of its own, over JSON."""

import json
import sys
from collections.abc import Iterator

from hicache.cli.demo_rows import Answer
from hicache.cli.demo_text import conversation
from hicache.config import Settings
from hicache.engine import Engine, create_engine
from hicache.engine.types import Chunk, SamplingParams
from hicache.errors import CacheError

ANSWER_TOKENS = 24
GREEDY = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0)


def ask(engine: Engine, question: str) -> Answer:
    """Ask about the demo's document, greedily. Raises CacheError when the engine fails."""
    prompt = engine.tokenizer.apply_chat_template(conversation(question), tokenize=False, add_generation_prompt=True)
    token_ids = engine.tokenizer.encode(prompt, add_special_tokens=False)
    return _collect(iter(engine.submit(token_ids, GREEDY)))


def _collect(chunks: Iterator[Chunk]) -> Answer:
    tokens: list[int] = []
    text = ""
    ttft_s = None
    for chunk in chunks:
        tokens += chunk.token_ids
        text += chunk.text
        ttft_s = ttft_s if chunk.ttft_s is None else chunk.ttft_s
        if chunk.finish_reason is None:
            continue
        if chunk.usage is None or ttft_s is None:
            raise CacheError(f"the engine did not answer: {chunk.error or chunk.finish_reason}")
        return Answer(chunk.usage.prompt_tokens, dict(chunk.usage.cached_tokens), ttft_s, tuple(tokens), text.strip())
    raise CacheError("the engine did not answer")


def main() -> int:
    """Read settings and a question from stdin, answer on stdout."""
    asked = json.load(sys.stdin)
    engine = create_engine(Settings.model_validate(asked["settings"]))
    try:
        answer = ask(engine, asked["question"])
    finally:
        engine.close()
    json.dump(answer.to_json(), sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
