from hypothesis import given
from hypothesis import strategies as st

from nearpeak.bound.cache import Residency, by_storage
from nearpeak.work.cost import Access
from nearpeak.work.op import Storage


def test_a_second_read_hits_until_others_push_it_out():
    cache = Residency(100)
    assert cache.access(1, 60) == 0
    assert cache.access(1, 60) == 60
    assert cache.access(2, 70) == 0
    assert cache.access(1, 60) == 30


def test_the_least_recently_used_goes_first():
    cache = Residency(100)
    for storage in (1, 2, 1, 3):
        cache.access(storage, 40)
    assert (cache.resident(1), cache.resident(2), cache.resident(3)) == (40, 20, 40)


def test_a_storage_larger_than_the_cache_keeps_at_most_its_capacity():
    cache = Residency(100)
    cache.access(1, 250)
    assert cache.access(1, 250) == 100


def test_a_write_reaches_memory_only_for_what_does_not_fit():
    cache = Residency(100)
    cache.write(1, 90)
    assert cache.written_back == 0
    cache.write(2, 250)
    assert cache.written_back == 150 + 90


def test_what_is_dead_is_never_written_back_and_takes_no_room():
    cache = Residency(100)
    cache.write(1, 90)
    cache.release(1)
    cache.write(2, 100)
    assert cache.written_back == 0
    assert cache.resident(1) == 0


def test_clean_bytes_are_given_up_first():
    cache = Residency(100)
    cache.access(1, 80)
    cache.write(1, 30)
    cache.access(2, 60)
    assert cache.written_back == 0
    cache.access(3, 30)
    assert cache.written_back == 20


def test_slices_written_in_turn_can_all_be_hit_and_may_be_one():
    cache = Residency(100)
    cache.write(1, 40, limit=80)
    cache.write(1, 40, limit=80)
    assert cache.resident(1) == 80
    assert cache.access(2, 60) == 0
    assert cache.written_back == 0  # room for one slice and storage 2


def test_no_cache():
    cache = Residency(0)
    cache.write(1, 5)
    assert cache.written_back == 5
    assert cache.access(1, 5) == 0


def test_views_of_one_storage_add_up_to_no_more_than_it_has():
    found = by_storage(
        (Access(storage=0, bytes=60), Access(storage=0, bytes=60)), {0: Storage(bytes=100, kind="input")}
    )
    assert found == {0: 100}


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(1, 150)), max_size=40))
def test_room_and_conservation(steps):
    cache = Residency(100)
    fetched: dict[int, float] = {}
    largest_read: dict[int, float] = {}
    written: dict[int, float] = {}
    for is_write, storage, size in steps:
        storage += 10 * is_write
        if is_write:
            cache.write(storage, size)
            written[storage] = max(written.get(storage, 0), size)
        else:
            hit = cache.access(storage, size)
            assert 0 <= hit <= min(size, 100)
            fetched[storage] = fetched.get(storage, 0) + size - hit
            largest_read[storage] = max(largest_read.get(storage, 0), size)
        assert cache._occupied <= 100 + 1e-9
    assert all(fetched[storage] >= size - 1e-9 for storage, size in largest_read.items())
    assert cache.written_back >= sum(written.values()) - 100 - 1e-9
