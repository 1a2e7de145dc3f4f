"""`hicache demo`: one question answered cold, from the device, from the host and, in a new process, from the store."""

import json
import logging
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hicache.cache import UnifiedRadixCache
from hicache.cli.demo_ask import ask
from hicache.cli.demo_rows import Answer, Row, make_rows, shortfalls, table
from hicache.cli.demo_store import new_store
from hicache.cli.demo_text import QUESTIONS
from hicache.config import Settings
from hicache.engine import Engine, create_engine
from hicache.errors import CacheError
from hicache.units import Tier

SETTLE_S = 60.0
NEW_PROCESS_S = 600.0


def run_demo(settings: Settings, as_json: bool) -> int:
    """Print the table, or with `as_json` its rows as JSON and nothing else on stdout. 1 when they fall short."""
    logging.basicConfig(format="hicache: %(message)s", stream=sys.stderr)
    if settings.cache.storage_url is not None:
        _say("the demo starts with a store of its own; storage_url is left alone")
    with new_store(settings.serve.cache_folder) as store:
        cache = settings.cache.replace(storage_url=f"file:{store}")
        return _run(settings.replace(cache=cache), store, as_json)


def _run(settings: Settings, store: Path, as_json: bool) -> int:
    answers = _in_this_process(settings)
    _say("asking the first question again in a new process, which has only the store...")
    storage = _in_new_process(settings, QUESTIONS[0])
    cold, device, *others, host = answers
    rows = make_rows({"cold": cold, "device": device, "host": host, "storage": storage})
    if as_json:
        print(json.dumps({"rows": [row.to_json() for row in rows]}))
    else:
        _print_story(rows, [cold, *others], settings, store)
    found = shortfalls(rows, settings.cache.page_size)
    for line in found:
        _say(f"this run fell short: {line}")
    return 1 if found else 0


def _in_this_process(settings: Settings) -> list[Answer]:
    """The first question cold and from the device, the others, and the first again from the host."""
    _say(f"loading {settings.serve.model}...")
    engine = create_engine(settings)
    try:
        _say("asking the first question cold...")
        answers = [ask(engine, QUESTIONS[0])]
        _say("asking it again, and then the others about the same document...")
        answers += [ask(engine, question) for question in QUESTIONS]
        _evict_device(engine)
        _say("asking the first question with the device emptied...")
        answers.append(ask(engine, QUESTIONS[0]))
    finally:
        engine.close()
    return answers


def _evict_device(engine: Engine) -> None:
    """Empty the device tier. Pages without a host copy are written back on the way, so it may take several calls."""
    deadline_s = time.monotonic() + SETTLE_S
    while engine.call(lambda core: _evict_some(core.cache)):
        if time.monotonic() > deadline_s:
            raise CacheError(f"the device could not be emptied in {SETTLE_S:.0f} s")
        time.sleep(0.01)


def _evict_some(cache: UnifiedRadixCache) -> int:
    """Evict what can go now; the pages that are left."""
    cache.evict(Tier.DEVICE)
    return sum(pool.cached for pool in cache.stats().pools if pool.tier is Tier.DEVICE)


def _in_new_process(settings: Settings, question: str) -> Answer:
    asked = json.dumps({"settings": settings.model_dump(mode="json"), "question": question})
    command = [sys.executable, "-m", "hicache.cli.demo_ask"]
    done = subprocess.run(command, input=asked, stdout=subprocess.PIPE, text=True, timeout=NEW_PROCESS_S, check=False)
    if done.returncode != 0:
        raise CacheError(f"the new process failed with status {done.returncode}; its last words are above")
    return Answer.from_json(json.loads(done.stdout))


def _print_story(rows: Sequence[Row], answers: Sequence[Answer], settings: Settings, store: Path) -> None:
    print("\nThree questions about one document; what they share is computed once:\n")
    for question, answer in zip(QUESTIONS, answers, strict=True):
        cached = sum(answer.cached_tokens.values())
        print(f"  {question}\n    {answer.text}\n    {cached} of {answer.prompt_tokens} prompt tokens were cached")
    print("\nThe first question again, its pages being in another place each time:\n")
    print(table(rows))
    stored_bytes = sum(file.stat().st_size for file in store.rglob("*") if file.is_file())
    print(f"\nThe store ({stored_bytes / 1e6:.0f} MB) lies in {store}; to serve from it:")
    print(f"  hicache serve {settings.serve.model} --storage-url {settings.cache.storage_url}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
