"""S28 through the cache: stored in one process, a full hit in another one under another PYTHONHASHSEED."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.storage.support import REPOSITORY
from tests.world import MODELS, PAGE

SCRIPT = """
import json, sys
from pathlib import Path
from hicache.storage.file import FileBackend
from hicache.transfer import ThreadExecutor
from tests.world import MODELS, PAGE, World, tokens
world = World(MODELS[sys.argv[2]], backend=FileBackend(Path(sys.argv[1])), executor=ThreadExecutor(), timeout_s=60.0)
prompt = tokens(*range(12 * PAGE + 1))
ticket = world.cache.prefetch(prompt, world.namespace)
while not ticket.done:
    world.cache.poll()
match = world.cache.match_prefix(prompt, world.namespace, ticket)
world.cache.load_back(match).result()
world.check(match)
assert world.allocate(match, len(prompt) // 4 - match.length_tokens)
world.compute(match, prompt)
cached = dict(match.cached_tokens)
world.cache.release(world.cache.insert(match, prompt))
while world.cache.stats().in_flight:
    world.cache.poll()
world.idle()
world.cache.close()
print(json.dumps(cached))
"""


def served(folder: Path, model: str, seed: str) -> dict[str, int]:
    command = [sys.executable, "-c", SCRIPT, str(folder), model]
    environment = os.environ | {"PYTHONHASHSEED": seed}
    done = subprocess.run(command, env=environment, capture_output=True, timeout=120, cwd=REPOSITORY, check=False)
    assert done.returncode == 0, done.stderr.decode()
    cached: dict[str, int] = json.loads(done.stdout)
    return cached


@pytest.mark.parametrize("model", sorted(MODELS))
def test_another_process_has_every_full_page_from_storage(tmp_path: Path, model):
    assert served(tmp_path, model, "1") == {"device": 0, "host": 0, "storage": 0}
    assert served(tmp_path, model, "2") == {"device": 0, "host": 0, "storage": 12 * PAGE}
