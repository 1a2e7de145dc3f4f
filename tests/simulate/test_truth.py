"""The model alone, step by step, and what it must read: two ways to the same digests."""

import numpy as np

from hicache.simulate.content import VOCABULARY, Sight, alphabet, chosen, code, own_part
from hicache.simulate.truth import Truth, wrong_pools

LETTERS = alphabet(64)
SIGHTS = (Sight("kv", 2), Sight("swa", 1, 4))
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def slow_digest(tokens: list[int], sights: tuple[Sight, ...] = SIGHTS) -> int:
    """Token by token, layer by layer, as the model reads it."""
    hashes = [int(word) for word in LETTERS.hashes(0, 0, tokens)]
    last = len(tokens) - 1
    digest = own_part(hashes[-1])
    for sight in sights:
        pool = code(sight.pool, sight.layers)
        for position in range(sight.first(last), last + 1):
            words = pool.encode(np.array([hashes[position]], np.uint64))[0]
            read = sum(int(word) * int(vote) for word, vote in zip(words, pool.votes, strict=True))
            digest += read * int(LETTERS.weights[position])
    return digest % (1 << 64)


def test_answers_follow_from_what_is_read():
    truth = Truth(LETTERS, SIGHTS)
    known = truth.tell(PROMPT, 5)
    tokens = list(PROMPT)
    for token in known.answer:
        assert token == chosen(slow_digest(tokens)) < VOCABULARY
        tokens.append(token)
    assert [truth.digest(int(hashed)) for hashed in known.hashes] == list(known.digests)
    assert known.digests[-1] == slow_digest(tokens)
    assert truth.next(int(known.hashes[len(PROMPT) - 1])) == known.answer[0]


def test_a_longer_answer_begins_as_a_shorter_one():
    truth = Truth(LETTERS, SIGHTS)
    assert truth.tell(PROMPT, 9).answer[:4] == truth.tell(PROMPT, 4).answer


def test_what_nobody_asked_is_not_known():
    truth = Truth(LETTERS, SIGHTS)
    truth.tell(PROMPT, 2)
    assert truth.digest(1) is None and truth.next(1) is None and truth.find(1) is None


def test_a_word_tells_its_hash():
    pool = code("kv", 3)
    hashes = LETTERS.hashes(0, 0, PROMPT)
    assert [pool.decode(int(word)) for word in pool.encode(hashes)[:, 0]] == hashes.tolist()
    assert code("kv", 3) is pool and (code("swa", 3).scale != pool.scale).any()


def test_it_is_said_where_a_pool_is_wrong():
    known = Truth(LETTERS, SIGHTS).tell(PROMPT, 0)
    words = code("kv", 2).encode(known.hashes)
    assert wrong_pools({"kv": words[2:]}, known, 2) == []
    words[5, 1] += np.uint64(1)
    assert wrong_pools({"kv": words[2:]}, known, 2) == ["pool 'kv' from position 5 on, 1 tokens"]
