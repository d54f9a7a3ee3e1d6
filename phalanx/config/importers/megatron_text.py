"""Texts of Megatron-LM's runs as keys: shell scripts, lines of arguments, MODEL_ARGS of its functional tests."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.nodes import MappingNode, ScalarNode, SequenceNode

from phalanx.config.importers.shell import Script, ShellWord, UnclosedQuote, expand, read_script
from phalanx.config.importers.translation import (
    ForeignKey,
    ForeignText,
    OpenValue,
)

PROGRAM = re.compile(r"[\w./$\x01\x02{}-]*\.py")
MORE_OPTIONS = re.compile(r"ARG|OPT|EXTRA|FLAG")


def words_of(source: ForeignText, script: Script) -> tuple[list[ShellWord], list[ShellWord]]:
    """The words before the program and its arguments, in the last command that has any."""
    for words in reversed(script.commands):
        found = split_command(words)
        if found is not None:
            return found
    for name in reversed(script.variables):  # a command that another one is to run, in one text
        text = script.variables[name][0].text if len(script.variables[name]) == 1 else ""
        if PROGRAM.search(text) and " --" in text and name not in script.given:
            last = text.rpartition(";")[2]
            line = script.variables[name][0].line
            return split_command([ShellWord(word, line) for word in last.split()]) or ([], [])
    held = [name for name in script.variables if is_options(script, name)]
    return [], [word for name in held for word in split_words(script.variables[name])]


def split_command(words: list[ShellWord]) -> tuple[list[ShellWord], list[ShellWord]] | None:
    """Before the program and after it; None if the command has no options of a program."""
    programs = [i for i, word in enumerate(words) if PROGRAM.fullmatch(word.text)]
    if programs and any(word.text.startswith("--") for word in words[programs[0] :]):
        return words[: programs[0] + 1], words[programs[0] + 1 :]
    if words and words[0].text.startswith("--"):
        return [], words
    return None


def is_options(script: Script, name: str) -> bool:
    """Whether a variable holds options that no other variable repeats."""
    words = split_words(script.variables[name])
    mine = " ".join(word.text for word in words)
    others = (
        " ".join(w.text for w in split_words(found)) for other, found in script.variables.items() if other != name
    )
    return bool(words) and words[0].text.startswith("--") and not any(mine in other for other in others)


def split_words(words: list[ShellWord]) -> list[ShellWord]:
    return [ShellWord(text, word.line) for word in words for text in word.text.split()]


def keys_of(words: Sequence[ShellWord]) -> list[ForeignKey]:
    """Arguments as keys: a switch is True, several values are a list. Words that no option takes are keys too."""
    made: list[ForeignKey] = []
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not word.text.startswith("--"):
            made.append(ForeignKey(word.shown, opened(word), word.line))
            continue
        name, equals, value = word.text.partition("=")
        values = [ShellWord(value, word.line)] if equals else []
        while at < len(words) and not words[at].text.startswith("--") and not carries_options(words[at]):
            values.append(words[at])
            at += 1
        found = [opened(v) for v in values]
        still_open = next((v for v in found if isinstance(v, OpenValue)), None)
        plain: Any = True if not found else (found[0] if len(found) == 1 else found)
        if still_open is not None:
            plain = OpenValue(" ".join(v.shown for v in values), still_open.why)
        made.append(ForeignKey(name, plain, word.line))
    return made


def carries_options(word: ShellWord) -> bool:
    """Whether a word is an unknown variable that by its name holds more options."""
    return not word.known and word.text.startswith("\x01") and bool(MORE_OPTIONS.search(word.text.upper()))


def opened(word: ShellWord) -> Any:
    """The text of a word without the quotes that a shell would keep, or why it is not known."""
    if word.known:
        return word.text[1:-1] if re.fullmatch(r"'[^']*'", word.text) else word.text
    names = ", ".join(dict.fromkeys(word.unknown))
    argument = re.fullmatch(r"\$\{?(\d)\}?", names)
    if argument:
        return OpenValue(word.shown, f"it is argument {argument[1]} of the script (--var {argument[1]}=VALUE gives it)")
    name = re.fullmatch(r"\$\{?([A-Za-z_]\w*)\}?", names)
    if name:
        return OpenValue(word.shown, f"nothing in the text sets {name[1]} (--var {name[1]}=VALUE does)")
    return OpenValue(word.shown, f"{names} is not known before the script runs")


def read_text(source: ForeignText) -> tuple[list[ForeignKey], Script, str, int | None]:
    """Keys, the script, the program's name, and the ranks that the launcher starts."""
    try:
        script = read_script(source.text, source.variables)
        before, words = words_of(source, script)
    except UnclosedQuote as error:
        raise source.refuse(f"is no shell script that can be read: {error}", error.line) from None
    program = before[-1].shown if before else ""
    keys = [ForeignKey(f"export {name}", True, line) for name, line in script.exported.items()]
    keys += launcher_keys(before[:-1])
    keys += keys_of(words)
    for unread in script.unread:
        name = f"line {unread.first}" if unread.first == unread.last else f"lines {unread.first}-{unread.last}"
        keys.append(ForeignKey(name, unread.why, unread.first))
    return keys, script, program, ranks_of(before)


