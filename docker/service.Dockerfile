# The service: no torch, no GPU. docker build -f docker/service.Dockerfile -t accrue-service .
FROM debian:bookworm-slim

ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PIP_NO_CACHE_DIR=1 ACCRUE_DATA_DIR=/data PATH=/opt/venv/bin:$PATH
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# Debian's mirrors drop old package versions, so a pinned version would break later builds.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/venv \
    && useradd --uid 10001 --create-home accrue \
    && install -d -o accrue -m 700 /data

WORKDIR /srv/accrue
COPY pyproject.toml setup.py constraints.txt README.md LICENSE ./
# Installs the dependencies of pyproject.toml, except torch and the other packages that only the trainer needs.
RUN python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; print('\n'.join(d for d in p['dependencies'] + p['optional-dependencies']['postgresql'] + p['optional-dependencies']['oidc'] + p['optional-dependencies']['s3'] if not d.startswith(('torch', 'transformers', 'safetensors', 'peft', 'pytorch_optimizer'))))" > /tmp/service.txt \
    && pip install -c constraints.txt -r /tmp/service.txt
COPY app app
COPY workers workers
COPY alembic alembic
RUN pip install --no-deps -e . && python -m compileall -q app workers alembic

USER 10001
VOLUME /data
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=10s \
    CMD ["python", "-c", "from urllib.request import ProxyHandler, build_opener; build_opener(ProxyHandler({})).open('http://127.0.0.1:8000/healthz', timeout=2)"]
CMD ["accrue", "serve"]
