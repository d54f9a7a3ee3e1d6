"""The server around the completions: errors, limits, keys, metrics, disconnects, slow readers, its end."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import openai
import pytest

from phalanx.base.errors import ConfigError, PeerLost
from phalanx.server.keys import read_keys
from phalanx.server.listen import open_socket
from phalanx.server.service import ServerLimits
from tests.server.conftest import KEY

USER = [{"role": "user", "content": "hello"}]


def ask(url, data=None, headers=None, method=None):
    """(status, headers, object or text) of a request without a client's help."""
    headers = {"content-type": "application/json", **(headers or {})}
    request = urllib.request.Request(url, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            status, head, body = answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        status, head, body = error.code, error.headers, error.read()
    return status, head, json.loads(body) if head.get_content_type() == "application/json" else body.decode()


def everything(line):
    """What comes until the other side closes."""
    answer = b""
    while more := line.recv(10_000):
        answer += more
    return answer


def completion(server, **asked):
    return ask(f"{server.url}/v1/completions", json.dumps({"model": "stub", "prompt": "a", **asked}).encode())


# ---- bad input -----------------------------------------------------------------------------------

WRONG = [
    ({"temperature": 3}, "temperature", "less than or equal to 2, not 3", "invalid_value"),
    ({"temperature": "1"}, "temperature", "valid number, not '1'", "invalid_value"),
    ({"temperature": 1.5}, "temperature", "is what this engine never takes", "invalid_value"),
    ({"top_p": 0}, "top_p", "greater than 0", "invalid_value"),
    ({"max_tokens": -1}, "max_tokens", "greater than or equal to 0", "invalid_value"),
    ({"max_tokens": True}, "max_tokens", "valid integer", "invalid_value"),
    ({"n": 0}, "n", "greater than or equal to 1", "invalid_value"),
    ({"n": 3, "best_of": 2}, "best_of", "at least n, 3, not 2", "invalid_value"),
    ({"best_of": 2, "stream": True}, "best_of", "larger than n in a stream", "invalid_value"),
    ({"logprobs": 99}, "logprobs", "less than or equal to 20", "invalid_value"),
    ({"logit_bias": {"1": 101}}, "logit_bias[1]", "less than or equal to 100", "invalid_value"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "from token ids to numbers", "invalid_value"),
    ({"logit_bias": {"99999": 1}}, "logit_bias", "token ids from 0 to", "invalid_value"),
    ({"stop": ["a"] * 17}, "stop", "at most 16 texts", "invalid_value"),
    ({"stop": ""}, "stop", "none of them empty", "invalid_value"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "need stream", "invalid_value"),
    ({"min_tokens": 20}, "min_tokens", "at most the 16 tokens", "invalid_value"),
    ({"suffix": "b"}, "suffix", "text is continued", "unsupported_parameter"),
    ({"temprature": 1}, "temprature", "Did you mean temperature", "unknown_parameter"),
    ({"zzz": 1}, "zzz", "not a parameter that this server knows.", "unknown_parameter"),
    ({"stream_options": {"x": 1}, "stream": True}, "stream_options.x", "not a parameter", "unknown_parameter"),
    ({"prompt": []}, "prompt", "must be a text, token ids", "invalid_value"),
    ({"prompt": [1, "a"]}, "prompt", "must be a text, token ids", "invalid_value"),
    ({"prompt": None}, "prompt", "must be a text, token ids", "invalid_value"),
    ({"prompt": [99999]}, "prompt", "token ids from 0 to", "invalid_value"),
    ({"prompt": [-1]}, "prompt", "token ids from 0 to", "invalid_value"),
    ({"prompt": ["a"] * 300}, "n", "300 sequences are asked for", "too_many_sequences"),
]


@pytest.mark.parametrize("asked, param, rule, code", WRONG, ids=[f"{w[1]}-{n}" for n, w in enumerate(WRONG)])
def test_field_value_and_rule_of_what_is_wrong(start, asked, param, rule, code):
    server = start()
    with pytest.raises(openai.BadRequestError) as refused:
        server.client().completions.create(model="stub", prompt="a", extra_body=asked)
    error = refused.value
    assert (error.param, error.code, error.type) == (param, code, "invalid_request_error")
    assert rule in error.message and error.request_id.startswith("req_")
    assert server.engine.seen == []


def test_all_problems_are_named_at_once(start):
    status, _, body = completion(start(), temperature=5, top_p=7, colour=1)
    assert status == 400 and all(word in body["error"]["message"] for word in ("temperature", "top_p", "colour"))


def test_null_is_the_default(start):
    """OpenAI's clients send null for what was not set."""
    status, _, body = completion(start(), suffix=None, temperature=None, stop=None, n=None, stream=None, user=None)
    assert status == 200 and body["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    "data, rule",
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[]", "must be a JSON object"),
        (b'{"prompt": "\xff"}', "not JSON"),
        (b'{"prompt": "a", "temperature": NaN}', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"{}", "prompt: is missing"),
    ],
)
def test_bodies_that_are_none(start, data, rule):
    status, head, body = ask(f"{start().url}/v1/completions", data)
    assert status == 400 and rule in body["error"]["message"] and head["x-request-id"]


