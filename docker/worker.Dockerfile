# A worker for NVIDIA GPUs: the wheels of torch bring CUDA, the host its driver (nvidia-container-toolkit).
# docker build -f docker/worker.Dockerfile -t accrue-worker .
FROM python:3.12-slim

ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 ACCRUE_DATA_DIR=/data \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /srv/accrue

COPY pyproject.toml constraints.txt README.md LICENSE ./
RUN pip install --no-cache-dir -c constraints.txt "$(grep '^torch==' constraints.txt)"
COPY app app
COPY workers workers
COPY alembic alembic
RUN pip install --no-cache-dir -c constraints.txt -e . \
    && useradd --uid 10001 --create-home accrue \
    && install -d -o accrue -m 700 /data

USER accrue
VOLUME /data
CMD ["accrue", "worker"]
