# One image for every role: `python -m api`, `python -m worker`, `alembic upgrade head`.

# The CUDA version of the torch wheel that constraints.txt pins; the driver must be able to run it (docs/gpu-box.md).
ARG CUDA=13.0
# `cpu` makes a smaller image for hosts without a GPU: docs/gpu-box.md.
ARG TORCH=cuda

FROM python:3.11-slim-bookworm AS build
ARG TORCH
# The index that has torch's wheels for CPUs alone, where pip's own settings name none.
ARG TORCH_INDEX=
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/optigpu
# The dependencies first, in a folder of their own: a change of the code does not download torch again.
# bitsandbytes is what `nf4` and `llm_int8` run; torch brings triton.
WORKDIR /dependencies
COPY pyproject.toml constraints.txt tools/image_requirements.py ./
RUN python image_requirements.py --torch "$TORCH" > requirements.txt \
    && /opt/optigpu/bin/pip install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -c constraints.txt -r requirements.txt \
    || { echo "The dependencies were not installed: read the error above. This step needs a network and 12 GB of disk," \
         "and with TORCH=cpu an index that has torch's wheels for CPUs, as TORCH_INDEX (docs/gpu-box.md)." >&2; exit 1; }
WORKDIR /src
COPY pyproject.toml LICENSE ./
COPY optigpu optigpu
COPY names names
RUN /opt/optigpu/bin/pip install --no-deps .

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
ARG CUDA
ARG TORCH
# The NVIDIA Container Toolkit gives a container CUDA and NVML, and refuses to start one that the driver is too old for.
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility NVIDIA_REQUIRE_CUDA="cuda>=$CUDA"
# What results say of the image and of the code in it: docker build --build-arg REVISION=$(git rev-parse HEAD) .
ARG IMAGE=
ARG REVISION=
ENV OPTIGPU_IMAGE=$IMAGE OPTIGPU_REVISION=$REVISION
USER optigpu
# The build ends here when torch's wheel is another one, when something that techniques need is missing, or when a program
# of the image does not start.
RUN --mount=type=bind,source=tools/image_check.py,target=/tmp/image_check.py \
    --mount=type=bind,source=pyproject.toml,target=/tmp/pyproject.toml \
    python /tmp/image_check.py --torch "$TORCH" --cuda "$CUDA" --project /tmp/pyproject.toml
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s --start-period=30s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/readyz', timeout=4)"]
CMD ["python", "-m", "api", "--host", "0.0.0.0", "--port", "8000"]
