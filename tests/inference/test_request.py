"""What is asked of the engine: values without a meaning are refused with field, value and rule."""

from __future__ import annotations

import math

import pytest

from phalanx.inference.request import PromptImage, Request, RequestError, SamplingOptions
from phalanx.inference.scores import ScoredPrompt


@pytest.mark.parametrize(
    "field, value, rule",
    (
        ("temperature", -0.1, "at least 0"),
        ("temperature", math.nan, "finite"),
        ("temperature", math.inf, "finite"),
        ("top_k", -1, "at least 0"),
        ("least_tokens", -1, "at least 0"),
        ("tokens", -1, "at least 0"),
        ("tokens", 2.5, "a whole number"),
        ("top_k", 2.5, "a whole number"),
        ("seed", 0.5, "a whole number"),
        ("logprobs", -1, "at least 0"),
        ("prompt_logprobs", -1, "at least 0"),
        ("scored_from", 0, "at least 1"),
        ("scored_from", 2, "does nothing without prompt_logprobs"),
        ("presence_penalty", math.nan, "finite"),
        ("frequency_penalty", -math.inf, "finite"),
        ("top_p", 0.0, "> 0 and <= 1"),
        ("top_p", 1.01, "> 0 and <= 1"),
        ("min_p", -0.1, "from 0 to 1"),
        ("min_p", 1.1, "from 0 to 1"),
        ("repetition_penalty", 0.0, "> 0"),
        ("sample", -1, "at least 0"),
        ("sample", 2**32, "< 2\\*\\*32"),
        ("bias", ((3, math.nan),), "below infinity"),
        ("bias", ((3, math.inf),), "below infinity"),
    ),
)
def test_values_without_a_meaning(field, value, rule):
    with pytest.raises(RequestError, match=f"^{field}=.*{rule}"):
        SamplingOptions(**{field: value})


def test_values_at_the_borders():
    SamplingOptions(
        temperature=0.0, top_p=1.0, min_p=1.0, tokens=0, logprobs=0, prompt_logprobs=0, bias=((3, -math.inf),), seed=-5
    )


@pytest.mark.parametrize(
    "field, prompt, options",
    (
        ("prompt", (1, 100), {}),
        ("prompt", (-1,), {}),
        ("prompt", (1.5,), {}),
        ("bias", (1,), {"bias": ((100, 1.0),)}),
        ("end_tokens", (1,), {"end_tokens": (5, 100)}),
    ),
)
def test_tokens_that_the_model_does_not_have(field, prompt, options):
    request = Request(number=0, prompt=prompt, options=SamplingOptions(**options))
    request.check_tokens(101) if 100 in prompt or 1 in prompt else None
    with pytest.raises(RequestError, match=f"^{field}=-?[01].*< 100, the size of the vocabulary"):
        request.check_tokens(100)


def test_tokens_before_the_first_that_is_scored_need_no_logits():
    """The token before it does: of a piece from position 5 on, all."""
    options = SamplingOptions(prompt_logprobs=0, scored_from=6)
    prompt = ScoredPrompt(Request(number=0, prompt=tuple(range(10)), options=options))
    assert [prompt.unscored(first) for first in (0, 4, 5, 8)] == [5, 1, 0, 0]


@pytest.mark.parametrize("prompt, first", (((1, 2, 3), 3), ((1,), 2)))
def test_a_prompt_of_which_nothing_is_scored(prompt, first):
    options = SamplingOptions(prompt_logprobs=0, scored_from=first)
    with pytest.raises(RequestError, match=f"^scored_from={first}.*< {len(prompt)}, the number of tokens"):
        Request(number=0, prompt=prompt, options=options).check_tokens(100)
    Request(number=0, prompt=(*prompt, 4, 5), options=options).check_tokens(100)


def test_the_last_token_of_a_scored_prompt_is_read_only_as_part_of_an_image():
    options = SamplingOptions(tokens=0, prompt_logprobs=0)
    image = PromptImage(b"", "", "aa", (1, 2), 2)
    read = [
        len(Request(number=0, prompt=(1, 2, 3, 4, 5), options=options, images=images).computed)
        for images in ((), ((2, image),), ((3, image),))
    ]
    assert read == [4, 4, 5]
