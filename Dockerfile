# One image for every role: `python -m api`, `python -m worker`, `alembic upgrade head`.
FROM python:3.11-slim AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/optigpu
WORKDIR /src
# The dependencies first, against an empty package: a change of the code does not download torch again.
COPY pyproject.toml constraints.txt LICENSE ./
RUN mkdir optigpu && touch optigpu/__init__.py \
    && /opt/optigpu/bin/pip install -c constraints.txt ".[service]"
COPY optigpu optigpu
RUN /opt/optigpu/bin/pip install --no-deps --force-reinstall .

FROM python:3.11-slim
# torch.compile compiles: C++ on a CPU, and a launcher in C for Triton's kernels on a GPU.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
# Folders made here give new volumes their owner.
RUN useradd --create-home --uid 1000 optigpu \
    && install --directory --owner optigpu --group optigpu /var/lib/optigpu/data /var/lib/optigpu/locks
COPY --from=build /opt/optigpu /opt/optigpu
WORKDIR /app
COPY alembic.ini ./
COPY migrations migrations
COPY api api
COPY worker worker
ENV PATH=/opt/optigpu/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    OPTIGPU_DATA_DIR=/var/lib/optigpu/data OPTIGPU_LOCK_DIR=/var/lib/optigpu/locks \
    HF_HOME=/var/lib/optigpu/data/huggingface
# What results say of the image and of the code in it: docker build --build-arg REVISION=$(git rev-parse HEAD) .
ARG IMAGE=
ARG REVISION=
ENV OPTIGPU_IMAGE=$IMAGE OPTIGPU_REVISION=$REVISION
USER optigpu
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/readyz', timeout=4)"]
CMD ["python", "-m", "api", "--host", "0.0.0.0", "--port", "8000"]
