from hypothesis import given
from hypothesis import strategies as st

from nearpeak.bound.cache import Residency, distinct
from nearpeak.ops.cost import Access
from nearpeak.ops.op import Storage


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
    found = distinct((Access(storage=0, bytes=60), Access(storage=0, bytes=60)), {0: Storage(bytes=100, kind="input")})
    assert found == (Access(storage=0, bytes=100),)


def test_a_kernel_reads_side_by_side_then_writes():
    storages = {number: Storage(bytes=60, kind="input") for number in range(3)}
    one, two = Residency(100), Residency(100)
    reads = (Access(storage=0, bytes=60), Access(storage=1, bytes=60))
    for _ in range(2):
        missed = sum(size - one.resident(number) for number, size in ((0, 60), (1, 60)))
        for number in (0, 1):
            one.access(number, 60)
        one.write(2, 60, limit=60)
        assert two.kernel(reads, (Access(storage=2, bytes=60),), storages) == missed
        assert [two.resident(number) for number in range(3)] == [one.resident(number) for number in range(3)]
        assert two.written_back == one.written_back
    assert one.written_back == 60  # in the second round the first result is pushed out


def test_what_is_not_wanted_is_not_written_back():
    cache = Residency(100)
    cache.kernel((), (Access(storage=0, bytes=80), Access(storage=1, bytes=80)), {}, wanted=False)
    assert cache.written_back == 0


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
