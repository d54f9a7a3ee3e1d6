"""Log-probabilities of tokens: of prompts, collected piece by piece, and as values for the host."""

from __future__ import annotations

from phalanx.inference.request import Request, TokenScore


class ScoredPrompt:
    """A prompt whose tokens are scored while it is computed, from the position that its options name on. Of the first
    token there is no score: nothing precedes it. Computed anew after a preemption, a token is scored once all the
    same."""

    def __init__(self, request: Request):
        self.tokens = request.prompt
        self.likeliest = request.options.prompt_logprobs or 0
        self.first = request.options.scored_from
        self.scores: list[TokenScore | None] = [None] * self.first

    @property
    def complete(self) -> bool:
        return len(self.scores) == len(self.tokens)

    def unscored(self, first: int) -> int:
        """Of the tokens from position `first` on, the number of those after which no token is scored."""
        return max(0, self.first - 1 - first)

    def add(self, position: int, score: TokenScore) -> bool:
        """The score of the token at a position, in order; whether it was the last one."""
        if position != len(self.scores):
            return False
        self.scores.append(score)
        return self.complete
