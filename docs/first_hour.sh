#!/usr/bin/env bash
# The first hour of a new user, from a clone to a checkpoint that transformers loads; says how long each step took.
#
#   bash docs/first_hour.sh [FOLDER]      works in FOLDER (default: first-hour), which must not exist yet
#
# FIRST_HOUR_PYTHON=.venv/bin/python      use this interpreter and this checkout: no clone, no install (transformers must be there)
# FIRST_HOUR_SCALE=small                  the same steps on less text, as the tests run them
# FIRST_HOUR_PAGE=docs/first-hour.md      write the table of times into this page
set -eEuo pipefail
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
folder=${1:-first-hour}
mkdir "$folder" && cd "$folder"
python=${FIRST_HOUR_PYTHON:-}
[ -z "$python" ] || case $python in /*) ;; */*) python=$OLDPWD/$python ;; esac
page=${FIRST_HOUR_PAGE:-}
[ -z "$page" ] || case $page in /*) ;; *) page=$OLDPWD/$page ;; esac

if [ "${FIRST_HOUR_SCALE:-full}" = small ]; then
  packages="asyncio json email logging" demo_steps=12 steps=40 stop_at=12
else
  packages="all" demo_steps=250 steps=400 stop_at=150
fi

# ---- how steps are run and timed -------------------------------------------------------------------------------------------------

clock() { "${python:-python3}" -c 'import time; print(time.time())'; }

step() { # step TITLE COMMAND...: show the command, run it, remember the time
  local began
  title=$1
  shift
  printf '\n== %s\n$ %s\n' "$title" "$(printf '%q ' "$@")"
  began=$(clock)
  "$@"
  printf '%s\t%s\t%s\n' "$title" "$began" "$(clock)" >> times.tsv
}
trap 'printf "first hour: \"%s\" ended with exit code %s\n" "${title:-start}" "$?" >&2' ERR

install() { # packages into .venv of the clone, then the `phalanx` command
  make -C clone env
  . clone/.venv/bin/activate
  pip install --quiet --no-deps --no-build-isolation -e ./clone
  pip install --quiet transformers # only to load the result; training does not need it
}

copy_text() { # real text that every machine has: the source of Python's own library
  python - "$packages" <<'END'
import os, shutil, sys
library, skip = os.path.dirname(os.__file__), shutil.ignore_patterns("*.pyc", "site-packages", "dist-packages", "test", "lib-dynload", "*.so")
for name in os.listdir(library) if sys.argv[1] == "all" else sys.argv[1].split():
    path = os.path.join(library, name)
    if os.path.isdir(path) and name not in ("site-packages", "dist-packages", "test", "__pycache__"):
        shutil.copytree(path, os.path.join("text", name), ignore=skip)
END
}

train_and_stop() { # as a cluster does it: SIGTERM in mid-run; the run saves and ends with 75
  phalanx train run.yaml layout.tp=2 --ranks 2 &
  local run=$! code=0
  until grep -q "\"step\": $stop_at," runs/first/metrics.jsonl 2> /dev/null; do
    kill -0 $run 2> /dev/null || wait $run # it ended too early: its exit code is ours
    sleep 0.1
  done
  kill -TERM $run
  wait $run || code=$?
  [ "$code" = 75 ] || { echo "expected exit code 75 (saved and stopped), got $code" >&2; return 1; }
  echo "exit code 75: saved and stopped"
}

# ---- the hour --------------------------------------------------------------------------------------------------------------------

if [ -z "$python" ]; then
  step "clone" git clone --quiet "$repo" clone # not "phalanx": Python would take the folder for the package
  step "install" install
else # what an installation would put on the path
  mkdir bin
  printf '#!/bin/sh\nPYTHONPATH="%s" exec "%s" -m phalanx "$@"\n' "$repo" "$python" > bin/phalanx
  printf '#!/bin/sh\nPYTHONPATH="%s" exec "%s" "$@"\n' "$repo" "$python" > bin/python
  chmod +x bin/phalanx bin/python
  PATH=$PWD/bin:$PATH
fi

step "what this machine can do" phalanx doctor
step "train the demo" python -m phalanx.cli.demo --dir demo train.steps=$demo_steps train.eval_interval=$((demo_steps / 2)) optim.warmup_steps=$((demo_steps / 20))

step "copy a text" copy_text
step "train a tokenizer" phalanx data train-tokenizer text -o tokenizer --vocab-size 2048
step "prepare the text" phalanx data prepare text --tokenizer tokenizer -o data/text --errors skip
step "look at the data" phalanx data show data/text --tokenizer tokenizer

cat > run.yaml <<END
dir: runs/first
model:
  family: llama
  vocab_size: 2048
  hidden_size: 96
  intermediate_size: 256
  num_hidden_layers: 4
  num_attention_heads: 4
  num_key_value_heads: 2
  max_position_embeddings: 128
train:
  steps: $steps
  global_batch: 8
  micro_batch: 4
  seq_length: 128
  eval_interval: $((steps / 2))
optim:
  lr: 3e-3
  min_lr: 3e-4
  warmup_steps: 10
data:
  paths: [data/text]
  split: '90,10,0'            # parts for training, validation and test
  tokenizer: tokenizer
checkpoint:
  interval: $((steps / 4))
END
step "plan it on 2 ranks" phalanx plan run.yaml layout.tp=2 --ranks 2
step "plan an 8B model on 64 GPUs" phalanx plan "$repo/recipes/llama3_8b.py" layout.tp=2 --ranks 64 --device H100
step "check the layout" phalanx verify run.yaml layout.tp=2 --ranks 2
step "train on 2 ranks, stop it" train_and_stop
step "go on with 1 rank" phalanx train run.yaml --ranks 1

newest=$(printf 'runs/first/checkpoints/step-%08d' "$steps")
step "list the checkpoints" phalanx checkpoint list runs/first
step "read every byte of one" phalanx checkpoint verify runs/first
step "generate text" phalanx generate runs/first --prompt "def " --tokens 40

cat > load.py <<END
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "$newest/weights"
model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
ids = tokenizer("def ", return_tensors="pt").input_ids
print("transformers:", repr(tokenizer.decode(model.generate(ids, max_new_tokens=8, do_sample=False)[0])))
END
step "load it in transformers" python load.py

# ---- the table -------------------------------------------------------------------------------------------------------------------

python - "$page" <<'END'
import pathlib, re, sys

rows = [line.split("\t") for line in pathlib.Path("times.tsv").read_text().splitlines()]
start = float(rows[0][1])
table = ["| step | seconds | since the start |", "|---|---|---|"]
for title, began, ended in rows:
    since = float(ended) - start
    table.append(f"| {title} | {float(ended) - float(began):.1f} | {int(since) // 60} min {int(since) % 60} s |")
text = "\n".join(table)
print(f"\n{text}")
if sys.argv[1]:
    page = pathlib.Path(sys.argv[1])
    old = page.read_text(encoding="utf-8")
    new = re.sub(r"(<!-- times -->\n).*?(<!-- end -->)", lambda m: f"{m[1]}{text}\n{m[2]}", old, flags=re.DOTALL)
    if "<!-- times -->" not in old:
        sys.exit(f"{page} has no place for the table: <!-- times --> and <!-- end -->")
    page.write_text(new, encoding="utf-8")
END
