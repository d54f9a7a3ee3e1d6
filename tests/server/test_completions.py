"""/v1/completions through OpenAI's client: texts, tokens, scores, stop strings, streams."""

from __future__ import annotations

import math
import time

import openai
import pytest

from phalanx.text.stops import StopStrings


def test_a_text_is_continued_and_counted(start, tokenizer):
    client = start().client()
    done = client.completions.create(model="stub", prompt="the quick", max_tokens=5, temperature=0)
    [choice] = done.choices
    assert choice.finish_reason == "length" and choice.text and choice.logprobs is None and done.id.startswith("cmpl-")
    prompt = len(tokenizer.encode("the quick"))
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == (prompt, 5, prompt + 5)
    assert client.completions.create(model="stub", prompt="the quick", temperature=0).usage.completion_tokens == 16


def test_an_end_token_ends_it_and_is_no_text(start):
    client = start(replies={"quick": "brown fox"}).client()
    [choice] = client.completions.create(model="stub", prompt="the quick", max_tokens=50, logprobs=0).choices
    assert (choice.text, choice.finish_reason) == ("brown fox", "stop")
    assert "".join(choice.logprobs.tokens) == "brown fox<|endoftext|>" and choice.logprobs.top_logprobs is None
    plain = client.completions.create(model="stub", prompt="the quick", max_tokens=50).choices[0]
    assert plain.text == "brown fox" and plain.logprobs is None


def test_prompts_of_all_four_forms(start, tokenizer):
    client = start().client()
    texts = ["the quick", "brown fox"]
    ids = [tokenizer.encode(text) for text in texts]
    options = {"model": "stub", "max_tokens": 6, "temperature": 0}
    one, many, as_ids, many_ids = (
        client.completions.create(prompt=p, **options) for p in (texts[0], texts, ids[0], ids)
    )
    assert [c.index for c in many.choices] == [0, 1]
    assert one.choices[0].text == many.choices[0].text == as_ids.choices[0].text == many_ids.choices[0].text
    assert many.choices[1].text == many_ids.choices[1].text != one.choices[0].text
    assert many.usage.prompt_tokens == sum(map(len, ids))


def test_names_of_special_tokens_in_a_prompt_are_those_tokens(start, tokenizer):
    server = start()
    server.client().completions.create(model="stub", prompt="<|im_start|>user\nhi", max_tokens=1)
    assert server.engine.seen[-1][0][0] == tokenizer.special_tokens["<|im_start|>"]


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_across_token_borders(start, stream):
    """Nothing of one is shown, though it comes in many tokens, and text that only looks like one is."""
    client = start(replies={"quick": "so sto stop he stop here, and more"}).client()
    asked = {"model": "stub", "prompt": "the quick", "max_tokens": 60, "stop": ["stop here", "never"], "logprobs": 1}
    if stream:
        chunks = list(client.completions.create(stream=True, **asked))
        text = "".join(c.choices[0].text for c in chunks)
        tokens = [t for c in chunks if c.choices[0].logprobs for t in c.choices[0].logprobs.tokens]
        reason = chunks[-1].choices[0].finish_reason
    else:
        [choice] = client.completions.create(**asked).choices
        text, tokens, reason = choice.text, choice.logprobs.tokens, choice.finish_reason
    assert (text, reason) == ("so sto stop he ", "stop")
    assert "".join(tokens).startswith(text.rstrip()) and "here" not in "".join(tokens)


def test_what_stops_first_does_not_depend_on_token_borders():
    text = "one abc two"
    for stops in (("abc", "b"), ("b", "abc"), ("c two", "ab"), ("x", "wo")):
        found = set()
        for size in range(1, len(text) + 1):
            cutter, given = StopStrings(stops), ""
            for at in range(0, len(text), size):
                if not cutter.found:
                    given += cutter.add(text[at : at + size])
            found.add((given if cutter.found else given + cutter.rest(), cutter.found))
        assert len(found) == 1, (stops, found)


