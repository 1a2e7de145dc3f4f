"""Layers arrive in order, and nobody waits for a load that has ended."""

import threading

import pytest

from hicache.transfer import LayerProgress


def test_a_layer_is_there_once_it_or_a_later_one_has_arrived():
    progress = LayerProgress(3)
    assert not progress.wait(0, 0.0)
    progress.arrive(1)
    assert progress.wait(0, 0.0)
    assert progress.wait(1, 0.0)
    assert not progress.wait(2, 0.0)
    progress.arrive(0)
    assert progress.wait(1, 0.0), "progress never goes back"


def test_layers_past_the_last_come_with_the_last():
    progress = LayerProgress(2)
    assert not progress.wait(9, 0.0)
    progress.arrive(1)
    assert progress.wait(9, 0.0)


def test_the_end_is_not_the_last_layer():
    progress = LayerProgress(2)
    progress.arrive(1)
    assert not progress.ended
    assert not progress.wait_end(0.0)
    progress.end()
    assert progress.ended
    assert progress.wait_end(0.0)


@pytest.mark.parametrize("wait", [lambda progress: progress.wait(1), lambda progress: progress.wait_end()])
def test_a_load_that_failed_wakes_whoever_waits(wait):
    progress = LayerProgress(2)
    answers: list[bool] = []
    waiter = threading.Thread(target=lambda: answers.append(wait(progress)))
    waiter.start()
    progress.end()
    waiter.join(10.0)
    assert answers == [True]


def test_a_waiter_goes_on_when_its_layer_arrives():
    progress = LayerProgress(2)
    answers: list[bool] = []
    waiter = threading.Thread(target=lambda: answers.append(progress.wait(0)))
    waiter.start()
    progress.arrive(0)
    waiter.join(10.0)
    assert answers == [True]
    assert not progress.ended
