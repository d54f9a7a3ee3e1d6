"""lm-evaluation-harness's model (https://github.com/EleutherAI/lm-evaluation-harness), computed by the engine on all
ranks of a layout. Rank 0 holds it; the others follow the engine.

Needs the extra `eval`. Its rules are the harness's own: how a pair is split into tokens, what is cut from the left,
which windows a long text is scored in, when a text ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, has_bos_prefix, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import DataError
from phalanx.evaluation.answers import AnswerFile, key_of
from phalanx.evaluation.asking import Continuation, TextQuestion, scores, texts
from phalanx.evaluation.model_text import ModelText
from phalanx.inference.engine import Engine
from phalanx.inference.request import SamplingOptions

MADE = 256  # tokens at most of an answer, where a task says nothing: as the harness's own models
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
WITHOUT_EFFECT = {"num_beams": 1, "num_return_sequences": 1, "use_cache": True}  # in some tasks: what is so anyway
SHOWN = 60  # characters of a text in a message


@dataclass(frozen=True)
class AnswerSource:
    """What an answer depends on beyond its request. weights: a digest of them."""

    weights: str
    precision: str
    tokenizer: str


class HarnessModel(TemplateLM):
    """A model that lm-evaluation-harness asks."""

    def __init__(self, engine: Engine, text: ModelText, source: AnswerSource, answers: AnswerFile | None = None):
        """On rank 0, while the others `follow` the engine. answers: what is known already, and is kept."""
        super().__init__()
        self.engine, self.text = engine, text
        self.max_length = engine.limits.length
        self.max_gen_toks = MADE
        self._source = asdict(source)
        self._answers = answers if answers is not None else AnswerFile(None)

    # ---- tokens ----

    @property
    def eot_token_id(self) -> int:
        return self.text.end

    @property
    def prefix_token_id(self) -> int:
        return self.text.prefix

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """As transformers does by the folder's tokenizer: names of special tokens mean those tokens, and the text
        begins as the tokenizer begins texts, unless it begins so already or `add_special_tokens` is False."""
        whole = add_special_tokens
        if whole is None:
            whole = not has_bos_prefix(string, self.text.tokenizer.decode([self.prefix_token_id]))
        return self.text.encode(string, whole)

    @property
    def tokenizer_name(self) -> str:
        return self.text.tokenizer.fingerprint

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return None if self.text.template is None else self.text.template.source

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self.text.chat(chat_history, add_generation_prompt)

    # ---- what the harness asks ----

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Of continuations of contexts, and whether each is what greedy decoding would make."""
        return list(super().loglikelihood(requests, disable_tqdm=disable_tqdm))

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        asked = [self._continuation(*request) for request in requests]
        return [(logprob, greedy) for logprob, greedy in self._scores(asked, "log-likelihoods")]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Of whole texts, each token scored once, after as many tokens as the model has positions for."""
        windows: list[Continuation] = []
        counts = []
        for (string,) in [request.args for request in requests]:
            pairs = [
                make_disjoint_window(window)
                for window in get_rolling_token_windows(
                    token_list=self.tok_encode(string),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length,
                    context_len=1,
                )
            ]
            windows += [self._continuation(("", string), *pair) for pair in pairs]
            counts.append(len(pairs))
        found = iter(self._scores(windows, "log-likelihoods of texts"))
        return [sum(next(found)[0] for _ in range(count)) for count in counts]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        repeats: Counter[str] = Counter()
        keys, questions, stops = [], [], []
        for context, given in [request.args for request in requests]:
            question = self._text_question(context, given)
            same = key_of(question.prompt, asdict(question.options), question.stop)
            questions.append(question if question.options.temperature == 0 else sampled(question, repeats[same]))
            repeats[same] += 1
            stops.append(question.stop)
            keys.append(
                key_of(self._source, "text", question.prompt, asdict(questions[-1].options), list(question.stop))
            )
        new = self._new(keys)
        answers = texts(self.engine, self.text.tokenizer, [questions[i] for i in new])
        for place, tokens in shown(answers, len(new), len(keys), "texts"):
            self._answers.add(keys[new[place]], list(tokens))
        return [self._cut(self._answers[key], stop) for key, stop in zip(keys, stops)]

    # ---- how it is answered ----

    def _continuation(self, pair: tuple[str, str], context: Sequence[int], following: Sequence[int]) -> Continuation:
        if not context or not 0 < len(following) <= self.max_length:
            rule = f"must have from 1 to {self.max_length} tokens (the model's positions), after a context"
            raise DataError(f"the continuation {pair[1][:SHOWN]!r} has {len(following)} tokens: it {rule}")
        tokens = (*context, *following)[-(self.max_length + 1) :]
        return Continuation(tokens, len(following))

    def _scores(self, asked: Sequence[Continuation], what: str) -> list[tuple[float, bool]]:
        keys = [key_of(self._source, "score", each.tokens, each.scored) for each in asked]
        new = self._new(keys)
        for place, score in shown(scores(self.engine, [asked[i] for i in new]), len(new), len(keys), what):
            self._answers.add(keys[new[place]], [score.logprob, score.greedy])
        return [tuple(self._answers[key]) for key in keys]

    def _new(self, keys: Sequence[str]) -> list[int]:
        """The places of requests that are not answered yet, of equal ones the first."""
        first = {key: place for place, key in reversed(list(enumerate(keys)))}
        return sorted(place for key, place in first.items() if key not in self._answers)

    def _text_question(self, context: str, given: Mapping[str, Any]) -> TextQuestion:
        wanted: dict[str, Any] = dict(normalize_gen_kwargs(dict(given), self.max_gen_toks))
        end = self.text.tokenizer.decode([self.eot_token_id])
        until = tuple(handle_stop_sequences(wanted.pop("until"), eos=end))
        tokens, draws = wanted.pop("max_gen_toks"), wanted.pop("do_sample")
        if not 0 < tokens < self.max_length:
            raise DataError(
                f"a task asks for {tokens} tokens (max_gen_toks); the model has positions for {self.max_length}, the "
                "prompt among them"
            )
        other = sorted(name for name in wanted if name not in SAMPLING and wanted[name] != WITHOUT_EFFECT.get(name))
        if other:
            known = ", ".join(SAMPLING)
            raise DataError(
                f"a task asks for generation with {', '.join(other)}, which is not there; there are {known}"
            )
        sampling = {name: wanted[name] for name in SAMPLING if name in wanted}
        if not draws:
            sampling = {**{k: v for k, v in sampling.items() if k == "repetition_penalty"}, "temperature": 0.0}
        options = SamplingOptions(tokens=tokens, end_tokens=self.text.ends, **sampling)
        return TextQuestion(tuple(self.tok_encode(context)[-(self.max_length - tokens) :]), options, until)

    def _cut(self, tokens: Sequence[int], stop: Sequence[str]) -> str:
        text = self.text.tokenizer.decode(tokens, skip_special_tokens=True)
        return str(postprocess_generated_text(text, list(stop), None))


def sampled(question: TextQuestion, number: int) -> TextQuestion:
    """The same question once more: the answer of this number to it."""
    return TextQuestion(question.prompt, SamplingOptions(**{**vars(question.options), "sample": number}), question.stop)


def shown(answers: Iterator[Any], new: int, whole: int, what: str) -> Iterator[Any]:
    """The same, with progress on a terminal."""
    yield from tqdm(answers, total=whole, initial=whole - new, desc=what, disable=None)
