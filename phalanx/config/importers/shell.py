"""Reading a shell script without running it: its variables, and the words of the command that it ends with.

Understood are assignments, arrays, `export`, quotes, continued lines, comments, `$NAME`, `${NAME}`, `${NAME:-default}`,
`${NAME[@]}`, `$((arithmetic))`, and `if` on comparisons of known values. Loops, functions, `case`, other files and
conditions that cannot be decided are not read, and are reported. What is not known stays in a word as a mark.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Mapping
from dataclasses import field

from phalanx.base.dataclass import dataclass

OPEN, CLOSE = "\x01", "\x02"  # around what is not known in a word
MARK = re.compile(f"{OPEN}(.*?){CLOSE}")
NAME = r"[A-Za-z_]\w*"
ASSIGNMENT = re.compile(rf"({NAME})(\+?)=", re.DOTALL)
SEPARATORS = ("&&", "||", ";;", ";", "|&", "|", "&", "\n")
OPENERS = {"if": "fi", "while": "done", "until": "done", "for": "done", "case": "esac", "{": "}"}
DECLARING = ("export", "readonly", "local", "declare", "typeset")
MOST_DEPTH = 50  # of values inside values


@dataclass(frozen=True)
class Token:
    """A raw word, or an operator; `array`: the raw words in its brackets."""

    text: str
    line: int
    array: tuple[Token, ...] | None = None


@dataclass(frozen=True)
class ShellWord:
    """An expanded word; text may hold marks of what is not known."""

    text: str
    line: int

    @property
    def known(self) -> bool:
        return OPEN not in self.text

    @property
    def shown(self) -> str:
        """As a person would write it."""
        return self.text.replace(OPEN, "").replace(CLOSE, "")

    @property
    def unknown(self) -> tuple[str, ...]:
        return tuple(MARK.findall(self.text))


@dataclass(frozen=True)
class UnreadLines:
    """Lines whose effect is not known."""

    first: int
    last: int
    why: str


class UnclosedQuote(Exception):
    """A quote or bracket without an end; line: where it begins."""

    def __init__(self, line: int):
        self.line = line
        super().__init__("a quote or bracket that begins here has no end")


@dataclass
class Script:
    """variables: words of each (one for a plain value). exported: names with their lines. commands: expanded."""

    variables: dict[str, list[ShellWord]] = field(default_factory=dict)
    arrays: set[str] = field(default_factory=set)
    exported: dict[str, int] = field(default_factory=dict)
    commands: list[list[ShellWord]] = field(default_factory=list)
    unread: list[UnreadLines] = field(default_factory=list)
    given: frozenset[str] = frozenset()


def read_script(text: str, variables: Mapping[str, str]) -> Script:
    """Read a script; `variables`: values that the user gives to names, or to arguments by number. UnclosedQuote if it
    cannot be read."""
    script = Script({name: [ShellWord(value, 0)] for name, value in variables.items()}, given=frozenset(variables))
    ShellReader(script, tokens(text)).block(())
    return script


# ---- words ---------------------------------------------------------------------------------------


def tokens(text: str) -> list[Token]:
    return Lexer(text).all()


class Lexer:
    """Text -> raw words and operators; quotes stay in the words, for expansion."""

    def __init__(self, text: str, line: int = 1):
        self.text, self.at, self.line = text.replace("\r\n", "\n"), 0, line
        self.heredocs: list[str] = []

    def all(self, until: str = "") -> list[Token]:
        made: list[Token] = []
        while self.at < len(self.text):
            char = self.text[self.at]
            if until and char == until:
                self.at += 1
                return made
            if char == "\n":
                self._newline(made, bool(until))
            elif char in " \t":
                self.at += 1
            elif self.text.startswith("\\\n", self.at):
                self.at += 2
                self.line += 1
            elif char == "#":
                self.at = self._end_of_line()
            elif heredoc := re.match(r"<<-?\s*(['\"]?)(\w+)\1", self.text[self.at :]):
                self.heredocs.append(heredoc[2])
                self.at += heredoc.end()
            elif (found := self._separator()) is not None:
                made.append(Token(found, self.line))
                self.at += len(found)
            elif char in "()":
                made.append(Token(char, self.line))
                self.at += 1
            else:
                made.append(self._word())
        if until:
            raise UnclosedQuote(self.line)
        return made

    def _newline(self, made: list[Token], inside: bool) -> None:
        if not inside:
            made.append(Token("\n", self.line))
        self.at += 1
        self.line += 1
        for end in self.heredocs:
            while self.at < len(self.text):
                stop = self._end_of_line()
                row = self.text[self.at : stop]
                self.at = min(stop + 1, len(self.text))
                self.line += 1
                if row.strip() == end:
                    break
        self.heredocs.clear()

    def _end_of_line(self) -> int:
        stop = self.text.find("\n", self.at)
        return len(self.text) if stop < 0 else stop

    def _separator(self) -> str | None:
        return next((s for s in SEPARATORS if self.text.startswith(s, self.at)), None)

    def _word(self) -> Token:
        start, line = self.at, self.line
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in " \t\n;|" or (char == "&" and not self.text[start : self.at].endswith(">")) or char == ")":
                break
            if char == "(":
                if ASSIGNMENT.fullmatch(self.text[start : self.at]):
                    head = self.text[start : self.at]
                    self.at += 1
                    return Token(head, line, tuple(self.all(")")))
                if self.at > start and re.fullmatch(NAME, self.text[start : self.at]):
                    break  # a function
                self.at += 1
                continue
            self._step()
        return Token(self.text[start : self.at].replace("\\\n", ""), line)

    def _step(self) -> None:
        """Past one character, quoted text or expansion."""
        char = self.text[self.at]
        if char == "\\":
            self.line += self.text[self.at : self.at + 2].count("\n")
            self.at += 2
        elif char == "'":
            self._past(self.text.find("'", self.at + 1))
        elif char == '"':
            self._double()
        elif char == "`":
            self._past(self.text.find("`", self.at + 1))
        elif self.text.startswith(("$(", "${"), self.at):
            self._nested()
        else:
            self.at += 1

    def _past(self, end: int) -> None:
        if end < 0:
            raise UnclosedQuote(self.line)
        self.line += self.text.count("\n", self.at, end)
        self.at = end + 1

    def _double(self) -> None:
        first, self.at = self.line, self.at + 1
        while self.at < len(self.text) and self.text[self.at] != '"':
            if self.text[self.at] == "\\":
                self.line += self.text[self.at : self.at + 2].count("\n")
                self.at += 2
            elif self.text.startswith(("$(", "${"), self.at):
                self._nested()
            else:
                self.line += self.text[self.at] == "\n"
                self.at += 1
        if self.at >= len(self.text):
            raise UnclosedQuote(first)
        self.at += 1

    def _nested(self) -> None:
        """Past $(...), $((...)) or ${...}."""
        first, opening = self.line, self.text[self.at + 1]
        closing, depth = {"(": ")", "{": "}"}[opening], 0
        self.at += 1
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in "\"'":
                self._step()
                continue
            depth += (char == opening) - (char == closing)
            self.line += char == "\n"
            self.at += 1
            if depth == 0:
                return
        raise UnclosedQuote(first)


# ---- expansion -----------------------------------------------------------------------------------


def expand(script: Script, raw: str, line: int, depth: int = 0) -> list[ShellWord]:
    """The words that a raw word becomes: quotes removed, variables replaced, and split where they were not quoted."""
    made, current, started = list[str](), "", False
    at = 0

    def split(text: str) -> None:
        nonlocal current, started
        pieces = re.split(r"[ \t\n]+", text)
        for i, piece in enumerate(pieces):
            if i and started:
                made.append(current)
                current, started = "", False
            if piece:
                current, started = current + piece, True

    while at < len(raw):
        char = raw[at]
        if char == "\\":
            current, started, at = current + raw[at + 1 : at + 2].replace("\n", ""), True, at + 2
        elif char == "'":
            end = raw.index("'", at + 1)
            current, started, at = current + raw[at + 1 : end], True, end + 1
        elif char == '"':
            inner, at = _quoted(raw, at)
            values = _inside_quotes(script, inner, line, depth)
            current, started = current + values[0], started or len(values) > 1 or inner == "" or bool(values[0])
            for value in values[1:]:
                made.append(current)
                current, started = value, True
            started = True
        elif (found := _expansion(raw, at)) is not None:
            split(" ".join(_value(script, found[0], line, depth)))
            at = found[1]
        else:
            current, started, at = current + char, True, at + 1
    if started:
        made.append(current)
    return [ShellWord(text, line) for text in made]


def _quoted(raw: str, at: int) -> tuple[str, int]:
    """The inside of "..." that begins at a place, and the place after it."""
    end = at + 1
    while raw[end] != '"':
        nested = _expansion(raw, end)
        end = end + 2 if raw[end] == "\\" else (nested[1] if nested is not None else end + 1)
    return raw[at + 1 : end], end + 1


def _inside_quotes(script: Script, inner: str, line: int, depth: int) -> list[str]:
    """The texts of "...": one, or with "${NAME[@]}" one for each element."""
    texts, at = [""], 0
    while at < len(inner):
        found = _expansion(inner, at)
        if inner[at] == "\\" and inner[at + 1 : at + 2] in ("$", '"', "\\", "`", "\n"):
            texts[-1] += inner[at + 1].replace("\n", "")
            at += 2
        elif found is not None:
            values = _value(script, found[0], line, depth)
            if re.search(r"\[@\]\}$", found[0]):
                if values:
                    texts[-1] += values[0]
                    texts += values[1:]
            else:
                texts[-1] += " ".join(values)
            at = found[1]
        else:
            texts[-1] += inner[at]
            at += 1
    return texts


def _expansion(raw: str, at: int) -> tuple[str, int] | None:
    """The expansion that begins at a place, and the place after it; None if none does."""
    if raw[at] == "`":
        end = raw.find("`", at + 1)
        return (raw[at : end + 1], end + 1) if end > 0 else None
    if raw[at] != "$":
        return None
    plain = re.compile(rf"\$(?:{NAME}|\d|[@*#?$!-])").match(raw, at)
    if plain is not None:
        return plain[0], plain.end()
    if raw[at + 1 : at + 2] not in ("{", "("):
        return None
    opening, depth, end = raw[at + 1], 0, at + 1
    closing = {"{": "}", "(": ")"}[opening]
    while end < len(raw):
        depth += (raw[end] == opening) - (raw[end] == closing)
        end += 1
        if depth == 0:
            return raw[at:end], end
    return None


def _value(script: Script, expansion: str, line: int, depth: int) -> list[str]:
    """The texts that an expansion stands for."""
    if depth > MOST_DEPTH:
        return [unknown(expansion)]
    if expansion.startswith("$(("):
        return [_arithmetic(script, expansion[3:-2], line, depth)]
    if expansion.startswith(("$(", "`")):
        return [unknown(expansion)]
    inner = expansion[2:-1] if expansion.startswith("${") else expansion[1:]
    plain = re.fullmatch(rf"({NAME}|\d+)(?:\[[@*]\])?", inner)
    if plain is not None:
        return _variable(script, plain[1], expansion)
    other = re.fullmatch(rf"({NAME}|\d+)(:?[-=+])(.*)", inner, re.DOTALL)
    if other is None:
        return [unknown(expansion)]
    name, how, rest = other.groups()
    values = [word.text for word in script.variables.get(name, [])]
    if how[-1] == "+":
        return [_joined(script, rest, line, depth)] if any(values) else []
    return values if any(values) or (values and how[0] != ":") else [_joined(script, rest, line, depth)]


def _joined(script: Script, raw: str, line: int, depth: int) -> str:
    return " ".join(word.text for word in expand(script, raw, line, depth + 1))


def _variable(script: Script, name: str, expansion: str) -> list[str]:
    if name in script.variables:
        return [word.text for word in script.variables[name]]
    return [unknown(expansion)]


def unknown(text: str) -> str:
    return OPEN + text.replace(OPEN, "").replace(CLOSE, "") + CLOSE


OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def _arithmetic(script: Script, raw: str, line: int, depth: int) -> str:
    text = re.sub(rf"(?<![\w$]){NAME}", lambda m: f"${m[0]}", raw)
    found = _joined(script, text.replace("(", " ( ").replace(")", " ) "), line, depth)
    whole = unknown(f"$(({raw}))")
    if OPEN in found or len(found) > 200:
        return whole
    try:
        return str(_calculated(ast.parse(found.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError):
        return whole


def _calculated(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_calculated(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return int(OPERATIONS[type(node.op)](_calculated(node.left), _calculated(node.right)))
    raise ValueError("not arithmetic of whole numbers")


# ---- statements ----------------------------------------------------------------------------------


class ShellReader:
    """Goes through the statements of a script and records what they do to variables."""

    def __init__(self, script: Script, found: list[Token]):
        self.script, self.found, self.at = script, found, 0

    def block(self, ends: tuple[str, ...], active: bool = True) -> str:
        """Statements up to one of the words; returns it."""
        while self.at < len(self.found):
            token = self.found[self.at]
            if token.text in (*SEPARATORS, ")", "("):
                self.at += 1
            elif token.text in ends:
                self.at += 1
                return token.text
            elif token.text == "if":
                self._if(active)
            elif token.text in OPENERS or self._is_function():
                self._skip(active)
            else:
                self._command(active)
        return ""

    def _is_function(self) -> bool:
        texts = [t.text for t in self.found[self.at : self.at + 3]]
        return texts[:1] == ["function"] or texts[1:3] == ["(", ")"]

    def _skip(self, active: bool) -> None:
        """Past a loop, a case or a function."""
        start, what = self.at, self.found[self.at].text
        if what not in OPENERS:
            while self.at < len(self.found) and self.found[self.at].text != "{":
                self.at += 1
            what = "{"
        ends, depth = [OPENERS[what]], True
        self.at += 1
        while self.at < len(self.found) and depth:
            text = self.found[self.at].text
            begins = self.at == 0 or self.found[self.at - 1].text in (*SEPARATORS, "do", "then", "else", "(", ")")
            if text == ends[-1]:
                ends.pop()
                depth = bool(ends)
            elif text in OPENERS and begins:
                ends.append(OPENERS[text])
            self.at += 1
        kind = {"{": "a function", "case": "a case"}.get(what, "a loop")
        self._report(start, self.at, kind, active)

    def _if(self, active: bool) -> None:
        decided, first = False, self.found[self.at].line
        self.at += 1
        word, undecided, start = "if", "", 0
        while word in ("if", "elif", "else"):
            verdict: bool | None = True
            if word != "else":
                begin = self.at
                while self.at < len(self.found) and self.found[self.at].text != "then":
                    self.at += 1
                verdict = self._condition(self.found[begin : self.at])
                self.at += 1
                if verdict is None and not decided and not undecided:
                    condition = " ".join(t.text for t in self.found[begin : self.at - 1] if t.text.strip(";\n"))
                    undecided, start = condition, begin
            runs = active and verdict is True and not decided and not undecided
            decided = decided or verdict is True
            word = self.block(("elif", "else", "fi"), runs)
        if undecided and active:
            self._report(start, self.at, f"depends on {undecided.strip()}", True, first)

    def _report(self, start: int, end: int, why: str, active: bool, first: int = 0) -> None:
        """Note lines that were not read, if they could change options."""
        inside = self.found[start:end]
        matters = any(t.array is not None or ASSIGNMENT.match(t.text) or "--" in t.text for t in inside)
        if active and matters:
            self.script.unread.append(UnreadLines(first or inside[0].line, inside[-1].line, why))

    def _condition(self, found: list[Token]) -> bool | None:
        """Whether a condition holds; None if that is not known."""
        verdicts: list[bool | None] = []
        joined: list[str] = []
        part: list[Token] = []
        for token in [*found, Token(";", 0)]:
            if token.text in ("&&", "||", ";", "\n"):
                if part:
                    verdicts.append(self._test(part))
                    joined.append(token.text)
                part = []
            else:
                part.append(token)
        result = verdicts[0] if verdicts else None
        for how, verdict in zip(joined, verdicts[1:]):
            if how == "&&":
                result = False if result is False or verdict is False else (result and verdict)
            elif how == "||":
                result = True if result is True or verdict is True else (None if None in (result, verdict) else False)
        return result

    def _test(self, part: list[Token]) -> bool | None:
        """One [ ... ] or [[ ... ]]."""
        texts = [token.text for token in part]
        if texts[0] not in ("[", "[[") or texts[-1] not in ("]", "]]"):
            return None
        words = [" ".join(w.text for w in expand(self.script, t.text, t.line)) for t in part[1:-1]]
        negated = words[:1] == ["!"]
        words = words[1:] if negated else words
        verdict = self._compared(words)
        return None if verdict is None else verdict != negated

    def _compared(self, words: list[str]) -> bool | None:
        if any(OPEN in word for word in words):
            return None
        if len(words) == 2 and words[0] in ("-z", "-n"):
            return (words[1] == "") == (words[0] == "-z")
        if len(words) != 3:
            return None
        left, how, right = words
        if how in ("=", "==", "!="):
            return (left == right) == (how != "!=")
        compare = {"-eq": operator.eq, "-ne": operator.ne, "-gt": operator.gt, "-ge": operator.ge, "-lt": operator.lt}
        compare["-le"] = operator.le
        if how in compare and re.fullmatch(r"-?\d+", left) and re.fullmatch(r"-?\d+", right):
            return bool(compare[how](int(left), int(right)))
        return None

    def _command(self, active: bool) -> None:
        start = self.at
        while self.at < len(self.found) and self.found[self.at].text not in (*SEPARATORS, "(", ")"):
            self.at += 1
        part = self.found[start : self.at]
        if self.at == start:
            self.at += 1
            return
        if active:
            self._run(part)

    def _run(self, part: list[Token]) -> None:
        declaring = part[0].text in DECLARING
        assigned = part[1:] if declaring else part
        while assigned and ASSIGNMENT.match(assigned[0].text):
            self._assign(assigned[0], part[0].text == "export")
            assigned = assigned[1:]
        if declaring or not assigned:
            return
        if assigned[0].text in ("source", "."):
            line = assigned[0].line
            names = " ".join(token.text for token in assigned[1:])
            self.script.unread.append(UnreadLines(line, line, f"reads another file, {names}"))
        elif assigned[0].text == "unset":
            for token in assigned[1:]:
                self.script.variables.pop(token.text, None)
                self.script.exported.pop(token.text, None)
        else:
            words = [word for token in assigned for word in expand(self.script, token.text, token.line)]
            self.script.commands.append(words)

    def _assign(self, token: Token, exported: bool) -> None:
        name, plus, raw = re.fullmatch(rf"({NAME})(\+?)=(.*)", token.text, re.DOTALL).groups()  # type: ignore[union-attr]
        if name in self.script.given:
            return  # what the user says counts
        if token.array is not None:
            words = [w for t in token.array if t.text != "\n" for w in expand(self.script, t.text, t.line)]
            self.script.arrays.add(name)
        else:
            words = [ShellWord(" ".join(w.text for w in expand(self.script, raw, token.line)), token.line)]
        before = self.script.variables.get(name, []) if plus else []
        if before and token.array is None:
            before, words = [], [ShellWord(before[0].text + words[0].text, token.line)]
        self.script.variables[name] = [*before, *words]
        if exported:
            self.script.exported[name] = token.line
