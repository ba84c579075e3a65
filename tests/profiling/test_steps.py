import copy
import gc
import os
import pickle
import threading

import pytest
import torch
import torch.utils.checkpoint

from nearpeak.profiling import steps
from nearpeak.profiling.steps import CALLS_WITHOUT_OPTIMIZER, MAX_CALLS, detect_steps
from nearpeak.trace.guard import Guard
from nearpeak.trace.live import LiveTrace


class Watcher:
    def __init__(self):
        self.events = []
        self.kinds = []

    def optimizer_begins(self, optimizer, args, kwargs):
        self.events.append("begins")

    def optimizer_ends(self):
        self.events.append("ends")

    def training_begins(self):
        self.events.append("training")

    def period_begins(self, words):
        self.events.append("period")

    def step_ends(self, kind):
        self.events.append("step")
        self.kinds.append(kind)


@pytest.fixture
def watcher():
    return Watcher()


def train(model, optimizer, steps, *, accumulated=1, scheduler=None):
    for _ in range(steps):
        for _ in range(accumulated):
            model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


@pytest.mark.parametrize("accumulated", [1, 3])
def test_a_training_step_ends_after_the_optimizers(watcher, accumulated):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters())
    with detect_steps(watcher):
        train(model, optimizer, 4, accumulated=accumulated)
    assert watcher.events == ["begins", "training", "ends", "step"] + ["begins", "ends", "step"] * 3
    assert {(kind.trained, kind.evaluated) for kind in watcher.kinds} == {(accumulated, 0)}
    assert "step" not in vars(optimizer)


def test_the_last_step_counts_that_ends_inside_the_backward_pass(watcher):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD([model.weight])
    model.weight.register_post_accumulate_grad_hook(lambda parameter: optimizer.step())
    with detect_steps(watcher):
        for _ in range(3):
            model(torch.randn(2, 4)).sum().backward()
    assert watcher.events.count("step") == 3


def test_the_first_of_several_optimizers_ends_the_steps(watcher):
    models = [torch.nn.Linear(4, 4) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters()) for model in models]
    with detect_steps(watcher):
        for _ in range(3):
            for model, optimizer in zip(models, optimizers, strict=True):
                train(model, optimizer, 1)
    assert watcher.events.count("step") == 3


def test_a_schedule_of_learning_rates_works_on_and_is_left_as_it_was(watcher):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    own = vars(optimizer)["step"]
    with detect_steps(watcher):
        train(model, optimizer, 3, scheduler=scheduler)  # a warning of the scheduler's would be an error here
    assert watcher.events.count("step") == 3
    assert vars(optimizer)["step"] is own


def test_inference_takes_a_step_with_each_outermost_module(watcher):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    with detect_steps(watcher):
        with torch.no_grad():
            for _ in range(3):
                model(torch.randn(2, 4))
        model(torch.randn(2, 4))  # with gradients: a training step that is not over
    assert watcher.events == ["step"] * 3


def follow_forces(model, steps):
    places = torch.randn(2, 4)
    for _ in range(steps):
        places.requires_grad_()
        (gradient,) = torch.autograd.grad(model(places).sum(), places)
        places = (places - gradient).detach()


def update_by_hand(model, steps):
    for _ in range(steps):
        model(torch.randn(2, 4)).sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None


def recompute(model, steps):
    for _ in range(steps):
        torch.utils.checkpoint.checkpoint(model, torch.randn(2, 4), use_reentrant=False).sum().backward()


@pytest.mark.parametrize("run", [follow_forces, update_by_hand, recompute])
def test_without_an_optimizer_a_step_lasts_from_one_call_to_the_next(watcher, monkeypatch, run):
    monkeypatch.setattr(steps, "_live_optimizer", lambda: "")  # of another test
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    with detect_steps(watcher):
        run(model, CALLS_WITHOUT_OPTIMIZER + 5)
    assert watcher.events == ["step"] * 6
    assert {kind.words for kind in watcher.kinds} == {"a call of Sequential with gradients"}
    assert watcher.kinds[1].is_similar(watcher.kinds[2])


