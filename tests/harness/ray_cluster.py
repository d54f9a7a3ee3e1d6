"""Run by an interpreter that has ray: a cluster of three nodes on this machine serves a model under load, and one node
is killed. Prints what became of the requests, as JSON.

    PYTHONPATH=recipes/deployment python ray_cluster.py MODEL COMMAND
"""

from __future__ import annotations

import json
import sys
import threading
import urllib.request
from collections import Counter

import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray_serve import replicas

NODES, CLIENTS, WAIT_S = 3, 6, 60.0
PORT = 18265


def ask(number: int) -> str:
    """What becomes of a request: its status, or how the connection ended."""
    body = json.dumps({"prompt": f"{number} green bottles", "max_tokens": 8, "seed": number}).encode()
    wanted = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/v1/completions", body, {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(wanted, timeout=WAIT_S) as answer:
            made = json.load(answer)["choices"][0]["text"]
            return f"{answer.status}" if isinstance(made, str) else "no text"
    except urllib.error.HTTPError as error:
        return f"{error.code}"
    except OSError as error:
        return type(error).__name__


def main(model: str, command: str) -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    workers = [cluster.add_node(num_cpus=1) for _ in range(NODES - 1)]
    ray.init(address=cluster.address, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    serve.run(replicas({"model": model, "count": str(NODES), "command": command}), route_prefix="/")
    before = Counter(ask(number) for number in range(8))
    amid: Counter[str] = Counter()
    over = threading.Event()
    lock = threading.Lock()

    def client(number: int) -> None:
        while not over.is_set():
            found = ask(number)
            with lock:
                amid[found] += 1
                answered.release()

    answered = threading.Semaphore(0)
    clients = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for thread in clients:
        thread.start()
    for _ in range(2 * CLIENTS):
        answered.acquire()
    cluster.remove_node(workers[0], allow_graceful=False)
    for _ in range(20 * CLIENTS):
        answered.acquire()
    over.set()
    for thread in clients:
        thread.join()
    after = Counter(ask(number) for number in range(20))
    print(json.dumps({"before": before, "amid": amid, "after": after}), flush=True)
    serve.shutdown()
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
