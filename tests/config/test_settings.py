"""The settings with their flags and variables, as users know them: a change here is a decision."""

import pytest

from hicache.config import OPTIONS

SETTINGS = """
cache.device_size           --device-size           HICACHE_DEVICE_SIZE
cache.host_size             --host-size             HICACHE_HOST_SIZE
cache.host_arena            --host-arena            HICACHE_HOST_ARENA
cache.page_size             --page-size             HICACHE_PAGE_SIZE
cache.window_ratio          --window-ratio          HICACHE_WINDOW_RATIO
cache.checkpoint_share      --checkpoint-share      HICACHE_CHECKPOINT_SHARE
cache.storage_url           --storage-url           HICACHE_STORAGE_URL
cache.storage_size          --storage-size          HICACHE_STORAGE_SIZE
cache.storage_failures      --storage-failures      HICACHE_STORAGE_FAILURES
cache.storage_slow_s        --storage-slow-s        HICACHE_STORAGE_SLOW_S
cache.storage_pause_s       --storage-pause-s       HICACHE_STORAGE_PAUSE_S
cache.write_policy          --write-policy          HICACHE_WRITE_POLICY
cache.write_through_hits    --write-through-hits    HICACHE_WRITE_THROUGH_HITS
cache.write_back_watermark  --write-back-watermark  HICACHE_WRITE_BACK_WATERMARK
cache.eviction_policy       --eviction-policy       HICACHE_EVICTION_POLICY
cache.fetch_workers         --fetch-workers         HICACHE_FETCH_WORKERS
cache.transfer_timeout_s    --transfer-timeout-s    HICACHE_TRANSFER_TIMEOUT_S
cache.prefetch_policy       --prefetch-policy       HICACHE_PREFETCH_POLICY
cache.prefetch_timeout_s    --prefetch-timeout-s    HICACHE_PREFETCH_TIMEOUT_S
cache.prefetch_page_timeout_s --prefetch-page-timeout-s HICACHE_PREFETCH_PAGE_TIMEOUT_S
cache.prefetch_limit_s      --prefetch-limit-s      HICACHE_PREFETCH_LIMIT_S
cache.prefetch_batch_pages  --prefetch-batch-pages  HICACHE_PREFETCH_BATCH_PAGES
serve.model                 MODEL                   HICACHE_SERVE_MODEL
serve.host                  --host                  HICACHE_SERVE_HOST
serve.port                  --port                  HICACHE_SERVE_PORT
serve.dtype                 --dtype                 HICACHE_SERVE_DTYPE
serve.max_running           --max-running           HICACHE_SERVE_MAX_RUNNING
serve.max_waiting           --max-waiting           HICACHE_SERVE_MAX_WAITING
serve.max_model_len         --max-model-len         HICACHE_SERVE_MAX_MODEL_LEN
serve.chunk_tokens          --chunk-tokens          HICACHE_SERVE_CHUNK_TOKENS
serve.snapshot_interval     --snapshot-interval     HICACHE_SERVE_SNAPSHOT_INTERVAL
serve.draft                 --draft                 HICACHE_SERVE_DRAFT
serve.draft_tokens          --draft-tokens          HICACHE_SERVE_DRAFT_TOKENS
serve.preemption            --preemption            HICACHE_SERVE_PREEMPTION
serve.priority_ageing_s     --priority-ageing-s     HICACHE_SERVE_PRIORITY_AGEING_S
serve.admin_key             --admin-key             HICACHE_SERVE_ADMIN_KEY
serve.api_key               --api-key               HICACHE_SERVE_API_KEY
serve.api_key_file          --api-key-file          HICACHE_SERVE_API_KEY_FILE
serve.threads               --threads               HICACHE_SERVE_THREADS
serve.cache_folder          --cache-folder          HICACHE_SERVE_CACHE_FOLDER
"""


def test_settings_flags_and_variables():
    actual = [(f"{option.group}.{option.field}", option.flag, option.variable) for option in OPTIONS]
    assert actual == [tuple(line.split()) for line in SETTINGS.strip().splitlines()]


@pytest.mark.parametrize("name", ["field", "flag", "variable"])
def test_no_two_settings_share_a_name(name: str):
    names = [getattr(option, name) for option in OPTIONS]
    assert len(set(names)) == len(names)


def test_every_setting_says_what_it_is_for():
    assert [option.field for option in OPTIONS if not option.help.endswith(".")] == []