def test_bodies_of_another_type_and_requests_that_are_no_http(start):
    server = start()
    status, _, body = ask(f"{server.url}/v1/completions", b"{}", {"content-type": "text/plain"})
    assert status == 415 and "Content-Type: application/json" in body["error"]["message"]
    with server.connect() as line:
        line.sendall(b"\x16\x03\x01 this is no HTTP\r\n\r\n")
        assert b"400" in line.recv(1000)
    assert completion(server, max_tokens=1)[0] == 200


def test_paths_and_methods_that_there_are_not(start):
    server = start()
    assert ask(f"{server.url}/v1/images/generations", b"{}")[0] == 404
    assert ask(f"{server.url}/v1/completions")[0] == 405
    assert "invalid_request_error" == ask(f"{server.url}/nothing")[2]["error"]["type"]


def test_other_models_are_refused_with_near_names(start):
    client = start().client()
    with pytest.raises(openai.NotFoundError, match="Did you mean stub") as refused:
        client.completions.create(model="stubb", prompt="a")
    assert refused.value.code == "model_not_found" and refused.value.param == "model"
    with pytest.raises(openai.NotFoundError, match="This server has stub"):
        client.models.retrieve("gpt-4")
    assert [model.id for model in client.models.list()] == ["stub"] and client.models.retrieve("stub").chat


@pytest.mark.parametrize("chunked", [False, True])
def test_bodies_that_are_too_large(start, chunked):
    """With or without a length; what comes after the limit is not kept."""
    server = start(limits=ServerLimits(body=10_000))
    with server.connect() as line:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        if chunked:
            line.sendall(head + b"transfer-encoding: chunked\r\n\r\n")
            for _ in range(11):
                line.sendall(b"3e8\r\n" + b" " * 1000 + b"\r\n")
        else:
            line.sendall(head + b"content-length: 1000000000\r\n\r\n")
        answer = everything(line)
    assert answer.startswith(b"HTTP/1.1 413") and b"10,000 bytes" in answer
    assert completion(server, max_tokens=1)[0] == 200


def test_a_body_that_does_not_come(start):
    server = start(limits=ServerLimits(read_seconds=0.2))
    with server.connect() as line:
        line.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"content-length: 100\r\n\r\n{"
        )
        assert line.recv(10_000).startswith(b"HTTP/1.1 408")


# ---- tokens, health, metrics ---------------------------------------------------------------------


