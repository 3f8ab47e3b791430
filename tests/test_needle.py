"""Needles lie where they should, and answers are judged by what the model says."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from language_models import real_model, tiny_model

from polarquant_nb import evaluate, needle

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

TEXT = "All work and no play makes Jack a dull boy. The rest is silence. " * 100


class Letters:
    """A tokenizer that can be undone: a token for each of ASCII's characters."""

    bos_token_id = 1

    def __init__(self, begins=False):
        self.begins = begins

    def __call__(self, text, add_special_tokens=True, **_):
        begin = [self.bos_token_id] if self.begins and add_special_tokens else []
        return {"input_ids": begin + [ord(c) for c in text]}

    def decode(self, ids):
        return "".join(map(chr, ids))


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("depth", [0, 0.3, 1])
def test_a_needle_lies_in_a_stretch_of_the_text(depth, begins):
    tokenizer = Letters(begins)
    found = needle.hide(tokenizer, TEXT, 400, depth, seed=3, sink=4, recent=50)
    assert (found.length, found.depth, found.seed) == (400, depth, 3)
    assert len(found.context) == 400
    assert found.context.count(1) == begins
    context = tokenizer.decode(found.context).removeprefix("\x01")
    introduction, _, haystack = context.partition("\n\n")
    assert introduction.startswith("Read the following text")
    question, answer = (tokenizer.decode(ids) for ids in (found.question, found.answer))
    assert answer == f" {found.number}"
    fact = question.rsplit("\nAnswer:", 1)[1] + answer + "."
    before, after = haystack.split(fact)
    assert before + after in TEXT
    assert not before or before.endswith(".")
    assert len(after) >= 50
    if depth != 0.3:
        assert len(before) < 60 if depth == 0 else len(after) < 50 + 60
    else:
        assert abs(len(before) / (len(before) + len(after) - 50) - 0.3) < 0.3


def test_a_needle_keeps_out_of_the_sinks():
    tokenizer = Letters()
    found = needle.hide(tokenizer, TEXT, 500, 0, sink=200, recent=0)
    context = tokenizer.decode(found.context)
    assert 200 <= context.index(" The special magic number for") < 270


def test_a_text_without_sentences_has_needles_too():
    tokenizer = Letters()
    found = needle.hide(tokenizer, "abc " * 1000, 400, 0.5, recent=0)
    context = tokenizer.decode(found.context)
    start, fact = context.index("\n\n") + 2, context.index(" The special magic number for")
    room = 400 - start - len(f" The special magic number for X is {found.number}.")
    assert abs(fact - start - room / 2) < 5


def test_seeds_decide_on_number_city_and_text_and_depths_do_not():
    tokenizer = Letters()

    def at(seed, depth=0.5, length=400):
        return needle.hide(tokenizer, TEXT, length, depth, seed=seed)

    assert at(1) == at(1)
    numbers = {at(seed).number for seed in range(20)}
    assert len(numbers) == 20
    assert all(len(number) == 5 and "0" not in number for number in numbers)
    assert len({at(seed).question for seed in range(20)}) > 5
    assert at(1).number != at(1, length=401).number
    deep = at(1, 1)
    assert (deep.number, deep.question) == (at(1).number, at(1).question)
    assert sorted(deep.context) == sorted(at(1).context)


def test_hide_refuses():
    tokenizer = Letters()
    with pytest.raises(ValueError, match=r"depth is 1\.5; it must be between 0 and 1"):
        needle.hide(tokenizer, TEXT, 400, 1.5)
    with pytest.raises(ValueError, match=r"length is 150; .* sink=4 and recent=64 .* take (18|19)"):
        needle.hide(tokenizer, TEXT, 150, 0.5)
    with pytest.raises(ValueError, match="the text has 10 tokens"):
        needle.hide(tokenizer, TEXT[:10], 400, 0.5)


def test_hide_says_how_long_a_context_must_be():
    tokenizer = Letters()
    with pytest.raises(ValueError, match="take ") as caught:
        needle.hide(tokenizer, TEXT, 150, 0.5, sink=100)
    taken = int(str(caught.value).rsplit(" ", 1)[1])
    needle.hide(tokenizer, TEXT, taken + 5, 0.5, sink=100)  # names of cities differ in length
    with pytest.raises(ValueError, match="take "):
        needle.hide(tokenizer, TEXT, taken - 5, 0.5, sink=100)


# ---- answers -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    return tiny_model(vocab_size=128)


@pytest.fixture(scope="module")
def hidden():
    return needle.hide(Letters(), TEXT, 250, 0.5, recent=20)


