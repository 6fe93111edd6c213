# The service: no torch, no GPU. docker build -f docker/service.Dockerfile -t accrue-service .
FROM python:3.12-slim

ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 ACCRUE_DATA_DIR=/data
WORKDIR /srv/accrue

COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY app app
COPY workers workers
COPY alembic alembic
# Everything that pyproject.toml asks for but what only a trainer needs.
RUN python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies']; print('\n'.join(d for d in p if not d.startswith(('torch', 'transformers', 'safetensors', 'pyarrow'))))" > service.txt \
    && pip install --no-cache-dir -c constraints.txt -r service.txt \
    && pip install --no-cache-dir --no-deps -e . \
    && useradd --uid 10001 --create-home accrue \
    && install -d -o accrue -m 700 /data

USER accrue
VOLUME /data
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=10s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/healthz', timeout=2)"]
CMD ["accrue", "serve"]
