"""The chat page in headless Chromium: a person types, reads the answer as it is made, stops it, meets an error.

Needs the package playwright and the program chromium (Debian's: apt-get install chromium). PHALANX_SHOTS=FOLDER keeps
pictures of it in light and dark, at a desk's and a phone's width.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from phalanx.server.keys import ApiKeys
from tests.server.conftest import KEY

pytestmark = pytest.mark.soak
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
LONG = "the lazy dog jumps over the quick brown fox, and the weather is fine.\n\n" * 30
REPLIES = {"a long one": LONG, "think": "<think>well, well</think>It is fine.", "hello": "the quick brown fox"}
WIDTHS = {"desk": (1100, 760), "phone": (390, 780)}


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="the page is driven by playwright: pip install playwright")
    if CHROMIUM is None:
        pytest.skip("there is no chromium here: apt-get install chromium")
    with api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(params=[(scheme, width) for scheme in ("light", "dark") for width in WIDTHS], ids=lambda p: "-".join(p))
def opened(request, browser):
    """Opens pages of servers; every one must log nothing to the console and stay inside its width."""
    scheme, width = request.param
    wide, high = WIDTHS[width]
    context = browser.new_context(color_scheme=scheme, viewport={"width": wide, "height": high})
    said = []

    def one(url):
        page = context.new_page()
        page.set_default_timeout(30_000)
        page.on("console", lambda m: said.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(url)
        page.shot = lambda name: shot(page, f"{name}-{scheme}-{width}")  # type: ignore[attr-defined]
        page.said = said
        return page

    yield one
    context.close()


def shot(page, name):
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    if folder := os.environ.get("PHALANX_SHOTS"):
        page.screenshot(path=str(Path(folder) / f"{name}.png"))


def say(page, text):
    page.get_by_label("Message").fill(text)
    page.get_by_role("button", name="Send").click()


def test_a_conversation(start, opened):
    server = start(replies=REPLIES)
    page = opened(server.url)
    page.get_by_text("Ask something.").wait_for()
    page.shot("empty")
    server.engine.pause_after = 3
    say(page, "hello <b>you</b>")
    page.locator(".assistant .said", has_text="the").wait_for()  # before it is whole
    assert (
        page.get_by_role("button", name="Stop").is_visible()
        and not page.get_by_role("button", name="Send").is_visible()
    )
    page.shot("streaming")
    server.engine.pause_after = None
    page.get_by_text("the quick brown fox", exact=True).wait_for()
    page.get_by_role("button", name="Send").wait_for()
    assert page.locator(".user").inner_text() == "hello <b>you</b>" and page.locator(".user b").count() == 0
    page.get_by_label("Message").fill("think")
    page.keyboard.press("Enter")
    page.get_by_text("It is fine.").wait_for()
    assert not page.get_by_text("well, well").is_visible()
    page.get_by_text("Reasoning").click()
    page.get_by_text("well, well").wait_for()
    page.shot("talk")
    sent = server.engine._tokenizer.decode(server.engine.seen[-1][0])
    assert "the quick brown fox" in sent and "hello" in sent  # the conversation goes along
    page.get_by_role("button", name="New chat").click()
    page.get_by_text("Ask something.").wait_for()
    say(page, "again")
    page.get_by_role("button", name="Send").wait_for()
    assert "hello" not in server.engine._tokenizer.decode(server.engine.seen[-1][0])
    assert page.said == []


def test_a_long_answer_is_followed_and_can_be_stopped(start, opened):
    server = start(positions=4000, replies=REPLIES)
    page = opened(server.url)
    say(page, "a long one")
    page.get_by_role("button", name="Send").wait_for()
    assert page.locator(".assistant .said").inner_text().strip() == LONG.strip()
    assert page.evaluate("(m => m.scrollHeight - m.scrollTop - m.clientHeight < 4)(document.getElementById('scroll'))")
    page.shot("long")
    server.engine.pause_after = 5
    say(page, "a long one, please")
    page.locator(".assistant").nth(1).locator(".said", has_text="the").wait_for()
    page.get_by_role("button", name="Stop").click()
    page.get_by_text("Stopped.").wait_for()
    assert server.engine.was_cancelled.wait(30)
    page.shot("stopped")
    server.engine.pause_after = None
    page.get_by_role("button", name="New chat").click()
    say(page, "hello")
    page.get_by_text("the quick brown fox", exact=True).wait_for()


def test_errors_are_shown(start, opened):
    server = start(positions=64, replies=REPLIES)
    page = opened(server.url)
    say(page, "漢" * 80)
    page.get_by_text("the model has 64 positions").wait_for()
    page.shot("error")
    assert page.get_by_label("Message").input_value() == "漢" * 80  # nothing that was typed is lost
    server.engine.pause_after = 2
    say(page, "hello")
    page.locator(".assistant .said", has_text="the").wait_for()
    server.engine.failure = RuntimeError("the cable is out")
    page.get_by_text("the engine failed").wait_for()
    server.thread.join(30)
    say(page, "hello")
    page.get_by_text("The server cannot be reached.").wait_for()
    page.shot("gone")


def test_a_key_is_asked_for(start, opened):
    page = opened(start(keys=ApiKeys([KEY]), replies=REPLIES).url)
    page.get_by_text("This server asks for an API key.").wait_for()
    page.shot("key")
    assert page.get_by_label("API key").evaluate("field => field === document.activeElement")
    page.get_by_label("API key").fill(KEY)
    page.get_by_role("button", name="Use key").click()
    page.get_by_text("Ask something.").wait_for()
    say(page, "hello")
    page.get_by_text("the quick brown fox", exact=True).wait_for()


def test_a_model_without_a_template_continues_text(start, opened):
    server = start(template=False, replies={"Once": "upon a time"})
    page = opened(server.url)
    page.get_by_text("continues the text").wait_for()
    say(page, "Once ")
    page.get_by_text("upon a time").wait_for()
    page.shot("base")


def test_one_of_several_models_is_chosen(start, opened):
    """A model alone is the title; of several one is chosen, which begins a new chat."""
    server = start(replies=REPLIES, adapters=("sql", "support"))
    page = opened(server.url)
    choice = page.get_by_label("Model")
    choice.wait_for()
    assert choice.locator("option").all_inner_texts() == ["stub", "sql", "support"]
    assert page.get_by_role("heading").count() == 0
    say(page, "hello")
    page.get_by_text("the quick brown fox", exact=True).wait_for()
    page.get_by_role("button", name="Send").wait_for()
    assert server.engine.seen[-1][1].adapter is None
    choice.select_option("support")
    page.get_by_text("Ask something.").wait_for()
    say(page, "hello")
    page.get_by_text("the quick brown fox", exact=True).wait_for()
    page.get_by_role("button", name="Send").wait_for()
    assert server.engine.seen[-1][1].adapter == "support" and page.title() == "support"
    page.shot("models")
    assert page.said == []