def test_a_stop_string_cancels_the_engine(start):
    server = start(replies={"quick": "stop " * 50})
    server.engine.pause_after = 20
    server.client().completions.create(model="stub", prompt="the quick", max_tokens=200, stop="stop")
    assert server.engine.was_cancelled.wait(30)


def test_echo_scores_the_prompt(start, tokenizer):
    """As evaluation needs it: the score of every token but the first, those made, and where each begins."""
    server = start()
    prompt = "the lazy dog: Zürich 漢"
    asked = {"model": "stub", "prompt": prompt, "max_tokens": 2, "temperature": 0, "logprobs": 3, "echo": True}
    [choice] = server.client().completions.create(**asked).choices
    ids, shown = tokenizer.encode(prompt), choice.logprobs
    assert choice.text.startswith(prompt)
    assert len(shown.tokens) == len(shown.token_logprobs) == len(shown.top_logprobs) == len(shown.text_offset)
    assert len(shown.tokens) == len(ids) + 2 and shown.token_logprobs[0] is None and shown.top_logprobs[0] is None
    for at in range(1, len(ids)):
        logits = server.engine.logits(ids[:at])
        wanted = logits[ids[at]] - math.log(sum(map(math.exp, logits)))
        assert shown.token_logprobs[at] == pytest.approx(wanted, abs=1e-9)
    assert all(
        len(top) in (3, 4) and min(top.values()) <= score <= max(top.values())
        for top, score in zip(shown.top_logprobs[1:], shown.token_logprobs[1:], strict=True)
    )
    plain = [n for n, token in enumerate(shown.tokens) if not token.startswith("bytes:")]
    assert all(choice.text[shown.text_offset[n] :].startswith(shown.tokens[n]) for n in plain)
    assert any(token.startswith("bytes:\\x") for token in shown.tokens)
    streamed = list(server.client().completions.create(stream=True, **asked))
    assert "".join(c.choices[0].text for c in streamed) == choice.text
    assert [t for c in streamed for t in c.choices[0].logprobs.token_logprobs] == shown.token_logprobs


def test_echo_without_tokens_made(start):
    [choice] = (
        start().client().completions.create(model="stub", prompt="the dog", max_tokens=0, echo=True, logprobs=0).choices
    )
    assert (choice.text, choice.finish_reason) == ("the dog", "length") and choice.logprobs.token_logprobs[0] is None


@pytest.mark.parametrize("scored", [None, 1])
def test_echo_in_a_stream_comes_first(start, scored):
    chunks = list(
        start()
        .client()
        .completions.create(
            model="stub",
            prompt=["the dog", "a fox"],
            n=2,
            max_tokens=3,
            echo=True,
            stream=True,
            logprobs=scored,
            seed=1,
        )
    )
    texts = [""] * 4
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert [text[:5] for text in texts] == ["the d", "the d", "a fox", "a fox"]


def test_n_best_of_and_seeds(start):
    server = start()
    asked = {"model": "stub", "prompt": "the quick", "max_tokens": 8}
    first = server.client().completions.create(n=3, seed=5, **asked)
    again = server.client().completions.create(n=3, seed=5, **asked)
    other = server.client().completions.create(n=3, seed=6, **asked)
    texts = [[c.text for c in done.choices] for done in (first, again, other)]
    assert texts[0] == texts[1] != texts[2] and len(set(texts[0])) == 3
    assert first.usage.completion_tokens == 24 and [c.index for c in first.choices] == [0, 1, 2]
    best = server.client().completions.create(n=1, best_of=6, seed=5, logprobs=0, **asked)
    every = server.client().completions.create(n=6, seed=5, logprobs=0, **asked)
    ranked = sorted(every.choices, key=lambda c: -sum(c.logprobs.token_logprobs) / len(c.logprobs.token_logprobs))
    assert best.choices[0].text == ranked[0].text and best.usage.completion_tokens == 48
    unseeded = {server.client().completions.create(**asked).choices[0].text for _ in range(4)}
    assert len(unseeded) > 1