def launcher_keys(words: list[ShellWord]) -> list[ForeignKey]:
    named = [word for word in words if word.text.startswith("--")]
    if not named:
        return []
    first = next(i for i, word in enumerate(words) if word.text.startswith("--"))
    return [ForeignKey(f"launcher {key.name}", key.value, key.line) for key in keys_of(words[first:])]


def ranks_of(words: list[ShellWord]) -> int | None:
    """Ranks of a machine times machines, if the launcher says both and they are numbers."""
    said = {key.name: key.value for key in keys_of(words)}
    each = said.get("--nproc_per_node", said.get("--nproc-per-node"))
    machines = said.get("--nnodes", "1")
    if isinstance(each, str) and isinstance(machines, str) and each.isdigit() and machines.isdigit():
        return int(each) * int(machines)
    return None


def read_yaml_arguments(source: ForeignText) -> tuple[list[ForeignKey], Script, str, int | None]:
    """The MODEL_ARGS of a functional test."""
    try:
        node = YAML(typ="safe", pure=True).compose(source.text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise source.refuse(f"is not YAML ({error.problem or error.context})", mark.line + 1 if mark else 1) from None
    script = Script({name: [ShellWord(value, 0)] for name, value in source.variables.items()})
    keys: list[ForeignKey] = []
    for key, value in node.value if isinstance(node, MappingNode) else ():
        inner = value.value if isinstance(value, MappingNode) else ()
        line = key.start_mark.line + 1
        if key.value == "ENV_VARS":
            keys += [ForeignKey(f"export {k.value}", True, k.start_mark.line + 1) for k, _ in inner]
        elif key.value == "MODEL_ARGS":
            keys += [found for k, v in inner if (found := yaml_key(script, k, v)) is not None]
        else:
            keys.append(ForeignKey(f"test {key.value}", shown(value), line))
    if not any(key.name.startswith("--") for key in keys):
        raise source.refuse("has MODEL_ARGS that are no arguments of Megatron-LM (they do not begin with --)")
    return keys, script, "", None


def shown(node: Any) -> Any:
    return node.value if isinstance(node, ScalarNode) else "..."


def yaml_key(script: Script, key: Any, value: Any) -> ForeignKey | None:
    """One of MODEL_ARGS; false is an option that is not given."""
    line = key.start_mark.line + 1
    if isinstance(value, SequenceNode):
        texts = [item.value for item in value.value]
    elif value.tag.endswith(":bool"):
        return ForeignKey(key.value, True, line) if value.value.lower() == "true" else None
    else:
        texts = [value.value]
    words = [word for text in texts for word in expand(script, quoted(text), line)]
    return keys_of([ShellWord(key.value, line), *words])[0]


def quoted(text: str) -> str:
    """A value of the YAML as its runner passes it on: variables are replaced, and blanks separate values."""
    try:
        return " ".join(f'"{word}"' if "$" not in word else word for word in shlex.split(text))
    except ValueError:
        return shlex.quote(text)
