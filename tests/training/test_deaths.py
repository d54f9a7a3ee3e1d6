"""How runs die, and what is said of it: the rank that began it is named, soon, in the run's own files as well."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from phalanx.launch.worker import Left
from tests.cli.test_cli import wait_for
from tests.training.test_training import words_of

ROOT = Path(__file__).resolve().parents[2]
CONFIG = {
    "model": {
        "family": "llama",
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    },
    "train": {
        "steps": 100_000,
        "global_batch": 4,
        "micro_batch": 1,
        "seq_length": 16,
        "device": "cpu",
        "timeout_s": 60,
    },
    "data": {"mock": True},
    "log": {"report": False},
}
JOBS = '''
import sys
from phalanx.cli.main import guarded
from phalanx.cli.setup import arguments, prepare
from phalanx.launch.local import start

def train(placement, config):
    """Rank 1 comes upon a fault of the program in step 3."""
    from phalanx.cli import jobs
    from phalanx.training import loop
    step, done = loop.train_step, []
    def train_step(*words, **more):
        done.append(0)
        if placement.rank == 1 and len(done) == 3:
            {}["nothing"]
        return step(*words, **more)
    loop.train_step = train_step
    jobs.train(placement, config)

if __name__ == "__main__":
    ready = prepare(sys.argv[1], (f"dir={sys.argv[2]}",), 2)
    sys.exit(guarded(lambda: start("phalanx_deaths_job:train", arguments(ready.run), 2)))
'''


MARK = "PHALANX_TEST_RUN"  # in the environment of a run here: its folder


def environment(*folders: Path) -> dict[str, str]:
    outer = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {
        **outer,
        "PYTHONPATH": os.pathsep.join(map(str, (*folders, ROOT))),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


@pytest.fixture
def config(tmp_path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(CONFIG))
    return path


def begin(warm, mark: Path, *words: object) -> subprocess.Popen[str]:
    command = [warm.python, "-m", "phalanx", "train", *map(str, words)]
    return subprocess.Popen(
        command, env={**environment(), MARK: str(mark)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def ranks_in(warm, folder: Path) -> dict[int, int]:
    """Process numbers of the ranks of the run whose environment names this folder: of the processes that compute, not
    of those that stand for them."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and b"phalanx.launch.worker" in words_of(int(entry.name)):
            try:
                settings = dict(
                    pair.split(b"=", 1) for pair in (entry / "environ").read_bytes().split(b"\0") if b"=" in pair
                )
            except OSError:
                continue  # it has just ended
            computes = warm.behind(int(entry.name))
            if settings.get(MARK.encode()) == os.fsencode(folder) and computes is not None:
                found[int(settings[b"RANK"])] = computes
    return found


def until_step(run: Path, step: int) -> None:
    wait_for(lambda: (run / "log.txt").exists() and f" step={step} " in (run / "log.txt").read_text())


def last_words(run: Path) -> tuple[str, dict]:
    return (run / "log.txt").read_text().splitlines()[-1], json.loads(
        (run / "failures.jsonl").read_text().splitlines()[-1]
    )


@pytest.mark.trust(
    14,
    "kill -9 a rank, then read log.txt and failures.jsonl: nothing, or a lost peer",
    "both name the rank and the signal",
)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_named_in_the_files_of_the_run(warm, config, tmp_path, victim):
    launcher = begin(warm, tmp_path, config, f"dir={tmp_path / 'run'}", "--ranks", "2")
    until_step(tmp_path / "run", 2)
    os.kill(ranks_in(warm, tmp_path)[victim], signal.SIGKILL)
    said = launcher.communicate(timeout=60)[0]
    line, row = last_words(tmp_path / "run")
    assert launcher.returncode == 6 and f"peer lost: rank {victim} of 2 was killed by SIGKILL" in said, said
    assert (
        f"rank {victim} of 2 was killed by SIGKILL" in line
        and f"rank {victim} of 2 was killed by SIGKILL" in row["error"]
        and row["step"] >= 2
    )
    assert len((tmp_path / "run/failures.jsonl").read_text().splitlines()) == 1


@pytest.mark.trust(
    14,
    "an exception on rank 1: log.txt and failures.jsonl of the run told of a lost peer",
    "they hold that exception, with its rank",
)
def test_the_first_exception_is_in_the_files_of_the_run(warm, config, tmp_path):
    (tmp_path / "phalanx_deaths_job.py").write_text(JOBS)
    words = [warm.python, "-m", "phalanx_deaths_job", str(config), str(tmp_path / "run")]
    done = subprocess.run(words, env=environment(tmp_path), capture_output=True, text=True, timeout=120)
    line, row = last_words(tmp_path / "run")
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == "rank 1 of 2: KeyError: 'nothing'", done.stderr
    assert (
        "rank 1 of 2: KeyError: 'nothing'" in line
        and "KeyError: 'nothing'" in row["error"]
        and "rank 1 of 2" in row["error"]
    ), (line, row)