def test_a_prompt_in_a_list_is_sampled_as_alone(start):
    client = start().client()
    asked = {"model": "stub", "max_tokens": 8, "seed": 3}
    together = client.completions.create(prompt=["the fox", "the dog"], **asked).choices
    assert [c.text for c in together] == [
        client.completions.create(prompt=p, **asked).choices[0].text for p in ("the fox", "the dog")
    ]


def test_options_reach_the_engine(start, tokenizer):
    server = start()
    server.client().completions.create(
        model="stub",
        prompt="a",
        max_tokens=4,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        logit_bias={"5": -100},
        seed=9,
        extra_body={"top_k": 7, "min_p": 0.125, "repetition_penalty": 1.25, "min_tokens": 2},
    )
    options = server.engine.seen[-1][1]
    assert (options.temperature, options.top_p, options.top_k, options.min_p) == (0.5, 0.9, 7, 0.125)
    assert (options.presence_penalty, options.frequency_penalty, options.repetition_penalty) == (0.25, -0.5, 1.25)
    assert (options.bias, options.seed, options.least_tokens, options.tokens) == (((5, -100.0),), 9, 2, 4)
    assert options.end_tokens == (tokenizer.eod, tokenizer.special_tokens["<|im_end|>"])
    server.client().completions.create(model="stub", prompt="a", max_tokens=1, extra_body={"ignore_eos": True})
    assert server.engine.seen[-1][1].end_tokens == ()


def test_priority_and_timeout_reach_the_engine(start):
    """Smaller numbers first, as in vLLM; seconds from now. Chats have them too."""
    server = start()
    client, before = server.client(), time.monotonic()
    client.completions.create(model="stub", prompt="a", max_tokens=2)
    client.completions.create(model="stub", prompt="a", max_tokens=2, extra_body={"priority": -3, "timeout": 600})
    message = [{"role": "user", "content": "a"}]
    client.chat.completions.create(model="stub", messages=message, extra_body={"priority": 5})
    (first, none), (second, deadline), (third, _) = server.engine.when
    assert (first, second, third) == (0, 3, -5) and none is None
    assert before + 600 <= deadline <= time.monotonic() + 600
    for wrong in ({"priority": 1.5}, {"timeout": 0}, {"timeout": 1e9}):
        with pytest.raises(openai.BadRequestError, match=next(iter(wrong))):
            client.completions.create(model="stub", prompt="a", extra_body=wrong)


def test_logit_bias_changes_the_answer(start, tokenizer):
    client = start().client()
    [token] = tokenizer.encode("e")
    [choice] = client.completions.create(
        model="stub", prompt="the", max_tokens=3, temperature=0, logit_bias={str(token): 100}
    ).choices
    assert choice.text == "eee"


def test_streams_with_usage(start):
    server = start(replies={"quick": "brown fox jumps"})
    asked = {"model": "stub", "prompt": "the quick", "max_tokens": 40, "stream": True}
    chunks = list(server.client().completions.create(stream_options={"include_usage": True}, **asked))
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens > 3
    assert all(chunk.usage is None for chunk in chunks[:-1]) and len({chunk.id for chunk in chunks}) == 1
    assert "".join(c.choices[0].text for c in chunks[:-1]) == "brown fox jumps"
    assert len(chunks) > 4 and chunks[-2].choices[0].finish_reason == "stop"
    assert all(chunk.usage is None for chunk in server.client().completions.create(**asked))


