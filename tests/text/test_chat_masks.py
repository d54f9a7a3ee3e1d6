"""What of chats is trained. Truth: the text that transformers makes of 50 published templates, read by eye once (how an
answer begins and ends in each) and searched for that; and, where a template marks answers, transformers' own masks.

The templates are those that llama.cpp's repository has, kept in tests/fixtures/chat_templates with source and licence,
and those that TRL's package has, with the models they come from named in its README.
"""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
import trl

from phalanx.text.chat_masks import CUT_TOKENS, MARKED_SHORT, NO_END, OTHER_PROMPT, REWRITTEN, ChatEncoder, turn_end
from phalanx.text.chat_records import BadChat, read_record
from phalanx.text.chat_template import ChatTemplate
from phalanx.text.tokenizers import JsonTokenizer, Tokenizer, byte_tokenizer, train_bpe

FOLDER = Path(trl.__file__).parent / "chat_templates"
KEPT = Path(__file__).parents[1] / "fixtures/chat_templates"
IM, IM_END = r"<\|im_start\|>assistant\n", r"<\|im_end\|>"
LLAMA = r"<\|start_header_id\|>assistant<\|end_header_id\|>\n\n", r"<\|eot_id\|>"
NEMOTRON = IM + r"<think>\n?", IM_END
# name: (what inference begins an answer with, what ends it), as regular expressions
PUBLISHED = {
    "cohere": (r"<\|START_OF_TURN_TOKEN\|><\|CHATBOT_TOKEN\|>", r"<\|END_OF_TURN_TOKEN\|>"),
    "cohere2": (
        r"<\|START_OF_TURN_TOKEN\|><\|CHATBOT_TOKEN\|><\|START_RESPONSE\|>",
        r"<\|END_RESPONSE\|><\|END_OF_TURN_TOKEN\|>",
    ),
    "deepseek_r1_distill": ("<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
    "deepseekv3": ("<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
    "gemma": ("<start_of_turn>model\n", "<end_of_turn>"),
    "gemma3": ("<start_of_turn>model\n", "<end_of_turn>"),
    **{name: (r"<\|turn>model\n", r"<turn\|>") for name in ("gemma4", "gemma4_v3", "gemma4_v5", "diffusion_gemma")},
    "glm4moe": (r"<\|assistant\|>", r"(?:<\|user\|>|$)"),
    "gptoss": (r"<\|start\|>assistant", r"<\|return\|>"),
    "lfm2": (IM, IM_END),
    "lfm2_v2": (IM, IM_END),
    "llama3": LLAMA,
    "llama3_1": LLAMA,
    "llama3_2": LLAMA,
    "muse_glimmer": (r"<\|start\|>assistant", r"<\|eot\|>"),
    "nemotron_3_5_lightning": NEMOTRON,
    "nemotron_3_nano": NEMOTRON,
    "nemotron_3_ultra": NEMOTRON,
    "phi3": (r"<\|assistant\|>\n", r"<\|end\|>"),
    "phi3_5": (r"<\|assistant\|>\n", r"<\|end\|>"),
    "qwen2_5": (IM, IM_END),
    "qwen2_5_vl": (IM, IM_END),
    "qwen3": (IM, IM_END),
    "qwen3_5_nothink": (IM + r"<think>\n\n</think>\n\n", IM_END),
    "qwen3_5_think": (IM + r"<think>\n", IM_END),
    "qwen3_6": (IM + r"<think>\n", IM_END),
    "qwen3_8": (IM + r"<think>\n", IM_END),
    "qwen3_instruct_2507": (IM, IM_END),
    "qwen3_vl": (IM, IM_END),
}
KIMI = r"<\|im_assistant\|>assistant<\|im_middle\|>", IM_END
GRANITE = r"<\|start_of_role\|>assistant<\|end_of_role\|>", r"<\|end_of_text\|>"
MISTRAL = r"\[/INST\]", "<eos>"
PUBLISHED |= {  # of llama.cpp
    "Bielik-11B-v3.0-Instruct": (IM, IM_END),
    "ByteDance-Seed-OSS": ("<seed:bos>assistant\n", "<seed:eos>"),
    "GigaChat3-10B-A1.8B": (r"assistant<\|role_sep\|>\n", r"<\|message_sep\|>"),
    "HuggingFaceTB-SmolLM3-3B": (IM, IM_END),
    "Kimi-K2-Instruct": KIMI,
    "Kimi-K2-Thinking": KIMI,
    "MiMo-VL": (IM, IM_END),
    "MiniMax-M1": ("<beginning_of_sentence>ai name=assistant\n", "<end_of_sentence>"),
    "Mistral-Small-3.2-24B-Instruct-2506": MISTRAL,
    "Qwen-QwQ-32B": (IM, IM_END),
    "Qwen-Qwen2.5-7B-Instruct": (IM, IM_END),
    "Qwen-Qwen3-0.6B": (IM, IM_END),
    "Qwen3-Coder": (IM, IM_END),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
    "deepseek-ai-DeepSeek-V3.1": ("<｜Assistant｜><think></think>", "<｜end▁of▁sentence｜>"),
    "ibm-granite-granite-3.3-2B-Instruct": GRANITE,
    "ibm-granite-granite-4.1": GRANITE,
    "meetkai-functionary-medium-v3.1": LLAMA,
    "microsoft-Phi-3.5-mini-instruct": (r"<\|assistant\|>\n", r"<\|end\|>"),
    "mistralai-Mistral-Nemo-Instruct-2407": MISTRAL,
    "openai-gpt-oss-120b": (r"<\|start\|>assistant", r"<\|return\|>"),
}
TOKENS = re.compile(r"<[|｜][^<>|｜\s]+[|｜]>|<\|?[a-z_:]+\|?>|<[A-Z_]+>")
NO_TOKENS = ("<think>", "<tool_call>", "<tool_response>", "<tools>", "<function>", "<parameters>", "<name>", "<role>")
WORDS = ["the quick brown fox asks a first question and gets an answer of one, two or three words.\n\n"] * 30
TALK = [
    {"role": "user", "content": "A first question?"},
    {"role": "assistant", "content": "The first answer."},
    {"role": "user", "content": "A second one: \N{SNOWMAN}?"},
    {"role": "assistant", "content": "Another.\n\nIn two parts, \N{SNOWMAN}."},
    {"role": "user", "content": "And <|im_end|><end_of_turn><|eot_id|>?"},
    {"role": "assistant", "content": "The last."},
]
ADD = {"type": "object", "properties": {"a": {"type": "integer", "description": "A number."}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": ADD}}
CALL = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOLS = [
    {"role": "user", "content": "What is it?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "add", "tool_call_id": "call00001", "content": "2"},
    {"role": "assistant", "content": "It is two."},
]


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> Tokenizer:
    return train_bpe(WORDS, 320, tmp_path_factory.mktemp("words"))


class Folder:
    """A published template with a small tokenizer that has its special tokens, here and as transformers has them."""

    def __init__(self, words: Tokenizer, name: str, text: str):
        core = tokenizers.Tokenizer.from_str(words._text)  # type: ignore[attr-defined]
        named = sorted(set(TOKENS.findall(text)) - set(NO_TOKENS))
        core.add_special_tokens([*named, "<bos>", "<eos>"])
        self.tokenizer = JsonTokenizer(core, "<eos>")
        variables = {"bos_token": "<bos>", "eos_token": "<｜end▁of▁sentence｜>" if "▁" in text else "<eos>"}
        self.template = ChatTemplate({"default": text}, variables, name)
        self.theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=core, chat_template=text, **variables)

    def encoder(self, train_on: Any = "answers") -> ChatEncoder:
        return ChatEncoder(self.tokenizer, self.template, train_on)

    def text(self, messages: list[dict[str, Any]], tools: Any = None, begins: bool = False) -> str:
        return self.theirs.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=begins)


def published(words: Tokenizer, name: str) -> Folder:
    kept = KEPT / f"{name}.jinja"
    return Folder(words, name, (kept if kept.is_file() else FOLDER / kept.name).read_text())


@pytest.mark.parametrize("name", PUBLISHED)
def test_generation_ends_where_answers_do(words, name):
    """Truth: what ends an answer of the text that transformers makes; where it is nothing, the end of a document."""
    folder = published(words, name)
    text = folder.text([{"role": "user", "content": "a first"}, {"role": "assistant", "content": "one"}])
    ends = [found[0] for found in re.finditer(PUBLISHED[name][1], text[text.rindex("one") :])]
    found = turn_end(folder.encoder())
    assert found is not None and (ends[0] or "<eos>").endswith(folder.tokenizer.token_name(found))


def loaded(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As templates want them: arguments of calls as objects."""
    return [dict(each) for each in read_record({"messages": messages}).messages]


def trained_texts(folder: Folder, samples: Any) -> list[str]:
    return [folder.tokenizer.decode(s.ids[first:stop]) for s in samples for first, stop in s.spans]


@pytest.mark.parametrize("name", PUBLISHED)
def test_answers_are_what_a_reader_finds(name, words):
    """Every answer once, as the last one of the text up to it, from where inference would begin it through the token
    that ends the turn; before it, exactly what inference would supply."""
    folder, (begin, end) = published(words, name), PUBLISHED[name]
    encoder, talk = folder.encoder(), TALK[:-2] + [{"role": "user", "content": "And?"}, TALK[-1]]
    samples = encoder.samples(read_record({"messages": talk}))
    spans = [(sample, span) for sample in samples for span in sample.spans]
    assert len(spans) == 3
    expected = re.compile(f"{begin}((?:(?!{begin}).)*?{end})", re.DOTALL)
    for number, (sample, (first, stop)) in zip((1, 3, 5), spans):
        written = folder.text(talk[: number + 1])
        more = folder.text(talk[: number + 2]) if name == "glm4moe" and number < 5 else written
        found = [match for match in expected.finditer(more) if talk[number]["content"] in match[1]]
        mine = folder.tokenizer.decode(sample.ids[first:stop])
        assert mine == found[-1][1] + ("<eos>" if name == "glm4moe" and number == 5 else "")
        before = folder.tokenizer.decode(sample.ids[:first])
        assert before == more[: found[-1].start(1)]
        prompt = folder.text(talk[:number], begins=True)
        assert before == prompt or OTHER_PROMPT.format(repr(prompt.removeprefix(before))) in encoder.notes
    last = samples[-1]
    whole = folder.text(talk)
    assert whole.startswith(folder.tokenizer.decode(last.ids).removesuffix("<eos>"))
    assert (len(samples) > 1) == (REWRITTEN in encoder.notes)


@pytest.mark.parametrize(
    "name",
    ["llama3_1", "qwen2_5", "qwen3_instruct_2507", "gptoss", "glm4moe", "gemma4", "lfm2_v2", "Qwen3-Coder"],
)
def test_calls_of_tools_are_answers(name, words):
    folder = published(words, name)
    samples = folder.encoder().samples(read_record({"messages": TOOLS, "tools": [TOOL]}))
    texts = trained_texts(folder, samples)
    assert len(texts) == 2 and "add" in texts[0] and "It is two." in texts[1] and "Adds." not in "".join(texts)
    for sample in samples:
        start, text = sample.spans[-1][0], folder.tokenizer.decode(sample.ids)
        number = 3 if "It is two." in text else 1
        prompt = folder.text(loaded(TOOLS)[:number], [TOOL], begins=True)
        assert folder.tokenizer.decode(sample.ids[:start]) == prompt


MARKED = sorted(path.stem for path in FOLDER.glob("*_training.jinja"))


@pytest.mark.parametrize("name", MARKED)
def test_marks_of_a_template_are_read_as_transformers_reads_them(name, words):
    folder = published(words, name)
    talk = TALK[:-2]
    if "['text']" in folder.template.source and "is string" not in folder.template.source:
        pytest.skip("takes lists of parts alone")
    theirs = folder.theirs.apply_chat_template(
        talk, return_dict=True, return_assistant_tokens_mask=True, add_special_tokens=False
    )
    ids, mask = theirs["input_ids"], theirs["assistant_masks"]
    samples = folder.encoder().samples(read_record({"messages": talk}))
    if len(samples) > 1:  # each is compared with the text up to its answer
        theirs = folder.theirs.apply_chat_template(
            talk[:2], return_dict=True, return_assistant_tokens_mask=True, add_special_tokens=False
        )
        ids, mask, samples = theirs["input_ids"], theirs["assistant_masks"], samples[:1]
    [sample] = samples
    mine = [0] * len(ids)
    for first, stop in sample.spans:
        mine[first:stop] = [1] * (stop - first)
    assert sum(mask) and mine == mask and list(sample.ids) == ids[: len(sample.ids)]


def test_reasoning_that_is_left_out_later_is_trained_where_it_stands(words):
    """Qwen3 writes the reasoning of the last answer alone: two samples, each with its own."""
    folder = published(words, "qwen3")
    talk = [dict(each) for each in TALK[:4]]
    talk[1]["reasoning_content"], talk[3]["reasoning_content"] = "The one.", "The other."
    encoder = folder.encoder()
    first, second = encoder.samples(read_record({"messages": talk}))
    assert encoder.notes == {REWRITTEN: 1}
    texts = trained_texts(folder, [first, second])
    assert texts == [
        "<think>\nThe one.\n</think>\n\nThe first answer.<|im_end|>",
        f"<think>\nThe other.\n</think>\n\n{TALK[3]['content']}<|im_end|>",
    ]
    assert "The one." not in folder.tokenizer.decode(second.ids), "as in inference"
    [last] = folder.encoder("last_answer").samples(read_record({"messages": talk}))
    assert last == second
    [whole] = folder.encoder("all").samples(read_record({"messages": talk}))
    assert whole.ids == second.ids and whole.spans[0][0] == 0 and whole.spans[-1][1] == len(whole.ids)


# ---- templates of our own, for what published ones here lack

INST = """\
{{ bos_token }}{% for m in messages %}
{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}{{ eos_token }}{% endif %}
{% endfor %}"""
PLAIN = """\
{% for m in messages %}
{{ 'USER: ' if m.role == 'user' else 'ASSISTANT: ' }}{{ m.content }}
{% endfor %}
{% if add_generation_prompt %}ASSISTANT: {% endif %}"""


def own(words: Tokenizer, text: str) -> Folder:
    return Folder(words, "own", text)


def test_no_end_of_a_turn(words):
    """The tokenizer's end of a document ends the last answer, and a token that an answer would share with the prompt is
    cut: the prompt's tokens are those of inference."""
    folder = own(words, PLAIN)
    encoder = folder.encoder()
    talk = [TALK[0], {"role": "assistant", "content": "first answer"}, *TALK[2:4]]
    [sample] = encoder.samples(read_record({"messages": talk}))
    assert trained_texts(folder, [sample]) == ["first answer\n", f"{TALK[3]['content']}\n<eos>"]
    assert encoder.notes[NO_END] == 1 and encoder.notes[CUT_TOKENS] == 1
    prompt = folder.text(talk[:1], begins=True)
    first = sample.spans[0][0]
    assert list(sample.ids[:first]) == folder.tokenizer.encode_with_special(prompt)
    assert folder.tokenizer.encode_with_special(f"{prompt}first")[:first] != list(sample.ids[:first]), "one token"
    assert folder.tokenizer.decode(sample.ids) == folder.text(talk) + "<eos>"


def test_arguments_as_a_template_takes_them(words):
    """As text where it joins texts, or would write an object as Python does; else as objects, such as for tojson."""
    talk = [dict(each) for each in TOOLS]
    for call, expected in (
        ("'[' + c.function.name + c.function.arguments + ']'", '[add{"a": 1}]<eos>'),
        ("c.function.name ~ c.function.arguments", 'add{"a": 1}<eos>'),
        ("c.function.name ~ c.function.arguments.a", "add1<eos>"),
    ):
        text = INST.replace(
            "{{ m.content }}{{ eos",
            f"{{% for c in m.tool_calls or [] %}}{{{{ {call} }}}}{{% endfor %}}{{{{ m.content }}}}{{{{ eos",
        )
        folder = own(words, text)
        samples = folder.encoder().samples(read_record({"messages": talk}))
        assert trained_texts(folder, samples)[0].strip() == expected


def test_one_bos(words):
    folder = own(words, INST)
    [sample] = folder.encoder().samples(read_record({"messages": TALK}))
    names = [folder.tokenizer.token_name(i) for i in sample.ids]
    assert names.count("<bos>") == 1 and names.count("<eos>") == 3 and "<|im_end|>" not in names
    assert trained_texts(folder, [sample])[0] == " The first answer.<eos>"
    with pytest.raises(BadChat, match="begins with two tokens <bos>"):
        own(words, "{{ bos_token }}" + INST).encoder().samples(read_record({"messages": TALK}))


def test_special_tokens_that_people_write_stay_text(words):
    """In questions and in answers: as many special tokens as of the same chat without their names."""
    folder = published(words, "qwen2_5")
    special = set(folder.tokenizer.special_tokens.values())
    counts = []
    for more in ("", " <|im_end|> and <|im_start|>user"):
        talk = [{**each, "content": each["content"] + more} for each in TALK[:2]]
        [sample] = folder.encoder().samples(read_record({"messages": talk}))
        counts.append(sum(token in special for token in sample.ids))
        assert trained_texts(folder, [sample]) == [f"The first answer.{more}<|im_end|>"]
    assert counts[0] == counts[1] == 6


def test_weights_and_the_last_answer(words):
    folder = own(words, INST)
    talk = [dict(each) for each in TALK]
    talk[3]["weight"] = 0
    [sample] = folder.encoder().samples(read_record({"messages": talk}))
    assert trained_texts(folder, [sample]) == [" The first answer.<eos>", " The last.<eos>"]
    [sample] = folder.encoder("last_answer").samples(read_record({"messages": talk}))
    assert trained_texts(folder, [sample]) == [" The last.<eos>"]
    [sample] = folder.encoder().samples(read_record({"prompt": TALK[:3], "completion": TALK[3:4]}))
    assert trained_texts(folder, [sample]) == [f" {TALK[3]['content']}<eos>"]


def test_texts_without_a_template(words):
    encoder = ChatEncoder(words, None, "answers")
    [sample] = encoder.samples(read_record({"prompt": "the quick", "completion": " brown <|endoftext|> fox"}))
    text = "the quick brown <|endoftext|> fox"
    assert words.decode(sample.ids) == text + "<|endoftext|>" and sample.ids.count(words.eod) == 1
    assert trained_of(words, sample) == " brown <|endoftext|> fox<|endoftext|>"
    with pytest.raises(BadChat, match="completion is empty"):
        read_record({"prompt": "the quick", "completion": ""})


def trained_of(tokenizer: Tokenizer, sample: Any) -> str:
    return "".join(tokenizer.decode(sample.ids[first:stop]) for first, stop in sample.spans)


def test_marks_that_leave_out_the_end_are_noted(words):
    text = INST.replace("{{ m.content }}{{ eos", "{% generation %}{{ m.content }}{% endgeneration %}{{ eos")
    encoder = own(words, text).encoder()
    encoder.samples(read_record({"messages": TALK}))
    assert encoder.notes == {MARKED_SHORT: 1}


UNMARKED = "{% if 0 %}{% generation %}{% endgeneration %}{% endif %}"
LEFT_OUT = "{% for m in messages %}{{ m.content[:9] }}<eos>{% endfor %}"
CHANGES = "{{ messages | length }}{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<eos>{% endfor %}"


@pytest.mark.parametrize(
    "template, messages, more, rule",
    [
        (LEFT_OUT, TALK[:2], {}, "turn 2: the template does not write the answer's text; of this answer it writes"),
        (
            INST,
            [TALK[0], {**TALK[1], "reasoning_content": "Hm."}],
            {},
            "turn 2: the template does not write its rea",
        ),
        (INST, TALK[:2], {"tools": [TOOL]}, "has the tool add, and the template writes no tools"),
        (INST, TALK[:2], {"tools": [{"type": "function", "function": {"name": "first"}}]}, "has the tool first, and"),
        (INST, TOOLS, {}, "turn 2: the template does not write its call of add"),
        (
            INST,
            [TOOLS[0], {**TOOLS[1], "content": "I add."}],
            {},
            "turn 2: the template does not write its call of add",
        ),
        (CHANGES, TALK[:2], {}, "turn 2: where this answer begins cannot be told: inference would go on from '1"),
        ("{{ raise_exception('no') }}", TALK[:2], {}, "turn 2: the template refuses the chat up to here: no"),
        (INST.replace("m.content", "m.content[:3]", 1), TALK[:2], {}, "turn 1: the template leaves out this message"),
        (UNMARKED + INST, TALK[:2], {}, "turn 2: the template marks nothing of this answer"),
    ],
)
def test_what_cannot_be_told_is_shown(template, messages, more, rule, words):
    with pytest.raises(BadChat) as caught:
        own(words, template).encoder().samples(read_record({"messages": messages, **more}))
    assert rule in str(caught.value)


def test_offsets_cover_the_text(words):
    """In order, from the first character to the last; characters of several tokens too."""
    for tokenizer, text in product([words, byte_tokenizer()], ["the \N{SNOWMAN} fox<|endoftext|> a", " and  the"]):
        ids, places = tokenizer.encode_offsets(text)
        assert ids == tokenizer.encode_with_special(text)
        assert places[0][0] == 0 and places[-1][1] == len(text)
        assert all(a <= c and b >= c for (a, b), (c, _) in zip(places, places[1:]))
