"""What the page's script makes of its data: columns, groups, order, modules, filters."""

import itertools
import json
import math
import random

import pytest
from javascript import run
from synthetic import profile

from nearpeak.render.html.profile import data_json
from nearpeak.render.text import short_name
from nearpeak.render.views.profile_roofs import ProfileRoofs

MODEL = ["units.js", "sorting.js", "model.js", "columns.js", "filters.js"]


@pytest.fixture(scope="module")
def made():
    return profile(400)


@pytest.fixture(scope="module")
def data(made):
    return json.loads(data_json(made, made.findings, ProfileRoofs(roofs=(), origin="")))


def test_columns_are_read_whichever_way_they_are_written():
    given = [[1, 2], {"all": 3, "count": 2}, {"values": ["a", "b"], "index": [1, 0, 1]}]
    assert run(["model.js"], "data.map(columnOf)", given) == [[1, 2], [3, 3], ["b", "a", "b"]]


def test_runs_of_indices_are_read_back():
    assert run(["model.js"], "indicesOf(data)", [2, 3, 4, 1]) == [2, 3, 4, 9]


@pytest.mark.parametrize("descending", [False, True])
def test_the_order_is_that_of_a_sort(descending):
    draw = random.Random(1)
    keys = [draw.choice([-1, 1]) * 10 ** draw.uniform(-12, 12) for _ in range(3000)] + [0.0, 0.0, 1.0, 1.0]
    order = run(["sorting.js"], f"Array.from(orderOf(Float64Array.from(data), {str(descending).lower()}))", keys)
    assert order == sorted(range(len(keys)), key=lambda at: -keys[at] if descending else keys[at])


def test_what_is_not_a_number_comes_last_in_both_directions():
    for descending, expected in (("false", [2, 0, 1]), ("true", [0, 2, 1])):
        assert run(["sorting.js"], f"Array.from(orderOf(Float64Array.from([2, NaN, 1]), {descending}))") == expected


def test_groups_have_the_sums_of_their_ops(made, data):
    sums = {}
    for op in made.ops:
        key = (op.name, op.phase, op.source, ", ".join(" x ".join(map(str, shape)) for shape in op.shapes))
        measured, count = sums.get(key, (0.0, 0))
        sums[key] = (measured + op.measured_s, count + 1)
    program = (
        "(() => { const model = readModel(data); const groups = groupsOf(model, null); "
        "return groups.what.map((what) => "
        '[...["name", "phase", "source", "shapes"].map((name) => whatText(model, name, what)), groups.measured[what], '
        "groups.ops[what]]); })()"
    )
    found = {tuple(row[:4]): row[4:] for row in run(MODEL, program, data)}
    assert found.keys() == sums.keys()
    for key, (measured, count) in sums.items():
        assert found[key][1] == count
        assert math.isclose(found[key][0], measured, rel_tol=1e-3)


def test_modules_sum_to_the_time_of_kernels(made, data):
    program = "(() => { const tree = modulesOf(readModel(data)); return [tree.measured, tree.ops, tree.bound]; })()"
    measured, ops, bound = run(MODEL, program, data)
    assert math.isclose(measured, made.kernel_s, rel_tol=1e-3)
    assert math.isclose(bound, sum(op.bound_s for op in made.ops), rel_tol=1e-3)
    assert ops == len(made.ops)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a.b"], "a.b"),
        (["a.0.c", "a.1.c"], "a.*.c"),
        (["a.0.c", "a.1.d"], "a.*.*"),
        (["a.b", "a.b.c"], "a.b.*"),
        (["", "a.b"], "*"),
        ([], ""),
    ],
)
def test_modules_of_a_group_are_named_together(names, expected):
    assert run(["model.js"], "commonModule(data)", names) == expected


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        ("", ["a.1", "a.1.b", "a.10.b", "c"]),
        ("a.1", ["a.1", "a.1.b"]),
        ("a.*.b", ["a.1.b", "a.10.b"]),
        ("a.1.", ["a.1.b"]),
        ("a.1.x", []),
        ("a", ["a.1", "a.1.b", "a.10.b"]),
    ],
)
def test_a_filter_takes_what_is_inside_of_a_module(prefix, expected):
    paths = ["a.1", "a.1.b", "a.10.b", "c"]
    flags = run(MODEL, "Array.from(modulesIn(data[0], data[1]))", [paths, prefix])
    assert [path for path, flag in zip(paths, flags, strict=True) if flag] == expected


def found_ops(data, **changes):
    filters = {"search": "", "phase": "", "limiter": "", "family": "", "module": "", "line": "", "free": False}
    filters |= {"finding": None, "what": None} | changes
    return run(MODEL, "Array.from(matchingOps(readModel(data.data), data.filter))", {"data": data, "filter": filters})


def test_filters_take_the_ops_that_they_say(made, data):
    costly = [at for at, op in enumerate(made.ops) if op.kernels or op.bound_s > 0.0]
    assert found_ops(data) == costly
    assert found_ops(data, free=True) == list(range(len(made.ops)))
    assert found_ops(data, phase="backward") == [at for at in costly if made.ops[at].phase == "backward"]
    memory = [at for at in costly if made.ops[at].limiter == "memory" and made.ops[at].modeled]
    assert found_ops(data, limiter="memory") == memory
    assert found_ops(data, limiter="no bound") == [at for at in costly if not made.ops[at].modeled]
    assert found_ops(data, family="matrix") == [at for at in costly if made.ops[at].family == "matrix"]
    line = made.ops[3].source
    assert found_ops(data, line=line) == [at for at in costly if made.ops[at].source == line]
    layer = [at for at in costly if made.ops[at].module.startswith("Model.layers.1.")]
    assert found_ops(data, module="Model.layers.1") == layer
    found = made.findings[1]
    assert found_ops(data, finding=1) == [at for at in found.ops if at in costly]


def test_a_search_wants_every_word(made, data):
    wanted = [at for at, op in enumerate(made.ops) if op.kernels and "mul" in op.name and "mlp" in op.module]
    assert wanted
    assert found_ops(data, search="MUL mlp") == wanted
    assert found_ops(data, search="mul nothing-has-this") == []


def test_labels_are_spread_in_order_and_no_nearer_than_asked():
    places = run(["roofs.js"], "spread(data, 10)", [5, 6, 7, 50, 100, 101])
    assert all(b - a >= 10 - 1e-9 for a, b in itertools.pairwise(places))
    assert places[3] == 50
    assert sum(places[:3]) / 3 == pytest.approx(6)


def test_amounts_are_read_back_in_their_unit(made, data):
    program = (
        "(() => { const model = readModel(data); const sum = (name) => Array.from(model.kind, (kind) => "
        'model[name][kind]).reduce((a, b) => a + b, 0); return [sum("flops"), sum("bytes"), sum("kernels")]; })()'
    )
    flops, moved, kernels = run(MODEL, program, data)
    assert math.isclose(flops, sum(op.flops for op in made.ops), rel_tol=1e-3)
    assert math.isclose(moved, sum(op.bytes for op in made.ops), rel_tol=1e-3)
    assert kernels == sum(op.kernels for op in made.ops)


def test_every_op_is_read_back_with_its_name_and_module(made, data):
    program = (
        "(() => { const model = readModel(data); return Array.from(model.kind, (kind, op) => "
        '[whatText(model, "name", model.whatOf[op]), whatText(model, "short", model.whatOf[op]), '
        "model.modules[model.module[op]]]); })()"
    )
    expected = [[op.name, short_name(op.name), op.module] for op in made.ops]
    assert run(MODEL, program, data) == expected