def test_a_prompt_that_ends_inside_a_character(start, tokenizer):
    """Its rest is the answer's beginning: the character is shown whole, once."""
    ids = tokenizer.encode("漢")
    rest = tokenizer.decode(ids[-1:])
    assert len(ids) > 1 and rest == "\ufffd"
    bias = {str(ids[-1]): 100}
    client = start().client()
    asked = {"model": "stub", "prompt": ids[:-1], "max_tokens": 1, "temperature": 0, "logit_bias": bias}
    for stream in (False, True):
        made = client.completions.create(stream=stream, **asked)
        text = "".join(c.choices[0].text for c in made) if stream else made.choices[0].text
        assert text == "漢"
    assert client.completions.create(echo=True, **asked).choices[0].text == "漢"


def test_an_answer_that_ends_inside_a_character_shows_it(start, tokenizer):
    first = tokenizer.encode("漢")[0]
    bias = {str(first): 100}
    [choice] = (
        start()
        .client()
        .completions.create(model="stub", prompt="a", max_tokens=1, temperature=0, logit_bias=bias)
        .choices
    )
    assert choice.text == "\ufffd"


def test_empty_prompts_and_prompts_of_special_tokens_alone(start, tokenizer):
    server = start()
    for prompt in ("", [[]], [""]):
        server.client().completions.create(model="stub", prompt=prompt, max_tokens=1)
        assert server.engine.seen[-1][0] == (tokenizer.eod,)
    end = tokenizer.special_tokens["<|im_end|>"]
    [choice] = (
        server.client().completions.create(model="stub", prompt=[end, end], max_tokens=1, echo=True, logprobs=1).choices
    )
    assert choice.text.startswith("<|im_end|><|im_end|>") and choice.logprobs.tokens[:2] == ["<|im_end|>"] * 2


def test_room(start):
    """The last position can be used; one token more is refused, with the numbers."""
    client = start(positions=64).client()
    long = client.completions.create(model="stub", prompt=[5] * 63, max_tokens=1)
    assert long.usage.completion_tokens == 1
    assert client.completions.create(model="stub", prompt=[5] * 64, max_tokens=0, echo=True).usage.prompt_tokens == 64
    for prompt, tokens, param in (([5] * 63, 2, "max_tokens"), ([5] * 65, 1, "prompt"), ([5] * 64, 1, "prompt")):
        with pytest.raises(openai.BadRequestError, match=f"64 positions; the prompt takes {len(prompt)}") as refused:
            client.completions.create(model="stub", prompt=prompt, max_tokens=tokens)
        assert (refused.value.code, refused.value.param) == ("context_length_exceeded", param)


def test_without_a_tokenizer_ids_are_served(start):
    client = start(text=False).client()
    [choice] = client.completions.create(model="stub", prompt=[1, 2, 3], max_tokens=4, logprobs=1, echo=True).choices
    assert choice.text == "" and len(choice.token_ids) == 4 and choice.prompt_token_ids == [1, 2, 3]
    assert choice.logprobs.tokens[:2] == ["token_id:1", "token_id:2"] and len(choice.logprobs.tokens) == 7
    chunks = list(client.completions.create(model="stub", prompt=[1, 2, 3], max_tokens=4, stream=True))
    assert sum(len(c.choices[0].token_ids) for c in chunks) == 4
    for asked in ({"prompt": "text"}, {"prompt": [1], "stop": ["a"]}):
        with pytest.raises(openai.BadRequestError, match="no tokenizer") as refused:
            client.completions.create(model="stub", **asked)
        assert refused.value.code == "no_tokenizer"


def test_token_ids_on_request(start, tokenizer):
    server = start(replies={"quick": "fox"})
    asked = {"model": "stub", "prompt": "the quick", "max_tokens": 9, "extra_body": {"return_token_ids": True}}
    wanted = [*tokenizer.encode("fox"), tokenizer.eod]
    assert server.client().completions.create(**asked).choices[0].token_ids == wanted
    chunks = server.client().completions.create(stream=True, **asked)
    assert [i for c in chunks for i in c.choices[0].token_ids] == wanted