@pytest.fixture(scope="module")
def cache(model, hidden):
    return evaluate.prefill(model, torch.tensor([hidden.context]))


def test_a_wrong_answer_is_told_with_its_likelihood(model, hidden, cache):
    hit, nll, said = needle.ask(model, Letters(), cache, hidden)
    assert not hit
    question = torch.tensor([hidden.question])
    assert said == Letters().decode(evaluate.greedy(model, cache, question, 10)[0].tolist())
    everything = torch.tensor([hidden.context + hidden.question + hidden.answer])
    with torch.no_grad():
        log_probs = torch.log_softmax(model(everything).logits, -1)[0, -7:-1]
    expected = -log_probs[range(6), list(hidden.answer)].mean().item()
    assert nll == pytest.approx(expected, rel=1e-4)


def test_what_the_model_says_is_a_hit(model, hidden, cache, monkeypatch):
    question = torch.tensor([hidden.question])
    likely = evaluate.greedy(model, cache, question, 10)[0].tolist()
    spelled = Letters().decode(likely)

    def known(start, stop):
        return replace(hidden, answer=tuple(likely[start:stop]), number=spelled[start:stop])

    # later than expected: the greedy answer is longer than the right one
    hit, _, said = needle.ask(model, Letters(), cache, known(3, 9))
    assert hit
    assert said == spelled
    monkeypatch.setattr(needle, "greedy", lambda *_: pytest.fail("there is no need to run it"))
    hit, nll, said = needle.ask(model, Letters(), cache, known(0, 6))
    assert hit
    assert said == spelled[:6]
    assert 0 < nll < 5


def test_search_asks_every_contender_and_leaves_out_what_is_known(model, monkeypatch):
    needles = [needle.hide(Letters(), TEXT, 300, depth, seed=1) for depth in (0, 1)]
    contenders = [evaluate.Contender("mine", partial(evaluate.compress, formats="tiny"), "ours")]
    found = list(needle.search(model, needles, Letters(), contenders))
    assert [(one.contender, one.family, one.length, one.depth, one.seed) for one in found] == [
        (name, family, 300, depth, 1)
        for depth in (0, 1)
        for name, family in (("exact", "exact"), ("mine", "ours"))
    ]
    cache = evaluate.prefill(model, torch.tensor([needles[1].context]))
    compressed = evaluate.compress(cache, "tiny").cache
    for one, held in zip(found[2:], (cache, compressed), strict=True):
        assert (one.hit, one.nll, one.said) == needle.ask(model, Letters(), held, needles[1])
    assert found[2].nll != found[3].nll
    known = {(one.contender, one.length, one.depth, one.seed) for one in found}
    skip = known - {("mine", 300, 1, 1)}
    assert list(needle.search(model, needles, Letters(), contenders, skip=skip)) == found[3:]
    monkeypatch.setattr(needle, "prefill", lambda *_: pytest.fail("nothing is left to do"))
    assert list(needle.search(model, needles, Letters(), contenders, skip=known)) == []


def test_tally_counts_by_contender_and_length():
    def answer(contender, length, hit, nll):
        return needle.Answer(contender, "", length, 0.5, 0, hit, nll, "")

    rows = [
        answer("b", 200, True, 1.0),
        answer("a", 100, False, 8.0),
        answer("b", 100, True, 2.0),
        answer("b", 100, False, 4.0),
    ]
    assert needle.tally(rows) == [
        needle.Tally("b", 100, 1, 2, 3.0),
        needle.Tally("b", 200, 1, 1, 1.0),
        needle.Tally("a", 100, 0, 1, 8.0),
    ]


@pytest.mark.model
def test_the_real_model_finds_a_needle_unless_it_is_erased():
    from polarquant_nb.models import load_text

    loaded = real_model()
    text, _ = load_text()
    hidden = needle.hide(loaded.tokenizer, text, 400, 0.5)

    def erase(cache):
        return evaluate.compress_with(cache, lambda _, x: (torch.zeros_like(x), 0))

    contenders = [
        evaluate.Contender("balanced", partial(evaluate.compress, formats="balanced")),
        evaluate.Contender("erased", erase),
    ]
    exact, balanced, erased = needle.search(loaded.model, [hidden], loaded.tokenizer, contenders)
    assert exact.hit
    assert balanced.hit
    assert exact.said.strip() == hidden.number
    assert exact.nll < 0.3
    assert abs(balanced.nll - exact.nll) < 0.2
    assert not erased.hit
    assert erased.nll > 1.5
