# A worker for NVIDIA GPUs. torch's wheel contains the CUDA runtime; the host provides the driver through
# nvidia-container-toolkit. The driver must support that version of CUDA: `accrue doctor` names both. gcc and Python's
# headers are there for torch.compile and Triton, which compile a small module when they first run.
# docker build -f docker/worker.Dockerfile -t accrue-worker .
FROM debian:bookworm-slim

ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PIP_NO_CACHE_DIR=1 ACCRUE_DATA_DIR=/data PATH=/opt/venv/bin:$PATH \
    HF_HOME=/data/hub TRITON_CACHE_DIR=/data/cache/triton TORCHINDUCTOR_CACHE_DIR=/data/cache/inductor \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# Debian's mirrors drop old package versions, so a pinned version would break later builds.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/venv \
    && useradd --uid 10001 --create-home accrue \
    && install -d -o accrue -m 700 /data

WORKDIR /srv/accrue
COPY pyproject.toml setup.py constraints.txt README.md LICENSE ./
# torch gets a layer of its own, because it is most of the image and changes least.
RUN torch="$(grep '^torch==' constraints.txt)" \
    && pip install -c constraints.txt "$torch"
COPY app app
COPY workers workers
COPY alembic alembic
RUN pip install -c constraints.txt -e '.[postgresql,qlora,kernels,s3]' && python -m compileall -q app workers alembic

USER 10001
VOLUME /data
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s \
    CMD ["python", "-m", "workers.health_check"]
CMD ["accrue", "worker"]
