"""Threads and their caller share the work: each job is carried out once, by whoever comes to it first."""

import threading

import pytest

from edgefl.learning.workers import Workers


def test_without_another_thread_a_job_is_carried_out_when_its_result_is_asked_for() -> None:
    alone, seen = Workers(1), []
    first, second = (alone.submit(lambda _, i=i: seen.append(i) or i) for i in (1, 2))
    assert seen == []
    assert second.result() == 2 and seen == [2]
    assert first.result() == 1 and seen == [2, 1]
    assert first.result() == 1 and seen == [2, 1]


def test_who_waits_for_what_another_thread_is_at_does_the_oldest_of_the_rest() -> None:
    pair, begun, go_on, seen = Workers(2), threading.Event(), threading.Event(), []

    def slow(_: int) -> str:
        begun.set()
        assert go_on.wait(30)
        return threading.current_thread().name

    def quick(_: int) -> str:
        seen.append(threading.current_thread().name)
        if len(seen) == 2:
            go_on.set()
        return seen[-1]

    far = pair.submit(slow)
    assert begun.wait(30)
    near = [pair.submit(quick) for _ in range(2)]
    here = threading.current_thread().name
    assert far.result() != here
    assert [job.result() for job in near] == [here, here] == seen


def test_each_job_is_carried_out_once_whoever_takes_it() -> None:
    several, seen = Workers(3), []
    jobs = [several.submit(lambda _, i=i: seen.append(i) or i) for i in range(200)]
    assert [job.result() for job in reversed(jobs)] == list(reversed(range(200)))
    assert sorted(seen) == list(range(200))


def test_a_job_that_nobody_wants_is_not_carried_out() -> None:
    alone, seen = Workers(1), []
    job, other = alone.submit(lambda _: seen.append("cancelled")), alone.submit(lambda _: seen.append("kept"))
    assert job.cancel()
    other.result()
    assert seen == ["kept"] and not other.cancel()


def test_a_job_is_told_the_place_of_its_thread() -> None:
    pair, both = Workers(2), threading.Barrier(2)

    def there(place: int) -> tuple[int, str]:
        both.wait(30)
        return place, threading.current_thread().name

    jobs = [pair.submit(there) for _ in range(2)]
    found = dict(job.result() for job in jobs)
    assert sorted(found) == [0, 1] and found[0] == threading.current_thread().name != found[1]


@pytest.mark.parametrize("count", [1, 2])
def test_what_a_job_raises_reaches_whoever_waits_for_it(count: int) -> None:
    def broken(_: int) -> None:
        raise ZeroDivisionError("a mistake")

    job = Workers(count).submit(broken)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="a mistake"):
            job.result()
