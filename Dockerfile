# syntax=docker/dockerfile:1
# Two stages: the first installs into a virtual environment, the second holds that and nothing of the build.
# Variants: the default is for CPUs; for NVIDIA GPUs build with --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130
ARG BASE_IMAGE=docker.io/library/python:3.11-slim

FROM ${BASE_IMAGE} AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /src
RUN python3 -m venv /opt/snapserve
COPY constraints.txt ./
RUN /opt/snapserve/bin/pip install --no-cache-dir --extra-index-url "${TORCH_INDEX}" "$(grep '^torch==' constraints.txt)"
COPY pyproject.toml README.md LICENSE ./
COPY cache cache
COPY backends backends
COPY scheduler scheduler
COPY server server
RUN /opt/snapserve/bin/pip install --no-cache-dir --constraint constraints.txt .

FROM ${BASE_IMAGE}
COPY --from=build /opt/snapserve /opt/snapserve
# A fixed, unprivileged user; models fetched from a hub and compiled code live under /cache, a volume, so the root file system may be read-only.
RUN groupadd --gid 10001 snapserve && useradd --uid 10001 --gid 10001 --home-dir /cache --no-create-home snapserve \
    && mkdir /cache && chown snapserve:snapserve /cache
ENV PATH=/opt/snapserve/bin:$PATH HOME=/cache HF_HOME=/cache/huggingface PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 SNAPSERVE_HOST=0.0.0.0
USER 10001:10001
WORKDIR /cache
VOLUME /cache
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=120s --retries=3 \
    CMD ["python3", "-c", "import os, urllib.request as u; u.urlopen(f\"http://127.0.0.1:{os.environ.get('SNAPSERVE_PORT', '8000')}/health\", timeout=2)"]
ENTRYPOINT ["snapserve"]
CMD ["serve"]
