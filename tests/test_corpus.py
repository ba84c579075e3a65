"""Every planted waste of the corpus is found at its line, and nothing in its clean twin."""

import pytest
import torch
from made_up import slow_cpu
from planted import CASES, load, planted

import nearpeak
from nearpeak.profiles.grade import WAITED
from nearpeak.profiling import session

ATTEMPTS = 3
CPU = slow_cpu()


@pytest.fixture(autouse=True)
def _few_steps(request, monkeypatch):
    """On the CPU the bounds are those of a made-up machine, and shares are compared, which take few steps."""
    if "gpu" not in request.keywords:
        for name, value in {"CLEAN_STEPS": 5, "CLEAN_SECONDS": 1.0, "AGAIN_STEPS": 5, "AGAIN_SECONDS": 0.2}.items():
            monkeypatch.setattr(session, name, value)


def shown(step, device):
    """The findings, and whether other work held the cores meanwhile: a pause of a thread looks like Python then."""
    profile = nearpeak.profile(step, on=CPU if device == "cpu" else None)
    conditions = profile.conditions
    busy = conditions is not None and (conditions.waited_share or 0.0) > WAITED[0]
    return [
        finding for finding in profile.findings if max(finding.share, finding.once_s / profile.wall_s) >= 0.01
    ], busy


def is_found(name, device):
    module, line = load(name), planted(name)
    found, busy = shown(module.waste(device), device)
    named = [finding for finding in found if finding.rule == module.RULE and line in (None, finding.source)]
    return (
        bool(named),
        busy,
        f"{module.RULE} was not found at {line}, but {[(item.rule, item.source) for item in found]}",
    )


def is_quiet(name, device):
    module = load(name)
    found, busy = shown(module.clean(device), device)
    found = [finding for finding in found if finding.rule not in getattr(module, "BY_NATURE", ())]
    return not found, busy, f"the clean twin has {[(item.rule, item.source, item.share) for item in found]}"


def is_faster_than_made_up(name):
    """Whether ops of the waste take less time than bounds on `CPU`: nothing is lost then, and nothing is found."""
    profile = nearpeak.profile(load(name).waste("cpu"), on=CPU)
    return any(op.measured_s < 0.9 * op.bound_s for op in profile.ops)


def check(name, device):
    """Times are measured: on a machine that others use, one that went wrong is taken again."""
    for look in (is_found, is_quiet):
        right, busy, what = look(name, device)
        for _ in range(ATTEMPTS - 1):
            if not right:
                right, busy, what = look(name, device)
        if not right and busy:
            pytest.skip(f"other work held the cores: {what}")
        if not right and device == "cpu" and is_faster_than_made_up(name):
            pytest.skip("this CPU is faster than the one that the bounds are of")
        assert right, what


@pytest.mark.parametrize(
    "name",
    # every fourth one; all of them take minutes
    [pytest.param(name, marks=pytest.mark.exhaustive if at % 4 else pytest.mark.slow) for at, name in enumerate(CASES)],
)
def test_on_a_cpu(name):
    if "cpu" not in load(name).DEVICES:
        pytest.skip("this waste cannot exist on a CPU")
    check(name, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name):
    if "cuda" not in load(name).DEVICES:
        pytest.skip("this waste cannot exist on a GPU")
    torch.cuda.empty_cache()
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")  # "highest" is a waste of its own
    try:
        check(name, "cuda")
    finally:
        torch.set_float32_matmul_precision(precision)


@pytest.mark.slow  # optimizers import much of torch
def test_gradients_that_are_checked_stay_finite_however_many_steps_are_timed(monkeypatch):
    norms, clip = [], torch.nn.utils.clip_grad_norm_
    monkeypatch.setattr(
        torch.nn.utils, "clip_grad_norm_", lambda *given, **options: norms.append(clip(*given, **options))
    )
    step = load("finite_gradients").waste("cpu")
    for _ in range(20):
        step()
    assert len(norms) == 20 and len({norm.item() for norm in norms}) == 1
