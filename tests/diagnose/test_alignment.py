import random

from hypothesis import given
from hypothesis import strategies as st

from nearpeak.diagnose.alignment import align

names = st.lists(st.sampled_from("abcdef"), max_size=40)


@given(names)
def test_a_sequence_is_itself(sequence):
    assert align(sequence, sequence) == list(range(len(sequence)))


@given(names, names)
def test_what_is_aligned_is_equal_and_in_order(one, other):
    found = [(at, to) for at, to in enumerate(align(one, other)) if to is not None]
    assert all(one[at] == other[to] for at, to in found)
    assert [to for _, to in found] == sorted({to for _, to in found})


def test_ops_that_only_one_run_has_are_passed_over():
    layer = ["mm", "add", "norm", "mul", "softmax", "mm2"]
    one = [f"{number}.{name}" for number in range(50) for name in layer]
    other = [name for name in one if not name.endswith("add")]
    found = align(one, other)
    assert [one[at] for at, to in enumerate(found) if to is None] == [name for name in one if name.endswith("add")]
    assert align(other, one) == [one.index(name) for name in other]


def test_a_few_random_differences_cost_a_few_ops():
    rng = random.Random(0)
    one = [rng.choice("abcdefghijklmnop") for _ in range(2000)]
    other = [name if rng.random() > 0.02 else "x" for name in one if rng.random() > 0.02]
    found = align(one, other)
    assert sum(to is not None for to in found) > 0.93 * len(one)
