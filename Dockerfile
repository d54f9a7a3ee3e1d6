# An image with Phalanx and its pinned packages, for machines with NVIDIA GPUs or without.
#
#   docker build -t phalanx .
#   docker run --rm --gpus all --ipc host -v "$PWD":/home/phalanx/work phalanx train work/run.yaml
FROM python:3.11-slim AS wheel
WORKDIR /source
COPY pyproject.toml setup.py README.md LICENSE ./
COPY phalanx phalanx
COPY recipes recipes
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

# Not slim: Triton compiles a launcher for each kernel at its first use, with the C compiler and headers of this image.
FROM python:3.11
COPY requirements.txt /tmp/requirements.txt
COPY --from=wheel /wheels /tmp/wheels
RUN pip install --no-cache-dir --requirement /tmp/requirements.txt /tmp/wheels/*.whl
# By its number, which is how Kubernetes sees that it is not root.
RUN useradd --create-home --uid 1000 phalanx
USER 1000
WORKDIR /home/phalanx
ENTRYPOINT ["phalanx"]
CMD ["doctor"]