def test_two_calls_with_gradients_that_recur_are_one_step(watcher, monkeypatch):
    monkeypatch.setattr(steps, "_live_optimizer", lambda: "")
    energy, field = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    with detect_steps(watcher):
        for _ in range(20):
            energy(torch.randn(2, 4)).sum().backward()
            field(torch.randn(2, 4)).sum().backward()
    assert watcher.events.count("period") == 1
    assert watcher.kinds[-1].words == "a period of 2 calls of Linear with gradients"


def test_an_optimizer_that_steps_late_ends_the_steps(watcher, monkeypatch):
    monkeypatch.setattr(steps, "_live_optimizer", lambda: "")
    model = torch.nn.Linear(4, 4)
    with detect_steps(watcher):
        follow_forces(model, CALLS_WITHOUT_OPTIMIZER + 2)
        train(model, torch.optim.SGD(model.parameters()), 2, accumulated=2)
    assert watcher.events[-8:] == ["step", "begins", "training", "ends", "step", "begins", "ends", "step"]


def test_an_optimizer_that_has_not_stepped_yet_is_waited_for(watcher):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    with detect_steps(watcher):
        follow_forces(model, 2 * CALLS_WITHOUT_OPTIMIZER)
        train(model, optimizer, 2)
    assert watcher.events.count("step") == 2


class Decoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(8, 4)

    def forward(self, tokens, mask=None):
        return self.embedding(tokens)


def test_tokens_of_a_text_are_alike_and_its_prompt_is_not(watcher):
    model = Decoder()
    with detect_steps(watcher), torch.no_grad():
        for _ in range(2):
            model(tokens=torch.zeros(1, 6, dtype=torch.int64), mask=torch.ones(1, 6))
            for length in range(7, 10):
                model(tokens=torch.zeros(1, 1, dtype=torch.int64), mask=torch.ones(1, length))
    first, *tokens, prompt, another, _, _ = watcher.kinds
    assert [kind.shape for kind in (*tokens, prompt, another)] == [(1, 1)] * 3 + [(1, 6), (1, 1)]
    assert tokens[0].is_similar(another)
    assert not tokens[0].is_similar(prompt)
    assert first.module == prompt.module


def test_an_evaluation_between_training_steps_makes_a_step_of_another_kind(watcher):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    with detect_steps(watcher):
        train(model, optimizer, 3)
        with torch.no_grad():
            model(torch.randn(2, 4))
        train(model, optimizer, 2)
    assert [kind.evaluated for kind in watcher.kinds] == [0, 0, 0, 1, 0]
    assert not watcher.kinds[2].is_similar(watcher.kinds[3])


def test_calls_are_still_told_when_no_new_modules_are_looked_for_and_nothing_is_left_behind(watcher):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    before = torch.nn.Module.__call__
    with detect_steps(watcher) as steps, torch.no_grad():
        during = torch.nn.Module.__call__
        model(torch.randn(2, 4))
        steps.calls.search(False)
        assert torch.nn.Module.__call__ is during  # a change would make what the interpreter has cached void
        model(torch.randn(2, 4))
        Decoder()(torch.zeros(1, 1, dtype=torch.int64))
        copied = copy.deepcopy(model)
        assert b"nearpeak" not in pickle.dumps(model)
    assert len(watcher.events) == 2
    assert torch.nn.Module.__call__ is before
    assert "__call__" not in vars(torch.nn.Sequential)
    copied(torch.randn(2, 4))
    assert len(watcher.events) == 2


def test_code_without_a_model_is_not_slowed(watcher):
    layers = [torch.nn.Linear(4, 4) for _ in range(MAX_CALLS + 1)]
    optimizer = torch.optim.SGD([parameter for layer in layers for parameter in layer.parameters()])
    with detect_steps(watcher):
        for _ in range(3):
            x = torch.randn(2, 4)
            for layer in layers:
                x = layer(x)
            x.sum().backward()
            optimizer.step()
        assert "__call__" not in vars(torch.nn.Linear)
    assert [kind.trained for kind in watcher.kinds] == [MAX_CALLS + 1, 0, 0]


