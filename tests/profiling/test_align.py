import random

from hypothesis import given
from hypothesis import strategies as st

from nearpeak.profiling.assemble import align, align_between, align_by

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


@given(names, names)
def test_light_ops_too_are_aligned_in_order(one, other):
    found = [(at, to) for at, to in enumerate(align_by(one, other, {"a", "b"})) if to is not None]
    assert all(one[at] == other[to] for at, to in found)
    assert [to for _, to in found] == sorted({to for _, to in found})


def test_views_that_only_one_run_has_mislead_nobody():
    one = ["t", "addmm", "gelu", "gelu_backward", "t", "mm", "t", "mm", "sum", "view", "detach"] * 4
    other = ["t", "detach", "detach", "addmm", "detach", "detach", "gelu_backward", "detach", "t", "mm", "t", "mm"]
    other = [*other, "sum", "view", "detach"] * 4
    found = align_by(one, other, {"t", "detach", "view"})
    assert {one[at] for at, to in enumerate(found) if to is None} == {"gelu"}
    assert [other[to] for to in found if to is not None] == [name for name in one if name != "gelu"]


def test_ops_that_grew_are_found_between_those_that_did_not():
    one = ["embed", ("mm", 7), ("add", 7), "norm", ("mm", 7), "argmax"]
    other = ["embed", ("mm", 8), "t", ("add", 8), "norm", ("mm", 8), "argmax"]
    found = align(one, other)
    assert found == [0, None, None, None, None, 6]
    loose = [[key[0] if isinstance(key, tuple) else key for key in keys] for keys in (one, other)]
    assert align_between(found, *loose) == [0, 1, 3, 4, 5, 6]