@pytest.mark.trust(
    14, "truncate a token file under a run of one process: it died of SIGBUS without a word", "exit 3, naming the file"
)
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says which files a process has mapped")
def test_a_file_that_is_cut_short_under_a_run_is_named(warm, config, tmp_path):
    from phalanx.text.tokenizers import byte_tokenizer

    byte_tokenizer().save(tmp_path / "tok")
    (tmp_path / "a.txt").write_text("Arma virumque cano, Troiae qui primus ab oris\n" * 20_000)
    made = warm.phalanx(
        "data", "prepare", str(tmp_path / "a.txt"), "-o", str(tmp_path / "a"), "--tokenizer", str(tmp_path / "tok")
    )
    assert made.returncode == 0, made.stderr
    run = tmp_path / "run"
    launcher = begin(
        warm,
        tmp_path,
        config,
        f"dir={run}",
        "data.mock=false",
        f"data.paths=[{tmp_path / 'a'}]",
        "model.vocab_size=257",
    )
    until_step(run, 2)
    os.truncate(tmp_path / "a.bin", 100)
    said = launcher.communicate(timeout=60)[0]
    assert launcher.returncode == 3 and "Traceback" not in said, said
    line, row = last_words(run)
    assert all(str(tmp_path / "a.bin") in text for text in (said, line, row["error"])) and row["kind"] == "DataError", (
        said,
        line,
        row,
    )


# ---- ranks that die while they start or meet -----------------------------------------------------


def kill_while_starting(
    warm, config: Path, folder: Path, ranks: int, pick: random.Random, longest_s: float
) -> tuple[str, float]:
    """Kill a rank at a random moment before the first step; what was wrong with what came of it, and the seconds
    until the end."""
    folder.mkdir()
    launcher = begin(warm, folder, config, f"dir={folder / 'run'}", "--ranks", ranks)
    wait_for(lambda: len(ranks_in(warm, folder)) == ranks or launcher.poll() is not None)
    victim = pick.randrange(ranks)
    time.sleep(pick.uniform(0.0, longest_s))  # what is tried: a moment, whichever it is
    os.kill(ranks_in(warm, folder)[victim], signal.SIGKILL)
    began = time.monotonic()
    said = launcher.communicate(timeout=100)[0]
    right = launcher.returncode == 6 and said.splitlines()[-1].startswith(
        f"peer lost: rank {victim} of {ranks} was killed by SIGKILL"
    )
    return (
        "" if right else f"rank {victim} was killed, exit status {launcher.returncode}: {said[-2000:]}",
        time.monotonic() - began,
    )


@pytest.mark.trust(
    13,
    "kill -9 a rank while ranks start or meet: the lowest rank was blamed, after 36 s",
    "the killed one is named, within 5 s",
)
def test_whoever_dies_while_ranks_meet_is_blamed(warm, config, tmp_path):
    pick = random.Random(13)
    for number in range(3):
        wrong, _ = kill_while_starting(warm, config, tmp_path / str(number), 2, pick, 1.0)
        assert wrong == ""


def test_a_rank_that_dies_while_it_writes_leaves_no_half_note(tmp_path):
    """The hundred deaths below found one: the launcher then read half a file, and died itself. Here the write of the
    note that says which folder rank 0 writes ends after a byte."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, before[1]))
    try:
        with pytest.raises(OSError):
            Left(tmp_path, 0).writes(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "run.json").exists()


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_hundred_deaths_while_ranks_meet(warm, config, tmp_path):
    pick, seconds = random.Random(100), []
    for number in range(100):
        wrong, lasted = kill_while_starting(warm, config, tmp_path / str(number), 2 + number % 2 * 2, pick, 3.0)
        assert wrong == "", number
        seconds.append(lasted)
    assert max(seconds) < 5.0, sorted(seconds)[-10:]


# ---- a request to stop that comes early ----------------------------------------------------------


@pytest.mark.trust(
    16, "SIGTERM while the config is read: a traceback of pydantic with exit 1", "exit 75, and what to type"
)
@pytest.mark.parametrize("words", [[], ["--ranks", "2"]])
def test_a_request_to_stop_before_training_ends_with_75(warm, config, tmp_path, words):
    """In the middle of the making of pydantic models."""
    code = (
        "import os, signal, sys\n"
        "from phalanx.cli.main import main\n"
        "import pydantic\n"
        "before = pydantic.create_model\n"
        "def create(*a, **k):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return before(*a, **k)\n"
        "pydantic.create_model = create\n"
        "main(sys.argv[1:])\n"
    )
    command = [warm.python, "-c", code, "train", str(config), f"dir={tmp_path / 'run'}", *words]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)
    assert (
        done.returncode == 75
        and done.stderr == "preempted: asked to stop before training began; start the same command again\n"
    ), done.stderr
    assert not (tmp_path / "run").exists()