def test_tokenize_and_detokenize(start, tokenizer):
    server = start()
    text = "the quick <|im_end|> 漢"
    status, _, body = ask(f"{server.url}/tokenize", json.dumps({"prompt": text, "return_token_strs": True}).encode())
    assert status == 200 and body["tokens"] == tokenizer.encode_with_special(text)
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"]) and body["max_model_len"] == 512
    assert ask(f"{server.url}/detokenize", json.dumps({"tokens": body["tokens"]}).encode())[2] == {"prompt": text}
    chat = ask(f"{server.url}/tokenize", json.dumps({"messages": USER}).encode())[2]
    server.client().chat.completions.create(model="stub", messages=USER, max_tokens=1)
    assert tuple(chat["tokens"]) == server.engine.seen[-1][0]
    for data in ({}, {"prompt": "a", "messages": USER}):
        assert ask(f"{server.url}/tokenize", json.dumps(data).encode())[0] == 400
    assert ask(f"{server.url}/detokenize", b'{"tokens": [99999]}')[0] == 400


def test_metrics_count(start):
    server = start(replies={"quick": "brown fox"})
    assert ask(f"{server.url}/health")[2] == {"status": "ok"}
    completion(server, prompt="the quick", max_tokens=20)
    completion(server, temperature=9)
    server.said.wait_for("/v1/completions", 2)
    text = ask(f"{server.url}/metrics")[2]
    value = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[0] != "#"}
    assert value['phalanx_requests_total{path="/v1/completions",status="200"}'] == 1
    assert value['phalanx_requests_total{path="/v1/completions",status="400"}'] == 1
    assert value["phalanx_prompt_tokens_total"] > 0 and value["phalanx_generated_tokens_total"] > 2
    assert value["phalanx_time_to_first_token_seconds_count"] == 1
    made = value["phalanx_generated_tokens_total"]
    assert value["phalanx_time_per_output_token_seconds_count"] == made - 1
    assert value['phalanx_sequences_total{reason="stop"}'] == 1
    assert (value["phalanx_sequences_running"], value["phalanx_pages_in_use"], value["phalanx_pages"]) == (0, 0, 4096)


def test_request_ids_are_in_the_answer_and_in_the_log(start):
    server = start()
    _, head, _ = ask(f"{server.url}/v1/models", headers={"x-request-id": "mine-1"})
    assert head["x-request-id"] == "mine-1"
    _, head, _ = ask(f"{server.url}/v1/models", headers={"x-request-id": "evil id status=200"})
    assert re.fullmatch(r"req_[0-9a-f]{32}", head["x-request-id"])
    server.client().completions.create(model="stub", prompt="a", max_tokens=3, user="eve\nadam")
    server.said.wait_for("/v1/completions")
    lines = server.said.getvalue().splitlines()
    assert any("request=mine-1" in line for line in lines) and not any("evil" in line for line in lines)
    assert any("prompt_tokens=1" in line and "tokens=3" in line and "user=eve%0Aadam" in line for line in lines)


# ---- who may ask ---------------------------------------------------------------------------------


def test_keys(start, tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"# ours\n{KEY}\n\nanother-key-that-is-long\n")
    path.chmod(0o600)
    server = start(keys=read_keys(path))
    for key in (KEY, "another-key-that-is-long"):
        assert server.client(key).models.list().data
    for key in ("wrong", KEY + "x", KEY[:-1], "# ours"):
        with pytest.raises(openai.AuthenticationError) as refused:
            server.client(key).models.list()
        assert refused.value.code == "invalid_api_key"
    for path in ("/v1/models", "/metrics", "/tokenize", "/nothing"):
        assert ask(server.url + path)[0] == 401, path
    assert ask(server.url + "/health")[0] == 200 and ask(server.url + "/")[0] == 200
    assert KEY not in server.said.getvalue()


@pytest.mark.parametrize(
    "text, mode, rule",
    [
        (KEY, 0o644, "chmod 600"),
        (KEY, 0o640, "chmod 600"),
        ("# none\n", 0o600, "must hold a key"),
        ("short\n", 0o600, "16 characters or more"),
        (None, 0o600, "no such file"),
    ],
)
def test_files_of_keys_that_are_refused(tmp_path, text, mode, rule):
    path = tmp_path / "keys"
    if text is not None:
        path.write_text(text)
        path.chmod(mode)
    with pytest.raises(ConfigError, match=rule):
        read_keys(path)


