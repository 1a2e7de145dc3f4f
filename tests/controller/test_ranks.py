"""What one rank has seen settles when every rank has; a difference or a silence is a named error, on all of them."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from hicache.controller import DistributedAgree, OneRank, Place, Seen, Subject
from hicache.controller.frames import HEADER_BYTES, REPORT_BYTES
from hicache.errors import ConfigError, RankError
from hicache.testing.ranks import VirtualRanks
from hicache.transfer import Completion


def bits(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.bool_)


def seen(*completions: Completion, now_s: float = 0.0, standing: bytes = b"") -> Seen:
    return Seen(completions, now_s, lambda: standing)


def ask(
    group: VirtualRanks, steps: Sequence[Sequence[Seen]], behind: int = 0
) -> list[list[tuple[float, list[Completion]]]]:
    """What every rank is told; `steps[rank]` is what it sees, step by step."""

    def one(rank: int):
        agree = DistributedAgree(group.channels[rank], behind=behind)
        return [(agree.now(-1.0), told) for each in steps[rank] for told in [list(agree.step(each))]]

    told = group.run(one)
    assert len(set(group.calls)) == 1
    return [[(now_s, one) for now_s, one in each] for each in told]


def ids(told: Sequence[tuple[float, list[Completion]]]) -> list[list[int]]:
    return [[one.id for one in completions] for _, completions in told]


def test_a_transfer_settles_in_the_step_of_the_last_rank():
    first = [seen(Completion(1), Completion(2)), seen(), seen()]
    second = [seen(Completion(2)), seen(), seen(Completion(1))]
    for told in ask(VirtualRanks(2), [first, second]):
        assert ids(told) == [[2], [], [1]]


def test_transfers_settle_by_their_ids():
    for told in ask(VirtualRanks(2), [[seen(Completion(3), Completion(1))], [seen(Completion(1), Completion(3))]]):
        assert ids(told) == [[1, 3]]


def test_only_what_is_right_on_every_rank_is_right():
    steps = [
        [seen(Completion(1, {"kv": bits(1, 1, 0), "swa": bits(1, 1)}))],
        [seen(Completion(1, {"kv": bits(0, 1, 1), "swa": bits(1, 1)}))],
        [seen(Completion(1, {"kv": bits(1, 1, 1), "swa": bits(1, 1)}))],
    ]
    for told in ask(VirtualRanks(3), steps):
        (one,) = told[0][1]
        assert one.good["kv"].tolist() == [False, True, False]
        assert one.good["swa"].tolist() == [True, True]
        assert one.error is None


def test_a_failure_on_one_rank_is_one_on_all():
    steps = [[seen(Completion(1, {"kv": bits(1, 1)}))], [seen(Completion(1, error="OSError: EIO"))]]
    (here,), (there,) = [told[0][1] for told in ask(VirtualRanks(2), steps)]
    assert (here.good, here.error) == ({}, "failed on another rank")
    assert (there.good, there.error) == ({}, "OSError: EIO")


def test_a_rank_that_ran_ahead_makes_all_late():
    steps = [[seen(Completion(1, late=True))], [seen(Completion(1))]]
    assert [told[0][1][0].late for told in ask(VirtualRanks(2), steps)] == [True, True]


def test_time_is_that_of_the_first_rank_and_never_goes_back():
    steps = [[seen(now_s=now_s) for now_s in (5.0, 7.0, 6.0)], [seen(now_s=now_s) for now_s in (100.0, 1.0, 50.0)]]
    group = VirtualRanks(2)

    def one(rank: int) -> list[float]:
        agree = DistributedAgree(group.channels[rank])
        times = []
        for each in steps[rank]:
            agree.step(each)
            times.append(agree.now(-1.0))
        return times

    assert group.run(one) == [[5.0, 7.0, 7.0]] * 2


def test_behind_by_one_a_step_settles_what_was_seen_in_the_one_before():
    steps = [
        [seen(Completion(1)), seen(Completion(2)), seen(), seen()],
        [seen(Completion(1)), seen(), seen(Completion(2)), seen()],
    ]
    for told in ask(VirtualRanks(2), steps, behind=1):
        assert ids(told) == [[], [1], [], [2]]


def test_behind_by_one_a_rank_may_be_a_step_ahead_without_waiting():
    group = VirtualRanks(2, timeout_s=0.05)
    ahead, slow = [DistributedAgree(channel, behind=1) for channel in group.channels]
    ahead.step(seen(Completion(1)))
    slow.step(seen(Completion(1)))
    assert [one.id for one in ahead.step(seen())] == [1]
    with pytest.raises(RankError, match="ranks \\[1\\] are gone, or late"):
        ahead.step(seen())


def test_what_does_not_fit_into_a_frame_comes_in_the_next_step():
    group = VirtualRanks(2, frame_bytes=HEADER_BYTES + 2 * REPORT_BYTES)
    many = seen(*[Completion(number) for number in range(5)])
    for told in ask(group, [[many, seen(), seen()]] * 2):
        assert ids(told) == [[0, 1], [2, 3], [4]]


def test_bitmaps_larger_than_a_frame_count_as_failed(caplog: pytest.LogCaptureFixture):
    group = VirtualRanks(2, frame_bytes=HEADER_BYTES + 2 * REPORT_BYTES)
    large = seen(Completion(1, {"kv": bits(*[1, 0] * 500)}))
    for told in ask(group, [[large]] * 2):
        assert told[0][1][0].good == {}
    assert "larger than a frame" in caplog.text


@pytest.mark.parametrize("subject", list(Subject))
def test_ranks_that_differ_get_a_named_error_in_the_same_step(subject: Subject):
    group = VirtualRanks(3)

    def one(rank: int) -> str:
        agree = DistributedAgree(group.channels[rank])
        agree.step(seen())
        standing = b""
        if rank == 2:
            agree.note(subject, b"something else")
        with pytest.raises(RankError) as caught:
            agree.step(seen(standing=standing))
        with pytest.raises(RankError, match="no longer agree.*" + subject.value):
            agree.step(seen())
        return str(caught.value)

    assert set(group.run(one)) == {f"step 1: ranks [2] {subject.value} than rank 0"}


def test_numbers_that_differ_are_a_named_error():
    group = VirtualRanks(2)

    def one(rank: int) -> None:
        with pytest.raises(RankError, match="ranks \\[1\\] have other slots, pins or nodes than rank 0"):
            DistributedAgree(group.channels[rank]).step(seen(standing=bytes([rank])))

    group.run(one)


def test_a_rank_that_polls_once_less_is_a_named_error():
    group = VirtualRanks(2)

    def one(rank: int) -> None:
        agree = DistributedAgree(group.channels[rank])
        agree.step(seen())
        if rank == 0:
            with pytest.raises(RankError, match="ranks \\[1\\] are gone"):
                agree.step(seen())

    group.run(one)
    assert group.calls == (2, 1)


def test_a_rank_that_is_late_is_a_named_error_within_the_deadline():
    group = VirtualRanks(2, timeout_s=0.05)
    with pytest.raises(RankError, match=r"late by 0\.05 s"):
        DistributedAgree(group.channels[0]).step(seen())


def gathered(group: VirtualRanks, messages: Sequence[bytes]) -> list[tuple[bytes, ...]]:
    return group.run(lambda rank: DistributedAgree(group.channels[rank]).gather(messages[rank]))


def test_ranks_tell_each_other_more_than_a_frame_at_the_start():
    messages = [b"", b"a" * 1000, bytes(range(256)) * 3]
    assert gathered(VirtualRanks(3, frame_bytes=100), messages) == [tuple(messages)] * 3


def test_a_rank_that_starts_while_another_runs_is_a_named_error():
    group = VirtualRanks(2)

    def one(rank: int) -> None:
        agree = DistributedAgree(group.channels[rank])
        call: Callable[[], object] = (lambda: agree.step(seen())) if rank else (lambda: agree.gather(b"x"))
        with pytest.raises(RankError, match="version"):
            call()

    group.run(one)


def test_a_rank_that_leaves_gets_what_others_have_not_seen():
    group = VirtualRanks(2)

    def one(rank: int) -> list[int]:
        agree = DistributedAgree(group.channels[rank])
        agree.step(seen(*([Completion(4), Completion(2)] if rank == 0 else [Completion(3)])))
        return [one.id for one in agree.leave()]

    assert group.run(one) == [[2, 4], [3]]


def test_one_rank_agrees_with_itself():
    alone = OneRank()
    completions = (Completion(2), Completion(1))
    assert alone.step(seen(*completions)) == completions
    assert (alone.now(3.0), alone.gather(b"x"), alone.leave(), alone.ranks, alone.rank) == (3.0, (b"x",), (), 1, 0)


@pytest.mark.parametrize("wrong", [{"behind": -1}, {"frame_bytes": 10}])
def test_what_makes_no_sense_is_refused(wrong: dict[str, int]):
    with pytest.raises(ConfigError):
        DistributedAgree(
            VirtualRanks(2, frame_bytes=wrong.get("frame_bytes", 100)).channels[0], behind=wrong.get("behind", 0)
        )


OWNER = bytes(32)


def test_shards_and_stages_have_keys_of_their_own():
    places = [Place(shard, 2, stage, 2) for shard in (0, 1) for stage in (0, 1)]
    assert len({place.namespace(OWNER, replicated=False) for place in places}) == 4
    assert len({place.namespace(OWNER, replicated=True) for place in places}) == 2
    assert [place.writes(replicated=True) for place in places] == [True, True, False, False]
    assert all(place.writes(replicated=False) for place in places)


def test_equal_bytes_have_one_key_for_any_number_of_shards():
    assert Place().namespace(OWNER, replicated=False) == Place(1, 4).namespace(OWNER, replicated=True) == OWNER


@pytest.mark.parametrize("numbers", [(2, 2), (-1, 2), (0, 1, 1, 1), (0, 0)])
def test_a_place_that_is_not_there_is_refused(numbers: tuple[int, ...]):
    with pytest.raises(ConfigError):
        Place(*numbers)