def test_a_marked_function_is_the_step_and_nothing_else_is(watcher):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())

    with detect_steps(watcher) as steps:

        @steps.mark
        def twice(again):
            """Both."""
            train(model, optimizer, 2)
            if again:
                twice(False)

        for _ in range(3):
            twice(True)
        with torch.no_grad():
            model(torch.ones(4))
        with pytest.raises(TypeError):
            twice()
    assert watcher.events.count("step") == 3
    assert twice.__doc__ == "Both."


def test_an_optimizer_with_a_closure_and_a_late_schedule_of_learning_rates(watcher):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().sum()
        loss.backward()
        return loss

    with detect_steps(watcher):
        for _ in range(3):
            optimizer.step(closure)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        for _ in range(2):
            optimizer.step(closure)
            scheduler.step()
    assert watcher.events.count("step") == 5


def test_a_step_that_a_scaler_skips_belongs_to_the_next(watcher):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with detect_steps(watcher):
        for bad in (False, False, True, False):
            loss = model(torch.ones(2, 4)).sum() * (float("inf") if bad else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert [kind.trained for kind in watcher.kinds] == [1, 1, 2]


def test_compiled_code_is_the_same_code(watcher):
    counters = torch._dynamo.utils.counters
    for compiled in (torch.compile(torch.nn.Linear(4, 4), backend="eager"), Decoder()):
        if isinstance(compiled, Decoder):
            compiled.compile(backend="eager")
        torch._dynamo.reset()
        watcher.events.clear()
        x = torch.zeros(1, 4) if not isinstance(compiled, Decoder) else torch.zeros(1, 4, dtype=torch.int64)
        with torch.no_grad():
            with detect_steps(watcher) as steps:
                compiled(x)
                graphs = counters["stats"]["unique_graphs"]
                for on in (True, False, True):
                    steps.calls.search(on)
                    compiled(x)
            compiled(x)
        assert watcher.events == ["step"] * 4
        assert counters["stats"]["unique_graphs"] == graphs


def test_a_live_trace_between_two_moments_knows_phases_and_changes_nothing():
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    live = LiveTrace()
    model(torch.ones(2, 4)).sum().backward()
    live.optimizer_begins(optimizer, (optimizer,), {})
    optimizer.step()
    live.optimizer_ends()
    traced = live.stop()
    assert [op.phase for op in traced.ops if op.packet == "aten.addmm"] == ["forward"]
    assert {"forward", "backward", "optimizer"} == {op.phase for op in traced.ops}
    before = len(traced.ops)
    model(torch.ones(2, 4))
    assert len(traced.ops) == before
    assert model.weight.grad is not None


def test_ops_of_a_closure_are_not_the_optimizers_in_a_live_step():
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)

    def closure():
        loss = model(torch.ones(2, 4)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    live = LiveTrace()

    class Listener(Watcher):
        def optimizer_begins(self, optimizer, args, kwargs):
            return live.optimizer_begins(optimizer, args, kwargs)

        def optimizer_ends(self):
            live.optimizer_ends()

    with detect_steps(Listener()):
        optimizer.step(closure)
    phases = {op.packet: op.phase for op in live.stop().ops}
    assert (phases["aten.addmm"], phases["aten.mm"], phases["aten.mul_"]) == ("forward", "backward", "optimizer")


class Ticking(Guard):
    """A guard whose clock ticks once for each time that it is asked."""

    ticks = 0

    def program_time(self, *, now=False):
        self.ticks += 1
        return 1e-3 * self.ticks


def rollout(model, calls):
    with torch.no_grad():
        for _ in range(calls):
            model(torch.randn(2, 4))


def test_a_rollout_before_several_training_steps_is_part_of_one_step(watcher):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    with detect_steps(watcher, Ticking()) as steps:
        for iteration in range(6):
            rollout(model, 30)
            if iteration == 0:
                assert steps.awaited()[0].startswith("the first step of ")  # another test may have left an optimizer
            train(model, optimizer, 3)
            if iteration == 0:
                assert steps.awaited()[0] == "calls of Linear without gradients again"
    assert watcher.events.count("period") == 1
    assert not steps.awaited().what
    assert watcher.events[-7:] == ["begins", "ends"] * 3 + ["step"]
    whole = watcher.kinds[-3:]
    assert {(kind.trained, kind.evaluated) for kind in whole} == {(3, 30)}
    assert whole[0].words == "a period of 30 calls of Linear without gradients and 3 steps of Adam"


def test_a_rollout_is_waited_for_also_where_each_training_step_asks_another_model(watcher):
    model, previous = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    clock = Ticking()
    with detect_steps(watcher, clock) as steps:
        for iteration in range(4):
            rollout(model, 30)
            clock.ticks += 5
            for _ in range(10):
                rollout(previous, 1)
                train(model, optimizer, 1)
                if iteration == 0:
                    assert steps.awaited()[0] == "calls of Linear without gradients again"
    assert not steps.awaited().what
    assert watcher.kinds[-1].words == "a period of 40 calls of Linear without gradients and 10 steps of Adam"


def test_a_training_step_says_that_it_has_calls_without_gradients(watcher):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    with detect_steps(watcher, Ticking()) as steps:
        for _ in range(4):
            rollout(model, 30)
            train(model, optimizer, 1)
    assert watcher.events.count("period") == 0
    assert {(kind.trained, kind.evaluated) for kind in watcher.kinds[-3:]} == {(1, 30)}
    assert watcher.kinds[-1].words == (
        "a training step, up to the step of Adam, with 30 calls of Linear without gradients"
    )
    assert not steps.awaited().what


def test_five_steps_of_a_critic_and_one_of_its_generator_are_one_step(watcher):
    models = [torch.nn.Linear(4, 4) for _ in range(2)]
    critic, generator = (torch.optim.SGD(model.parameters()) for model in models)
    with detect_steps(watcher, Ticking()):
        for _ in range(6):
            train(models[0], critic, 5)
            train(models[1], generator, 1)
    assert watcher.kinds[-1].words == "a period of 6 steps of SGD"
    assert watcher.kinds[-1].trained == 6


def test_a_guided_and_a_free_pass_are_one_step_and_what_comes_between_is_another(watcher):
    model, decoder = torch.nn.Linear(4, 4), torch.nn.Tanh()
    with detect_steps(watcher, Ticking()), torch.no_grad():
        for _ in range(2):
            x = torch.randn(2, 4)
            for _ in range(5):
                wanted = model(x)
                free = model(x)
                x = x - (free + 2 * (wanted - free))
            decoder(x)
    kinds = watcher.kinds[-8:]
    assert [kind.irregular for kind in kinds] == [False, True, *[False] * 5, True]
    assert {kind.words for kind in kinds if not kind.irregular} == {"a period of 2 calls of Linear without gradients"}


def test_drafts_and_their_check_are_one_step(watcher):
    draft, target = torch.nn.Linear(4, 4), torch.nn.Bilinear(4, 4, 4)
    with detect_steps(watcher, Ticking()), torch.no_grad():
        for _ in range(6):
            for _ in range(4):
                draft(torch.randn(1, 4))
            target(torch.randn(5, 4), torch.randn(5, 4))
    assert watcher.kinds[-1].words == "a period of 4 calls of Linear and a call of Bilinear without gradients"


def test_a_period_that_the_program_leaves_is_the_step_no_longer(watcher):
    model = torch.nn.Linear(4, 4)
    with detect_steps(watcher, Ticking()), torch.no_grad():
        for _ in range(4):
            model(torch.randn(2, 4))
            model(torch.randn(2, 4))
        for _ in range(12):
            model(torch.randn(2, 4))
    assert watcher.events.count("period") == 2
    assert watcher.kinds[-1].words == "a call of Linear without gradients"


def test_calls_on_several_threads_are_no_period(watcher):
    model = torch.nn.Linear(4, 4)

    def call():
        with torch.no_grad():
            model(torch.randn(2, 4))

    with detect_steps(watcher, Ticking()), torch.no_grad():
        for _ in range(8):
            model(torch.randn(2, 4))
            thread = threading.Thread(target=call)
            thread.start()
            thread.join()
    assert watcher.events == ["step"] * 16


def test_nothing_is_awaited_without_an_optimizer_or_with_a_step_function(watcher, monkeypatch):
    model = torch.nn.Linear(4, 4)
    objects = [model, {}]
    monkeypatch.setattr(gc, "get_objects", lambda: objects)
    with detect_steps(watcher) as steps:
        rollout(model, 3)
        assert not steps.awaited().what
        objects.append(torch.optim.SGD(model.parameters()))
        assert steps.awaited()[0] == "the first step of SGD"
        steps.has_step_function = True
        assert not steps.awaited().what


def test_a_class_that_refuses_changes_is_watched_without_its_metaclass_knowing(watcher):
    class Frozen(type):
        def __setattr__(cls, name, value):
            raise AttributeError(f"{name} of a frozen class")

        def __delattr__(cls, name):
            raise AttributeError(f"{name} of a frozen class")

    class Fixed(torch.nn.Linear, metaclass=Frozen):
        pass

    model = Fixed(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    with detect_steps(watcher):
        train(model, optimizer, 4)
    assert watcher.events.count("step") == 4
    assert "__call__" not in vars(Fixed)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes do not fork here")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of Python 3.12, with threads of torch
def test_a_forked_child_has_its_classes_and_optimizers_as_they_were(watcher):
    class Model(torch.nn.Linear):
        pass

    model = Model(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    with detect_steps(watcher):
        train(model, optimizer, 3)
        assert "step" in vars(optimizer) and "__call__" in vars(Model)
        child = os.fork()
        if child == 0:
            os._exit(int("step" in vars(optimizer) or "__call__" in vars(Model)))
        assert os.waitpid(child, 0)[1] == 0
        train(model, optimizer, 2)
    assert watcher.events.count("step") == 5


def test_the_next_text_may_be_read_by_many_calls_before_its_tokens_follow(watcher):
    embedding, head = torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8)
    encoder, decoder = ([torch.nn.Linear(4, 4) for _ in range(count)] for count in (8, 3))
    with detect_steps(watcher, Ticking()), torch.no_grad():
        for _ in range(3):
            text = torch.ones(2, 4)
            for layer in encoder:
                text = layer(text)
            for _ in range(6):
                token = embedding(torch.zeros(2, dtype=torch.long))
                token = decoder[0](token + text)
                token = decoder[1](token + text)
                token = decoder[2](token + text)
                head(token)
    assert watcher.events.count("period") == 1
    tokens = [kind.irregular for kind in watcher.kinds[-2 * (8 + 6) :]]
    assert tokens == [*[True] * 8, *[False] * 6] * 2


def answer(requests, model, head):
    for request in range(requests):
        text = model(torch.randn(2, 4))
        for _ in range(6 + request % 2):
            head(model(text))
        yield request  # what comes after the tokens is in no call


def test_a_turn_of_a_loop_around_loops_is_a_step(watcher):
    clock = Ticking()
    model, head = torch.nn.Linear(4, 4), torch.nn.Tanh()
    with detect_steps(watcher, clock) as steps, torch.no_grad():
        for request in answer(6, model, head):
            clock.ticks += 40
            if request == 0:
                assert "answer" not in steps.awaited().what
                assert steps.awaited().is_loop
    assert not steps.awaited().what
    line = answer.__code__.co_firstlineno + 1
    whole = watcher.kinds[-3:]
    assert [kind.evaluated for kind in whole] == [13, 15, 13]
    assert not any(kind.irregular for kind in whole)
    assert whole[0].is_similar(whole[1])
    assert whole[0].words == (
        f"an iteration of the loop at test_steps.py:{line}, "
        "with 7 calls of Linear and 6 calls of Tanh without gradients"
    )


def test_what_comes_between_the_turns_of_a_loop_is_another_step(watcher):
    embedding, head = torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8)
    encoder, decoder = ([torch.nn.Linear(4, 4) for _ in range(count)] for count in (8, 3))
    with detect_steps(watcher, Ticking()), torch.no_grad():
        for _ in range(3):
            text = torch.ones(2, 4)
            for layer in encoder:
                text = layer(text)
            for _ in range(6):
                token = embedding(torch.zeros(2, dtype=torch.long))
                for layer in decoder:
                    token = layer(token + text)
                head(token)
    assert [kind.irregular for kind in watcher.kinds[-13:]] == [True, *[False] * 6, True, *[False] * 5]
