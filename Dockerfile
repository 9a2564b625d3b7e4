# One image for every role: `python -m api`, `python -m worker`, `alembic upgrade head`.

# The CUDA version of the torch wheel that constraints.txt pins; the driver must be able to run it (docs/gpu-box.md).
ARG CUDA=13.0

FROM python:3.11-slim-bookworm AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/optigpu
WORKDIR /src
# The dependencies first, against an empty package: a change of the code does not download torch again.
# bitsandbytes is what `nf4` and `llm_int8` run; torch brings triton.
COPY pyproject.toml constraints.txt LICENSE ./
RUN mkdir optigpu && touch optigpu/__init__.py \
    && /opt/optigpu/bin/pip install -c constraints.txt ".[service,otel]" bitsandbytes
COPY optigpu optigpu
COPY names names
RUN /opt/optigpu/bin/pip install --no-deps --force-reinstall .

FROM python:3.11-slim-bookworm
# torch.compile compiles: C++ on a CPU, and a launcher in C for Triton's kernels on a GPU.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
# Folders made here give new volumes their owner.
RUN useradd --create-home --uid 1000 optigpu \
    && install --directory --owner optigpu --group optigpu \
       /var/lib/optigpu/data /var/lib/optigpu/locks /var/lib/optigpu/cache /var/lib/optigpu/hub
COPY --from=build /opt/optigpu /opt/optigpu
WORKDIR /app
COPY alembic.ini ./
COPY migrations migrations
COPY api api
COPY worker worker
ENV PATH=/opt/optigpu/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    OPTIGPU_DATA_DIR=/var/lib/optigpu/data OPTIGPU_LOCK_DIR=/var/lib/optigpu/locks \
    XDG_CACHE_HOME=/var/lib/optigpu/cache HF_HOME=/var/lib/optigpu/hub
# The build ends here when torch's wheel is of another CUDA, or when something that techniques need is missing.
ARG CUDA
RUN --mount=type=bind,source=tools/image_check.py,target=/tmp/image_check.py \
    python /tmp/image_check.py --cuda "$CUDA"
# The NVIDIA Container Toolkit gives a container CUDA and NVML, and refuses to start one that the driver is too old for.
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility NVIDIA_REQUIRE_CUDA="cuda>=$CUDA"
# What results say of the image and of the code in it: docker build --build-arg REVISION=$(git rev-parse HEAD) .
ARG IMAGE=
ARG REVISION=
ENV OPTIGPU_IMAGE=$IMAGE OPTIGPU_REVISION=$REVISION
USER optigpu
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s --start-period=30s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/readyz', timeout=4)"]
CMD ["python", "-m", "api", "--host", "0.0.0.0", "--port", "8000"]
