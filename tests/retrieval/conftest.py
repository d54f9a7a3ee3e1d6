"""Servers, as the tests of the server start them."""

from tests.server.conftest import model_folder, start, tokenizer

__all__ = ["model_folder", "start", "tokenizer"]
