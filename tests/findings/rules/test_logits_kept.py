import pytest
import torch
from gpu_steps import examined, found_in
from planted import load, planted
from torch.nn import functional

from nearpeak.findings.rules.logits_kept import logits_kept

NAME = "logits-kept"


def head(read):
    def build():
        hidden = torch.randn(4, 512, 1024, dtype=torch.bfloat16)
        weight = torch.randn(32768, 1024, dtype=torch.bfloat16)
        return lambda: read(functional.linear(hidden, weight))

    return build


@pytest.mark.parametrize("name", ["logits_kept", "logits_kept_for_masked"])
def test_the_corpus(name):
    module = load(name)
    step, clean = (examined(lambda make=make: make("cuda")) for make in (module.waste, module.clean))
    (finding,) = found_in(step, NAME)
    assert finding.source == planted(name)
    assert finding.saving_s == pytest.approx(step.profile.wall_s - clean.profile.wall_s, rel=0.05)
    assert not found_in(clean, NAME)


def test_casts_of_all_logits_are_part_of_it():
    step = examined(head(lambda logits: logits.float()[:, -1].argmax(-1)))
    (waste,) = logits_kept(step)
    assert [step.ops[index].packet for index in sorted(waste.gains)] == ["aten.mm", "aten._to_copy"]


@pytest.mark.parametrize(
    "read",
    [
        lambda logits: logits,
        lambda logits: logits[:, -1],  # a view: the rest is kept with it
        lambda logits: logits[:, :-1].argmax(-1),
        lambda logits: logits[..., :100].argmax(-1),
        lambda logits: logits.gather(-1, torch.zeros(4, 512, 1, dtype=torch.int64)),
        lambda logits: (logits[:, -1].argmax(-1), logits.amax()),
    ],
    ids=["returned", "returned-view", "shifted", "columns", "gathered", "read-twice"],
)
def test_silent(read):
    assert not list(logits_kept(examined(head(read))))


TOKENS, PROMPT, WORDS = 512, 384, 8192


def training(loss_of):
    """A head in training, with labels at the tokens after a prompt."""

    def build():
        hidden = torch.randn(4, TOKENS, 128, requires_grad=True)
        weight = torch.randn(WORDS, 128, requires_grad=True)
        labels = torch.randint(WORDS, (4, TOKENS))
        labels[:, :PROMPT] = -100
        return lambda: loss_of(hidden, weight, labels).backward()

    return build


def ignored(hidden, weight, labels):
    return functional.cross_entropy(functional.linear(hidden, weight).flatten(0, 1), labels.flatten())


def weighted(hidden, weight, labels):
    logits = functional.linear(hidden, weight).flatten(0, 1)
    losses = functional.cross_entropy(logits, labels.clamp(min=0).flatten(), reduction="none").view_as(labels)
    return (losses * (labels >= 0)).sum() / labels.numel()


def sliced(hidden, weight, labels):
    return ignored(hidden[:, PROMPT:], weight, labels[:, PROMPT:])


@pytest.mark.parametrize("loss_of", [ignored, weighted])
def test_rows_that_a_loss_does_not_count(loss_of):
    step, mended = (examined(training(each), live=True) for each in (loss_of, sliced))
    (finding,) = found_in(step, NAME)
    assert finding.source.startswith("test_logits_kept.py:")
    assert "512 are counted" in finding.title
    assert finding.saving_s == pytest.approx(step.profile.wall_s - mended.profile.wall_s, rel=0.1)
    assert not found_in(mended, NAME)


def test_a_head_on_rows_that_are_not_side_by_side_is_a_batch_of_products_with_one_weight():
    def shifted(hidden, weight, labels):
        return ignored(hidden[:, :-1], weight.detach(), labels[:, 1:].contiguous())

    step = examined(training(shifted), live=True)
    (finding,) = found_in(step, NAME)
    assert "512 are counted" in finding.title
    products = {index for index, op in enumerate(step.ops) if op.packet == "aten.bmm"}
    assert products <= set(finding.ops)
    assert len(products) == 2


def test_a_cast_between_the_softmax_and_the_loss_as_autocast_makes_it():
    def cast(hidden, weight, labels):
        losses = functional.linear(hidden.bfloat16(), weight.bfloat16()).flatten(0, 1).log_softmax(-1).float()
        return functional.nll_loss(losses, labels.flatten(), ignore_index=-100)

    step = examined(training(cast), live=True)
    (finding,) = found_in(step, NAME)
    assert "512 are counted" in finding.title
    large = {index for index, op in enumerate(step.ops) if step.time(index) and WORDS in op.outputs[0].shape}
    casts_of_weight = {index for index in large if step.ops[index].inputs[0].shape == (WORDS, 128)}
    assert large - casts_of_weight <= set(finding.ops)


def test_rows_that_all_count():
    def all_of_them(hidden, weight, labels):
        return ignored(hidden, weight, labels.clamp(min=0))

    def of_weights(hidden, weight, labels):
        losses = functional.cross_entropy(
            functional.linear(hidden, weight).flatten(0, 1), labels.clamp(min=0).flatten(), reduction="none"
        )
        return (losses * torch.rand(labels.numel())).sum()

    for loss_of in (all_of_them, of_weights):
        assert not list(logits_kept(examined(training(loss_of), live=True)))