def test_web_pages_of_others_cannot_use_a_server_without_keys(start):
    """Neither from their own name nor by pointing it to 127.0.0.1 (DNS rebinding)."""
    server = start()
    assert ask(f"{server.url}/v1/models", headers={"host": "evil.example"})[0] == 403
    assert ask(f"{server.url}/v1/models", headers={"origin": "https://evil.example"})[0] == 403
    assert ask(f"{server.url}/v1/models", headers={"origin": server.url})[0] == 200
    assert ask(f"{server.url}/v1/models", headers={"host": "localhost"})[0] == 200


def test_nothing_listens_beyond_loopback(start):
    server = start()
    mine = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if fd_is_there(fd)}
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    listening = {row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine}
    port = server.address[1]
    assert f"0100007F:{port:04X}" in listening
    assert not [address for address in listening if address.endswith(f":{port:04X}") and address[:8] != "0100007F"]


def fd_is_there(fd):
    return os.path.exists(f"/proc/self/fd/{fd}") or os.path.islink(f"/proc/self/fd/{fd}")


def test_addresses_that_cannot_be_had():
    with open_socket("127.0.0.1", 0) as taken, pytest.raises(ConfigError, match="--port.*must be free"):
        open_socket("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(ConfigError, match="--host.*address of this machine"):
        open_socket("203.0.113.7", 0)


# ---- load ----------------------------------------------------------------------------------------


def test_too_many_get_429_and_when_to_come_again(start):
    server = start(limits=ServerLimits(sequences=4))
    server.engine.gate.clear()
    found = []
    threads = [threading.Thread(target=lambda: found.append(completion(server, n=2, max_tokens=2))) for _ in range(2)]
    with server.client().completions.create(model="stub", prompt="a", stream=True, n=4):
        with pytest.raises(openai.RateLimitError, match="4 sequences run or wait") as refused:
            server.client().completions.create(model="stub", prompt="a")
        assert 1 <= int(refused.value.response.headers["retry-after"]) <= 60
        assert refused.value.code == "queue_full"
        server.engine.pause_after = 1
        server.engine.gate.set()
    assert server.engine.was_cancelled.wait(30)
    server.engine.pause_after = None
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [status for status, _, _ in found] == [200, 200]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_is_forgotten(start, stream):
    """What it asked for is cancelled in the engine, and its place is free."""
    server = start(limits=ServerLimits(sequences=1))
    server.engine.pause_after = 5
    body = json.dumps({"prompt": "a", "max_tokens": 400, "stream": stream}).encode()
    with server.connect() as line:
        line.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n" % len(body) + body
        )
        assert server.engine.paused.wait(30)
        if stream:
            assert line.recv(1000).startswith(b"HTTP/1.1 200")
    assert server.engine.was_cancelled.wait(30) and server.engine.idle
    server.engine.pause_after = None
    assert completion(server, max_tokens=3)[0] == 200


def test_a_client_that_reads_nothing_holds_nobody_up(start):
    """Others get their answers meanwhile; it is given up in time, though its connection stays open."""
    server = start(positions=2000, limits=ServerLimits(write_seconds=0.5))
    body = json.dumps({"prompt": "a", "max_tokens": 1500, "stream": True, "n": 4, "logprobs": 20}).encode()
    with server.connect(buffer=4096) as line:
        line.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"x-request-id: slow-1\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        )
        for _ in range(5):
            assert completion(server, max_tokens=3)[0] == 200
        server.said.wait_for("request=slow-1")
    assert completion(server, max_tokens=3)[0] == 200


# ---- its end -------------------------------------------------------------------------------------


def test_it_drains(start):
    """What runs ends, what is new gets 503, then the server is gone."""
    server = start()
    server.engine.pause_after = 3
    waiting = server.connect()
    with server.client().completions.create(model="stub", prompt="a", max_tokens=9, stream=True) as stream:
        first = next(iter(stream))
        assert server.engine.paused.wait(30)
        server.server.stop()
        waiting.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        answer = everything(waiting)
        waiting.close()
        assert answer.startswith(b"HTTP/1.1 503") and b"shutting_down" in answer and b"retry-after" in answer
        server.engine.pause_after = None
        rest = list(stream)
    assert first and rest[-1].choices[0].finish_reason == "length"
    server.thread.join(30)
    assert not server.thread.is_alive() and server.ended == []
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(server.address)


def test_what_does_not_end_in_time_gets_its_error(start):
    server = start(limits=ServerLimits(drain_seconds=0.2))
    server.engine.pause_after = 3
    with server.client().completions.create(model="stub", prompt="a", max_tokens=9, stream=True) as stream:
        assert server.engine.paused.wait(30)
        server.server.stop()
        with pytest.raises(openai.APIError, match="shutting down and did not wait"):
            list(stream)
    server.thread.join(30)
    assert not server.thread.is_alive() and server.ended == [] and server.engine.idle


def test_a_lost_engine_ends_everything_with_its_error(start):
    """Streams, whole answers and whoever comes later. Where ranks run is not their business."""
    server = start()
    server.engine.pause_after = 3
    found = []
    whole = threading.Thread(target=lambda: found.append(completion(server, max_tokens=9)))
    whole.start()
    with server.client().completions.create(model="stub", prompt="b", max_tokens=9, stream=True) as stream:
        assert server.engine.paused.wait(30)
        server.engine.failure = PeerLost("rank 3 at 10.0.0.7 did not answer")
        with pytest.raises(openai.APIError, match="the engine failed, and the server ends: peer lost") as lost:
            list(stream)
    assert lost.value.type == "server_error" and lost.value.code == "engine_lost"
    whole.join(30)
    assert found[0][0] == 500 and "peer lost" in found[0][2]["error"]["message"]
    assert "10.0.0.7" not in str(lost.value) + str(found[0][2])
    server.thread.join(30)
    assert [(error.exit_code, str(error)) for error in server.ended] == [(6, "rank 3 at 10.0.0.7 did not answer")]


def test_a_mistake_of_the_server_is_no_silence(start, monkeypatch):
    server = start()
    monkeypatch.setattr(server.server.service.metrics, "text", lambda: 1 / 0)
    status, _, body = ask(f"{server.url}/metrics")
    assert status == 500 and body["error"]["code"] == "internal_error" and "ZeroDivision" not in str(body)
    assert "ZeroDivisionError" in server.said.getvalue()


PROGRAM = """
import sys
from pathlib import Path
from phalanx.base.log import Log
from phalanx.server.listen import HttpServer, open_socket
from phalanx.server.served import ServedModel
from phalanx.text.tokenizers import load_tokenizer
from tests.harness.stub_engine import StubEngine
tokenizer = load_tokenizer("bytes")
engine = StubEngine(tokenizer)
engine.pause_after = 3
server = HttpServer(ServedModel("stub", 512, tokenizer), engine, open_socket("127.0.0.1", 0), Log())
print(server.url, flush=True)
server.run()
"""


def test_signals(start):
    """SIGTERM waits for what runs, a second one does not; both end with 0."""
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": str(root)}
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, env=env) as program:
        url = program.stdout.readline().strip()
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        with client.completions.create(model="stub", prompt="a", max_tokens=9, stream=True) as stream:
            next(iter(stream))
            program.terminate()
            assert "stopping" in next(line for line in program.stdout if "stopping" in line)
            program.terminate()
            with pytest.raises(openai.APIError, match="told twice"):
                list(stream)
        assert program.wait(30) == 0
